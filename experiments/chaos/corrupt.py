"""Damages single files of an interrupted run: whatever uses it must refuse, or compute what an undisturbed run did.

    python -m fedloom.experiments.chaos.corrupt --times 1000

Each attempt flips a bit, changes a digit, cuts, empties, removes or exchanges one file, then resumes and reports.
"""

import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fedloom.experiments.chaos.attack import arguments, attack
from fedloom.experiments.chaos.interrupted import Template, interrupted
from fedloom.experiments.chaos.subjects import SHARED, run_on, undisturbed
from fedloom.experiments.chaos.victims import SERIAL, TINY, frames, same
from fedloom.experiments.report.pages.runs import write_report
from fedloom.experiments.runs.configuration import stored_config
from fedloom.platform.runs.run import resume_run
from fedloom.platform.runs.serial import make_serial

DAMAGES = ("flip", "digit", "cut", "empty", "remove", "exchange")
WRONG = ("silent", "tracebacks", "many_lines")


def damaged(root: Path, rng: random.Random) -> tuple[Path, str]:
    """Damages one file; gives its path and how."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.name != ".owner"]
    path, how = rng.choice(files), rng.choice(DAMAGES)
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


def main() -> None:
    """Makes as many damages as asked."""
    args = arguments(__doc__)
    expected = undisturbed(run_on(SERIAL), args.folder / SHARED).outcome
    template = interrupted(args.folder / SHARED, [*TINY, *SERIAL])

    def blow(number: int, rng: random.Random) -> Counter[str]:
        with tempfile.TemporaryDirectory() as place:
            root = Path(place) / "results"
            shutil.copytree(template.root, root)
            path, how = damaged(root, rng)
            said = [_outcome(use) for use in (lambda: _reported(root, template), lambda: _resumed(root, template))]
            refused = any(kind == "refused" for kind, _ in said)
            right = said[1][0] == "done" and same(frames(root, template.run_id), expected)
            counts = Counter(
                {
                    "silent": int(not refused and not right),
                    "tracebacks": sum(kind == "error" for kind, _ in said),
                    "many_lines": sum(kind == "refused" and "\n" in line for kind, line in said),
                    "refused": int(refused),
                    "right all the same": int(right and not refused),
                    how: 1,
                }
            )
            if any(counts[what] for what in WRONG):
                sys.stderr.write(f"{number}: {how} {path}: {said}\n")
            return counts

    attack("corrupt", blow, args, WRONG)


def _outcome(use: Callable[[], object]) -> tuple[str, str]:
    try:
        use()
    except (ValueError, OSError) as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - what a user would see as a traceback
        return "error", f"{type(error).__name__}: {error}"
    return "done", ""


def _reported(root: Path, template: Template) -> None:
    write_report(root, [template.run_id])


def _resumed(root: Path, template: Template) -> None:
    run_id, config = stored_config(root, template.run_id)
    resume_run(config, run_id, make_serial)


if __name__ == "__main__":
    main()
