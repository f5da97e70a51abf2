"""Layers that stay with the clients: two rounds in literal numbers, limits, what travels and what is kept, refusals."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.averaging.processors import Processor
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.apfl import APFLConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fedproto import FedProtoConfig, FedProtoTrainingConfig
from fedloom.platform.methods.personal_layers import (
    PersonalConfig,
    PersonalTrainingConfig,
    layers_of,
    stages as stages_of_personal,
)
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silos import (
    WEIGHTS,
    ScoreOwn,
    ScoreShared,
    SiloTraining,
    SiloTrainingConfig,
    SubnetConfig,
    subnet_stages,
    under,
)
from fedloom.platform.spaces.slices import bytes_of
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]

CLASSIFIER = {"fixed.classifier.weight", "fixed.classifier.bias"}


def personal(*patterns: str, **train: Any) -> PersonalConfig:
    """Two rounds; keywords change the training."""
    values = {"rounds": 2, "batch_size": 12, "use_validation": False, **train}
    return PersonalConfig(personal=[*patterns], train=PersonalTrainingConfig(**values))


def apfl(alpha: float, *, adaptive: bool = True, **train: Any) -> APFLConfig:
    """The same training with a mixture."""
    values = {"rounds": 2, "batch_size": 12, "use_validation": False, **train}
    return APFLConfig(alpha=alpha, adaptive=adaptive, train=SiloTrainingConfig(**values))


def kept(state: RunState, client_id: int) -> dict[str, Tensor]:
    tensors = state.client_state(client_id)
    return {} if tensors is None else under(tensors, WEIGHTS)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    config = partial(silo_config, train_samples=150)
    return lambda *args, **data: _one_by_one(config(*args, **data))


def _one_by_one(config: RunConfig) -> RunConfig:
    """Clients in stacks round differently, and personal layers are not stacked."""
    return replace(config, executor=replace(config.executor, stack_clients="off"))


# -- in literal numbers -----------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Logits c * (a x) of two classes: the body a is 1 at first, the head c is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        nn.init.ones_(self.body.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


Samples = list[tuple[float, int, int]]
"""An x, its class and its client."""
TWO_CLASSES: Samples = [(1.0, 0, 0), (2.0, 1, 1)]


@pytest.fixture
def chain(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Two clients that train a chain on these samples."""

    def make(method: SubnetConfig, samples: Samples = TWO_CLASSES) -> RunConfig:
        x, y, clients = (np.array(column) for column in zip(*samples, strict=True))
        part = (x[:, None], y, clients)
        data = {"train": part, "test": part, "mean": [0.0], "std": [1.0], "class_names": ["a", "b"]}
        module = ModuleType("my_chain")
        module.__dict__.update(data=lambda _config: data, net=Chain, __file__="my_chain.py")
        monkeypatch.setitem(sys.modules, "my_chain", module)
        brought = {"dataset": "my_chain:data", "partition": "natural", "num_clients": 2, "validation_share": 0.0}
        space = SpaceConfig("module", build="my_chain:net")
        return make_config(method, space=space, train_samples=None, test_samples=None, **brought)

    return make


SGD = {"lr": 1.0, "momentum": 0.0, "clip_norm": 0.0, "schedule": "fixed"}


def test_two_rounds_of_fedper_by_hand(chain: Make, run_in_memory: Run) -> None:
    _, memory, state = run_in_memory(chain(personal("head.*", **SGD)))
    # Round 1, at logits (0, 0): the head's gradient is (-.5, .5) x for class 0 and (.5, -.5) x for class 1, the body's
    # is 0, as the head is. Heads: (.5, -.5), and for x = 2 (-1, 1). Body: 1.
    first = memory.state(0)
    assert kept(first, 0)["head.weight"].flatten().tolist() == [0.5, -0.5]
    assert kept(first, 1)["head.weight"].flatten().tolist() == [-1.0, 1.0]
    assert first.weights("supernet")["body.weight"].item() == 1.0
    # Round 2, client 0: logits (.5, -.5), of class 1 with 1 / (1 + e) = .26894; head .5 + .26894, body 1 + .26894.
    # Client 1: logits (-2, 2), of class 0 with 1 / (1 + e^4) = .01799; head 1 + 2 * .01799, body 1 + 4 * .01799.
    assert kept(state, 0)["head.weight"].flatten().tolist() == pytest.approx([0.7689414, -0.7689414])
    assert kept(state, 1)["head.weight"].flatten().tolist() == pytest.approx([-1.0359724, 1.0359724])
    assert state.weights("supernet")["body.weight"].item() == pytest.approx(1 + (0.2689414 + 0.0719448) / 2)
    assert state.weights("supernet")["head.weight"].flatten().tolist() == [0.0, 0.0], "nobody has sent one"
    clients = memory.table("clients").query("stage == 'personal_layers'")
    assert set(clients["bytes_up"]) == set(clients["bytes_down"]) == {4}
    assert set(clients["parameters"]) == {1}


