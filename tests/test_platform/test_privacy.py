"""Differential privacy on slices: sensitivity, fixed denominators, published epsilons, limits, and what is refused."""

import math
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.averaging.privacy import clip_changes, epsilon, expected_weights, limited, privatised, with_round
from fedloom.platform.federation.algorithm import RunState, TrainingStage
from fedloom.platform.federation.config import DevicesConfig, RunConfig
from fedloom.platform.federation.processing import check_privacy
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig, rules_of
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.global_nas import GlobalNasConfig
from fedloom.platform.methods.registry import METHODS, build_stages
from fedloom.platform.methods.shares import SharesConfig
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig
from fedloom.platform.methods.silos import SiloTrainingConfig
from fedloom.platform.methods.superfednas import DistributionConfig
from fedloom.platform.spaces.slices import Region, Slice
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
SHAPES = {"a": (6, 5), "b": (4,)}


# -- sensitivity -------------------------------------------------------------------------------------------------------


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    ends = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    return tuple((low, max(high, low + 1)) for low, high in ends)


@st.composite
def clients(draw: st.DrawFn) -> list[dict[str, Region]]:
    """Two to six clients that hold random parts of one or both tensors."""
    number = draw(st.integers(2, 6))
    names = st.sets(st.sampled_from(sorted(SHAPES)), min_size=1)
    return [{name: draw(regions(SHAPES[name])) for name in sorted(draw(names))} for _ in range(number)]


def update_of(held: dict[str, Region], old: dict[str, Tensor], weight: float, seed: int, clip: float) -> Update:
    """A client's clipped update, of changes of very different size."""
    generator = torch.Generator().manual_seed(seed)
    received = {name: Slice(name, region).of(old[name]).clone() for name, region in held.items()}
    scale = 10.0 ** (seed % 5 - 2)
    tensors = {name: t + scale * torch.randn(t.shape, generator=generator) for name, t in received.items()}
    clip_changes(tensors, received, clip)
    slices = {name: Slice(name, region) for name, region in held.items()}
    return Update(tensors, slices, dict.fromkeys(tensors, weight))


