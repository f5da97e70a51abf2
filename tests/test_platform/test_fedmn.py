"""FedMN: what a round trains, sends and averages, the final choice of modules, whole runs, and what is refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.averaging.average import Update, WeightedSums, average
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import (
    SerialExecutor,
    SharedWeights,
    make_chunks,
    run_assignment,
)
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import SUPERNET, RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.training_config import local_sgd, rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedmn import FedMnConfig, FedMnTrainingConfig, ScoreModular, TrainModular
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silos import AdaptationConfig, SiloTrainingConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.operator_choice import SummedOperatorSpace
from fedloom.platform.spaces.slices import bytes_of, parse_subspace
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import size_of
from tests.test_platform.test_spaces_operator_choice import tensors_of

Make = Callable[..., RunConfig]
Refused = Callable[[RunConfig], str]

LOCAL = LocalSGD(epochs=1, batch_size=16, lr=0.05, momentum=0.9, clip_norm=5.0)
RULES = rules_of(SiloTrainingConfig(), "method.train")
TASK = TrainModular(LOCAL, router_lr=0.1, temperature=1.0, rules=RULES)
SMALL = SpaceConfig("resnet18_modular_small", input_shape=[1, 8, 8], stem_channels=4)
CELLS = SpaceConfig("darts_s2_small", channels=4)
BIAS = "router/out.bias"


@pytest.fixture
def fedmn_config(tiny_config: Make) -> Make:
    def make(space: SpaceConfig = SMALL, **train: object) -> RunConfig:
        values = {"rounds": 3, "pretraining_rounds": 1, "batch_size": 16, "evaluate_every": 1, **train}
        config = tiny_config(
            space=space,
            tiers=TiersConfig(count=1, paths=100),
            method=FedMnConfig(
                train=FedMnTrainingConfig(**values),  # type: ignore[arg-type]
                adapt=AdaptationConfig(epochs=1, lr=0.01),
            ),
        )
        return replace(config, data=replace(config.data, num_clients=4, train_samples=160, validation_share=0.2))

    return make


@pytest.fixture
def world(fedmn_config: Make) -> World:
    return build_world(fedmn_config())


def space_of(world: World) -> SummedOperatorSpace:
    assert isinstance(world.space, SummedOperatorSpace)
    return world.space


def begun(world: World) -> RunState:
    """The state before round 0."""
    return build_stages(world)[0].begin(RunState())


def shared_weights(world: World) -> dict[str, Tensor]:
    return dict(begun(world).weights(SUPERNET))


def with_logits(weights: Mapping[str, Tensor], logits: Sequence[float]) -> dict[str, Tensor]:
    """The tensor group with a router that gives these logits, whatever it reads."""
    return {**weights, BIAS: torch.tensor(logits)}


def one_silo(world: World, client_id: int, weights: Mapping[str, Tensor], worker: Worker | None = None) -> ClientResult:
    """A silo's round by itself; what it sends is copied, as it lies in the worker's module until that is used again."""
    assignment = Assignment("fedmn", 1, client_id, "tier1", TASK)
    outcome = TASK.run(worker or Worker(world.spec), assignment, weights)
    assert outcome.update is not None
    tensors = {name: tensor.clone() for name, tensor in outcome.update.tensors.items()}
    return replace(outcome, update=Update(tensors, outcome.update.slices, outcome.update.weights))


def one_round(world: World, stage: Stage, state: RunState) -> RunState:
    plan = stage.plan(state)
    shared = SharedWeights(state.weights(plan.group), state.version(plan.group))
    results = SerialExecutor(Worker(world.spec)).run(make_chunks(plan.assignments, world.num_clients), shared)
    return stage.merge(state, plan, merge_chunks(results)).state


# -- a round ----------------------------------------------------------------------------------------------------------


def test_what_travels_is_what_was_chosen_and_the_router(world: World) -> None:
    space, weights = space_of(world), shared_weights(world)
    outcome = one_silo(world, 0, weights)
    assert outcome.update is not None
    assert outcome.subspace is not None
    kept = parse_subspace(outcome.subspace)
    assert kept != space.largest_subspace, "with 16 modules of probability .73 this is one draw in 150"
    router = {name: t for name, t in weights.items() if name.startswith("router/")}
    assert set(outcome.update.tensors) == set(space.subspace_slices(kept)) | set(router)
    size = size_of(space.cost_table("bytes"), kept) + bytes_of(router)
    assert outcome.bytes_down == outcome.bytes_up == size == bytes_of(outcome.update.tensors)
    assert outcome.macs == size_of(world.macs_table, kept) * outcome.samples
    assert set(outcome.update.weights.values()) == {float(outcome.samples)}
    assert outcome.state is None


def test_only_chosen_modules_teach_the_router(world: World) -> None:
    weights = shared_weights(world)
    outcome = one_silo(world, 1, weights)
    assert outcome.update is not None
    kept = parse_subspace(outcome.subspace or "")
    bias = outcome.update.tensors[BIAS].reshape(8, 2)
    for decision in range(8):
        for option in range(2):
            assert (bias[decision, option] != 1.0) == (option in kept[decision])
    assert not torch.equal(outcome.update.tensors["router/hidden.weight"], weights["router/hidden.weight"])
    assert not outcome.update.tensors[BIAS].requires_grad


def test_the_chosen_modules_train_as_a_network_of_their_own(world: World) -> None:
    weights = shared_weights(world)
    outcome = one_silo(world, 3, weights)
    plain = Train(MixedNetwork(parse_subspace(outcome.subspace or "")), LOCAL, validation="trained")
    same = plain.run(Worker(world.spec), Assignment("fedmn", 1, 3, "tier1", plain), weights)
    assert outcome.update is not None
    assert same.update is not None
    assert (outcome.loss, outcome.metric, outcome.macs) == (same.loss, same.metric, same.macs)
    assert all(torch.equal(outcome.update.tensors[n], t) for n, t in same.update.tensors.items()), "gates are 1"


def test_a_silo_draws_its_own_modules_whatever_the_worker_did_before(world: World) -> None:
    weights = shared_weights(world)
    used = Worker(world.spec)
    first = [one_silo(world, client, weights, used) for client in (0, 1, 2)]
    again = one_silo(world, 1, weights)
    assert again.update is not None
    assert first[1].update is not None
    assert again.subspace == first[1].subspace
    assert again.update.tensors.keys() == first[1].update.tensors.keys()
    assert all(torch.equal(again.update.tensors[n], first[1].update.tensors[n]) for n in again.update.tensors)
    assert len({o.subspace for o in first}) > 1


def test_a_silo_that_chooses_nothing_trains_the_fixed_part(world: World) -> None:
    weights = with_logits(shared_weights(world), [-60.0] * 16)
    outcome = one_silo(world, 0, weights)
    assert outcome.update is not None
    assert outcome.subspace == "/" * 7
    names = {name for name in outcome.update.tensors if not name.startswith("router/")}
    assert names == set(tensors_of(space_of(world), None))
    assert not torch.equal(outcome.update.tensors["head.weight"], weights["head.weight"])
    assert all(torch.equal(outcome.update.tensors[n], weights[n]) for n in weights if n.startswith("router/"))


def test_a_module_is_averaged_over_those_who_chose_it_and_else_unchanged(world: World) -> None:
    stage, space = build_stages(world)[0], space_of(world)
    # Nobody chooses the first block's first branch, everybody its second; the others as they are drawn.
    weights = with_logits(shared_weights(world), [-60.0, 60.0] + [0.0] * 14)
    state = replace(begun(world).with_group(SUPERNET, weights), round=1)
    after = one_round(world, stage, state).weights(SUPERNET)

    outcomes = {c: alone(world, stage, state, c) for c in range(world.num_clients)}
    partly = 0
    for name, old in weights.items():
        updates = [o.update for o in outcomes.values() if o.update is not None and name in o.update.tensors]
        if not updates:
            assert torch.equal(after[name], old), f"nobody chose {name}"
            continue
        partly += len(updates) < world.num_clients
        if old.is_floating_point():
            samples = torch.tensor([u.weights[name] for u in updates])
            mean = torch.stack([u.tensors[name].double() * s for u, s in zip(updates, samples, strict=True)]).sum(0)
            torch.testing.assert_close(after[name], (mean / samples.sum()).float())
    assert partly > 0
    assert all(torch.equal(after[n], weights[n]) for n in tensors_of(space, (0, 0)))
    assert not any(n in o.update.tensors for o in outcomes.values() if o.update for n in tensors_of(space, (0, 0)))
    changed = [n for n in tensors_of(space, (0, 1)) if not torch.equal(after[n], weights[n])]
    assert len(changed) == len(tensors_of(space, (0, 1)))


def alone(world: World, stage: Stage, state: RunState, client_id: int) -> ClientResult:
    """One silo's part of the coming round, by itself."""
    assignment = next(a for a in stage.plan(state).assignments if a.client_id == client_id)
    return assignment.task.run(Worker(world.spec), assignment, state.weights(SUPERNET))


