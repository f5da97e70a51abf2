"""HeteroFL, FjORD, FedRolex: who trains which width, their limits, rounds by a slow reference, statistics, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.evaluation import estimate_statistics
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import IGNORED, OBJECTIVES, DistilledLoss, Objective, divergence
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import BudgetConfig, DevicesConfig, ObjectiveConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedrolex import FedRolexConfig
from fedloom.platform.methods.fjord import FjordConfig, Ordered
from fedloom.platform.methods.heterofl import HeteroFLConfig
from fedloom.platform.methods.registry import build_stages, check_space
from fedloom.platform.methods.tier_models import TierModelsStage, WidthConfig, largest_of_tiers, of_widths
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.measure import activation_bytes_of

Make = Callable[..., RunConfig]
SPACE = SpaceConfig("cnn_width", input_shape=[1, 8, 8], stage_widths=[4, 8], widths=[0.25, 0.5, 1.0])
LOCAL = LocalSGD(epochs=1, batch_size=16, lr=0.1)
METHODS = (HeteroFLConfig, FjordConfig, FedRolexConfig)


@pytest.fixture
def width_config(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in 3 tiers, one per width; `train` changes the training, keywords the method."""

    def make(kind: type[WidthConfig], train: dict[str, Any] | None = None, **method: Any) -> RunConfig:
        space = replace(SPACE, **method.pop("space", {}))
        training = TrainingConfig(rounds=2, clients_per_round=5, batch_size=16, evaluate_every=2, weighting="plain")
        config = kind(train=replace(training, **(train or {})), **method)
        bounds = [1500.0, 4000.0, 7000.0][-len(space.widths or ()) :]
        owners = [0, 0, 0, 1, 1, 1, 2, 2] if len(bounds) == 3 else [0] * 8
        tiers = TiersConfig(count=len(bounds), clients=owners, upper_bounds=bounds)
        return tiny_config(method=config, space=space, tiers=tiers)

    return make


def test_peaks_are_those_of_the_built_networks() -> None:
    space = build_space(replace(SPACE, input_shape=[1, 32, 32], stage_widths=[16, 32]))
    table = space.cost_table("activation_bytes")
    peaks = [activation_bytes_of(space.build_subnet((i,)), torch.zeros(1, 1, 32, 32)) for i in range(3)]
    assert [table.cost((i,)) for i in range(3)] == peaks == sorted(set(peaks))


# -- absent classes ---------------------------------------------------------------------------------------------------


def test_rows_of_absent_classes_are_sent_and_left_out_of_the_mean(width_config: Make) -> None:
    config = width_config(HeteroFLConfig)
    config = replace(config, data=replace(config.data, partition="lda", alpha=0.05))
    worlds = {
        in_mean: build_world(replace(config, objective=ObjectiveConfig("masked_classes", {"in_mean": in_mean})))
        for in_mean in (True, False)
    }
    after, moved, bytes_up = {}, {}, {}
    for in_mean, world in worlds.items():
        stage, worker = build_stages(world)[0], Worker(world.spec)
        state = stage.begin(RunState())
        plan, before = stage.plan(state), state.weights("supernet")
        sums, held = WeightedSums(), list[tuple[dict[str, Tensor], set[int]]]()
        reports = []
        for assignment in (a for a in plan.assignments if a.client_id is not None):
            outcome = assignment.task.run(worker, assignment, before)
            assert outcome.update is not None
            tensors = {name: tensor.clone() for name, tensor in outcome.update.tensors.items()}
            labels = world.data.client(assignment.client_id, "train")[1]
            held.append((tensors, set(labels.tolist())))
            sums.add(outcome.update)
            reports.append(outcome.bytes_up)
        after[in_mean], bytes_up[in_mean] = sums.finish(before).weights, reports
        name = next(n for n, t in before.items() if t.shape == (10, 8))
        moved[in_mean] = float((after[in_mean][name] - before[name]).norm())
        for label, unit in product(range(10), range(8)):
            there = [
                t[name][label, unit] for t, own in held if unit < t[name].shape[1] and (label in own or not in_mean)
            ]
            expected = torch.stack(there).mean() if there else before[name][label, unit]
            torch.testing.assert_close(after[in_mean][name][label, unit], expected, rtol=1e-5, atol=1e-6)
    assert any(len(own) < 10 for _, own in held)
    assert bytes_up[True] == bytes_up[False], "all rows travel"
    assert moved[True] > 1.2 * moved[False]


