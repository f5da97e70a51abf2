"""The line of a finished round, for the terminal and for the run's log; rounds count from 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Showing a run's lines needs no torch, which this imports.
    from fedloom.platform.federation.loop import RoundProgress


def as_bytes(size_bytes: float) -> str:
    """Formats a size, such as 3.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def as_time(seconds: float) -> str:
    """Formats a duration, such as 2:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def round_line(p: "RoundProgress") -> str:
    """Stage and round, clients, loss, accuracies, bytes, and the time that the whole run will still take."""
    parts = [f"{p.stage:<18} {p.round + 1:>4}/{p.rounds_total}"]
    if p.counted != "rounds":
        parts[0] += f" {p.counted}"
    if p.clients_planned:
        parts.append(f"clients {p.clients_ok}/{p.clients_planned}")
    if p.loss is not None:
        parts.append(f"loss {p.loss:.4f}")
    if p.metric is not None:
        parts.append(f"clients' {p.metric_of} accuracy {p.metric:.4f}")
    if p.validated is not None:
        after = "" if p.validated.rounds is None else f" after {p.validated.rounds}"
        parts.append(f"validation {p.validated.accuracy:.4f}{after}")
    if p.bytes_down:
        parts.append(f"down {as_bytes(p.bytes_down)} up {as_bytes(p.bytes_up)}")
    parts.append(f"{p.wall_s:.2f} s")
    return "  ".join([*parts, *_left(p)])


def _left(p: "RoundProgress") -> list[str]:
    if p.left_s is not None:
        return [f"left {as_time(p.left_s)}"] if p.left_s > 0 else []
    return [f"left {as_time(p.stage_left_s)} in this stage"] if p.stage_left_s else []
