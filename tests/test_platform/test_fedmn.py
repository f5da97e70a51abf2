"""FedMN: the router's reading of data, its gates, what a round trains, sends and averages, and whole runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.averaging.average import WeightedSums, average
from fedloom.platform.clients.execution import (
    Assignment,
    Outcome,
    SerialExecutor,
    SharedWeights,
    make_chunks,
    run_assignment,
)
from fedloom.platform.clients.training import SGD, LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.training import SUPERNET
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedmn import FedMnConfig, FedMnStage, FedMnTrainingConfig, stages
from fedloom.platform.methods.personalised import AdaptationConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_stage import SiloTrainingConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import start_run
from fedloom.platform.seeding import torch_stream
from fedloom.platform.silos.fedavg import TrainShared
from fedloom.platform.silos.fedmn import ScoreModular, TrainModular
from fedloom.platform.silos.router import (
    Router,
    chosen,
    embedding_of,
    initial_router,
    logistic_noise,
    received_router,
    straight_through,
)
from fedloom.platform.spaces.kept import KeptSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import bytes_of, parse_subspace
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import size_of

Make = Callable[..., RunConfig]

LOCAL = LocalSGD(epochs=1, batch_size=16, lr=0.05, momentum=0.9, clip_norm=5.0)
TASK = TrainModular(LOCAL, router_lr=0.1, temperature=1.0)
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


def space_of(world: World) -> KeptSpace:
    assert isinstance(world.space, KeptSpace)
    return world.space


def begun(world: World) -> RunState:
    """The state before round 0."""
    return build_stages(world)[0].begin(RunState())


def shared_weights(world: World) -> dict[str, Tensor]:
    return dict(begun(world).weights(SUPERNET))


def with_logits(weights: Mapping[str, Tensor], logits: Sequence[float]) -> dict[str, Tensor]:
    """The bag with a router that gives these logits, whatever it reads."""
    return {**weights, BIAS: torch.tensor(logits)}


def one_silo(world: World, client_id: int, weights: Mapping[str, Tensor], worker: Worker | None = None) -> Outcome:
    assignment = Assignment("fedmn", 1, client_id, "tier1", TASK)
    return TASK.run(worker or Worker(world.spec), assignment, weights)


def one_round(world: World, stage: FedMnStage, state: RunState) -> RunState:
    plan = stage.plan(state)
    shared = SharedWeights(state.weights(plan.bag), state.version(plan.bag))
    results = SerialExecutor(Worker(world.spec)).run(make_chunks(plan.assignments, world.num_clients), shared)
    return stage.merge(state, plan, merge_chunks(results)).state


def fresh_router(embedding_size: int, *options: int) -> Router:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Router(embedding_size, options)


# -- the router -------------------------------------------------------------------------------------------------------


def test_what_the_router_reads_with_literal_numbers() -> None:
    image = torch.arange(64.0).reshape(1, 8, 8)
    x = torch.stack([image, image + 4.0])  # whose mean is image + 2
    read = embedding_of((x, torch.tensor([2, 0])), num_classes=3)
    # A 2 x 2 patch that begins with v has v, v + 1, v + 8 and v + 9.
    pooled = [v + 4.5 + 2.0 for start in (0, 16, 32, 48) for v in range(start, start + 8, 2)]
    assert read.tolist() == pytest.approx([*pooled, 0.5, 0.0, 0.5])
    assert read.dtype == torch.float32


def test_what_the_router_reads_is_the_mean_over_pooled_samples() -> None:
    x = torch.randn((7, 3, 9, 6), generator=torch_stream(1, "x"))
    y = torch.tensor([0, 1, 1, 3, 3, 3, 0])
    pooled = torch.stack([F.adaptive_avg_pool2d(sample, 4).flatten() for sample in x]).mean(dim=0)
    read = embedding_of((x, y), num_classes=5)
    assert read.shape == (3 * 16 + 5,)
    torch.testing.assert_close(read[:48], pooled)
    assert read[48:].tolist() == pytest.approx([2 / 7, 2 / 7, 0.0, 3 / 7, 0.0])


def test_every_module_is_likely_at_first_whatever_the_data() -> None:
    space = build_space(SMALL)
    assert isinstance(space, KeptSpace)
    weights = initial_router(space, 10, torch_stream(1, "supernet"))
    assert sum(t.numel() for t in weights.values()) == (16 + 10) * 64 + 64 + 64 * 16 + 16
    router = received_router(space, 10, weights, torch.device("cpu"))
    logits = router(torch.randn(26, generator=torch_stream(2, "x")))
    assert logits.tolist() == [[1.0, 1.0]] * 8
    assert chosen(logits) == space.largest_subspace
    again = initial_router(space, 10, torch_stream(1, "supernet"))
    assert all(torch.equal(weights[n], again[n]) for n in weights)
    assert weights["router/hidden.weight"].std() > 0


def test_options_that_do_not_exist_are_never_chosen() -> None:
    logits = fresh_router(5, 1, 3, 2)(torch.ones(5))
    assert logits.shape == (3, 3)
    assert torch.isinf(logits).tolist() == [[False, True, True], [False, False, False], [False, False, True]]
    assert chosen(logits + 1e6) == ((0,), (0, 1, 2), (0, 1))


def test_modules_are_drawn_with_the_probability_of_their_logit() -> None:
    noise = logistic_noise((20000,), torch_stream(1, "test"))
    for logit, probability in ((0.0, 0.5), (1.0, 0.7311), (-2.0, 0.1192)):
        assert (logit + noise > 0).float().mean().item() == pytest.approx(probability, abs=0.01)
    assert torch.isfinite(noise).all()
    assert noise.dtype == torch.float32


def test_a_decision_may_choose_nothing() -> None:
    assert chosen(torch.tensor([[0.1, -0.1], [-1.0, 0.0], [2.0, 3.0]])) == ((0,), (), (0, 1))


def test_the_gates_with_literal_numbers() -> None:
    scores = torch.tensor([[2.0, -1.0]], requires_grad=True)
    gates = straight_through(scores, torch.tensor([[1.0, 0.0]]), temperature=2.0)
    assert gates.tolist() == [[1.0, 0.0]]
    (gates * torch.tensor([[3.0, 1.0]])).sum().backward()  # type: ignore[no-untyped-call]
    # sigmoid(1) = .7310586, sigmoid(-.5) = .3775407: 3 s (1 - s) / 2 and s (1 - s) / 2
    assert scores.grad is not None
    assert scores.grad.tolist() == [pytest.approx([0.2949179, 0.1175019])]


def test_gates_are_exact_and_options_that_do_not_exist_have_no_gradient() -> None:
    logits = torch.randn(50, generator=torch_stream(1, "test")).requires_grad_()
    scores = torch.cat([logits, torch.full((1,), -torch.inf)])
    hard = (scores > 0).float()
    gates = straight_through(scores, hard, temperature=0.3)
    assert torch.equal(gates, hard)
    gates.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_logit_of_a_needed_module_rises_above_that_of_a_harmful_one() -> None:
    generator = torch_stream(3, "test")
    x = torch.randn((128, 2), generator=generator)
    y = (x[:, 0] > 0).long()
    needed = torch.stack([-x[:, 0], x[:, 0]], dim=1)
    harmful = -0.5 * needed
    router, embedding = fresh_router(4, 2), torch.ones(4)
    router.load_state_dict({**router.state_dict(), "out.weight": torch.zeros(2, 64), "out.bias": torch.ones(2)})
    local = LocalSGD(epochs=1, batch_size=128, lr=0.1)
    for _round in range(60):
        noise = logistic_noise((1, 2), generator)
        hard = (router(embedding).detach() + noise > 0).float()
        sgd = SGD(local, list(router.parameters()))
        gates = straight_through(router(embedding) + noise, hard, 1.0)
        output = sum(gates[0, o] * (needed, harmful)[o] for o in chosen(hard)[0])
        if isinstance(output, Tensor):
            F.cross_entropy(output, y).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    first, second = router(embedding)[0].tolist()
    assert first > 1.0 > second
    assert chosen(router(embedding)) == ((0,),)


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
    size = size_of(space.bytes_table(), kept) + bytes_of(router)
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
    plain = TrainShared(parse_subspace(outcome.subspace or ""), LOCAL)
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
    assert names == set(space_of(world).fixed_tensors)
    assert not torch.equal(outcome.update.tensors["head.weight"], weights["head.weight"])
    assert all(torch.equal(outcome.update.tensors[n], weights[n]) for n in weights if n.startswith("router/"))


def test_a_module_is_averaged_over_those_who_chose_it_and_else_unchanged(world: World) -> None:
    stage, space = build_stages(world)[0], space_of(world)
    assert isinstance(stage, FedMnStage)
    # Nobody chooses the first block's first branch, everybody its second; the others as they are drawn.
    weights = with_logits(shared_weights(world), [-60.0, 60.0] + [0.0] * 14)
    state = replace(begun(world).with_bag(SUPERNET, weights), round=1)
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
    assert all(torch.equal(after[n], weights[n]) for n in space.operator_tensors(0, 0))
    assert not any(n in o.update.tensors for o in outcomes.values() if o.update for n in space.operator_tensors(0, 0))
    changed = [n for n in space.operator_tensors(0, 1) if not torch.equal(after[n], weights[n])]
    assert len(changed) == len(space.operator_tensors(0, 1))


def alone(world: World, stage: FedMnStage, state: RunState, client_id: int) -> Outcome:
    """One silo's part of the coming round, by itself."""
    assignment = next(a for a in stage.plan(state).assignments if a.client_id == client_id)
    return assignment.task.run(Worker(world.spec), assignment, state.weights(SUPERNET))


