"""Runs on a disk that becomes full: the run is refused, or ends the same when it is resumed with room again.

    PYTHONPATH=tests python -m chaos.disk --times 50

Each attempt runs on a file system in memory with a random size (Linux; `unshare` makes it, also without root).
"""

import random
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from chaos.attack import arguments, attack
from chaos.subjects import SHARED, UNDISTURBED, run_on, undisturbed
from chaos.victims import SERIAL, TINY, frames, same

WRONG = ("differ", "tracebacks", "noise", "cannot_resume", "half_begun")
MOST_LINES = 4
"""Lines on standard error that a full disk may cost."""

SCRIPT = """
mount -t tmpfs -o size={size}k tmpfs {disk} || exit 99
{python} -m fedloom.experiments.cli run {overrides} results={disk}/results >{out}/first.out 2>{out}/first.err
echo $? >{out}/first.code
mount -o remount,size=1g {disk}
run=$(ls {disk}/results/artifacts 2>/dev/null)
if [ -n "$run" ]; then
  {python} -m fedloom.experiments.cli resume $run --results {disk}/results >{out}/again.out 2>{out}/again.err
  echo $? >{out}/again.code
fi
cp -r {disk}/. {out}/disk
"""


def size_kb(folder: Path) -> int:
    """The size of a folder's files."""
    return sum(p.stat().st_size // 1024 + 4 for p in folder.rglob("*") if p.is_file())


def main() -> None:
    """Makes as many disks full as asked."""
    args = arguments(__doc__)
    folder, overrides = args.folder / "disk", [*TINY, *SERIAL]
    expected = undisturbed(run_on(SERIAL), args.folder / SHARED).outcome
    whole_kb = size_kb(args.folder / SHARED / UNDISTURBED)

    def blow(number: int, rng: random.Random) -> Counter[str]:
        out = (folder / f"attempt-{number}").absolute()
        shutil.rmtree(out, ignore_errors=True)
        (out / "mount").mkdir(parents=True)
        values = {"disk": out / "mount", "out": out, "python": sys.executable}
        quoted = {name: shlex.quote(str(value)) for name, value in values.items()}
        size = rng.choice([rng.randrange(4, 200), rng.randrange(4, whole_kb)])
        script = SCRIPT.format(**quoted, size=size, overrides=shlex.join(overrides))
        subprocess.run(["unshare", "-rm", "sh", "-c", script], check=False)
        counts = _counted(out, expected)
        if not any(counts[what] for what in WRONG):
            shutil.rmtree(out, ignore_errors=True)
        return counts

    attack("disk", blow, args, WRONG)


def _counted(out: Path, expected: dict[str, pd.DataFrame]) -> Counter[str]:
    err = (out / "first.err").read_text()
    code = int((out / "first.code").read_text())
    runs = [p.name for p in (out / "disk" / "results" / "artifacts").glob("*")]
    again = out / "again.code"
    done = code == 0 or (again.exists() and again.read_text().strip() == "0")
    right = done and same(frames(out / "disk" / "results", runs[0]), expected)
    return Counter(
        {
            "differ": int(done and not right),
            "tracebacks": int("Traceback" in err),
            "noise": int(len(re.findall(r"\n", err)) > MOST_LINES),
            "cannot_resume": int(bool(runs) and not done),
            "half_begun": int(not runs and any((out / "disk" / "results").glob("*/experiment=*/run_id=*"))),
            "refused before it began": int(not runs),
            "stopped, then identical": int(code != 0 and right),
            "had room": int(code == 0),
        }
    )


if __name__ == "__main__":
    main()
