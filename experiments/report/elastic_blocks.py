"""SuperFedNAS in tables: the evaluated subnets, how good the predictors are, and what k models cost."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedloom.experiments.analysis.frames import communication
from fedloom.experiments.analysis.intervals import Estimate, is_absent
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.subnets import ALONE, COSTS, SEARCHED, SUPERNET, Predictor, Subnet, SubnetSummary
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.experiments.report.costs import CostComparison, Step
from fedloom.experiments.report.table import Block
from fedloom.experiments.report.words import ABSENT, percent, seconds, si, stage_name, times

KINDS = {
    SUPERNET: "the family's subnets are cut from the supernet",
    SEARCHED: "targets and tiers name the search's winners, cut without any training",
    ALONE: "every subnet was trained alone",
}


def subnet_block(summary: SubnetSummary, *, wide: bool) -> Block:
    """One row per evaluated subnet, or per target; `wide` adds the winners' choices, which no terminal holds."""
    columns = [c for c in _columns() if any(s.values[c[0]] is not None for s in summary.subnets)]
    labels = ("subnet", "choices", "id") if wide else ("subnet",)
    heads = (*labels, *(head for _, head, _ in columns))
    rows = tuple(
        (*_names(s)[: len(labels)], *(_cell(s.values[key], write, key) for key, _, write in columns))
        for s in summary.subnets
    )
    return Block(f"Subnets: {summary.setting.name}", _text(summary), heads, rows, labels=len(labels))


def _columns() -> list[tuple[str, str, Callable[[Any], str]]]:
    columns: list[tuple[str, str, Callable[[Any], str]]] = [("macs", "MACs", si), ("parameters", "params", si)]
    for quality, unit, write in (("accuracy", " %", percent), ("perplexity", "\nperplexity", _perplexity)):
        columns += [(f"{split}_{quality}", f"{split}{unit}", write) for split in ("validation", "test")]
    return columns


def _perplexity(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{float(value):.4g}"


def _names(subnet: Subnet) -> tuple[str, str, str]:
    return (subnet.target or subnet.label, subnet.label, subnet.architecture or ABSENT)


def _cell(value: Estimate | None, write: Callable[[Any], str], key: str) -> str:
    if value is None:
        return ABSENT
    if value.half_width is None or (key in COSTS and value.half_width == 0):
        return write(value.mean)
    return f"{write(value.mean)} ± {write(value.half_width)}"


def _text(summary: SubnetSummary) -> tuple[str, ...]:
    runs = summary.setting.run_ids
    over = f"Run {runs[0]}." if len(runs) == 1 else f"Mean ± 95 % interval (Student's t) over {len(runs)} runs."
    found = dict.fromkeys(s.model for s in summary.subnets)
    kinds = "; ".join(KINDS[model] for model in found)
    measured = f"{kinds[:1].upper()}{kinds[1:]}. Validation and test: the server's whole data."
    return (over, measured, *(_quality(p) for p in summary.predictors))


def _quality(predictor: Predictor) -> str:
    """How far the predictor's order and values are right on subnets that it has not seen."""
    latency = predictor.measure == "latency_s"
    tau, error = predictor.kendall_tau, predictor.mean_absolute_error
    shown = _over(error, seconds if latency else percent)
    unit = "" if latency else " percentage points"
    held_out = ABSENT if predictor.held_out is None else f"{predictor.held_out.mean:.0f}"
    return (
        f"Predictor of {'latency' if latency else 'accuracy'}, on {held_out} held-out subnets: "
        f"Kendall tau {_over(tau, lambda v: f'{v:.2f}')}, mean absolute error {shown}{unit}."
    )


def _over(value: Estimate | None, write: Callable[[Any], str]) -> str:
    return _cell(value, write, "")


def dry_block(tables: Tables, run_id: str, labels: Labels) -> Block:
    """What a dry run counted, per stage and in total."""
    stages = communication(only(tables, [run_id]))
    sums = {name: stages[name].sum() for name in ("rounds", "clients", "bytes_down", "bytes_up", "macs", "simulated_s")}
    rows = [(_stage_label(row, run_id, labels), *_work(row)) for row in stages.to_dict(orient="records")]
    if len(rows) > 1:
        rows.append(("in total", *_work(sums)))
    heads = ("stage", "rounds", "client\ntasks", "\ndown", "\nup", "\nMACs", "simulated\ntime")
    return Block(f"Dry run {run_id}", ("Counted over all clients; nothing was trained.",), heads, tuple(rows), labels=1)


def _stage_label(row: Mapping[Any, Any], run_id: str, labels: Labels) -> str:
    tier = str(row["tier"])
    return f"{stage_name(str(row['kind']))} {labels.of(run_id, tier) if row['kind'] == ALONE else tier}".strip()


def _work(row: Mapping[Any, Any]) -> Sequence[str]:
    sizes = (si(row["bytes_down"], "B"), si(row["bytes_up"], "B"))
    return (f"{row['rounds']:.0f}", f"{row['clients']:.0f}", *sizes, si(row["macs"]), seconds(row["simulated_s"]))


def cost_block(comparison: CostComparison) -> Block:
    """iFedAvg over the first k members against the supernet, and FedAvg on the largest alone."""
    c = comparison
    heads = ("k", "with member", "bytes,\niFedAvg", "bytes,\nsupernet", "\nratio", "MACs,\niFedAvg", "MACs,\nsupernet")
    last = ("FedAvg", f"{c.largest.member.label} alone")
    rows = [(*_step_names(step), *_step_cells(step, c)) for step in c.steps]
    rows.append((*last, *_step_cells(c.largest, c)))
    return Block(
        f"Cost of k models: {c.supernet} against {c.separately}", _cost_text(c), (*heads, "\nratio"), tuple(rows)
    )


def _step_names(step: Step) -> tuple[str, str]:
    return str(step.k), step.member.label


def _step_cells(step: Step, c: CostComparison) -> Sequence[str]:
    sent = (si(step.total.size_bytes, "B"), si(c.supernet_cost.size_bytes, "B"), times(step.communication_ratio))
    return (*sent, si(step.total.macs), si(c.supernet_cost.macs), times(step.compute_ratio))


def _cost_text(c: CostComparison) -> tuple[str, ...]:
    last, largest = c.steps[-1], c.largest
    which = "the largest subnet" if largest.member.is_largest else f"the largest member, {largest.member.label},"
    members = "member costs" if last.k == 1 else "members cost"
    text = [
        "Training alone, summed over all clients: bytes down and up, and MACs. iFedAvg trains the first k members of "
        "the family one by one; one supernet serves any number of them.",
        f"{last.k} {members} {times(last.communication_ratio)} the supernet's communication and "
        f"{times(last.compute_ratio)} its compute; {which} alone "
        f"{times(largest.communication_ratio)} and {times(largest.compute_ratio)}.",
    ]
    if c.differences:
        text.append(f"They were not trained at equal terms: {'; '.join(c.differences)}.")
    return tuple(text)
