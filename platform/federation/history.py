"""What the server remembers of the clients of a training stage: little, and only of those that took part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Report


@dataclass(frozen=True)
class ClientRecord:
    """One client as its reports show it.

    Attributes:
        participations: rounds in which it was planned.
        answers: of these, rounds whose answer counted.
        last_round: the last round in which it was planned.
        loss: mean training loss that it reported last.
        loss_norm: root mean square of its samples' losses, if the stage asks for it (`loss_norms`).
        samples: training samples that it reported last.
        simulated_s: simulated seconds of its last answer.
    """

    participations: int = 0
    answers: int = 0
    last_round: int = -1
    loss: float | None = None
    loss_norm: float | None = None
    samples: int = 0
    simulated_s: float = 0.0


History = Mapping[int, ClientRecord]
"""By client; those that never took part are not in it."""

_FIELDS = tuple(f.name for f in fields(ClientRecord))


def with_reports(history: History, round_: int, reports: Iterable[Report]) -> dict[int, ClientRecord]:
    """The history after a round."""
    after = dict(history)
    for report in reports:
        if report.client_id is None:
            continue
        before = after.get(report.client_id, ClientRecord())
        planned = replace(before, participations=before.participations + 1, last_round=round_)
        after[report.client_id] = _answered(planned, report) if report.status == "ok" else planned
    return after


def _answered(record: ClientRecord, report: Report) -> ClientRecord:
    return replace(
        record,
        answers=record.answers + 1,
        loss=report.loss,
        loss_norm=report.loss_norm,
        samples=report.samples,
        simulated_s=report.simulated_s,
    )


def packed(history: History) -> dict[str, list[Any]]:
    """The history as JSON values: a list per client."""
    return {str(client): list(asdict(record).values()) for client, record in history.items()}


def unpacked(values: Mapping[str, list[Any]]) -> dict[int, ClientRecord]:
    """The inverse of `packed`."""
    return {int(client): ClientRecord(**dict(zip(_FIELDS, row, strict=True))) for client, row in values.items()}