def test_pretraining_is_fedavg_of_the_whole_network(world: World) -> None:
    stage, space = build_stages(world)[0], space_of(world)
    state = begun(world)
    after = one_round(world, stage, state).weights(SUPERNET)

    weights = state.weights(SUPERNET)
    updates = [alone(world, stage, state, c).update for c in range(world.num_clients)]
    assert all(u is not None and set(u.tensors) == set(space.owner_of) for u in updates)
    expected = average(weights, [u for u in updates if u is not None])
    assert all(torch.equal(after[n], expected[n]) for n in weights)
    assert all(torch.equal(after[n], weights[n]) for n in weights if n.startswith("router/"))

    # One silo by hand: plain SGD on the whole network, every branch with weight 1.
    assert updates[0] is not None
    mine = by_hand(
        world,
        {n: weights[n] for n in space.owner_of},
        local_sgd(world.config.method.train, 0, world.augment, balanced=False),
    )
    for name, tensor in mine.items():
        torch.testing.assert_close(updates[0].tensors[name], tensor, msg=name)


def by_hand(world: World, weights: dict[str, Tensor], local: LocalSGD) -> dict[str, Tensor]:
    network = space_of(world).build_supernet().train()
    network.load_state_dict(weights)
    optimizer = torch.optim.SGD(network.parameters(), lr=local.lr, momentum=local.momentum)
    parts = [world.data.client(0, split) for split in ("train", "validation")]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    generator = torch_stream(world.spec.training_seed, "batches", "fedmn", 0, 0)
    for index in torch.split(torch.randperm(len(y), generator=generator), local.batch_size):
        optimizer.zero_grad()
        F.cross_entropy(network(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), local.clip_norm)
        optimizer.step()
    return network.state_dict()


