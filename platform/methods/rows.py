"""Measurements as rows of the table `evaluations`."""

from collections.abc import Iterable

from fedloom.platform.clients.execution import Report
from fedloom.platform.federation.stage import Row


def evaluation_rows(reports: Iterable[Report], tier: str | None = None) -> list[Row]:
    """One row per measured value; `tier` is the model's tier, the client's own if not given."""
    return [
        (
            "evaluations",
            {
                "model": m.model,
                "tier": tier if tier is not None else report.tier,
                "architecture": m.architecture,
                "client_id": report.client_id,
                "split": m.split,
                "metric": m.metric,
                "value": m.value,
                "samples": m.samples,
            },
        )
        for report in reports
        for m in report.measurements
    ]
