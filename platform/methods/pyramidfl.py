"""PyramidFL: Oort's selection, and within the cohort less to send and more to train (Li et al. 2022).

    the selected clients are ranked by their statistical utility;
    who ranks k-th of K sends its update without the smallest  low + k (high - low) / K  of its changes;
    T = the time of the slowest of them with that;
    who would be done before trains as many more epochs as fit until T.

The authors rank by the norm of the last update, here by Oort's statistical utility. A client that never answered sends
all and trains as configured, as nothing is known about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fedloom.platform.federation.selection import Choice, Cohort, SelectionTraits
from fedloom.platform.methods.oort import oort, statistical_utility
from fedloom.platform.plugins import declares
from fedloom.platform.settings import BELOW_ONE, PART, ZERO_OR_MORE
from fedloom.tiers.devices import TRAINING_FACTOR


@declares(SelectionTraits(needs_loss_norm=True, shortens_updates=True))
def pyramidfl(
    choice: Choice,
    *,
    dropped_low: Annotated[
        float, BELOW_ONE, "PyramidFL: the share of its changes that the first rank leaves out"
    ] = 0.0,
    dropped_high: Annotated[float, BELOW_ONE, "PyramidFL: the share that a rank after the last would"] = 0.6,
    most_extra: Annotated[int, ZERO_OR_MORE, "PyramidFL: the largest number of additional epochs"] = 10,
    exploration: Annotated[float, PART, "Oort: eps, the share of clients that are explored in the first round"] = 0.9,
    least_exploration: Annotated[float, PART, "Oort: the least eps"] = 0.2,
    penalty: Annotated[float, ZERO_OR_MORE, "Oort: alpha, the exponent for clients slower than T"] = 2.0,
    preferred: Annotated[float, PART, "Oort: T at first, as a quantile of the durations; 1: no T"] = 0.3,
) -> Cohort:
    """Oort's cohort with epochs and shares per client."""
    cohort = oort(
        choice, exploration=exploration, least_exploration=least_exploration, penalty=penalty, preferred=preferred
    )
    known = [c for c in cohort.client_ids if choice.record(c).answers]
    ranked = sorted(known, key=lambda c: (-statistical_utility(choice.record(c)), c))
    step = (dropped_high - dropped_low) / max(1, len(cohort.client_ids))
    sends = {c: 1.0 - (dropped_low + rank * step) for rank, c in enumerate(ranked)}
    given = choice.memory.get("epochs", {})
    epoch_s = {c: _compute_s(choice, c) / _answered_epochs(choice, given, c) for c in known}
    times_s = {c: choice.epochs * epoch_s[c] + _transfer_s(choice, c, sends[c]) for c in known}
    round_s = max(times_s.values(), default=0.0)
    extra = {c: min(most_extra, math.floor((round_s - times_s[c]) / epoch_s[c])) for c in known if epoch_s[c] > 0}
    epochs = {c: choice.epochs + more for c, more in extra.items() if more}
    kept = {
        str(c): [
            *(entry for entry in given.get(str(c), []) if entry[0] == choice.record(c).answered),
            [choice.round, epochs.get(c, choice.epochs)],
        ]
        for c in cohort.client_ids
    }
    memory = {**cohort.memory, "epochs": {**given, **kept}}
    return replace(cohort, reason="pyramidfl", memory=memory, epochs=epochs, sends=sends)


def _answered_epochs(choice: Choice, given: Mapping[str, Any], client_id: int) -> int:
    """The epochs of a client's last answer, which may be older than its last selection."""
    answered = choice.record(client_id).answered
    return next((epochs for round_, epochs in given.get(str(client_id), []) if round_ == answered), choice.epochs)


def _compute_s(choice: Choice, client_id: int) -> float:
    return TRAINING_FACTOR * choice.record(client_id).macs / choice.device(client_id).macs_per_s


def _transfer_s(choice: Choice, client_id: int, sends: float) -> float:
    device, record = choice.device(client_id), choice.record(client_id)
    return record.bytes_down / device.down_bytes_per_s + sends * record.bytes_down / device.up_bytes_per_s
