"""What cannot be planned is refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.store.ablations import Ablation

Plan = Callable[..., Ablation]

LR = "axes: {lr: {key: method.train.lr, values: [0.1, 0.2]}}\nseeds: [1]\n"


def lr_of(values: str) -> str:
    return LR.replace("[0.1, 0.2]", values)


REFUSED = {
    "unknown key": (LR.replace("train.lr", "train.lrr"), [], "key 'method.train.lrr'; did you mean 'method.train.lr'?"),
    "new key of a mapping": (
        LR.replace("method.train.lr", "tiers.budget.macs"),
        [],
        "unknown configuration key 'tiers.budget.macs'",
    ),
    "wrong type": (lr_of("[0.1, abc]"), [], "method.train.lr=abc: must be a float"),
    "wrong type, deep": (lr_of("[0.1, {a: 1}]"), [], "method.train.lr"),
    "out of range": (
        LR.replace("method.train.lr", "executor.chunk_size").replace("0.1, 0.2", "1, 0"),
        [],
        "executor.chunk_size=0: must be between 1 and 1000000",
    ),
    "varied twice": (
        LR.replace("axes: {", "axes: {a: {settings: {x: {method.train.lr: 1}}}, "),
        [],
        "ablation.axes.lr: method.train.lr is set by another axis, too",
    ),
    "varied twice, in a mapping": (
        LR.replace("axes: {", "axes: {a: {key: method.train, values: [{lr: 1, epochs: 2}]}, "),
        [],
        "ablation.axes.lr: method.train.lr is set by another axis, too",
    ),
    "varied twice, its whole section": (
        "axes: {a: {key: executor.failures.policy, values: [stop]}, b: {key: +executor.failures, values: [null]}}\n",
        [],
        "ablation.axes.b: executor.failures is set by another axis, too",
    ),
    "varied twice, with a plus": (
        LR.replace("axes: {", "axes: {a: {settings: {x: {+method.train.lr: 1}}}, "),
        [],
        "ablation.axes.lr: method.train.lr is set by another axis, too",
    ),
    "varied with a plus and fixed": (
        LR.replace("method.train.lr", "+method.train.lr"),
        ["method.train.lr=3"],
        "method.train.lr=3: the ablation varies method.train.lr; change its values instead (ablation.axes.lr.values=",
    ),
    "varied and fixed": (
        LR,
        ["method.train.lr=3"],
        "method.train.lr=3: the ablation varies method.train.lr; change its values instead (ablation.axes.lr.values=",
    ),
    "varied in a mapping and fixed": (
        "axes: {weights: {key: tiers.cost_weights, values: [{macs: 2}, {macs: 3}]}}\n",
        ["+tiers.cost_weights.macs=1"],
        "+tiers.cost_weights.macs=1: the ablation varies tiers.cost_weights.macs; change its values instead",
    ),
    "varied and fixed with others": (
        LR,
        ["method.train={lr: 3, rounds: 2}"],
        "method.train={lr: 3, rounds: 2}: the ablation varies method.train.lr; change its values instead",
    ),
    "varied and forced": (LR, ["++method.train.lr=3"], "++method.train.lr=3: the ablation varies method.train.lr"),
    "seed": (LR, ["seed=3"], "seed=3: an ablation has several seeds; give ablation.seeds=[1,2]"),
    "cluster": (
        LR.replace("method.train.lr, values: [0.1, 0.2]", "ray.num_cpus, values: [1, 2]"),
        [],
        "ablation.axes.lr sets ray.num_cpus: all trials of an ablation run on one cluster; give ray.KEY=VALUE",
    ),
    "name in the file": (LR + "overrides: [name=x]", [], "ablation.overrides has name=x: the trials of an ablation"),
    "forced seed": (LR, ["++seed=3"], "++seed=3: an ablation has several seeds"),
    "unknown experiment": (LR, ["experiment=fedoras_digit"], "experiment=fedoras_digit: no such preset"),
    "method of another preset": (
        LR.replace("method.train.lr, values: [0.1, 0.2]", "method, values: [fedavg]"),
        [],
        "experiment=fedoras_digits and method=fedavg do not go together",
    ),
    "unknown common key": (LR, ["data.alfa=1"], "unknown configuration key 'data.alfa'; did you mean 'data.alpha'?"),
    "unknown key in the file": (LR + "overrides: [data.alfa=1]", [], "did you mean 'data.alpha'?"),
    "two ablations": (LR, ["ablation=alpha"], "give one ablation=NAME"),
    "unknown key of the ablation": (LR, ["ablation.seed=[1]"], "key 'ablation.seed'; did you mean 'ablation.seeds'?"),
    "far too many": (
        f"axes: {{{', '.join(f'a{i}: {{key: k{i}, values: {list(range(10))}}}' for i in range(12))}}}\nseeds: [1]\n",
        [],
        "has 1000000000000 trials: 10000 at most",
    ),
    "too many": (
        LR,
        ["ablation.search.kind=random", "ablation.search.samples=5001", "ablation.seeds=[1,2]"],
        "mine.yaml has 10002 trials: 10000 at most; take fewer values",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_line(case: str, plan: Plan, tmp_path: Path) -> None:
    text, arguments, expected = REFUSED[case]
    experiment = "" if any(a.startswith("experiment=") for a in arguments) else "fedoras_digits"
    with pytest.raises(ValueError, match=r"\w") as refusal:
        plan(text, *arguments, experiment=experiment)
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value).strip()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("arguments", [[], ["experiment=fedoras_digits"], ["ablation=", "experiment=fedoras_digits"]])
def test_no_ablation_is_named(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"give one ablation=NAME \(or a YAML file of your own\)"):
        plan_ablation(arguments)


def test_without_an_experiment_nothing_is_planned() -> None:
    with pytest.raises(ValueError, match="give the experiment that the ablation varies, such as experiment="):
        plan_ablation(["ablation=alpha"])


def test_an_ablation_for_another_method_says_so() -> None:
    with pytest.raises(ValueError, match=r"ablation=tier_split does not fit superfednas_digits: .*rand_init"):
        plan_ablation(["ablation=tier_split", "experiment=superfednas_digits"])
