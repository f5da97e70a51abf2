"""The section of targets: how many runs reach a validation score, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedloom.experiments.analysis.settings import SEEDS, estimate_by_seed
from fedloom.experiments.analysis.subnets import Labels
from fedloom.experiments.analysis.tables import METRIC, Tables
from fedloom.experiments.analysis.targets import first_reached, stop_targets
from fedloom.experiments.report.content import Block
from fedloom.experiments.report.rounds import stage_label
from fedloom.experiments.report.wording import INTERVALS, Write, count, percent, seconds, si, two_digits, with_interval

Target = tuple[str, float]
"""The metric, and the value to reach."""

RunsOf = Sequence[tuple[tuple[str, ...], Sequence[str]]]
"""Settings: their labels, and the ids of their runs."""

COLUMNS: tuple[tuple[str, str, Write], ...] = (
    ("rounds", "rounds", count),
    ("megabytes", "MB", si),
    ("simulated_h", "simulated", lambda hours: seconds(3600 * float(hours))),
)
"""The cost, its head and its format."""


def target_blocks(
    tables: Tables, settings: RunsOf, heads: tuple[str, ...], labels: Labels, targets: Sequence[Target] = ()
) -> Iterator[Block]:
    """One table per target, by default those at which the runs were to stop; `heads` are the titles of the labels."""
    for metric, target in targets or stop_targets(tables):
        frame, rows = first_reached(tables, target, metric), []
        write = percent if metric == METRIC else two_digits
        for names, run_ids in settings:
            of_setting = frame[frame["run_id"].isin(run_ids)]
            for (kind, tier), group in of_setting.groupby(["kind", "tier"], sort=False):
                stage = stage_label(str(group["run_id"].iloc[0]), str(kind), str(tier), labels)
                estimates = [(estimate_by_seed(group[name], group[SEEDS]), form) for name, _, form in COLUMNS]
                best = with_interval(estimate_by_seed(group["best"], group[SEEDS]), write)
                reach = f"{group['reached'].sum()} of {len(group)}"
                rows.append((*names, stage, reach, best, *(with_interval(known, form) for known, form in estimates)))
        shown = f"accuracy {percent(target)} %" if metric == METRIC else f"loss {target:g}"
        text = (
            f"How many runs reach {shown} on validation data, and what they need until the first evaluation that does.",
            "Rounds are counted within the stage; megabytes (received and sent by all clients) and simulated time "
            "since the run began, without stages of the same kind for other tiers.",
            f"The best {'accuracy in %' if metric == METRIC else 'loss'} is over all runs. Costs are only those of the "
            "runs that reach the target: if some do not, the mean costs are those of the faster ones.",
            f"Nothing is interpolated: a run that is evaluated every 5 rounds needs a multiple of 5. {INTERVALS}",
        )
        names = (*heads, "stage", "reach it", "best", *(head for _, head, _ in COLUMNS))
        yield Block(f"To {shown}", text, names, tuple(rows), labels=len(heads) + 1)