def test_a_round_of_fedrep_by_hand(chain: Make, run_in_memory: Run) -> None:
    _, _, state = run_in_memory(chain(personal("head.*", rounds=1, epochs=2, personal_epochs=1, **SGD)))
    # The first epoch leaves the body at 1, the second the heads where the first has brought them.
    assert kept(state, 0)["head.weight"].flatten().tolist() == [0.5, -0.5]
    assert kept(state, 1)["head.weight"].flatten().tolist() == [-1.0, 1.0]
    away = [1 / (1 + math.e), 4 / (1 + math.e**4)]
    assert away == pytest.approx([0.2689414, 0.0719448], abs=1e-6)
    assert state.weights("supernet")["body.weight"].item() == pytest.approx(1 + sum(away) / 2)


def test_two_rounds_of_apfl_by_hand(chain: Make, run_in_memory: Run) -> None:
    _, memory, state = run_in_memory(chain(apfl(alpha=0.5, **SGD)))
    first = memory.state(0)
    # Round 1: both models are alike, so that alpha rests; the shared heads are those of FedPer's round, of which the
    # personal ones go half the way. The mean of (.5, -.5) and (-1, 1) is (-.25, .25).
    assert kept(first, 0)["head.weight"].flatten().tolist() == [0.25, -0.25]
    assert kept(first, 1)["head.weight"].flatten().tolist() == [-0.5, 0.5]
    assert first.weights("supernet")["head.weight"].flatten().tolist() == [-0.25, 0.25]
    assert [first.groups[f"client-{c}"].tensors["alpha"].item() for c in range(2)] == [0.5, 0.5]
    # Round 2, client 0: the mixture's head is 0, its gradient (-.5, .5). alpha: .5 - <(.5, -.5), (-.5, .5)> = 1.
    # The shared logits (-.25, .25) have class 1 with .6224593: head -.25 + .6224593, body 1 - .6224593 / 2.
    # Client 1: the mixture's head (-.375, .375), for x = 2 class 0 with 1 / (1 + e^1.5) = .1824255, gradients
    # 2 * .1824255 of the head, and -1.5 * .1824255 of the body. alpha: .5 + 2 * .25 * 2 * .1824255.
    # The shared logits (-.5, .5): head -.25 - 2 * .2689414, body 1 + .2689414.
    assert kept(state, 0)["head.weight"].flatten().tolist() == [0.5, -0.5]
    assert kept(state, 0)["body.weight"].item() == 1.0
    assert kept(state, 1)["head.weight"].flatten().tolist() == pytest.approx([-0.6824255, 0.6824255])
    assert kept(state, 1)["body.weight"].item() == pytest.approx(1.1368191)
    alphas = [state.groups[f"client-{c}"].tensors["alpha"].item() for c in range(2)]
    assert alphas == pytest.approx([1.0, 0.6824255])
    assert state.weights("supernet")["head.weight"].flatten().tolist() == pytest.approx(
        [-0.2077118, 0.2077118], abs=1e-6
    )
    assert state.weights("supernet")["body.weight"].item() == pytest.approx((0.6887703 + 1.2689414) / 2)
    scored = memory.table("evaluations").query("metric == 'alpha'")
    assert dict(zip(scored["client_id"], scored["value"], strict=True)) == dict(enumerate(alphas))


