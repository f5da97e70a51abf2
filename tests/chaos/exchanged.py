"""Exchanges files of two runs that differ in their seed: what uses them refuses, or computes what it would have else.

    PYTHONPATH=tests python -m chaos.exchanged --times 30

Each attempt gives an interrupted run a file or a folder of the other one, or a status that says that it is done, then
verifies and resumes it; or gives a new run the other's supernet in the place of its own.
"""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

from chaos.attack import arguments, attack
from chaos.interrupted import interrupted
from chaos.subjects import UNDISTURBED, run_on, undisturbed
from chaos.victims import SERIAL, TINY, called, frames, same
from fedloom.platform.results.paths import RunPaths, list_runs

WRONG = ("silent", "differ", "tracebacks", "hangs", "many_lines")
REFUSED = ("journal", "checkpoint", "state", "rows", "manifest", "configuration", "artifacts")
HARMLESS = ("status", "done", "supernet")
EXCHANGED = (*REFUSED, *HARMLESS)


def exchange(what: str, mine: RunPaths, other: RunPaths) -> None:
    """Puts a file or a folder of the other run where the same of mine is."""
    match what:
        case "journal":
            name = next(mine.artifacts.glob("journal-*")).name
            copy(next(other.artifacts.glob("journal-*")), mine.artifacts / name)
        case "checkpoint":
            copy(other.checkpoint, mine.checkpoint)
        case "state":
            copy(other.checkpoint / "state.json", mine.checkpoint / "state.json")
        case "rows":
            copy(other.table("runs"), mine.table("runs"))  # the rows of the others are in the journal
        case "manifest":
            copy(other.artifacts / "manifest.json", mine.artifacts / "manifest.json")
        case "configuration":
            copy(other.config, mine.config)
        case "artifacts":
            copy(other.artifacts, mine.artifacts)
        case "status":
            copy(other.status, mine.status)
        case "done":
            mine.status.write_text(json.dumps({**json.loads(mine.status.read_text()), "state": "done"}))
        case "supernet":
            here, there = (next((run.root / "supernets").glob("[0-9a-f]*")) for run in (mine, other))
            copy(there, here)


def copy(source: Path, to: Path) -> None:
    """Replaces a file or a folder by a copy of another."""
    if source.is_dir():
        shutil.rmtree(to)
        shutil.copytree(source, to)
    else:
        shutil.copyfile(source, to)


def main() -> None:
    """Makes as many exchanges as asked."""
    args = arguments(__doc__)
    folder = args.folder.absolute() / "exchanged"
    keys = {seed: [*SERIAL, f"seed={seed}", "reuse_supernet=true"] for seed in (1, 2)}

    def blow(number: int, _: random.Random) -> Counter[str]:
        place, what = folder / f"attempt-{number}", EXCHANGED[number % len(EXCHANGED)]
        expected, _ = (undisturbed(run_on(keys[seed]), folder / str(seed)).outcome for seed in (1, 2))
        if what == "supernet":
            roots = [folder / str(seed) / UNDISTURBED / "results" for seed in (1, 2)]
        else:
            roots = [interrupted(folder / str(seed), [*TINY, *keys[seed]]).root for seed in (1, 2)]
        results = ["--results", str(place / "results")]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(roots[0], place / "results")
        (mine,), (other,) = list_runs(place / "results"), list_runs(roots[1])
        exchange(what, mine, other)
        if what == "supernet":
            shutil.rmtree(mine.artifacts)
            for table in mine.tables():
                shutil.rmtree(table)
            ends = [called(["run", *TINY, *keys[1], f"results={place / 'results'}"], place, "run")]
        else:
            ends = [called([name, mine.run_id, *results], place, name) for name in ("verify", "resume")]
        runs = list_runs(place / "results")
        found = frames(place / "results", runs[0].run_id) if ends[-1].code == 0 and len(runs) == 1 else None
        if found is not None:  # a run that trains its own supernet names itself
            for tables in (expected, found):
                tables["runs"] = tables["runs"].drop(columns=["supernet", "supernet_run_id"])
        is_same = found is not None and same(found, expected)
        is_refused = all(end.code == 2 for end in ends)
        counts = Counter(
            {
                "silent": int(what in REFUSED and not is_refused),
                "differ": int(what in HARMLESS and not is_same),
                "tracebacks": sum(end.has_traceback for end in ends),
                "hangs": sum(end.code == 124 for end in ends),
                "many_lines": int(ends[-1].code == 2 and ends[-1].err.count("\n") != 1),
                "refused": int(is_refused),
                "identical": int(is_same),
                what: 1,
            }
        )
        if not any(counts[wrong] for wrong in WRONG):
            shutil.rmtree(place, ignore_errors=True)
        return counts

    attack("exchanged", blow, args, WRONG)


if __name__ == "__main__":
    main()
