"""Table of the training cost of k models."""

from collections.abc import Sequence

from fedloom.experiments.analysis.costs import CostComparison, Step
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import si, size, times


def cost_block(comparison: CostComparison) -> Block:
    """iFedAvg over the first k members compared with the supernet, and FedAvg on the largest member alone."""
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
    sent = (size(step.total.size_bytes), size(c.supernet_cost.size_bytes), times(step.communication_ratio))
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