def test_two_rounds_of_fedproto_by_hand(chain: Make, run_in_memory: Run) -> None:
    method = FedProtoConfig(train=FedProtoTrainingConfig(rounds=2, use_validation=False, pull=1.0, **SGD))
    _, memory, state = run_in_memory(chain(method, [(1.0, 0, 0), (2.0, 0, 1), (2.0, 0, 1)]))
    first = memory.state(0).weights("supernet")
    # Round 1 leaves the bodies at 1, and the heads at (.5, -.5) and (1, -1). The features are x: (1 * 1 + 2 * 2) / 3.
    assert first["prototype/0"].tolist() == pytest.approx([5 / 3])
    assert first["prototype/1"].tolist() == [0.0], "nobody has the class"
    # Round 2, client 0: the loss's gradient of the body is -.2689414, the pull's 2 (1 - 5/3).
    # Client 1: -.0719448, as in FedPer's, and 2 (2 - 5/3) * 2.
    bodies = [1 + 0.2689414 + 4 / 3, 1 + 0.0719448 - 4 / 3]
    assert [kept(state, c)["body.weight"].item() for c in range(2)] == pytest.approx(bodies, abs=1e-6)
    assert state.weights("supernet")["prototype/0"].item() == pytest.approx(0.5189068, abs=1e-6)
    assert state.weights("supernet")["body.weight"].item() == 1.0, "no weight travels"
    clients = memory.table("clients").query("stage == 'fedproto'")
    assert set(clients["bytes_up"]) == {4}
    assert set(clients["bytes_down"]) == {8}
    scored = memory.table("evaluations").query("stage == 'evaluation' and metric == 'accuracy'")
    assert scored["value"].tolist() == [1.0, 1.0], "the class without a prototype is not predicted"
    ends = memory.table("clients").query("stage == 'evaluation'")
    assert set(ends["macs"] / ends["samples"]) == {2 * (1 + 2)}, "by prototypes and by the classifier"


# -- limits -----------------------------------------------------------------------------------------------------------


def test_without_personal_tensors_it_is_fedavg_bit_for_bit(
    make_config: Make, run_in_memory: Run, run_stages: Any
) -> None:
    world, _, state = run_in_memory(make_config(personal()))
    train = SiloTrainingConfig(rounds=2, batch_size=12, use_validation=False)
    # Under the same name, on which the order of the batches depends.
    _, fedavg = run_stages(
        world, subnet_stages(world, SubnetConfig("personal_layers", train=train), ScoreOwn), RunState()
    )
    assert differing(dict(fedavg.weights("supernet")), dict(state.weights("supernet"))) == []
    assert [*state.groups] == ["supernet"], "no client keeps anything"


def test_with_personal_tensors_alone_every_client_trains_alone(make_config: Make, run_in_memory: Run) -> None:
    world, memory, state = run_in_memory(make_config(personal("*")))
    stage = build_stages(world)[0]
    fresh = dict(stage.begin(RunState()).weights("supernet"))
    assert differing(fresh, dict(state.weights("supernet"))) == []
    clients = memory.table("clients").query("stage == 'personal_layers'")
    assert clients["bytes_up"].tolist() == clients["bytes_down"].tolist() == [0] * 6
    # Local training is FedAvg of one client.
    alone = make_config(personal())
    alone.method.train.selection = "all"
    planned = build_stages(build_world(alone))[0]
    begun = planned.begin(RunState())
    worker, weights = Worker(world.spec), fresh
    for round_ in range(2):
        plan = planned.plan(replace(begun, round=round_))
        result = plan.assignments[1].task.run(worker, plan.assignments[1], weights)
        assert result.update is not None
        weights = {name: tensor.detach().clone() for name, tensor in result.update.tensors.items()}
    assert differing(weights, kept(state, 1)) == []


def test_with_one_client_it_does_not_matter_what_is_personal(make_config: Make, run_in_memory: Run) -> None:
    ends = []
    for patterns in ([], ["classifier"], ["batch_norms"], ["*", "!classifier"], ["*"]):
        _, _, state = run_in_memory(make_config(personal(*patterns, weighting="plain"), num_clients=1))
        ends.append({**state.weights("supernet"), **kept(state, 0)})
    assert [differing(ends[0], end) for end in ends[1:]] == [[]] * 4