# -- the final evaluation ---------------------------------------------------------------------------------------------


def test_the_final_choice_is_without_noise_and_may_be_nothing(world: World) -> None:
    logits = [3.0, -3.0, -0.001, -0.001, 0.001, 0.001] + [1.0, -1.0] * 5
    weights = with_logits(shared_weights(world), logits)
    task = ScoreModular(LOCAL)
    assignment = Assignment("evaluation", 0, 2, "tier1", task, reads_test=True)
    chunk = make_chunks([assignment], 1)
    (result,) = SerialExecutor(Worker(world.spec)).run(chunk, SharedWeights(weights, "1"))
    report = result.client_results[0]
    assert report.status == "ok", report.traceback
    assert report.subspace == "0//0,1/0/0/0/0/0"
    assert {m.model for m in report.measurements} == {"global", "personal"}
    assert {m.architecture for m in report.measurements} == {report.subspace}
    losses = {m.model: m.value for m in report.measurements if m.metric == "loss"}
    assert losses["global"] != losses["personal"]
    assert not result.sums.tensors, "nothing of an evaluation is averaged"
    macs = {m.value for m in report.measurements if m.metric == "macs"}
    assert macs == {size_of(world.macs_table, parse_subspace(report.subspace))}


# -- whole runs -------------------------------------------------------------------------------------------------------


def run(config: RunConfig) -> tuple[Path, str]:
    run_id = start_run(config, make_serial)
    return Path(config.results), run_id


