"""How the platform's own work grows: with registered clients, cohorts, rounds, the supernet's size, and actors.

    python -m fedloom.experiments.benchmarks.scale [--parts registered cohorts rounds supernets actors]
        [--repeats 3] [--folder FOLDER] [--small]

Clients do nothing (`noop`): what is measured is the real loop, executor, recorder, tables and checkpoints. Every case
runs in a separate process, one at a time, and figures are medians over repeats. Prints a table per part, the constants
of `scale_model` if the parts that they come from are there, and one JSON object with all figures on the last line. Only
ratios within one call are meaningful. Results and checkpoints are written to FOLDER, by default the system's temporary
one; with a folder in memory (/dev/shm) the time is the platform's alone, without that of waiting for the disk.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from fedloom.experiments.benchmarks.processes import printed
from fedloom.experiments.benchmarks.scale_case import ScaleCase
from fedloom.experiments.benchmarks.scale_model import server_of

Figures = Mapping[str, Any]
"""What `scale_case` measured of one case."""
Row = dict[str, Any]

FLAT_ROUNDS = 100
"""Rounds after which a process has imported and allocated what every later round needs."""
REST_S = 0.05


def _registered(numbers: Sequence[int], rounds: int) -> list[ScaleCase]:
    return [ScaleCase(number, cohort=10, rounds=rounds, warm_up=rounds // 10) for number in numbers]


def _cohorts(sizes: Sequence[int], clients: int) -> list[ScaleCase]:
    """Rounds of about `clients` clients together, so that short rounds are measured as long as long ones."""
    return [ScaleCase(max(sizes), cohort=size, rounds=3 + max(2, clients // size)) for size in sizes]


def _rounds(numbers: Sequence[int]) -> list[ScaleCase]:
    return [ScaleCase(100, cohort=10, rounds=number, reads=True) for number in numbers]


def _supernets(millions: Sequence[float], cohorts: tuple[int, int]) -> list[ScaleCase]:
    """Every size with few and with more clients, whose difference is what a client's weights cost."""
    given = [(int(1e6 * size), cohort) for size in millions for cohort in cohorts]
    return [ScaleCase(10, cohort, rounds=5, parameters=size, kind="ray", warm_up=1) for size, cohort in given]


def _actors(numbers: Sequence[int], rests: Sequence[int], real: Sequence[int], per_actor: int) -> list[ScaleCase]:
    """No-op clients one by one and in chunks of ten, clients that take their time, and a few real actors."""
    case = ScaleCase(0, cohort=0, rounds=6, kind="simulated")
    busy = [replace(case, actors=k, chunk_size=chunk) for chunk in (1, 10) for k in numbers]
    slow = [replace(case, actors=k, rest_s=REST_S) for k in rests]
    own = [replace(case, actors=k, kind="ray") for k in real]
    return [_filled(each, per_actor) for each in [*busy, *slow, *own]]


def _filled(case: ScaleCase, per_actor: int) -> ScaleCase:
    cohort = case.actors * case.chunk_size * per_actor
    if not case.rest_s:
        cohort = max(cohort, 32 * per_actor)
    return replace(case, registered=cohort, cohort=cohort)


LARGE: dict[str, list[ScaleCase]] = {
    "registered": _registered([100, 1000, 10_000, 100_000, 1_000_000], rounds=500),
    "cohorts": _cohorts([10, 30, 100, 300, 1000, 3000, 10_000], clients=5000),
    "rounds": _rounds([1, 10, 100, 1000, 10_000]),
    "supernets": _supernets([1, 10, 50, 200], cohorts=(1, 5)),
    "actors": _actors([1, 8, 64], rests=[1, 2, 4, 8, 16, 32, 64], real=[1, 2], per_actor=16),
}
SMALL: dict[str, list[ScaleCase]] = {
    "registered": _registered([100, 1000], rounds=10),
    "cohorts": _cohorts([10, 100], clients=10),
    "rounds": _rounds([1, 20]),
    "supernets": [replace(case, kind="serial") for case in _supernets([0.01, 0.1], cohorts=(1, 2))],
    "actors": [replace(case, kind="serial", rest_s=0.0) for case in _actors([1, 2], [1], [], per_actor=1)],
}
"""Without Ray: that its actors answer is the subject of other tests."""


def rows_of(part: str, cases: Sequence[ScaleCase], repeats: Sequence[Sequence[Figures]]) -> list[Row]:
    """The rows of a part's table, one per case."""
    return [_ROWS[part](place, case, repeats) for place, case in enumerate(cases)]


Repeats = Sequence[Sequence[Figures]]


def _median(repeats: Repeats, place: int, name: str) -> float:
    return float(median(run[place][name] for run in repeats))


def _ratio(repeats: Repeats, place: int, name: str) -> float:
    """To the first case, within each repeat, because the machine is another one later."""
    return float(median(run[place][name] / run[0][name] for run in repeats))