@pytest.mark.parametrize(("alpha", "adaptive"), [(0.0, False), (0.5, True)])
def test_the_shared_model_of_apfl_is_that_of_fedavg_bit_for_bit_and_with_an_alpha_of_0_its_mixture(
    alpha: float, adaptive: bool, make_config: Make, run_in_memory: Run, run_stages: Any
) -> None:
    world, mixtures, state = run_in_memory(make_config(apfl(alpha, adaptive=adaptive)))
    train = SiloTrainingConfig(rounds=2, batch_size=12, use_validation=False)
    shared = Subnet((0, 0, 0), stand_alone=True)
    both = subnet_stages(world, SubnetConfig("apfl", train=train), lambda _: ScoreShared(shared))
    memory, fedavg = run_stages(world, both, RunState())
    assert differing(dict(fedavg.weights("supernet")), dict(state.weights("supernet"))) == []
    scores = [m.table("evaluations").query("split == 'test'")["value"].tolist() for m in (mixtures, memory)]
    assert (scores[0] == scores[1]) is (alpha == 0)


def test_scaffolds_own_pass_changes_nothing_of_apfls_first_round(make_config: Make, run_in_memory: Run) -> None:
    """All control variates are zero in the first round, whose steps are those of plain SGD."""
    states = [
        run_in_memory(make_config(apfl(0.5, rounds=1, local_rule=rule, options=options)))[2]
        for rule, options in (("sgd", {}), ("scaffold", {"option": 1}))
    ]
    for client_id in range(3):
        sgd, scaffold = ({**kept(s, client_id), "alpha": (s.client_state(client_id) or {})["alpha"]} for s in states)
        assert differing(sgd, scaffold) == []


def test_apfl_with_a_fixed_alpha_of_1_trains_every_client_alone(
    make_config: Make, run_in_memory: Run, run_stages: Any
) -> None:
    world, memory, state = run_in_memory(make_config(apfl(alpha=1.0, adaptive=False)))
    # Under the same name, on which the order of the batches depends.
    _, alone = run_stages(world, stages_of_personal(replace(personal("*"), name="apfl"), world), RunState())
    for client_id in range(3):
        assert differing(kept(state, client_id), kept(alone, client_id)) == []
    row = memory.table("clients").iloc[0]
    assert row["macs"] == 2 * row["samples"] * world.macs_table.cost((0, 0, 0))
    assert row["bytes_up"] == bytes_of(state.weights("supernet"))


def test_fedproto_scores_features_of_half_precision(make_config: Make, run_in_memory: Run) -> None:
    train = FedProtoTrainingConfig(rounds=1, batch_size=12, use_validation=False)
    config = make_config(FedProtoConfig(train=train))
    config.executor.precision = "bfloat16"
    _, memory, _ = run_in_memory(config)
    assert set(memory.table("clients").query("stage == 'evaluation'")["status"]) == {"ok"}


def test_fedproto_without_a_pull_trains_every_client_alone(
    make_config: Make, run_in_memory: Run, run_stages: Any
) -> None:
    train = {"rounds": 2, "batch_size": 12, "use_validation": False}
    world, _, state = run_in_memory(make_config(FedProtoConfig(train=FedProtoTrainingConfig(pull=0.0, **train))))
    # Under the same name, on which the order of the batches depends.
    alone = replace(personal("*"), name="fedproto")
    _, other = run_stages(world, stages_of_personal(alone, world), RunState())
    for client_id in range(3):
        assert differing(kept(state, client_id), kept(other, client_id)) == []
    assert not any(name.startswith("prototype/") for name in kept(state, 0))


# -- what travels, and what is kept -----------------------------------------------------------------------------------