def test_a_whole_run(fedmn_config: Make) -> None:
    results, run_id = run(fedmn_config(use_validation=False))
    clients = read_table(results, "clients", run_id=run_id)
    training = clients[clients.stage == "fedmn"]
    assert training.groupby("round").size().tolist() == [4] * 3
    assert (training.status == "ok").all()
    before, after = training[training["round"] == 0], training[training["round"] > 0]
    assert set(before.subspace) == {"/".join(["0,1"] * 8)}
    assert after.subspace.nunique() > 1
    assert after.macs.mean() < before.macs.mean()
    assert (training.bytes_up == training.bytes_down).all()
    assert (training.bytes_down > 0).all()

    rows = read_table(results, "evaluations", run_id=run_id)
    accuracy = rows[rows.metric == "accuracy"]
    test = accuracy[accuracy.split == "test"]
    assert sorted(zip(test.model, test.client_id, strict=True)) == [
        (model, client) for model in ("global", "personal") for client in range(4)
    ]
    seen = accuracy[accuracy.split == "validation"]
    assert seen.groupby("round").size().tolist() == [4] * 3

    group = load_checkpoint(find_run(results, run_id).checkpoint).groups[SUPERNET].tensors
    assert (group[BIAS] != 1.0).any(), "the router has learnt something"


def test_it_runs_on_cells_too(fedmn_config: Make) -> None:
    world = build_world(fedmn_config(CELLS))
    stage = build_stages(world)[0]
    state = replace(begun(world), round=1)
    assignment = stage.plan(state).assignments[0]
    outcome = assignment.task.run(Worker(world.spec), assignment, state.weights(SUPERNET))
    assert outcome.update is not None
    kept = parse_subspace(outcome.subspace or "")
    space_of(world).validate_subspace(kept)
    bias = outcome.update.tensors[BIAS]
    assert sum(map(len, kept)) < len(bias) == sum(world.space.options)
    assert ((bias != 1.0).sum() > 0).item()


def test_what_diverges_is_left_out(world: World) -> None:
    weights = shared_weights(world)
    task = replace(TASK, router_lr=float("inf"))
    assignment, sums = Assignment("fedmn", 1, 0, "tier1", task), WeightedSums()
    report = run_assignment(Worker(world.spec), assignment, SharedWeights(weights, "1"), sums)
    assert report.status == "failed"
    assert not sums.tensors


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"pretraining_rounds": 4}, "between 0 and method.train.rounds, the number of all rounds (3)"),
        ({"pretraining_rounds": -1}, "0 or more"),
        ({"router_lr": 0.0}, "greater than 0"),
        ({"temperature": float("nan")}, "greater than 0"),
        ({"momentum": -0.5}, "0 or more and below 1"),
    ],
)
def test_what_cannot_run_is_refused(
    fedmn_config: Make, refused: Refused, changes: dict[str, float], allowed: str
) -> None:
    ((name, value),) = changes.items()
    assert refused(fedmn_config(**changes)) == f"method.train.{name}={value}: must be {allowed}"


def test_first_answers_are_refused_before_pretraining(fedmn_config: Make, refused: Refused) -> None:
    assert refused(fedmn_config(arrivals=2)) == (
        "method.train.arrivals=2: what the clients of fedmn cost is not known before they have trained, and so neither "
        "whose answer comes first; leave it out, and method.train.asynchronous with it"
    )


def test_other_spaces_and_adaptations_are_refused(fedmn_config: Make, tiny_config: Make, refused: Refused) -> None:
    method = FedMnConfig(train=FedMnTrainingConfig(rounds=2, pretraining_rounds=1))
    said = refused(tiny_config(method=method))
    assert said.startswith("fedmn cannot use space cnn_digits, ")
    assert "; choose space.name=resnet18_modular or darts_s2, " in said
    config = fedmn_config()
    config.method.adapt = AdaptationConfig(epochs=0)
    assert refused(config) == "method.adapt.epochs=0: must be between 1 and 100000"


def test_the_papers_rounds_are_the_defaults() -> None:
    config = FedMnConfig()
    assert (config.train.pretraining_rounds, config.train.rounds) == (500, 1000)
    assert (config.adapt.epochs, config.adapt.lr) == (1, 0.01)
    assert isinstance(config.train, SiloTrainingConfig)
