"""Early stopping: scores on validation data decide when a training stage ends and which weights it keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from fedloom.platform.plugins import is_import_path
from fedloom.platform.settings import ONE_OR_MORE, POSITIVE

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Evaluation

ROUNDING = 1e-12
"""Tolerance of a target: the mean of several scores may miss it by a rounding error."""


@dataclass
class StopConfig:
    """Early stopping of training stages that are scored on validation data (`evaluate_every` above 0).

    Each stage is judged separately, by the mean of the server's scores, or of the clients' if the server has none.
    """

    metric: Annotated[Literal["accuracy", "loss"], "the score on validation data that decides: accuracy or loss"] = (
        "accuracy"
    )
    patience: Annotated[
        int | None, ONE_OR_MORE, "a stage ends after this many evaluations in a row without improvement; null: never"
    ] = None
    target: Annotated[
        float | None,
        POSITIVE,
        "a stage ends when it reaches this accuracy (a share), or falls to this loss; null: never",
    ] = None
    weights: Annotated[
        Literal["best", "last"],
        "with patience or target: the weights that a stage ends with, of its best evaluation or of its last round",
    ] = "best"

    @property
    def is_set(self) -> bool:
        """Whether stages may end early."""
        return self.patience is not None or self.target is not None


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a score is better than another."""
    return value < than if metric == "loss" else value > than


def reaches(metric: str, value: float, target: float) -> bool:
    """Whether a score reaches a target: as large an accuracy, as small a loss."""
    return value <= target + ROUNDING if metric == "loss" else value >= target - ROUNDING


class Score(NamedTuple):
    """A mean score (NaN if all scores are NaN), and the number of rounds after which it was measured."""

    value: float
    rounds: int


def latest_score(evaluations: Sequence[Evaluation], round_: int, metric: str) -> Score | None:
    """The mean of a round's latest scores on validation data: the server's if any, otherwise the clients'."""
    # The server scores the weights before the round's training, clients score their own models after it.
    scores = [
        (round_ + (e.client_id is not None) if e.round is None else e.round, e)
        for e in evaluations
        if e.split == "validation" and e.metric == metric
    ]
    if not scores:
        return None
    latest = max(rounds for rounds, _ in scores)
    known = [e for rounds, e in scores if rounds == latest and not math.isnan(e.value)]
    values = [e.value for e in known if e.client_id is None] or [e.value for e in known]
    return Score(sum(values) / len(values) if values else math.nan, latest)


@dataclass(frozen=True)
class Judgement:
    """The result of a stage's evaluations so far.

    Attributes:
        best: the best score; None before the first one that is a number.
        rounds: the number of rounds after which the best score was measured.
        since: the number of evaluations since then, none of them better.
        stopped: why the stage ends; empty if it goes on.
    """

    best: float | None = None
    rounds: int = 0
    since: int = 0
    stopped: str = ""

    def after(self, score: Score, stop: StopConfig) -> Judgement:
        """The judgement after one more evaluation."""
        (value, rounds), best = score, self.best
        if not math.isnan(value) and (best is None or is_better(stop.metric, value, best)):
            best, of_rounds, since = value, rounds, 0
        else:
            of_rounds, since = self.rounds, self.since + 1
        stopped = ""
        if stop.target is not None and reaches(stop.metric, value, stop.target):
            stopped = f"{stop.metric} {value:.6g} on validation data reaches stop.target={stop.target:g}"
        elif stop.patience is not None and since >= stop.patience:
            known = "number" if best is None else f"better than {best:.6g} after round {of_rounds}"
            left = "; the weights are those" if stop.weights == "best" and best is not None else ""
            stopped = f"{stop.metric} on validation data is no {known} (stop.patience={stop.patience}){left}"
        return Judgement(best, of_rounds, since, stopped)


def check_stop(stop: StopConfig, objective: str, keys: Sequence[str], *, is_scored: bool) -> None:
    """Raises ValueError if early stopping is configured and cannot work.

    `objective` is the objective's name; `keys` are the configuration keys of the method's training stages; `is_scored`
    says whether one of them is scored.
    """
    if not stop.is_set:
        return
    asked = f"stop.target={stop.target:g}" if stop.target is not None else f"stop.patience={stop.patience}"
    if not is_scored:
        what = (
            f"set {' or '.join(f'{key}.evaluate_every' for key in keys)} to the rounds between two evaluations"
            if keys
            else "leave it out"
        )
        raise ValueError(f"{asked} needs scores on validation data, and no training stage has any: {what}")
    is_share = stop.metric == "accuracy" and not is_import_path(objective)
    if stop.target is not None and is_share and stop.target > 1:
        raise ValueError(f"{asked}: accuracy is a share, at most 1, such as 0.8")


def check_scored(stop: StopConfig, key: str, *, names_some: bool) -> None:
    """Raises ValueError if early stopping is configured and the stage's `key` names nothing to score."""
    if stop.is_set and not names_some:
        raise ValueError(f"{key}: no scores on validation data, so stop.* cannot end the stage; name what to score")
