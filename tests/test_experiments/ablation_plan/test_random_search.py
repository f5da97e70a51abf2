"""Random search: draws lie in their ranges, are those of the seed, and are different."""

from collections.abc import Callable
from typing import Any

import pytest

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.store.ablations import Ablation

Plan = Callable[..., Ablation]

RANDOM = """
axes:
  lr: {key: method.train.lr, log_uniform: [0.001, 1]}
  pull: {key: data.alpha, uniform: [2, 3]}
  rounds: {key: method.train.rounds, integers: [1, 3]}
  rule: {key: method.train.weighting, values: [opa, plain]}
  shares: {key: tiers.shares, values: [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]}
seeds: [1]
search: {kind: random, samples: 24, seed: 5}
"""


def drawn(ablation: Ablation) -> list[dict[str, Any]]:
    return [dict(t.setting) for t in ablation.trials if t.seed == 1]


def test_draws_lie_in_their_ranges(plan: Plan) -> None:
    ablation = plan(RANDOM)
    points = drawn(ablation)
    assert len(points) == len(ablation.trials) == 24
    assert all(0.001 <= p["lr"] <= 1 and 2 <= p["pull"] <= 3 for p in points)
    assert {p["rounds"] for p in points} == {1, 2, 3}
    assert {p["rule"] for p in points} == {"opa", "plain"}
    below = sum(p["lr"] < 0.0316 for p in points)
    assert 5 <= below <= 19, "half of a log-uniform range lies below its geometric middle"
    assert ablation.axes["rounds"] == (1, 2, 3)
    assert ablation.axes["lr"] == tuple(sorted(p["lr"] for p in points))
    assert len(ablation.axes["shares"]) == 2
    assert ablation.reference.keys() <= {"rule", "shares"}
    for trial in ablation.trials[:6]:
        assert trial.config["method"]["train"]["lr"] == trial.setting["lr"]
        assert type(trial.config["method"]["train"]["rounds"]) is int


@pytest.mark.parametrize("kind", ["uniform", "log_uniform"])
def test_rounding_leaves_no_range(plan: Plan, kind: str) -> None:
    one = f"axes:\n  lr: {{key: method.train.lr, {kind}: [0.12346, 0.12347]}}\nsearch: {{kind: random, samples: 1}}\n"
    assert [point["lr"] for point in drawn(plan(one, "ablation.seeds=[1]"))] == [0.12347]


def test_draws_are_those_of_the_seed(plan: Plan) -> None:
    few = "ablation.search.samples=4"
    first = drawn(plan(RANDOM, few))
    assert drawn(plan(RANDOM, few, "ablation.search.seed=6")) != first
    seeds = plan(RANDOM, few, "ablation.seeds=[1,5]")
    assert [(t.seed, dict(t.setting)) for t in seeds.trials] == [(s, point) for point in first for s in (1, 5)]
    assert drawn(plan(RANDOM, "ablation.search.samples=5"))[:4] == first


def test_an_axis_draws_the_same_whatever_the_others_are(plan: Plan) -> None:
    alone = RANDOM.splitlines(keepends=True)
    text = "".join(line for line in alone if "pull" not in line and "rule" not in line)
    few = "ablation.search.samples=4"
    assert [p["lr"] for p in drawn(plan(text, few))] == [p["lr"] for p in drawn(plan(RANDOM, few))]


def test_random_points_are_different_and_as_many_as_there_are() -> None:
    asked = ["ablation=alpha", "experiment=fedoras_digits", "ablation.seeds=[1]", "ablation.search.kind=random"]
    found = [t.setting["alpha"] for t in plan_ablation([*asked, "ablation.search.samples=3"]).trials]
    assert sorted(found) == [0.1, 1.0, 100.0]
    with pytest.raises(ValueError, match=r"samples=4: the axes have only about 3 different points"):
        plan_ablation([*asked, "ablation.search.samples=4"])