def summed_change(updates: Sequence[Update], old: dict[str, Tensor]) -> Tensor:
    """The unnoised sum of weighted changes, as one vector of all scalars, in double precision."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for update in updates:
        for name, tensor in update.tensors.items():
            piece = update.slices[name]
            piece.of(total[name]).add_(update.weights[name] * (tensor.double() - piece.of(old[name]).double()))
    return torch.cat([t.flatten() for t in total.values()])


@settings(max_examples=200, deadline=None)
@given(clients(), st.floats(0.01, 10), st.integers(0, 10_000), st.floats(0, 1))
def test_removing_a_client_changes_the_sum_by_at_most_the_clip(
    held: list[dict[str, Region]], clip: float, seed: int, weight: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    weights = [weight, *[1.0] * (len(held) - 1)]
    updates = [update_of(part, old, w, seed + i, clip) for i, (part, w) in enumerate(zip(held, weights, strict=True))]
    whole = summed_change(updates, old)
    for i in range(len(updates)):
        rest = summed_change([*updates[:i], *updates[i + 1 :]], old)
        assert float((whole - rest).norm()) <= clip * (1 + 1e-5) + 1e-6, "float32's rounding of values of about 1"
        # Replacing it by any other client changes the sum by at most twice as much.
        other = update_of(held[i], old, 1.0, seed + 77, clip)
        changed = summed_change([*updates[:i], other, *updates[i + 1 :]], old)
        assert float((whole - changed).norm()) <= 2 * clip * (1 + 1e-5) + 1e-6


@settings(max_examples=100, deadline=None)
@given(clients(), st.integers(0, 1000))
def test_the_change_of_a_scalar_is_the_sum_over_its_expected_weight(held: list[dict[str, Region]], seed: int) -> None:
    """Against a loop over scalars in double precision."""
    generator = torch.Generator().manual_seed(seed)
    old = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    updates = [update_of(part, old, 1.0, seed + i, 1.0) for i, part in enumerate(held)]
    expected = {name: torch.rand(shape, generator=generator) * 3 for name, shape in SHAPES.items()}
    sums = WeightedSums()
    for update in updates:
        sums.add(update)
    found = privatised(sums.finish(old), old, expected, 0.0, 0.5, torch.Generator())
    assert {coverage.factor for covered in found.coverage.values() for coverage in covered.values()} <= {1.0}
    for name in SHAPES:
        change = np.zeros(SHAPES[name])
        for update in updates:
            if name in update.tensors:
                region = update.slices[name].region or ()
                place = tuple(slice(*edge) for edge in region)
                change[place] += (update.tensors[name].double() - old[name][place].double()).numpy()
        reached = expected[name].numpy() >= 0.5
        new = old[name].double().numpy() + np.where(reached, change / np.maximum(expected[name].numpy(), 1e-9), 0.0)
        np.testing.assert_allclose(found.weights[name].numpy(), new, rtol=1e-4, atol=1e-5)


# -- the mechanism -----------------------------------------------------------------------------------------------------


def test_clipping_is_joint_over_all_tensors_and_keeps_what_is_within() -> None:
    received = {"a": torch.zeros(2), "b": torch.zeros(1), "n": torch.tensor(3)}
    tensors = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "n": torch.tensor(9)}
    assert clip_changes(tensors, received, 1.0) == 5.0
    assert tensors["a"].tolist() == pytest.approx([0.6, 0.0], rel=1e-5)
    assert tensors["b"].tolist() == pytest.approx([0.8], rel=1e-5)
    assert int(tensors["n"]) == 9
    kept = {"a": torch.tensor([0.3, 0.1])}
    clip_changes(kept, {"a": torch.zeros(2)}, 1.0)
    assert kept["a"].tolist() == torch.tensor([0.3, 0.1]).tolist()


def test_a_mask_of_infinite_values_does_not_switch_clipping_off() -> None:
    mask = torch.tensor([0.0, -math.inf])
    tensors = {"a": torch.tensor([3.0, 4.0]), "mask": mask.clone()}
    assert clip_changes(tensors, {"a": torch.zeros(2), "mask": mask}, 1.0) == 5.0
    assert tensors["a"].tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    assert torch.equal(tensors["mask"], mask)


def test_noise_is_in_every_expected_scalar_and_larger_where_fewer_are_expected() -> None:
    old = {"w": torch.zeros(3, 20_000)}
    expected = {"w": torch.tensor([[4.0], [1.0], [0.25]]).expand(3, 20_000)}
    sums = WeightedSums()
    update = Update({"w": torch.ones(1, 20_000)}, {"w": Slice("w", ((0, 1), (0, 20_000)))}, {"w": 1.0})
    sums.add(update)
    found = privatised(sums.finish(old), old, expected, 2.0, 0.5, torch.Generator().manual_seed(0)).weights["w"]
    assert found.std(dim=1).tolist() == pytest.approx([2 / 4, 2 / 1, 0.0], rel=0.03)
    assert found.mean(dim=1).tolist() == pytest.approx([1 / 4, 0.0, 0.0], abs=0.05)


def test_variances_stay_positive_under_noise_and_are_else_what_clients_have_measured() -> None:
    name, expected = "n.running_var", {"n.running_var": torch.tensor([2.0, 2.0, 0.1])}
    old = {name: torch.tensor([1e-4, 1e-4, 2e-4])}
    sums = WeightedSums()
    sums.add(Update({name: torch.tensor([3e-4, 5e-4, 9e-4])}, {name: Slice(name)}, {name: 2.0}))
    for noise, close in ((0.0, True), (9.0, False)):
        averaged = deepcopy(sums).finish(old)
        found = privatised(averaged, old, expected, noise, 0.5, torch.Generator().manual_seed(3)).weights[name]
        assert found[2] == old[name][2], "few are expected to have it"
        assert (found[:2].tolist() == pytest.approx([3e-4, 5e-4])) is close
        assert close or bool((found[:2] >= 1e-3).all())


def test_expected_weights_are_means_over_simulated_cohorts() -> None:
    like = {"w": torch.zeros(3), "n": torch.tensor(1)}
    half = {"w": Slice("w", ((0, 2),)), "n": Slice("n")}
    rounds = [[(half, 1.0), ({"w": Slice("w")}, 1.0)], [({"w": Slice("w")}, 0.5)]]
    found = expected_weights(rounds, like)
    assert found["w"].tolist() == [1.25, 1.25, 0.75]
    assert set(found) == {"w"}


def test_expected_weights_follow_maxnets_beta(elastic_config: Make) -> None:
    """One client of a round has the largest subnet, and so every scalar, with a weight of .9 that falls to .25."""
    private = PrivacyConfig(clip=1.0)
    config = elastic_config(train={"rounds": 5, "weighting": "plain", "evaluate_every": 0, "privacy": private})
    stage, *_ = build_stages(build_world(config))
    assert isinstance(stage, TrainingStage)
    state, least = stage.begin(RunState()), list[float]()
    for round_ in (0, 4):
        simulated = partial(stage._simulated_tasks, replace(state, round=round_))
        weights = stage.processing._expected_weights(state.weights("supernet"), simulated)
        least.append(min(float(weight.min()) for weight in weights.values()))
    assert least[0] >= 0.9
    assert 0.25 <= least[1] < 0.6


def test_weights_are_capped_and_counters_left_out() -> None:
    tensors = {"w": torch.zeros(1), "n": torch.tensor(4)}
    update = Update(tensors, {}, {"w": 30.0, "n": 30.0})
    assert limited(update, 60.0) == {"w": 0.5, "n": 0.0}
    assert limited(update, 10.0) == {"w": 1.0, "n": 0.0}


# -- epsilon -----------------------------------------------------------------------------------------------------------


def classic(sampling: float, noise: float, rounds: int, delta: float) -> float:
    """Mironov's conversion of Rényi divergences, by which the older papers found their epsilon."""
    accountant = RdpAccountant(orders=[1 + x / 10 for x in range(1, 1000)] + list(range(101, 512)))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(noise)), rounds)
    orders, divergences = np.asarray(accountant._orders), np.asarray(accountant._rdp)
    return float(np.min(divergences + math.log(1 / delta) / (orders - 1)))


