"""Damages files of interrupted and finished runs: whatever uses them must refuse, or compute what it would have else.

    PYTHONPATH=tests python -m chaos.corrupt --times 1000

Each attempt flips a bit, changes a digit, cuts, empties, removes or exchanges a file, or adds a copy of a part of a
table, sometimes two of these, then reports and resumes. The report's figures are compared with those of the undamaged
run, the tables of the resumed run with those of one that was never interrupted.
"""

import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.attack import arguments, attack
from chaos.interrupted import Template, interrupted
from chaos.subjects import SHARED, UNDISTURBED, run_on, undisturbed
from chaos.victims import SERIAL, TINY, frames, same
from fedloom.experiments.report.runs import report_json, write_report
from fedloom.experiments.runs.configuration import stored_config
from fedloom.platform.results.paths import list_runs
from fedloom.platform.runs.run import make_serial, resume_run

DAMAGES = ("flip", "digit", "cut", "empty", "remove", "exchange", "add")
TWO_AT_A_TIME = 0.25
"""The share of attempts with two damages."""
WRONG = ("silent", "tracebacks", "many_lines")


def damaged(root: Path, rng: random.Random) -> tuple[Path, str]:
    """Damages one file; gives its path and how."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.name != ".owner"]
    path, how = rng.choice(files), rng.choice(DAMAGES)
    if how == "add":
        return _added(rng.choice([p for p in files if p.suffix == ".parquet"])).relative_to(root), how
    content = bytearray(path.read_bytes())
    digits = [m.start() for m in re.finditer(rb"[0-9]", bytes(content))]
    if how == "remove":
        path.unlink()
    elif how == "exchange":
        other = rng.choice([p for p in files if p.suffix == path.suffix])
        path.write_bytes(other.read_bytes())
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif how == "empty" or not content:
        path.write_bytes(b"")
    elif how == "digit" and digits:
        place = rng.choice(digits)
        content[place] = ord(b"0") + (content[place] - ord(b"0") + rng.randrange(1, 10)) % 10
        path.write_bytes(content)
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    return path.relative_to(root), how


def _added(part: Path) -> Path:
    """A copy of a part of a table, called like the part that would be next."""
    name, _, number = part.stem.rpartition("-")
    last = max(int(p.stem.rpartition("-")[2]) for p in part.parent.glob(f"{name}-*.parquet"))
    copy = part.with_name(f"{name}-{last + 1:0{len(number)}}.parquet")
    shutil.copyfile(part, copy)
    return copy


def main() -> None:
    """Makes as many damages as asked."""
    args = arguments(__doc__)
    expected = undisturbed(run_on(SERIAL), args.folder / SHARED).outcome
    # One has its rows in the journal, the other one in the tables.
    templates = [interrupted(args.folder / SHARED, [*TINY, *SERIAL]), _finished(args.folder / SHARED)]
    reports = [_figures(template.root, template) for template in templates]

    def blow(number: int, rng: random.Random) -> Counter[str]:
        with tempfile.TemporaryDirectory() as place:
            root, which = Path(place) / "results", rng.randrange(len(templates))
            template = templates[which]
            shutil.copytree(template.root, root)
            damages = [damaged(root, rng) for _ in range(1 + (rng.random() < TWO_AT_A_TIME))]
            figures: list[Any] = []
            said = [
                _outcome(lambda: figures.append(_reported(root, template))),
                _outcome(lambda: _resumed(root, template)),
            ]
            refused = any(kind == "refused" for kind, _ in said)
            right = said[1][0] != "done" or same(frames(root, template.run_id), expected)
            right = right and all(found == reports[which] for found in figures)
            counts = Counter(
                {
                    "silent": int(not right),
                    "tracebacks": sum(kind == "error" for kind, _ in said),
                    "many_lines": sum(kind == "refused" and "\n" in line for kind, line in said),
                    "refused": int(refused),
                    "right all the same": int(right and not refused),
                    **Counter(how for _, how in damages),
                }
            )
            if any(counts[what] for what in WRONG):
                done = " and ".join(f"{how} {path}" for path, how in damages)
                sys.stderr.write(f"{number}: {done}: {said}\n")
            return counts

    attack("corrupt", blow, args, WRONG)


def _finished(folder: Path) -> Template:
    """The run that was never interrupted."""
    root = folder / UNDISTURBED / "results"
    (run,) = list_runs(root)
    return Template(root, run.run_id)


def _outcome(use: Callable[[], object]) -> tuple[str, str]:
    try:
        use()
    except (ValueError, OSError) as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - what a user would see as a traceback
        return "error", f"{type(error).__name__}: {error}"
    return "done", ""


def _reported(root: Path, template: Template) -> dict[str, Any]:
    write_report(root, [template.run_id])
    return _figures(root, template)


def _figures(root: Path, template: Template) -> dict[str, Any]:
    """The figures of the report without the run's state, which is read from a file that belongs to no result."""
    values = json.loads(json.dumps(report_json(root, [template.run_id])))
    return {name: value for name, value in values.items() if name not in ("runs", "missing")}


def _resumed(root: Path, template: Template) -> None:
    run_id, config = stored_config(root, template.run_id)
    resume_run(config, run_id, make_serial)


if __name__ == "__main__":
    main()