def test_pretraining_is_fedavg_of_the_whole_network(world: World) -> None:
    stage, space = build_stages(world)[0], space_of(world)
    assert isinstance(stage, FedMnStage)
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
    mine = by_hand(world, {n: weights[n] for n in space.owner_of}, stage.local(0))
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
    report = result.reports[0]
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
    run_id = start_run(config, lambda world: SerialExecutor(Worker(world.spec)))
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

    bag = load_checkpoint(find_run(results, run_id).checkpoint).bags[SUPERNET].tensors
    assert (bag[BIAS] != 1.0).any(), "the router has learnt something"


def test_it_runs_on_cells_too(fedmn_config: Make) -> None:
    world = build_world(fedmn_config(CELLS))
    stage = build_stages(world)[0]
    assert isinstance(stage, FedMnStage)
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
    ("changes", "message"),
    [
        (
            {"pretraining_rounds": 4},
            r"method\.train\.pretraining_rounds=4: must be between 0 and method\.train\.rounds",
        ),
        ({"pretraining_rounds": -1}, r"method\.train\.pretraining_rounds=-1: must be between 0 and"),
        ({"router_lr": 0.0}, r"method\.train\.router_lr=0\.0: must be greater than 0"),
        ({"temperature": float("nan")}, r"method\.train\.temperature=nan: must be greater than 0"),
        ({"momentum": -0.5}, r"method\.train\.momentum=-0\.5: must be 0 or more"),
    ],
)
def test_what_cannot_run_is_refused(fedmn_config: Make, changes: dict[str, float], message: str) -> None:
    config = fedmn_config(**changes)
    with pytest.raises(ValueError, match=message):
        stages(config.method, build_world(config))


def test_other_spaces_and_adaptations_are_refused(fedmn_config: Make, tiny_config: Make) -> None:
    method = FedMnConfig(train=FedMnTrainingConfig(rounds=2, pretraining_rounds=1))
    with pytest.raises(ValueError, match=r"space\.name=cnn_digits: fedmn takes a space of modules"):
        stages(method, build_world(tiny_config()))
    config = fedmn_config()
    config.method.adapt = AdaptationConfig(epochs=0)
    with pytest.raises(ValueError, match=r"method\.adapt\.epochs=0"):
        stages(config.method, build_world(config))


def test_the_papers_rounds_are_the_defaults() -> None:
    config = FedMnConfig()
    assert (config.train.pretraining_rounds, config.train.rounds) == (500, 1000)
    assert (config.adapt.epochs, config.adapt.lr) == (1, 0.01)
    assert isinstance(config.train, SiloTrainingConfig)
