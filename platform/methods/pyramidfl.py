"""PyramidFL: Oort's selection, with smaller updates and additional epochs within the cohort (Li et al. 2022).

    the selected clients are ranked by their statistical utility;
    the k-th of K clients leaves the smallest  low + k (high - low) / K  of its changes out of its update;
    T = the time that the slowest client then takes;
    clients that would finish earlier train as many additional epochs as fit until T.

The authors rank by the norm of the last update, here clients are ranked by Oort's statistical utility. A client that
never answered sends everything and trains the configured epochs, as nothing is known about it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

from fedloom.platform.federation.selection import Choice, Cohort, SelectionTraits
from fedloom.platform.methods.oort import Exploration, LeastExploration, Penalty, Preferred, oort, statistical_utility
from fedloom.platform.plugins import declares
from fedloom.platform.settings import BELOW_ONE, ZERO_OR_MORE
from fedloom.tiers.devices import TRAINING_FACTOR


@declares(SelectionTraits(needs_loss_norm=True, shortens_updates=True, same_round=True))
def pyramidfl(
    choice: Choice,
    *,
    dropped_low: Annotated[
        float, BELOW_ONE, "PyramidFL: the share of its changes that the first rank leaves out"
    ] = 0.0,
    dropped_high: Annotated[float, BELOW_ONE, "PyramidFL: the share that a rank after the last would leave out"] = 0.6,
    most_extra: Annotated[int, ZERO_OR_MORE, "PyramidFL: the largest number of additional epochs"] = 10,
    exploration: Exploration = 0.9,
    least_exploration: LeastExploration = 0.2,
    penalty: Penalty = 2.0,
    preferred: Preferred = 0.3,
) -> Cohort:
    """Oort's cohort, with epochs and the share of changes to send per client."""
    cohort = oort(
        choice, exploration=exploration, least_exploration=least_exploration, penalty=penalty, preferred=preferred
    )
    known = [c for c in cohort.client_ids if choice.record(c).answers]
    ranked = sorted(known, key=lambda c: (-statistical_utility(choice.record(c)), c))
    step = (dropped_high - dropped_low) / max(1, len(cohort.client_ids))
    sends = {c: 1.0 - (dropped_low + rank * step) for rank, c in enumerate(ranked)}
    past = choice.memory.get("epochs", {})  # per client, [round, epochs] of its selections
    epoch_s: dict[int, float] = {}
    times_s: dict[int, float] = {}
    for c in known:
        device, record = choice.device(c), choice.record(c)
        # The epochs of the last answer, which may be older than the last selection.
        answered = (epochs for round_, epochs in past.get(str(c), []) if round_ == record.answered)
        epoch_s[c] = TRAINING_FACTOR * record.macs / device.macs_per_s / next(answered, choice.epochs)
        transfer_s = record.bytes_down / device.down_bytes_per_s + sends[c] * record.bytes_down / device.up_bytes_per_s
        times_s[c] = choice.epochs * epoch_s[c] + transfer_s
    round_s = max(times_s.values(), default=0.0)
    extra = {c: min(most_extra, math.floor((round_s - times_s[c]) / epoch_s[c])) for c in known if epoch_s[c] > 0}
    epochs = {c: choice.epochs + more for c, more in extra.items() if more}
    still_needed = {
        str(c): [
            *(entry for entry in past.get(str(c), []) if entry[0] == choice.record(c).answered),
            [choice.round, epochs.get(c, choice.epochs)],
        ]
        for c in cohort.client_ids
    }
    memory = {**cohort.memory, "epochs": {**past, **still_needed}}
    return replace(cohort, reason="pyramidfl", memory=memory, epochs=epochs, sends=sends)