def _registered_row(place: int, case: ScaleCase, repeats: Repeats) -> Row:
    return {
        "registered": case.registered,
        "round_ms": 1e3 * _median(repeats, place, "round_s"),
        "cpu_ms": 1e3 * _median(repeats, place, "cpu_s"),
        "ratio": _ratio(repeats, place, "round_s"),
        "cpu_ratio": _ratio(repeats, place, "cpu_s"),
        "start_s": _median(repeats, place, "start_s"),
        "resident_mb": _resident(repeats, place, case.rounds) / 1e6,
    }


def _cohort_row(place: int, case: ScaleCase, repeats: Repeats) -> Row:
    round_s, cpu_s = (_median(repeats, place, name) for name in ("mean_s", "cpu_s"))
    return {
        "cohort": case.cohort,
        "round_ms": 1e3 * round_s,
        "cpu_ms": 1e3 * cpu_s,
        "clients_per_s": case.cohort / round_s,
        "cpu_us_per_client": 1e6 * cpu_s / case.cohort,
    }


def _rounds_row(place: int, case: ScaleCase, repeats: Repeats) -> Row:
    seen = min(FLAT_ROUNDS, case.rounds)
    sizes = {name: _median(repeats, place, f"clients_{name}") for name in ("rows", "bytes", "read_s")}
    return {
        "rounds": case.rounds,
        "resident_mb": _resident(repeats, place, case.rounds) / 1e6,
        "to_round_100": _resident(repeats, place, case.rounds) / _resident(repeats, place, seen),
        "client_rows": sizes["rows"],
        "kb": sizes["bytes"] / 1e3,
        "bytes_per_row": sizes["bytes"] / sizes["rows"],
        "read_ms": 1e3 * sizes["read_s"],
        "read_us_per_row": 1e6 * sizes["read_s"] / sizes["rows"],
    }


def _resident(repeats: Repeats, place: int, rounds: int) -> float:
    return float(median(run[place]["resident_bytes"][str(rounds)] for run in repeats))


def _supernet_row(place: int, case: ScaleCase, repeats: Repeats) -> Row:
    size_bytes = 4 * case.parameters
    round_s, cpu_s = (_median(repeats, place, name) for name in ("mean_s", "cpu_s"))
    return {
        "parameters": case.parameters,
        "clients": case.cohort,
        "round_s": round_s,
        "cpu_s": cpu_s,
        "cpu_s_per_gb": 1e9 * cpu_s / size_bytes,
        "resident_per_state": _resident(repeats, place, case.rounds) / size_bytes,
    }


def _actors_row(place: int, case: ScaleCase, repeats: Repeats) -> Row:
    round_s, cpu_s = (_median(repeats, place, name) for name in ("mean_s", "cpu_s"))
    return {
        "kind": case.kind,
        "actors": case.actors,
        "chunk_size": case.chunk_size,
        "rest_ms": 1e3 * case.rest_s,
        "clients": case.cohort,
        "clients_per_s": case.cohort / round_s,
        "of_ideal": case.cohort * case.rest_s / case.actors / round_s if case.rest_s else None,
        "cpu_us_per_client": 1e6 * cpu_s / case.cohort,
    }


_ROWS: Mapping[str, Callable[[int, ScaleCase, Repeats], Row]] = {
    "registered": _registered_row,
    "cohorts": _cohort_row,
    "rounds": _rounds_row,
    "supernets": _supernet_row,
    "actors": _actors_row,
}


def main() -> None:
    """Measures the parts and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*LARGE], default=[*LARGE])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where results, checkpoints and prepared data are written")
    parser.add_argument("--small", action="store_true", help="a few small cases per part, to see that all of it works")
    args = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {}
    for part in args.parts:
        cases = (SMALL if args.small else LARGE)[part]
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figures[part] = rows_of(part, cases, measured(cases, args.repeats, folder))
        print_table(part, figures[part])
    server = server_of(figures)
    if server is not None:
        print(f"\n{server}")
    print(json.dumps({**figures, **({} if server is None else {"server": asdict(server)})}))


def measured(cases: list[ScaleCase], repeats: int, folder: str) -> list[list[Figures]]:
    """The figures of every case in every repeat; in a repeat all cases follow each other."""
    return [[run_in_process(case, folder) for case in cases] for _ in range(repeats)]


def run_in_process(case: ScaleCase, folder: str) -> Figures:
    """Runs a case in a separate process."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.scale_case", json.dumps(asdict(case)), folder]
    figures: Figures = printed(command)
    return figures


def print_table(part: str, rows: list[dict[str, float]]) -> None:
    """The rows of a part, with as many digits as their size needs."""
    print(f"\n{part}")
    widths = {name: max(len(name), 9) + 2 for name in rows[0]}
    print("".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("".join(f"{_short(row[name]):>{width}}" for name, width in widths.items()), flush=True)


def _short(value: Any) -> str:
    if isinstance(value, str) or value is None:
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


if __name__ == "__main__":
    main()
