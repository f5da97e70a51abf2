"""Generates ablations in any state with the platform's own writer, with known effects instead of training."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.analysis.architectures import space_of
from fedloom.experiments.store.ablations import Ablation, Trial, axis_value, write_ablation
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.writer import RunWriter

BASE, PER_PLACE = 0.70, 0.04
"""The accuracy of the smallest subnet or tier at the references, and the difference to the next larger one."""
EFFECTS: Mapping[str, Mapping[Any, float]] = {
    "beta_0": {0.9: 0.0, 0.5: -0.04},
    "decay": {"cosine": 0.0, "linear": -0.01, "constant": -0.03},
    "decay_share": {0.8: 0.0, 0.5: 0.02},
    "budget": {1.0: 0.0, 0.5: -0.04, 0.25: -0.10},
    "alpha": {100.0: 0.0, 1.0: -0.02, 0.1: -0.08},
    "searcher": {"nsga2": 0.0, "random": -0.015, "federated": 0.005},
    "averaging": {"opa": 0.0, "fedavg": -0.02, "plain": -0.05},
}
"""The effect on accuracy, by axis and value."""
OF_SEED: Mapping[int, tuple[float, float]] = {1: (-0.002, 0.9), 2: (0.002, 1.1)}
"""By seed: the term added to the accuracy, and the factor of the effects."""
OF_MODEL: Mapping[str, float] = {"supernet_init": -0.08, "fine_tuned": 0.0, "rand_init": -0.12}
TIERS = ("tier1", "tier2", "tier3", "tier4")
MACS = 150_000
"""MACs of the smallest subnet or tier; the n-th has n times as many."""
BYTES, ROUND_S = 4000, 2.0
"""Bytes per client and direction, and simulated seconds, of a round."""
CLIENTS = 10


@dataclass(frozen=True)
class Fates:
    """Indices of trials with special states; all other trials are done.

    `failed` and `running` trials have half of the training rounds, `waiting` trials have not started. `reusing` maps
    trials to the trial whose supernet they start from.
    """

    failed: Collection[int] = ()
    running: Collection[int] = ()
    waiting: Collection[int] = ()
    reusing: Mapping[int, int] | None = None


def write_planned(
    root: Path, arguments: Sequence[str], fates: Fates | None = None, *, rounds: int = 40, candidates: int = 30
) -> Ablation:
    """Plans an ablation (`ablation=NAME experiment=NAME ...`) and writes its plan and the runs of its trials.

    Evaluated accuracies come from `planted`; axes that are not in `EFFECTS` have no effect.
    """
    fates = fates or Fates()
    ablation = plan_ablation([*arguments, f"results={root}"])
    write_ablation(root, ablation)
    for trial in ablation.trials:
        if trial.index not in fates.waiting:
            _write(root, ablation, trial, fates, rounds, candidates)
    return ablation


def planted(trial: Trial, place: int) -> float:
    """The known accuracy of a trial's subnet or tier with index `place` (from 0) after fine-tuning."""
    offset, scale = OF_SEED.get(trial.seed, (0.0, 1.0))
    effects = sum(EFFECTS.get(axis, {}).get(axis_value(value), 0.0) for axis, value in trial.setting.items())
    return BASE + PER_PLACE * place + offset + scale * effects


def _write(root: Path, ablation: Ablation, trial: Trial, fates: Fates, rounds: int, candidates: int) -> None:
    writer = RunWriter.create(root, trial.experiment, trial.run_id, flush_interval_s=60.0)
    source = (fates.reusing or {}).get(trial.index, trial.index)
    place = {"ablation": ablation.ablation_id, "trial": trial.index, "setting": json.dumps(dict(trial.setting))}
    names = ("partition", "initialisation", "selection", "training", "search")
    writer.update_run(
        method=str(trial.config["method"]["name"]),
        config=json.dumps(trial.config),
        seeds=json.dumps(dict.fromkeys(names, trial.seed)),
        status="done",
        supernet=f"key{source}",
        supernet_run_id=ablation.trials[source].run_id,
        **place,
    )
    rng = np.random.default_rng(trial.index)
    whole = trial.index not in (*fates.failed, *fates.running)
    done = rounds if whole else rounds // 2
    if source == trial.index:
        _add_training(writer, trial, done, rounds, rng)
    if whole:
        _add_rest(writer, trial, candidates, rng)
    writer.close()
    _write_status(writer.paths, trial, fates, done, rounds)