PUBLISHED = {
    # Abadi et al. 2016, Sec. 3: q = .01, sigma = 4, 10 000 steps.
    "Abadi": (0.01, 4.0, 10_000, 1e-5, 1.26),
    # McMahan et al. 2018, Tab. 1: 5000 of 763 430 users, z = 1, 5000 rounds.
    "McMahan": (5000 / 763_430, 1.0, 5000, 1e-9, 4.634),
    # TensorFlow Privacy's tutorial: 60 000 digits, batches of 256, z = 1.1, 60 epochs.
    "tutorial": (256 / 60_000, 1.1, 60 * 60_000 // 256, 1e-5, 3.01),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_epsilons(name: str) -> None:
    sampling, noise, rounds, delta, published = PUBLISHED[name]
    assert classic(sampling, noise, rounds, delta) == pytest.approx(published, rel=0.01)
    # The accountant converts more tightly (Canonne et al. 2020), and loss distributions are tighter still.
    spent = [[["poisson", sampling, noise], 1000, rounds]]
    ours, tightest = (epsilon(spent, delta, accountant) for accountant in ("rdp", "pld"))
    assert 0.75 * published < tightest < ours < published


def test_epsilon_grows_with_rounds_and_a_fixed_cohort_costs_more() -> None:
    fixed, poisson = ([[[s, n, 2.0], 100, r] for r in (1, 10, 100)] for s, n in (("uniform", 10), ("poisson", 0.1)))
    a, b = ([epsilon([entry], 1e-5, "rdp") for entry in entries] for entries in (fixed, poisson))
    assert a == sorted(a)
    assert b == sorted(b)
    assert all(x > y for x, y in zip(a, b, strict=True)), "neighbours that replace a client differ by twice the clip"
    assert epsilon([[["poisson", 0.1, 0.0], 100, 1]], 1e-5, "rdp") == math.inf


def test_stages_add_up() -> None:
    one = ("poisson", 0.1, 2.0)
    spent = with_round(with_round([], one, 100), one, 100)
    assert spent == [[["poisson", 0.1, 2.0], 100, 2]]
    both = with_round(spent, ("poisson", 0.2, 2.0), 50)
    assert epsilon(both, 1e-5, "rdp") > epsilon(spent, 1e-5, "rdp")
    with pytest.raises(ValueError, match="stages that sample by uniform and by poisson have no common epsilon"):
        with_round(spent, ("uniform", 10, 2.0), 100)


def from_scratch(spent: list[list[Any]], delta: float, accountant: str) -> float:
    """Every round's event given to a new accountant."""
    fixed = any(mechanism[0] == "uniform" for mechanism, _, _ in spent)
    relations = dp_accounting.NeighboringRelation
    whole = (PLDAccountant if accountant == "pld" else RdpAccountant)(
        neighboring_relation=relations.REPLACE_ONE if fixed else relations.ADD_OR_REMOVE_ONE
    )
    for (sampling, share, noise), population, rounds in spent:
        event = dp_accounting.GaussianDpEvent(noise / 2 if fixed else noise)
        if sampling == "uniform":
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, int(share), event)
        elif sampling == "poisson":
            event = dp_accounting.PoissonSampledDpEvent(share, event)
        whole.compose(event, rounds)
    return float(whole.get_epsilon(delta))


STAGES: dict[str, list[tuple[Any, int]]] = {
    "uniform": [(("uniform", 10.0, 3.1), 100), (("uniform", 25.0, 4.3), 90), (("all", 1.0, 6.0), 100)],
    "poisson": [(("poisson", 0.1, 3.1), 100), (("all", 1.0, 6.0), 100), (("poisson", 0.25, 4.3), 90)],
}


@pytest.mark.parametrize(("sampling", "accountant"), [("uniform", "rdp"), ("poisson", "rdp"), ("poisson", "pld")])
def test_epsilon_has_the_bits_of_an_accountant_composed_from_scratch(sampling: str, accountant: str) -> None:
    """Rounds of several stages, the first of which goes on after the others: what is kept from a round is the round."""
    one, two, three = STAGES[sampling]
    spent: list[list[Any]] = []
    found, expected = list[float](), list[float]()
    for mechanism, population in (one, one, two, three, three, one):
        spent = with_round(spent, mechanism, population)
        found.append(epsilon(spent, 1e-5, accountant))
        if len(found) in (1, 2, 6):
            expected.append(from_scratch(spent, 1e-5, accountant))
    assert [rounds for _, _, rounds in spent] == [3, 1, 2]
    assert [found[0], found[1], found[5]] == expected


def test_what_a_round_spends_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    compose = RdpAccountant.compose
    monkeypatch.setattr(RdpAccountant, "compose", lambda self, *a: found.append(a) or compose(self, *a))
    for rounds in range(1, 20):
        epsilon([[["uniform", 7.0, 1.37], 77, rounds]], 1e-5, "rdp")
    assert len(found) == 1


def test_loss_distributions_do_not_know_cohorts_of_a_fixed_size() -> None:
    with pytest.raises(ValueError, match="pld knows stages of selection=poisson and all, not uniform: use rdp"):
        epsilon([[["uniform", 10.0, 1.0], 100, 1]], 1e-5, "pld")


# -- runs --------------------------------------------------------------------------------------------------------------


def private(make: Make, clip: float | None, noise: float, **train: Any) -> RunConfig:
    known = {"rounds": 3, "clients_per_round": 4, "batch_size": 16, "weighting": "plain", "evaluate_every": 0, **train}
    training = TrainingConfig(privacy=PrivacyConfig(clip=clip, noise=noise), **known)
    return make(method=FedAvgConfig(architecture="0-1-2", train=training, evaluate=False))


def weights_after(run_in_memory: Any, config: RunConfig) -> tuple[dict[str, Tensor], list[Any]]:
    _, memory, _ = run_in_memory(config)
    stage = next(r.state for r in memory.records if r.state is not None and r.state.stage == 1)
    rounds = [row for r in memory.records for table, row in r.rows if table == "rounds" and row["stage"] == "fedavg"]
    return dict(stage.weights("fedavg")), rounds


def test_without_noise_and_within_the_clip_it_is_fedavg_bit_for_bit(tiny_config: Make, run_in_memory: Any) -> None:
    plain, _ = weights_after(run_in_memory, private(tiny_config, None, 0.0))
    same, rounds = weights_after(run_in_memory, private(tiny_config, 1e9, 0.0))
    assert all(torch.equal(same[n], t) for n, t in plain.items() if t.is_floating_point())
    assert [row["epsilon"] for row in rounds] == [None] * 3


def test_epsilon_is_in_every_round(tiny_config: Make, run_in_memory: Any) -> None:
    for selection in ("uniform", "poisson", "all"):
        _, rounds = weights_after(run_in_memory, private(tiny_config, 1.0, 1.5, selection=selection))
        spent = [row["epsilon"] for row in rounds]
        assert spent == sorted(spent)
        sampling = {"uniform": 4.0, "poisson": 0.5, "all": 0.5}[selection]
        assert spent[-1] == epsilon([[[selection, sampling, 1.5], 8, 3]], 1e-5, "rdp")


def test_an_empty_cohort_is_noise_alone(
    tiny_config: Make, run_in_memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = private(tiny_config, 1.0, 1.0, selection="poisson", clients_per_round=1, rounds=12)
    config.method.train.privacy.least_coverage = 1e-3
    _, rounds = weights_after(run_in_memory, config)
    assert 0 in {row["clients_planned"] for row in rounds}
    assert "no update arrived (no client was selected), so only noise was added; 1 such" in caplog.text


def test_a_stage_that_undoes_privacy_is_warned_of(
    tiny_config: Make, run_in_memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config()
    private_ = PrivacyConfig(clip=1.0, noise=1.0, weight_cap=100.0)
    config.method.train = replace(config.method.train, privacy=private_, min_contributors=1)
    run_in_memory(config)
    assert "fine_tuned/tier1 trains without differential privacy after stages with it" in caplog.text


@pytest.mark.parametrize("method", ["fedoras", "superfednas"])
def test_supernets_of_every_averaging_rule_can_be_private(
    tiny_config: Make, elastic_config: Make, train_in_memory: Any, method: str
) -> None:
    privacy = PrivacyConfig(clip=1.0, noise=0.5, weight_cap=100.0)
    if method == "fedoras":
        config = tiny_config()
        config.method.train = replace(config.method.train, privacy=privacy, min_contributors=1, rounds=2)
    else:
        alone = {"distribution": DistributionConfig("random"), "shares": SharesConfig(rule="overlap")}
        config = elastic_config(train={"privacy": privacy, **alone})
    memory = train_in_memory(config)
    rows = [row for r in memory.records for table, row in r.rows if table == "rounds" and row["stage"] == "supernet"]
    assert all(row["epsilon"] > 0 for row in rows)
    last = [r.state for r in memory.records if r.state is not None and "supernet" in r.state.groups][-1]
    assert all(bool(torch.isfinite(t).all()) for t in last.weights("supernet").values() if t.is_floating_point())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "method.train.distribution.heuristic=tracking_sandwich: what a client trains, or weighs, depends on who"),
        ({"distribution": DistributionConfig("random")}, "method.train.shares.rule=maxnet: what a client trains"),
    ],
)
def test_noise_needs_clients_whose_work_depends_on_nobody_else(
    elastic_config: Make, changes: dict[str, Any], said: str
) -> None:
    train = {"weighting": "plain", "privacy": PrivacyConfig(clip=1.0, noise=0.5), **changes}
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        build_stages(build_world(elastic_config(train=train)))


