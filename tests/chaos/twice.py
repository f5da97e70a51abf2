"""Resumes one interrupted run by two processes at the same time: exactly one goes on, and the tables are right.

    PYTHONPATH=tests python -m chaos.twice --times 20

The other one is told who has the run, or comes so late that nothing is left to do.
"""

import random
import shutil
import time
from collections import Counter

from chaos.attack import arguments, attack
from chaos.interrupted import interrupted
from chaos.subjects import SHARED, run_on, undisturbed
from chaos.victims import SERIAL, TINY, ended, frames, same, start

WRONG = ("both", "neither", "differ", "tracebacks", "unexplained")


def main() -> None:
    """Makes as many pairs as asked."""
    args = arguments(__doc__)
    folder = args.folder / "twice"
    expected = undisturbed(run_on(SERIAL), args.folder / SHARED).outcome
    template = interrupted(args.folder / SHARED, [*TINY, *SERIAL])

    def blow(number: int, rng: random.Random) -> Counter[str]:
        place = folder / f"attempt-{number}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template.root, place / "results")
        command = ["resume", template.run_id, "--results", str(place / "results")]
        first = start(command, place, "first")
        time.sleep(rng.choice([0.0, 0.0, rng.uniform(0.0, 1.0)]))
        second = start(command, place, "second")
        ends = [ended(first, place, "first"), ended(second, place, "second")]
        going, refused = [e for e in ends if e.rounds], [e for e in ends if e.code == 2]
        counts = Counter(
            {
                "both": int(len(going) == 2),
                "neither": int(not any(e.code == 0 for e in going)),
                "differ": int(not same(frames(place / "results", template.run_id), expected)),
                "tracebacks": sum(e.has_traceback for e in ends),
                "unexplained": sum("is at work in " not in e.err for e in refused),
                "one went on": int(len(going) == 1),
                "refused": len(refused),
            }
        )
        if not any(counts[what] for what in WRONG):
            shutil.rmtree(place, ignore_errors=True)
        return counts

    attack("twice", blow, args, WRONG)


if __name__ == "__main__":
    main()
