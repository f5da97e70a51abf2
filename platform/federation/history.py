"""The server's history of the clients that took part in a training stage, for selection rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import ClientResult


@dataclass(frozen=True)
class ClientRecord:
    """A client's history, taken from its results.

    Attributes:
        participations: the number of rounds in which it was selected.
        answers: the number of these rounds with status `ok`.
        last_round: the last round in which it was selected.
        loss: the mean training loss of its last answer.
        loss_norm: the root mean square of its samples' losses, if the stage asks for it (`loss_norms`).
        samples: the number of training samples of its last answer.
        simulated_s: the simulated seconds of its last answer.
        macs: the forward MACs of its last answer.
        bytes_down: the bytes that it then received.
        answered: the round of its last answer.
    """

    participations: int = 0
    answers: int = 0
    last_round: int = -1
    loss: float | None = None
    loss_norm: float | None = None
    samples: int = 0
    simulated_s: float = 0.0
    macs: float = 0.0
    bytes_down: int = 0
    answered: int = -1


History = Mapping[int, ClientRecord]
"""Records by client id, only of clients that have taken part."""

_FIELDS = tuple(f.name for f in fields(ClientRecord))


def recorded(values: Mapping[str, list[Any]], round_: int, results: Iterable[ClientResult]) -> dict[str, list[Any]]:
    """The history's JSON values after a round, in which the records of its clients alone are changed."""
    after = dict(values)
    for result in results:
        if result.client_id is None:
            continue
        key = str(result.client_id)
        before = unpacked({key: after[key]})[result.client_id] if key in after else ClientRecord()
        planned = replace(before, participations=before.participations + 1, last_round=round_)
        after |= packed({result.client_id: _answered(planned, result) if result.status == "ok" else planned})
    return after


def _answered(record: ClientRecord, result: ClientResult) -> ClientRecord:
    return replace(
        record,
        answers=record.answers + 1,
        loss=result.loss,
        loss_norm=result.loss_norm,
        samples=result.samples,
        simulated_s=result.simulated_s,
        macs=result.macs,
        bytes_down=result.bytes_down,
        answered=record.last_round,
    )


def packed(history: History) -> dict[str, list[Any]]:
    """The history as JSON values, one list per client."""
    return {str(client): list(asdict(record).values()) for client, record in history.items()}


def unpacked(values: Mapping[str, list[Any]]) -> dict[int, ClientRecord]:
    """The inverse of `packed`, also of records from before the last fields were added."""
    return {int(client): ClientRecord(**dict(zip(_FIELDS, row, strict=False))) for client, row in values.items()}