def test_masked_rows_do_not_go_with_privacy(width_config: Make, refused: Callable[[RunConfig], str]) -> None:
    config = width_config(HeteroFLConfig, train={"privacy": PrivacyConfig(clip=1.0, noise=1.0)}, space={"norm": "none"})
    message = "reveal which classes a client has: set objective.options.in_mean=false"
    assert message in refused(replace(config, objective=ObjectiveConfig("masked_classes")))


# -- who trains what --------------------------------------------------------------------------------------------------


def test_a_tier_trains_the_widest_network_that_it_affords(width_config: Make) -> None:
    world = build_world(width_config(HeteroFLConfig))
    costs = [world.cost_table.cost((i,)) for i in range(3)]
    assert costs[0] <= 1500 < costs[1] <= 4000 < costs[2]
    assert largest_of_tiers(world) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("kind", METHODS)
def test_every_tier_gets_a_model_of_its_width(width_config: Make, run_in_memory: Any, kind: type[WidthConfig]) -> None:
    world, memory, _ = run_in_memory(width_config(kind))
    clients = [row for record in memory.records for table, row in record.rows if table == "clients"]
    trained = [row for row in clients if row["stage"] == "supernet"]
    bytes_by_tier = {row["tier"]: row["bytes_down"] for row in trained}
    assert bytes_by_tier == {
        tier.name: world.space.cost_table("bytes").cost((i,)) for i, tier in enumerate(world.tiers)
    }
    models = [model for record in memory.records for _, model in record.models]
    assert [(m.name, m.architecture) for m in models] == [
        (f"tier{i + 1}-{kind().name}", str(i))
        for i in range(3)  # type: ignore[attr-defined]
    ]


def test_dynamic_widths_are_drawn_among_those_that_a_tier_affords(width_config: Make, run_in_memory: Any) -> None:
    _, memory, _ = run_in_memory(width_config(HeteroFLConfig, {"rounds": 12}, dynamic=True))
    rows = [row for record in memory.records for table, row in record.rows if table == "clients"]
    seen: dict[str, set[str]] = {}
    for row in rows:
        if row["stage"] == "supernet":
            seen.setdefault(row["tier"], set()).add(row["architecture"])
    assert seen == {"tier1": {"0"}, "tier2": {"0", "1"}, "tier3": {"0", "1", "2"}}


# -- FjORD's batches --------------------------------------------------------------------------------------------------


def world_of(width_config: Make, **space: Any) -> World:
    return build_world(width_config(FjordConfig, space=space))


def test_widths_are_drawn_alike_and_their_macs_counted(width_config: Make) -> None:
    world = world_of(width_config)
    worker = Worker(world.spec)
    for distillation in (0.0, 1.0):
        task = Train(Ordered((2,), distillation), replace(LOCAL, epochs=3))
        assignment = Assignment("supernet", 0, 6, "tier3", task)
        weights = world.space.initial_weights(torch.Generator().manual_seed(0))
        ran, counted = task.run(worker, assignment, weights), task.account(worker, assignment)
        for figure in ("macs", "bytes_down", "bytes_up", "steps", "samples", "parameters", "subspace"):
            assert getattr(ran, figure) == getattr(counted, figure), figure
    draws = Ordered((2,))._draws(worker, Assignment("supernet", 0, 6, "tier3", task))
    counts = np.bincount([next(draws)[0] for _ in range(3000)], minlength=3)
    assert chisquare(counts).pvalue > 0.001


