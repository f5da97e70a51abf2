"""Estimates a run's remaining time from the MACs that its stages expect and the rate measured so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedloom.platform.federation.algorithm import RunState
    from fedloom.platform.federation.method import Stage

FURTHEST = 2.0
"""The rate of a kind of stage is trusted for up to this multiple of the MACs that it was measured on: small networks
take longer per MAC than large ones, and a kind's first rounds are often those of the smallest tier."""
SHORT_S = 10.0
"""Seconds; a shorter first round predicts nothing, because starting the workers takes much of it."""
MOST_MACS = 1e100
"""Upper limit of expected MACs: a larger value is a mistake, and such values could not be added up."""


@dataclass(frozen=True)
class Left:
    """Seconds that the current stage and the whole run will still take; None if unknown."""

    stage_s: float | None
    run_s: float | None


@dataclass(frozen=True)
class Measured:
    """Seconds, expected MACs and number of finished rounds."""

    seconds: float = 0.0
    macs: float = 0.0
    rounds: int = 0

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.seconds + other.seconds, self.macs + other.macs, self.rounds + other.rounds)


NOTHING = Measured()


def macs_left(stage: Stage, state: RunState) -> float | None:
    """The MACs that the stage expects; None if unknown, as for a user's stage that does not derive from `Stage`.

    Raises ValueError if a user's stage returns anything but None or a number from 0.
    """
    tell = getattr(stage, "macs_left", None)
    told: Any = None if tell is None else tell(state)
    if told is None:
        return None
    if not isinstance(told, int | float | np.number) or not 0 <= told < MOST_MACS:
        raise ValueError(f"macs_left of stage {stage.name!r} gives {told!r:.60}: give a number from 0, or None")
    return float(told)


def kind_of(stage: Stage) -> str:
    """The kind of a stage: `search/tier1` and `search/tier2` are of one kind."""
    return stage.name.partition("/")[0]


class Forecast:
    """Estimates the time left from finished rounds: the MACs left times the seconds per MAC of that kind of stage.

    A kind that has not run yet, or hardly (see `FURTHEST`), is expected to run at the rate of the kinds that train if
    it trains, or that score if it scores: these rates differ by more than the passes per step. Without such kinds, the
    rate of all kinds together is used. The stage in progress keeps its own rate. A stage whose clients will draw their
    networks expects the MACs of a mid-sized one: the error cancels if the kind was measured.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        # A user's stage need not derive from Stage.
        self._trains = {kind_of(stage): bool(getattr(stage, "trains", False)) for stage in stages}
        self._of_kind: dict[str, Measured] = {}
        self._of_stage: dict[int, Measured] = {}
        self._warm_up: str | None = None
        self._all = NOTHING
        self._place = (-1, -1)
        self._macs: float | None = None
        self._later: list[tuple[Stage, float | None]] = []

    def begins(self, before: RunState) -> None:
        """Records the MACs left before a round; those of later stages change only when the current stage changes."""
        if self._place[0] != before.stage:
            later = self._stages[before.stage + 1 :]
            self._later = [(stage, macs_left(stage, replace(before, round=0))) for stage in later]
        if self._place != (before.stage, before.round):
            self._macs = macs_left(self._stages[before.stage], before)

    def finished(self, after: RunState, seconds: float) -> None:
        """Records the round's duration in seconds."""
        stage = self._stages[after.stage]
        had, has = self._macs, macs_left(stage, after)
        macs = max(0.0, had - has) if had is not None and has is not None else 0.0
        kind, measured = kind_of(stage), Measured(seconds, macs, 1)
        self._all += measured
        # The first round of a process also starts its workers and builds their networks: the second one replaces it.
        if self._warm_up == kind:
            self._of_kind.clear()
            self._of_stage.clear()
        self._warm_up = kind if self._warm_up is None else ""
        self._of_kind[kind] = self._of_kind.get(kind, NOTHING) + measured
        self._of_stage[after.stage] = self._of_stage.get(after.stage, NOTHING) + measured
        self._place, self._macs = (after.stage, after.round), has

    @property
    def is_known(self) -> bool:
        """Whether the rounds so far suffice for an estimate."""
        return self._all.rounds > 1 or self._all.seconds >= SHORT_S

    def left(self, rounds_left: int) -> Left:
        """The time left after the last finished round, whose stage has `rounds_left` more rounds."""
        number, _ = self._place
        measured = self._of_stage[number]
        if self._macs is None or measured.macs == 0:
            stage_s = rounds_left * measured.seconds / measured.rounds
        else:
            stage_s = self._macs * measured.seconds / measured.macs if rounds_left > 0 else 0.0
        to_come = [self._seconds(stage, macs) for stage, macs in self._later]
        known = [seconds for seconds in to_come if seconds is not None]
        is_known = len(known) == len(to_come) and (not to_come or self._macs is not None)
        return Left(stage_s, stage_s + math.fsum(known) if is_known else None)

    def _seconds(self, stage: Stage, macs: float | None) -> float | None:
        kind = kind_of(stage)
        alike = [m for other, m in self._of_kind.items() if self._trains[other] == self._trains[kind]]
        sums = (sum(each, start=NOTHING) for each in (alike, self._of_kind.values()))
        same = self._of_kind.get(kind, NOTHING)
        candidates = (*((same,) if macs is not None and FURTHEST * same.macs >= macs else ()), *sums)
        measured = next((m for m in candidates if m.macs > 0), NOTHING)
        if macs is None or measured.macs == 0:
            return None
        return macs * measured.seconds / measured.macs