def test_memory_is_for_those_who_took_part_and_bytes_for_what_travels(make_config: Make, run_in_memory: Run) -> None:
    config = make_config(personal("classifier", clients_per_round=2, rounds=1), num_clients=8)
    world, memory, state = run_in_memory(config)
    clients = memory.table("clients")
    trained = clients[clients["stage"] == "personal_layers"]
    assert len(trained) == 2
    assert {name for name in state.groups if name.startswith("client-")} == {f"client-{c}" for c in trained.client_id}
    weights = state.weights("supernet")
    for client_id in trained["client_id"]:
        assert kept(state, client_id).keys() == CLASSIFIER
        assert {*differing({n: weights[n] for n in CLASSIFIER}, kept(state, client_id))} == CLASSIFIER
    shared = bytes_of({name: tensor for name, tensor in weights.items() if name not in CLASSIFIER})
    assert set(trained["bytes_up"]) == set(trained["bytes_down"]) == {shared}
    # A device that drops out has cost what it would have received.
    config.devices.dropout = 1.0
    plan = build_stages(build_world(config))[0].plan(build_stages(world)[0].begin(RunState()))
    counted = plan.assignments[0].task.account(Worker(world.spec), plan.assignments[0])  # type: ignore[attr-defined]
    row = trained.iloc[0]
    assert (counted.bytes_down, counted.bytes_up, counted.parameters) == (shared, shared, row["parameters"])


def test_every_client_is_scored_with_its_own_tensors_and_a_new_one_with_fresh_ones(
    make_config: Make, run_in_memory: Run
) -> None:
    world, memory, state = run_in_memory(
        make_config(personal("classifier", clients_per_round=2, rounds=1), num_clients=4)
    )
    rows = memory.table("evaluations").query("stage == 'evaluation' and metric == 'accuracy'")
    assert set(rows["model"]) == {"personal"}
    assert sorted(rows["client_id"]) == [0, 1, 2, 3]
    assert [state.client_state(c) is None for c in range(4)].count(True) == 2
    worker = Worker(world.spec)
    for row in rows.itertuples():
        module = world.space.build_subnet((0, 0, 0))
        module.load_state_dict({**state.weights("supernet"), **kept(state, row.client_id)})
        with worker.data.reading_test(), torch.no_grad():
            x, y = worker.client_data(row.client_id, "test")
            assert row.value == pytest.approx((module.eval()(x).argmax(dim=1) == y).double().mean().item())


