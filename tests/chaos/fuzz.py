"""Composes random configurations: each is accepted, or refused in one line, quickly, with nothing written.

    PYTHONPATH=tests python -m chaos.fuzz --times 10000

Values are taken from the tree of keys: the ends of each range and just beyond them, other types, texts that are no
names, and numbers that are none. What is accepted at a boundary is listed in FOLDER/fuzz-accepted.txt, to be read.
"""

import json
import os
import random
import signal
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from chaos.attack import arguments, attack
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.presets import experiments
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.runs.run import planned_stages, planned_world
from fedloom.platform.settings import Setting, settings_of

WRONG = ("tracebacks", "many_lines", "hangs", "written", "exits")
HANG_S = 20
ODD = (
    *("nan", "inf", "-inf", "-1", "0", "1", "2", "0.5", "-0.0", "1e-320", "1e308", "1e400", "9223372036854775808"),
    *("true", "null", "[]", "[1]", "[1,nan]", "{}", "{a: 1}", "''", "' '", "x", "../x", "a/b", "'a\\nb'", "x" * 300),
    *("${seed}", "${oc.env:HOME}", "[[[]]]", "ä", "0x10", "1_000", "1e", "=", "a=b", "!!python/object:os.system"),
)
EXPENSIVE = ("num_clients", "paths", "samples", "rounds", "count", "image_size", "input_shape", "population")
"""Keys whose great values are allowed, and cost time or memory in proportion: composed, but no world is built."""


@cache
def settings(choice: str) -> tuple[Setting, ...]:
    """All keys of a preset or method."""
    return tuple(settings_of(compose_config([choice])))


def edges(setting: Setting) -> list[str]:
    """The ends of a setting's range, and values just outside."""
    if setting.choices:
        return [*setting.choices, f"{setting.choices[0]}x"]
    bounds = [getattr(mark, name, None) for mark in setting.marks for name in ("ge", "gt", "le", "lt")]
    ends = [end for end in bounds if end is not None]
    return [text for end in ends for text in (f"{end:.17g}", f"{end + 1:.17g}", f"{end - 1:.17g}", f"[{end:.17g}]")]


def drawn(rng: random.Random) -> tuple[list[str], list[Setting]]:
    """Overrides of one to three keys of a method or preset."""
    choices = [f"method={name}" for name in METHODS] + [f"experiment={name}" for name in experiments()]
    choice = rng.choice(choices)
    chosen = rng.sample(settings(choice), rng.choice([1, 1, 1, 2, 3]))
    values = [rng.choice([*edges(s), *ODD]) for s in chosen]
    return [choice, *(f"{s.key}={value}" for s, value in zip(chosen, values, strict=True))], chosen


class Hung(BaseException):
    """It took too long."""


def hung(_signal: int, _frame: FrameType | None) -> None:
    raise Hung


def tried(overrides: list[str], folder: Path, *, build: bool) -> tuple[str, str]:
    """What becomes of a configuration: its kind, and the line that is said."""
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    try:
        config = compose_config([*overrides, f"results={folder / 'results'}"])
        if build:
            planned_stages(planned_world(config))
    except ValueError as error:
        return "refused", str(error)
    except Hung:
        return "hangs", ""
    except SystemExit as error:
        return "exits", str(error)
    except Exception as error:  # noqa: BLE001 - what a user would see as a traceback
        return "tracebacks", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return "accepted", ""


def main() -> None:
    """Tries as many as asked."""
    args = arguments(__doc__)
    accepted = args.folder / "fuzz-accepted.txt"

    def blow(number: int, rng: random.Random) -> Counter[str]:
        overrides, chosen = drawn(rng)
        build = number % 10 == 0 and not any(word in s.key for s in chosen for word in EXPENSIVE)
        with tempfile.TemporaryDirectory() as folder:
            before = os.getcwd()
            os.chdir(folder)
            try:
                kind, line = tried(overrides, Path(folder), build=build)
            finally:
                os.chdir(before)
            written = kind != "accepted" and any(Path(folder).rglob("*"))  # a world that is built may fill its cache
        counts: Counter[str] = Counter({kind: 1, "written": int(written), "many_lines": int("\n" in line)})
        if any(counts[what] for what in WRONG):
            _note(args.folder / "fuzz-wrong.txt", [number, kind, overrides, line])
        elif kind == "accepted":
            _note(accepted, overrides)
        return counts

    attack("fuzz", blow, args, WRONG)


def _note(path: Path, what: Any) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main()
