"""SCAFFOLD, FedDyn, FedNova: rounds by hand, limits, laws of what is kept, convergence, and what is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedloom.experiments.benchmarks.convex import (
    ALGORITHMS,
    Algorithm,
    Federation,
    Quadratics,
    X,
    distances,
    drifting,
    unequal,
)
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.local_rules import STATE
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import TrainingConfig, rules_of
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fednova import total_weight
from fedloom.platform.methods.personal_layers import PersonalConfig, PersonalTrainingConfig
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.spaces.slices import Slice

Make = Callable[..., RunConfig]


# -- two rounds by hand: the losses are x^2 / 2 and (x - 4)^2 / 2, x begins at 0, the learning rate is 1/2 ------------


def two_clients(name: str, steps: tuple[int, int], **options: Any) -> Federation:
    ones = torch.ones((2, 1), dtype=torch.float64)
    problem = Quadratics(ones, torch.tensor([[0.0], [4.0]], dtype=torch.float64), steps, 0.5)
    server = ComponentSpec(name) if name in ("feddyn", "fednova") else ComponentSpec("replace")
    return Federation(problem, Algorithm(ComponentSpec(name, tuple(sorted(options.items()))), server))


def after_round(federation: Federation, slot: str) -> list[float]:
    """x, the clients' tensors in a slot, and the server's other tensors."""
    federation.round([0, 1])
    kept = [float(federation.clients[i].get(f"{slot}/{X}", torch.tensor([0.0]))) for i in (0, 1)]
    others = [float(t) for name, t in {**federation.weights, **federation.server}.items() if name != X]
    return [float(federation.weights[X]), *kept, *others]


def test_scaffold_with_the_mean_step_by_hand() -> None:
    federation = two_clients("scaffold", (2, 2))
    # Client 1 goes 0 -> 2 -> 3:  c_1 = (0 - 3) / (2 * 1/2) = -3;  client 0 stays, c_0 = 0.
    assert after_round(federation, "own") == [1.5, 0.0, -3.0, -1.5]
    # Client 0 is corrected by c - c_0 = -1.5 and stays at 1.5:  c_0 = 0 + 1.5 + 0.
    # Client 1 by -1.5 + 3 = 1.5, goes 1.5 -> 2 -> 2.25:  c_1 = -3 + 1.5 - 0.75.
    assert after_round(federation, "own") == [1.875, 1.5, -2.25, -0.375]


def test_scaffold_with_the_gradient_at_x_by_hand() -> None:
    federation = two_clients("scaffold", (2, 2), option=1)
    assert after_round(federation, "own") == [1.5, 0.0, -4.0, -2.0]  # the gradients at 0
    # Corrected by -2 and by +2 both go 1.5 -> 1.75 -> 1.875; the gradients at 1.5 are 1.5 and -2.5.
    assert after_round(federation, "own") == [1.875, 1.5, -2.5, -0.5]


def test_scaffolds_clients_keep_what_they_have_where_a_cosine_ends_at_a_rate_of_zero() -> None:
    federation = two_clients("scaffold", (2, 2))
    federation.round([0, 1])
    federation.problem = replace(federation.problem, lr=0.0)
    assert after_round(federation, "own") == [1.5, 0.0, -3.0, -1.5]


def test_feddyn_by_hand() -> None:
    federation = two_clients("feddyn", (1, 1), alpha=1.0)
    # Client 1 goes to 2:  g_1 = -(2 - 0);  the mean is 1, and the sum of mean changes 1.
    assert after_round(federation, "gradient") == [2.0, 0.0, -2.0, 1.0]
    # Client 0 goes to 1, g_0 = -(1 - 2);  client 1 has the gradient -2 + 2 = 0.  The mean is 1.5, the sum 1 - 0.5.
    assert after_round(federation, "gradient") == [2.0, 1.0, -2.0, 0.5]


def test_fednova_by_hand() -> None:
    federation = two_clients("fednova", (1, 2))
    # Client 1 goes to 3 in two steps, 1.5 per step:  x = (1 + 2) / 2 * (0 + 1.5) / 2.
    assert after_round(federation, "")[0] == 1.125
    # Client 0 changes by -0.5625, client 1 by 2.15625 in two steps:  x = 1.125 + 1.5 * (-0.5625 + 1.078125) / 2.
    assert after_round(federation, "")[0] == 1.51171875


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.floats(0, 0.99))
def test_fednovas_total_weight_is_that_of_the_gradients_in_momentums_change(steps: int, momentum: float) -> None:
    change, velocity = 0.0, 0.0
    for _ in range(steps):  # the gradient is 1 in every step
        velocity = momentum * velocity + 1.0
        change += velocity
    assert total_weight(steps, momentum) == pytest.approx(change, rel=1e-9)


# -- limits -----------------------------------------------------------------------------------------------------------


def changed(problem: Quadratics, steps: tuple[int, ...]) -> Quadratics:
    return Quadratics(problem.curvatures, problem.minima, steps, problem.lr)


@pytest.mark.parametrize("name", ["SCAFFOLD, option 1", "SCAFFOLD, option 2"])
def test_scaffold_of_one_step_of_all_clients_is_fedavg(name: str) -> None:
    one_step = changed(drifting(), (1,) * 10)
    expected = distances(one_step, ALGORITHMS["FedAvg"], 30)
    assert distances(one_step, ALGORITHMS[name], 30) == pytest.approx(expected, rel=1e-12)


def test_fednova_of_equal_steps_is_fedavg() -> None:
    expected = distances(drifting(), ALGORITHMS["FedAvg"], 30)
    assert distances(drifting(), ALGORITHMS["FedNova"], 30) == pytest.approx(expected, rel=1e-12)


def test_feddyns_clients_are_fedavgs_as_alpha_vanishes() -> None:
    fedavg, feddyn = (Federation(drifting(), Algorithm(ComponentSpec("sgd"))), two_dyn(1e-14))
    for federation in (fedavg, feddyn):
        federation.round(range(10))
    # The first round's mean counts twice: theta = mean - h / alpha, and - h / alpha is the mean change from 0.
    assert torch.allclose(feddyn.weights[X], 2 * fedavg.weights[X], rtol=1e-12)
    assert all(float(kept[f"gradient/{X}"].abs().max()) < 1e-12 for kept in feddyn.clients.values())


def two_dyn(alpha: float) -> Federation:
    return Federation(drifting(), Algorithm(ComponentSpec("feddyn", (("alpha", alpha),)), ComponentSpec("feddyn")))


# -- what they are for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cohort", "rounds"), [(None, 150), (3, 600)])
def test_where_clients_drift_fedavg_has_an_error_that_corrections_do_not_have(cohort: int | None, rounds: int) -> None:
    assert distances(drifting(), ALGORITHMS["FedAvg"], rounds, cohort)[-1] > 0.1
    for name in ("SCAFFOLD, option 1", "SCAFFOLD, option 2", "FedDyn"):
        assert distances(drifting(), ALGORITHMS[name], rounds, cohort)[-1] < 1e-6, name


def test_where_clients_make_unequal_steps_fedavg_ends_off_the_optimum_and_fednova_does_not() -> None:
    errors = {
        name: [distances(unequal(lr), ALGORITHMS[name], int(6 / lr))[-1] for lr in (0.02, 0.01)]
        for name in ("FedAvg", "FedNova")
    }
    assert min(errors["FedAvg"]) > 0.5
    # Half the learning rate, half the error: what is left is the drift within a round.
    assert errors["FedNova"][0] < 0.07
    assert errors["FedNova"][0] / errors["FedNova"][1] == pytest.approx(2.0, rel=0.1)


# -- on networks and supernets ----------------------------------------------------------------------------------------

LOCAL = {"rounds": 3, "momentum": 0.0, "weighting": "plain", "evaluate_every": 0}


def last_states(run_in_memory: Any, config: RunConfig) -> tuple[int, list[RunState]]:
    """The number of clients, and the states of the first stage."""
    world, memory, _ = run_in_memory(config)
    states = [record.state for record in memory.records if record.state is not None]
    return world.num_clients, [state for state in states if state.stage == 0 and state.round]


def mean_of_clients(state: RunState, place: str, clients: int) -> torch.Tensor:
    kept = [t[place] for i in range(clients) if (t := state.client_state(i)) is not None and place in t]
    return torch.stack(kept).double().sum(dim=0) / clients


@pytest.mark.parametrize("method", ["fedavg", "superfednas"])
@pytest.mark.parametrize("option", [1, 2])
def test_scaffolds_control_is_the_mean_of_all_clients(
    tiny_config: Make, elastic_config: Make, run_in_memory: Any, method: str, option: int
) -> None:
    train: dict[str, Any] = {**LOCAL, "local_rule": "scaffold", "options": {"option": option}, "clients_per_round": 3}
    if method == "fedavg":
        config = tiny_config(method=FedAvgConfig(train=TrainingConfig(batch_size=16, **train)))
    else:
        config = elastic_config(train={**train, "clip_norm": 0.0})
    clients, states = last_states(run_in_memory, config)
    state = states[-1]
    shared = {n: t for group in state.groups.values() for n, t in group.tensors.items() if n.startswith("control/")}
    assert shared
    for name, control in shared.items():
        place = f"{STATE}own/{name.removeprefix('control/')}"
        mean = mean_of_clients(state, place, clients)
        torch.testing.assert_close(control.double(), mean, rtol=1e-4, atol=1e-6)
    assert any(bool(t.any()) for t in shared.values())


def test_feddyns_shift_is_the_mean_gradient_of_all_clients(tiny_config: Make, run_in_memory: Any) -> None:
    alpha = 0.1
    rules = {"local_rule": "feddyn", "server": "feddyn", "options": {"alpha": alpha}, "clients_per_round": 3}
    config = tiny_config(method=FedAvgConfig(train=TrainingConfig(batch_size=16, **LOCAL, **rules)))
    clients, states = last_states(run_in_memory, config)
    server = states[-1].weights("server-fedavg")
    for name, shift in server.items():
        mean = mean_of_clients(states[-1], f"{STATE}gradient/{name.removeprefix('shift/')}", clients)
        torch.testing.assert_close(-alpha * shift.double(), mean, rtol=1e-3, atol=1e-6)
    assert any(bool(t.any()) for t in server.values())


def test_fednova_normalises_what_is_sent_not_what_a_client_keeps_and_scores(
    silo_config: Make, run_in_memory: Any
) -> None:
    kept, scores = list[dict[str, torch.Tensor]](), list[list[float]]()
    for rules in ({}, {"local_rule": "fednova", "server": "fednova"}):
        train = PersonalTrainingConfig(rounds=1, batch_size=8, use_validation=False, evaluate_every=1, **rules)
        _, memory, state = run_in_memory(silo_config(PersonalConfig(train=train)))
        kept.append(dict(state.client_state(0)))
        rows = memory.table("evaluations").query("stage == 'personal_layers' and split == 'validation'")
        scores.append(rows["value"].tolist())
    assert kept[0]
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())
    assert scores[0]
    assert scores[1] == scores[0]


def test_factors_are_averaged_per_scalar() -> None:
    sums = WeightedSums()
    slices = [Slice("w", ((0, 2),)), Slice("w", ((1, 3),))]
    for piece, weight, factor in zip(slices, (1.0, 3.0), (2.0, 6.0), strict=True):
        sums.add(Update({"w": torch.ones(2)}, {"w": piece}, {"w": weight}, factors={"w": factor}))
    covered = sums.finish({"w": torch.zeros(3)}).coverage["w"]
    assert {region: coverage.factor for region, coverage in covered.items()} == {
        ((0, 1),): 2.0,
        ((1, 2),): 5.0,  # (2 + 3 * 6) / 4
        ((2, 3),): 6.0,
    }


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            {"local_rule": "scaffold"},
            "method.train.local_rule=scaffold cannot be used with method.train.momentum=0.9: option 2 takes x - y for "
            "the sum of the gradients; use momentum=0",
        ),
        (
            {"local_rule": "scaffold", "momentum": 0.0, "options": {"option": 3}},
            "method.train.options.option=3: must be between 1 and 2 (an option of local rule scaffold)",
        ),
        (
            {"local_rule": "feddyn"},
            "method.train.local_rule=feddyn needs method.train.server=feddyn, given replace: set both",
        ),
        (
            {"server": "fednova"},
            "method.train.server=fednova needs method.train.local_rule=fednova, given sgd: set both",
        ),
        (
            {"local_rule": "feddyn", "server": "feddyn", "options": {"alpha": 0.0}},
            "method.train.options.alpha=0.0: must be greater than 0 (an option of local rule feddyn)",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused_in_one_line(train: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        rules_of(TrainingConfig(**train), "method.train")


def test_what_clients_do_not_send_whole_is_refused() -> None:
    for train, said in (
        ({"local_rule": "scaffold", "momentum": 0.0, "clip_norm": 1.0}, "clip_norm=1: option 2 takes x - y"),
        (
            {"local_rule": "scaffold", "momentum": 0.0, "selection": "pyramidfl"},
            "method.train.local_rule=scaffold needs whole changes, but pyramidfl's clients send only parts: use "
            "another selection rule$",
        ),
        ({"local_rule": "feddyn", "server": "feddyn", "min_contributors": 2}, "min_contributors=2: feddyn's server"),
    ):
        with pytest.raises(ValueError, match=said):
            rules_of(TrainingConfig(**train), "method.train")  # type: ignore[arg-type]


def test_a_control_variate_is_not_diluted_where_weights_of_clients_without_a_tensor_count() -> None:
    sums = WeightedSums()
    control = Update({"x": torch.ones(2), "control/x": torch.ones(2)}, {n: Slice(n) for n in ("x", "control/x")}, {})
    weights = {"x": 100.0, "control/x": 1.0}
    sums.add(replace(control, weights=weights, unheld=100.0))
    old = {"x": torch.zeros(2), "control/x": torch.full((2,), 5.0)}
    averaged = sums.finish(old, singly={"control/x"}).weights
    assert averaged["control/x"].tolist() == [1.0, 1.0], "the mean change of those that sent one"