def test_stages_that_have_no_common_epsilon_are_refused_and_open_ones_before_private_ones_are_said(
    tiny_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    privacy = PrivacyConfig(clip=1.0, noise=0.5)
    config = tiny_config()
    private = {"privacy": privacy, "weighting": "plain"}
    config.method.finetune = replace(config.method.finetune, **private)
    build_stages(build_world(config))
    assert "fine_tuned/tier1: epsilon is that of the private stages alone; supernet, before it, trained" in caplog.text
    config.method.train = replace(config.method.train, **private, min_contributors=1, selection="poisson")
    with pytest.raises(ValueError, match="stages that sample by uniform and by poisson have no common epsilon"):
        build_stages(build_world(config))


def test_a_search_that_removes_operators_can_be_private_and_resumed(
    silo_config: Make, run_in_memory: Any, run_stages: Any
) -> None:
    train = SiloTrainingConfig(rounds=4, batch_size=16, weighting="plain", use_validation=False)
    train.privacy = PrivacyConfig(clip=1.0, noise=0.5)
    method = GlobalNasConfig(train=train, search=ArchitectureSearchConfig(start=0, every=1))
    config = silo_config(method, space=SpaceConfig("darts_s2_small", channels=4, nodes=1))
    world, memory, state = run_in_memory(config)
    sizes = [len(memory.state(r).weights("supernet")) for r in range(4)]
    assert sizes[0] > sizes[1] == sizes[2] == sizes[3], "both decisions remove operators"
    _, resumed = run_stages(world, build_stages(world), memory.state(1))
    assert all(torch.equal(t, resumed.weights("supernet")[n]) for n, t in state.weights("supernet").items())


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(train: TrainingConfig) -> None:
    check_privacy(train, rules_of(train, "method.train"))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            {},
            "method.train.weighting=fedavg: a client's weight, and so its influence, has no bound; use "
            "method.train.weighting=plain or method.train.privacy.weight_cap",
        ),
        (
            {"weighting": "fedavg_whole"},
            "method.train.weighting=fedavg_whole: a client's weight, and so its influence, has no bound; use "
            "method.train.weighting=plain",
        ),
        (
            {"weighting": "plain", "local_rule": "scaffold", "momentum": 0.0},
            "method.train.local_rule=scaffold: what it sends beside the change is neither clipped nor accounted for; "
            "use sgd or fedprox",
        ),
        (
            {"weighting": "plain", "selection": "oort"},
            "method.train.selection=oort: selection probabilities are unknown; use uniform, poisson or all",
        ),
        (
            {"weighting": "plain", "min_contributors": 2},
            "method.train.min_contributors=2: counting a scalar's contributors would reveal who took part; use 1 "
            "(method.train.privacy.least_coverage withholds what few are expected to hold)",
        ),
    ],
)
def test_unbounded_influence_is_refused_in_one_line(train: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        refused(TrainingConfig(**train, privacy=PrivacyConfig(clip=1.0, noise=1.0)))


def test_further_mistakes_are_refused(tiny_config: Make) -> None:
    lonely = TrainingConfig(privacy=PrivacyConfig(noise=1.0))
    with pytest.raises(ValueError, match=r"privacy\.noise=1 needs method\.train\.privacy\.clip, its unit"):
        refused(lonely)
    pld = TrainingConfig(weighting="plain", privacy=PrivacyConfig(clip=1.0, accountant="pld"))
    with pytest.raises(ValueError, match=r"privacy\.accountant=pld knows selection=poisson and all, not uniform"):
        refused(pld)
    for devices in (DevicesConfig(availability=0.5), DevicesConfig(availability_table="generated")):
        away = replace(private(tiny_config, 1.0, 1.0), devices=devices)
        with pytest.raises(ValueError, match="selection probabilities are unknown for devices that may be away"):
            build_stages(build_world(away))


@pytest.mark.parametrize("method", ["apfl", "ditto", "pfedme", "fedproto", "local_adaptation"])
@pytest.mark.parametrize(
    "changes", [{"processors": ["sparsify"], "options": {"share": 0.5}}, {"privacy": PrivacyConfig(secure=True)}]
)
def test_what_acts_on_one_update_is_refused_before_a_run_where_clients_send_more(
    method: str, changes: dict[str, Any], silo_config: Make
) -> None:
    config = silo_config(METHODS[method].config())
    config.method.train = replace(config.method.train, **changes)
    message = r"^method\.train\.use_validation=true: privacy and processors act on .* set it to false$"
    if method != "local_adaptation":
        message = f"^privacy and processors: the clients of {method} send more than the change of one network"
    with pytest.raises(ValueError, match=message):
        build_stages(build_world(config))


@pytest.mark.parametrize("method", ["apfl", "ditto", "spider"])
def test_first_answers_are_refused_before_a_run_where_nobody_knows_them(method: str, silo_config: Make) -> None:
    config = silo_config(METHODS[method].config(), space=SpaceConfig("darts_s2_small", channels=4))
    config.method.train = replace(config.method.train, arrivals=2)
    with pytest.raises(ValueError, match=rf"arrivals=2: what the clients of {method} cost is not known before they"):
        build_stages(build_world(config))


@pytest.mark.parametrize("method", ["apfl", "ditto", "fedproto", "local_adaptation"])
def test_shares_of_a_change_are_refused_before_a_run_where_clients_send_more(method: str, silo_config: Make) -> None:
    config = silo_config(METHODS[method].config())
    config.method.train = replace(config.method.train, selection="pyramidfl", use_validation=False)
    if method == "local_adaptation":
        build_stages(build_world(config))
        return
    message = f"selection=pyramidfl says which share of its change a client sends, and the clients of {method} send"
    with pytest.raises(ValueError, match=message):
        build_stages(build_world(config))


def test_masks_and_noise_are_not_combined() -> None:
    both = TrainingConfig(weighting="plain", privacy=PrivacyConfig(clip=1.0, secure=True))
    with pytest.raises(ValueError, match=r"use it without method\.train\.privacy\.clip"):
        refused(both)
