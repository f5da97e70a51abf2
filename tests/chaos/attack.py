"""What all attacks share: how long they go on, where they continue, and the line of figures at the end."""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.platform.results.files import write_atomically

Blow = Callable[[int, random.Random], Counter[str]]
"""One attempt: its number and its random stream; returns what is to be counted."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """What every attack can be told: how long it may take, and where."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="stop after so many seconds, to be continued by the next call")
    parser.add_argument("--folder", type=Path, default=Path("chaos"), help="where it works and continues (chaos)")
    return parser


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of an attack that makes attempts."""
    parser = command_line(description)
    parser.add_argument("--times", type=int, default=20, help="attempts in all (default: 20)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def is_over(args: argparse.Namespace) -> Callable[[], bool]:
    """Whether the time that an attack may take, which begins now, is over."""
    end_s = time.monotonic() + (args.seconds or float("inf"))
    return lambda: time.monotonic() > end_s


def attack(name: str, blow: Blow, args: argparse.Namespace, wrong: tuple[str, ...]) -> None:
    """Makes the attempts that are left, and prints the figures; exit code 1 if any figure of `wrong` is not 0.

    Attempt N depends on the seed and N alone, so that one that went wrong can be repeated. Its counts are on the disk
    before the next one begins.
    """
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{name}-{args.seed}.json"
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"done": 0, "counts": {}}
    counts = Counter[str](state["counts"])
    stops = is_over(args)
    for number in range(state["done"], args.times):
        if stops():
            break
        found = blow(number, random.Random(f"{name}/{args.seed}/{number}"))
        bad = [what for what in wrong if found[what]]
        if bad:
            sys.stderr.write(f"{name} {number}: {', '.join(bad)}\n")
        counts.update(found)
        state = {"done": number + 1, "counts": dict(counts)}
        write_atomically(path, json.dumps(state).encode(), durable=False)
    figures = {"attack": name, "seed": args.seed, "times": state["done"], **dict.fromkeys(wrong, 0), **counts}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(1 if any(counts[what] for what in wrong) else 0)