def _write_status(paths: RunPaths, trial: Trial, fates: Fates, done: int, rounds: int) -> None:
    status = StatusFile(paths.status)
    if trial.index in fates.failed:
        message = "3 of 10 clients failed, 2 are tolerated: loss is not finite in layer_2 & 50% of the batches"
        status.write("failed", stage="supernet", round=done, rounds_total=rounds, message=message)
    elif trial.index in fates.running:
        status.write("running", stage="supernet", round=done, rounds_total=rounds)
    else:
        status.write("done")


def _add_round(writer: RunWriter, stage: str, round_: int, metric: float) -> None:
    sent = {"bytes_down": BYTES * CLIENTS, "bytes_up": BYTES * CLIENTS, "macs": 10**6, "wall_s": 0.1}
    counts = {"clients_planned": CLIENTS, "clients_ok": CLIENTS, "clients_failed": 0, "simulated_s": ROUND_S}
    writer.add("rounds", stage=stage, round=round_, **sent, **counts, loss=1.0 - metric, metric=metric)


def _add_validation(writer: RunWriter, place: Mapping[str, Any], value: float, split: str = "validation") -> None:
    for metric, measured in (("accuracy", value), ("loss", 1.0 - value)):
        writer.add("evaluations", **place, split=split, metric=metric, value=measured, samples=100)


def _add_training(writer: RunWriter, trial: Trial, done: int, rounds: int, rng: np.random.Generator) -> None:
    top = planted(trial, 1) - 0.08
    for round_ in range(done):
        _add_round(writer, "supernet", round_, _grown(top, round_, rounds))
        if round_ % 5 == 0:
            for path in range(3):
                place = {"stage": "supernet", "round": round_, "model": "supernet", "tier": "server"}
                value = _grown(top, round_, rounds) + 0.02 * rng.standard_normal()
                _add_validation(writer, {**place, "architecture": f"{path}-0"}, value)


def _grown(top: float, round_: int, rounds: int) -> float:
    """The value of a learning curve that starts at 0.1 and is close to `top` after all rounds."""
    return float(top - (top - 0.1) * np.exp(-5.0 * round_ / rounds))


def _add_rest(writer: RunWriter, trial: Trial, candidates: int, rng: np.random.Generator) -> None:
    if trial.config["method"]["name"] == "superfednas":
        for place, architecture in enumerate(_family(trial)):
            _add_evaluation(writer, trial, place, "supernet", "server", architecture)
        return
    if "search" not in trial.config["method"]:
        _add_evaluation(writer, trial, 0, "fedavg", "all", "0")
        return
    for place, tier in enumerate(TIERS):
        _add_search(writer, tier, planted(trial, place) - 0.1, candidates, rng)
        for round_ in range(10):
            _add_round(writer, f"fine_tuned/{tier}", round_, planted(trial, place) - 0.05)
        baseline = ["rand_init"] if trial.config["method"]["rand_init"]["rounds"] else []
        for model in ("supernet_init", "fine_tuned", *baseline):
            _add_evaluation(writer, trial, place, model, tier, f"{place}-0")


def _family(trial: Trial) -> list[str]:
    space = space_of(trial.config)
    assert space is not None, "presets have a space"
    return ["-".join(map(str, _member(space, text))) for text in trial.config["method"]["family"]]


def _member(space: Any, text: str) -> Sequence[int]:
    named: dict[str, Sequence[int]] = {"smallest": space.smallest, "largest": space.largest}
    return named[text] if text in named else space.parse(text)


def _add_evaluation(writer: RunWriter, trial: Trial, place: int, model: str, tier: str, architecture: str) -> None:
    row = {"stage": "evaluation", "round": 0, "model": model, "tier": tier, "architecture": architecture}
    accuracy = planted(trial, place) + OF_MODEL.get(model, 0.0)
    for split, better in (("validation", 0.01), ("test", 0.0)):
        _add_validation(writer, row, accuracy + better, split)
    for metric, cost in (("macs", MACS * (place + 1)), ("parameters", 2 * MACS * (place + 1))):
        writer.add("evaluations", **row, metric=metric, value=float(cost))


def _add_search(writer: RunWriter, tier: str, top: float, candidates: int, rng: np.random.Generator) -> None:
    for i, worse in enumerate(np.sort(rng.random(candidates))[::-1].tolist()):
        place = {"stage": f"search/{tier}", "round": 0, "tier": tier, "generation": i // 10, "feasible": True}
        costs = {"macs": MACS + i, "parameters": MACS, "architecture": f"{i}-0", "metric": top - 0.3 * worse}
        writer.add("candidates", **place, **costs, loss=1.0, on_front=False)