def test_the_words_and_patterns_name_tensors_in_their_order(make_config: Make) -> None:
    space = build_world(make_config(personal())).space

    def named(*patterns: str) -> frozenset[str]:
        return layers_of(space, (0, 0, 0), [*patterns]).personal

    every = named("*")
    assert named("classifier") == named("fixed.classifier.*") == CLASSIFIER
    assert named("*", "!classifier") == every - CLASSIFIER
    assert named("!classifier", "*") == every
    norms = named("batch_norms")
    assert {name.rpartition(".")[2] for name in norms} == {
        *("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert norms == {name for name in every if ".norm." in name}


def test_privacy_bounds_what_travels_and_not_what_stays(make_config: Make, run_in_memory: Run) -> None:
    private = PrivacyConfig(clip=1e-3)
    world, _, state = run_in_memory(
        make_config(personal("classifier", rounds=1, weighting="plain", privacy=private, clients_per_round=3))
    )
    fresh, weights = (dict(s.weights("supernet")) for s in (build_stages(world)[0].begin(RunState()), state))
    shared = world.space.parameter_names & fresh.keys() - CLASSIFIER
    assert 0 < sum((weights[n] - fresh[n]).square().sum().item() for n in shared) ** 0.5 <= 1.001e-3
    own = kept(state, 0)
    assert sum((own[n] - fresh[n]).square().sum().item() for n in CLASSIFIER) ** 0.5 > 0.01


def test_processors_act_on_what_travels(make_config: Make, run_in_memory: Run) -> None:
    config = make_config(personal("classifier", rounds=1, processors=["sparsify"], options={"share": 0.5}))
    _, memory, state = run_in_memory(config)
    clients = memory.table("clients").query("stage == 'personal_layers'")
    whole = bytes_of({n: t for n, t in state.weights("supernet").items() if n not in CLASSIFIER})
    assert (clients["bytes_up"] < whole).all()
    assert set(clients["bytes_down"]) == {whole}


class Reversed(Processor):
    def on_labels(self, client_id: int, labels: Any, num_classes: int) -> Any:
        return num_classes - 1 - labels


def test_a_processor_changes_the_labels_here_too(make_config: Make, run_in_memory: Run) -> None:
    processors: list[list[str]] = [[], [f"{__name__}:Reversed"]]
    as_they_are, reversed_ = (
        kept(run_in_memory(make_config(personal("classifier", rounds=1, processors=each)))[2], 0) for each in processors
    )
    assert set(differing(as_they_are, reversed_)) >= CLASSIFIER


# -- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "no tensor": (["haed.*"], {}, r"^method.personal: 'haed\.\*' matches no tensor .* classifier or batch_norms, or a"),
    "no trained tensor": (
        ["*running_mean"],
        {"epochs": 2, "personal_epochs": 1},
        r"personal_epochs=1 trains one part after the other, and method.personal=.* names no parameter",
    ),
    "every tensor": (["*"], {"epochs": 2, "personal_epochs": 1}, r"method.personal=\['\*'\] names every parameter"),
    "no epoch left": (
        ["classifier"],
        {"personal_epochs": 1},
        r"personal_epochs=1 leaves none of method.train.epochs=1",
    ),
    "control variates": (
        ["classifier"],
        {"local_rule": "scaffold", "clip_norm": 0.0, "momentum": 0.0},
        r"local_rule=scaffold sends tensors for every",
    ),
    "corrections": (
        ["classifier"],
        {"local_rule": "feddyn", "server": "feddyn", "momentum": 0.0},
        r"local_rule=feddyn keeps a correction for every parameter, but method.personal keeps some",
    ),
    "nothing to change": (["*"], {"processors": ["sparsify"]}, r"names every parameter, so that nothing is sent"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(case: str, make_config: Make, tmp_path: Path) -> None:
    patterns, train, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as refused:
        build_stages(build_world(make_config(personal(*patterns, **train))))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("slot", "rule", "default"), [("server", "fedadam", "replace"), ("weighting", "plain", "fedavg")]
)
def test_rules_for_weights_are_refused_where_prototypes_are_averaged(
    slot: str, rule: str, default: str, make_config: Make, refused: Callable[[RunConfig], str]
) -> None:
    train: dict[str, Any] = {slot: rule}
    assert refused(make_config(FedProtoConfig(train=FedProtoTrainingConfig(**train)))) == (
        f"method.train.{slot}={rule}: fedproto's server averages prototypes, weighted by the samples of their class; "
        f"use {default}"
    )


def test_a_server_rule_that_would_step_none_of_a_stage_s_tensors_is_refused(make_config: Make) -> None:
    stage = cast(SiloTraining, build_stages(build_world(make_config(personal("classifier", server="fedavgm"))))[0])
    assert replace(stage, parameters=frozenset(CLASSIFIER)).begin(RunState()).round == 0
    with pytest.raises(
        ValueError, match=r"^method.train.server=fedavgm steps trained tensors, and none of the stage's"
    ):
        replace(stage, parameters=frozenset({"mine/weight"})).begin(RunState())


def test_silos_are_scored_with_the_tensor_group_that_they_trained(make_config: Make) -> None:
    stage = cast(SiloTraining, build_stages(build_world(make_config(personal("classifier"))))[0])
    _, evaluation = replace(stage, group="mine").and_evaluation()
    assert evaluation.plan(RunState()).group == "mine"


@pytest.mark.parametrize(
    "method",
    [personal("classifier"), FedAvgConfig(train=TrainingConfig(clients_per_round=3))],
    ids=["silos", "fedavg"],
)
def test_batch_norms_whose_statistics_nobody_estimates_are_refused(make_config: Make, method: Any) -> None:
    space = SpaceConfig("cnn_width", input_shape=[1, 8, 8], stage_widths=[8], widths=[1.0])
    with pytest.raises(ValueError, match=r"^space.norm=static: no training updates .* use space.norm=batch or group$"):
        build_stages(build_world(make_config(method, space=space)))