def test_the_loss_of_self_distillation_by_hand() -> None:
    taught, objective = DistilledLoss(0.75, 2.0), Objective()
    teacher, student = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    target = torch.tensor([0])
    for _ in range(2):  # two batches
        assert taught.is_first
        taught.passed(teacher)
        own = float(taught.loss(objective, teacher, target))
        assert own == pytest.approx(float(np.log(1 + np.exp(-2))))
        assert not taught.is_first
        taught.passed(student)
        # Softened by 2: logits (1, 0) teach (0, 2).
        p, q = np.array([np.e, 1.0]) / (np.e + 1), np.array([1.0, np.e**2]) / (1 + np.e**2)
        expected = 0.25 * np.log(1 + np.exp(4)) + 0.75 * 4 * float((p * np.log(p / q)).sum())
        assert float(taught.loss(objective, student, target)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("choice", ["classification", "last_position", "later_positions"])
def test_self_distillation_teaches_the_positions_that_count_alone(choice: str) -> None:
    """As many, and with the same gradients, as a batch of only these positions; also of outputs by name."""
    options = (("skip", 1),) if choice == "later_positions" else ()
    objective = OBJECTIVES.make(ComponentSpec(choice, options))
    targets = torch.tensor([[1, 2, 0, IGNORED], [0, 1, IGNORED, IGNORED]])
    counts = {
        "classification": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)],
        "last_position": [(0, 2), (1, 1)],
        "later_positions": [(0, 1), (0, 2), (1, 1)],
    }[choice]
    rng = torch.Generator().manual_seed(1)
    teacher, outputs = torch.randn(2, 3, 4, generator=rng), torch.randn(2, 3, 4, generator=rng).requires_grad_()
    rows, positions = (torch.tensor(index) for index in zip(*counts, strict=True))
    taught = DistilledLoss(0.5, 2.0)
    taught.passed({"logits": teacher})
    taught.loss(objective, teacher, targets)
    taught.passed({"logits": outputs})
    loss = taught.loss(objective, {"logits": outputs}, targets)
    pupil, labels = outputs[rows, :, positions], targets[rows, positions]
    expected = 0.5 * F.cross_entropy(pupil, labels) + 0.5 * 4 * divergence(pupil, teacher[rows, :, positions], 2.0)
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(each, outputs)[0] for each in (loss, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm", ["static", "batch", "none"])
def test_narrow_passes_are_those_of_the_narrow_network(width_config: Make, norm: str) -> None:
    """One step of the narrowest width changes the leading channels as the narrow network's own step, and no others."""
    world = world_of(width_config, norm=norm)
    worker = Worker(world.spec)
    weights = world.space.initial_weights(torch_stream(3, "test"))
    local = replace(LOCAL, batch_size=worker.data.size(6, "train"))
    network = Ordered((2,))
    place = next(r for r in range(50) if next(network._draws(worker, at(r)))[0] == 0)
    ours = Train(network, local).run(worker, at(place), weights).update
    theirs = Train(Subnet((0,)), local).run(worker, at(place), weights).update
    assert ours is not None
    assert theirs is not None
    for name, piece in world.space.slices((0,)).items():
        if "tracked" in name:
            continue
        torch.testing.assert_close(piece.of(ours.tensors[name]), theirs.tensors[name], rtol=1e-4, atol=1e-6)
        outside = torch.ones_like(weights[name], dtype=torch.bool)
        piece.of(outside).fill_(False)
        assert torch.equal(ours.tensors[name][outside], weights[name][outside])


def at(round_: int) -> Assignment:
    return Assignment("supernet", round_, 6, "tier3", None)  # type: ignore[arg-type]


# -- limits: one width is FedAvg, bit for bit --------------------------------------------------------------------------


def test_one_width_is_fedavg(width_config: Make) -> None:
    world = world_of(width_config)
    worker = Worker(world.spec)
    weights = world.space.initial_weights(torch_stream(3, "test"))
    whole = world.space.largest
    alone = Train(Subnet(whole, stand_alone=True), LOCAL).run(worker, at(0), weights).update
    heterofl = Train(Subnet(whole), LOCAL).run(worker, at(0), weights).update
    assert alone is not None
    assert heterofl is not None
    same(heterofl.tensors, alone.tensors)
    one = world_of(width_config, widths=[1.0])
    worker = Worker(one.spec)
    weights = one.space.initial_weights(torch_stream(3, "test"))
    expected = Train(Subnet((0,), stand_alone=True), LOCAL).run(worker, at(0), weights).update
    fjord = Train(Ordered((0,)), LOCAL).run(worker, at(0), weights).update
    assert expected is not None
    assert fjord is not None
    same(fjord.tensors, expected.tensors)


def same(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_fedrolex_that_does_not_roll_is_heterofl(width_config: Make, run_in_memory: Any) -> None:
    states = []
    for config in (width_config(HeteroFLConfig), width_config(FedRolexConfig, step=0)):
        _, memory, _ = run_in_memory(config)
        found = [r.state for r in memory.records if r.state is not None and r.state.stage == 0 and r.state.round == 2]
        states.append(found[0].weights("supernet"))
    same(*states)


# -- compressed slices -------------------------------------------------------------------------------------------------


def test_clients_remember_what_they_have_not_sent_of_their_own_slices(width_config: Make, run_in_memory: Any) -> None:
    compressed = {"processors": ["top_k", "uniform"], "options": {"share": 0.2, "bits": 4}, "clients_per_round": 8}
    world, memory, _ = run_in_memory(width_config(HeteroFLConfig, compressed))
    rows = [row for r in memory.records for table, row in r.rows if table == "clients" and row["stage"] == "supernet"]
    assert {row["parameters"] for row in rows} == {scalars(world, tier) for tier in range(3)}
    for row in rows:
        held = world.space.slices(largest_of_tiers(world)[int(world.tier_of_client[row["client_id"]])])
        tensors = len(world.space.parameter_names & {piece.source for piece in held.values()})
        number = row["parameters"]
        few = math.ceil(number / 5)
        levels, which = math.ceil(few / 2), math.ceil(number / 8)
        assert row["bytes_up"] == row["bytes_down"] - 4 * number + which + levels + 4 * tensors
    state = memory.state(1)
    for client_id in range(8):
        mine, inside = state.client_state(client_id), 0
        assert mine is not None
        for piece in world.space.slices(largest_of_tiers(world)[int(world.tier_of_client[client_id])]).values():
            left_out = mine.get(f"rule/top_k/{piece.source}")
            if left_out is not None:
                inside += int(piece.of(left_out).count_nonzero())
        assert inside > 0
        assert inside == sum(int(t.count_nonzero()) for t in mine.values()), "nothing beside its slices"
    _, _, last = run_in_memory(width_config(HeteroFLConfig, compressed))
    assert all(not name.startswith("client-") for name in last.groups), "the memory ends with the stage"


def scalars(world: World, tier: int) -> int:
    return int(world.space.cost_table("parameters").cost(largest_of_tiers(world)[tier]))


# -- two rounds by a slow reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HeteroFLConfig, FedRolexConfig])
def test_rounds_are_means_over_those_who_hold_a_scalar(
    width_config: Make, run_in_memory: Any, kind: type[WidthConfig]
) -> None:
    world, memory, _ = run_in_memory(width_config(kind))
    states = [r.state for r in memory.records if r.state is not None and r.state.stage == 0]
    rows = [row for r in memory.records for table, row in r.rows if table == "clients" and row["stage"] == "supernet"]
    worker, space = Worker(world.spec), of_widths(world.space, "test")
    stage = build_stages(world)[0]
    weights: dict[str, Tensor] = dict(stage.begin(replace(states[0], groups={})).weights("supernet"))
    names = set(space.parameter_names)
    for round_ in range(2):
        total = {n: np.zeros(t.shape) for n, t in weights.items() if n in names}
        count = {n: np.zeros(t.shape) for n, t in weights.items() if n in names}
        for row in (r for r in rows if r["round"] == round_):
            width = (int(row["tier"].removeprefix("tier")) - 1,)
            local = replace(LOCAL, momentum=0.9)
            task = Train(Subnet(width), local, ComponentSpec("plain"))
            given = Assignment("supernet", round_, row["client_id"], row["tier"], task)
            update = task.run(worker, given, weights).update
            assert update is not None
            for name in names:
                place = tuple(slice(0, n) for n in update.tensors[name].shape)
                total[name][place] += update.tensors[name].detach().double().numpy()
                count[name][place] += 1
        for name in names:
            held = count[name] > 0
            mean = np.where(held, total[name] / np.maximum(count[name], 1), weights[name].double().numpy())
            weights[name] = torch.from_numpy(mean).float()
        if kind is FedRolexConfig:
            weights = space.rolled(weights, 1)
        ours = next(s for s in states if s.round == round_ + 1).weights("supernet")
        for name in names:
            torch.testing.assert_close(ours[name], weights[name], rtol=1e-4, atol=1e-5, msg=name)


# -- static batch norms ------------------------------------------------------------------------------------------------


def test_a_tiers_statistics_are_the_mean_over_all_clients(width_config: Make, run_in_memory: Any) -> None:
    world, memory, _ = run_in_memory(width_config(HeteroFLConfig))
    final = [r.state for r in memory.records if r.state is not None and r.state.stage == 2][-1]
    stage, worker = TierModelsStage(world, "heterofl", None), Worker(world.spec)
    for tier in range(3):
        group = final.weights(stage.group(tier))
        module = world.space.build_subnet(stage.architectures[tier]).eval()
        total, samples = dict[str, Tensor](), 0
        for client_id in range(world.num_clients):
            module.load_state_dict(dict(group))
            x, _ = worker.client_data(client_id, "train")
            estimate_statistics(module, x)
            samples += len(x)
            for name, buffer in module.named_buffers():
                total[name] = total.get(name, torch.zeros(())) + len(x) * buffer.double()
        checked = [name for name in total if "running" in name]
        assert checked
        for name in checked:
            torch.testing.assert_close(group[name].double(), total[name] / samples, rtol=1e-4, atol=1e-6)


def test_statistics_are_measured_by_clients_whatever_their_devices_do(width_config: Make, run_in_memory: Any) -> None:
    config = replace(width_config(HeteroFLConfig, statistics_clients=1), devices=DevicesConfig(dropout=0.9))
    _, memory, _ = run_in_memory(config)
    measured = memory.table("clients").query("stage == 'tier_models'")
    assert measured["status"].tolist() == ["ok"] * 3


def test_networks_without_statistics_have_no_such_rounds(width_config: Make, run_in_memory: Any) -> None:
    _, memory, _ = run_in_memory(width_config(HeteroFLConfig, space={"norm": "none"}))
    rounds = [row["stage"] for r in memory.records for table, row in r.rows if table == "rounds"]
    assert rounds == ["supernet"] * 2 + ["evaluation"] * 3


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_other_spaces_and_poor_tiers_are_refused(width_config: Make, tiny_config: Make) -> None:
    world = build_world(tiny_config())
    with pytest.raises(ValueError, match="fjord cannot use space cnn_digits, whose subnets are not widths"):
        check_space(FjordConfig(), world.space)
    world = build_world(width_config(HeteroFLConfig))
    poor = replace(world, tiers=tuple(replace(t, lower=t.lower / 4, upper=t.upper / 4) for t in world.tiers))
    with pytest.raises(ValueError, match=r"tier1 may spend 375 macs, the smallest network costs 884: raise its upper"):
        build_stages(poor)


def test_a_rule_that_needs_the_gradient_of_one_network_is_refused_by_ordered_dropout(
    width_config: Make, refused: Callable[[RunConfig], str]
) -> None:
    config = width_config(FjordConfig, train={"local_rule": "scaffold", "options": {"option": 1}})
    assert "but clients train another one in every pass: use option=2" in refused(config)


@pytest.mark.parametrize(
    "train",
    [
        *({"server": "fedadam"}, {"local_rule": "scaffold", "momentum": 0.0}, {"processors": ["top_k"]}),
        {"asynchronous": "fedbuff", "arrivals": 2},
    ],
)
def test_rules_that_keep_tensors_by_channel_do_not_roll(width_config: Make, train: dict[str, Any]) -> None:
    kept = "(what (rules keep|top_k)|answers from older weights)"
    with pytest.raises(ValueError, match=f"fedrolex rolls the channels after every round, so {kept}"):
        build_stages(build_world(width_config(FedRolexConfig, train)))


def test_budgets_that_no_client_keeps_to_are_said(width_config: Make, caplog: pytest.LogCaptureFixture) -> None:
    for dynamic in (True, False):
        config = width_config(HeteroFLConfig, dynamic=dynamic)
        config.tiers.budget = BudgetConfig("schedule", factors=[1.0, 0.5])
        assert not caplog.messages
        build_stages(build_world(config))
    assert caplog.messages == [
        "tiers.budget.kind=schedule has no effect: with these settings, what clients of heterofl train does not depend "
        "on budgets"
    ]


def test_kl_is_torchs() -> None:
    logits, teacher = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.5]])
    expected = F.kl_div(F.log_softmax(logits, 1), F.softmax(teacher, 1), reduction="batchmean")
    taught = DistilledLoss(1.0, passes_made=1, teacher=teacher)
    taught.passed(logits)
    assert float(taught.loss(Objective(), logits, torch.tensor([0]))) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("privacy", [PrivacyConfig(clip=1.0, noise=1.0), PrivacyConfig(secure=True)])
def test_batch_norms_that_clients_measure_are_not_private(width_config: Make, privacy: PrivacyConfig) -> None:
    train = {"privacy": privacy}
    with pytest.raises(ValueError, match="heterofl's clients measure batch norms without noise or masks at the end"):
        build_stages(build_world(width_config(HeteroFLConfig, train)))
    build_stages(build_world(width_config(HeteroFLConfig, train, space={"norm": "none"})))
