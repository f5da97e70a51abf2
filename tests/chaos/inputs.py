"""Changes the data and the files that runs began with: what goes on with a run refuses, or the change was none.

    PYTHONPATH=tests python -m chaos.inputs --times 60

The runs read an .npz file, a device table, and a file that a budget of their own is given. Each attempt changes or
removes one of them, or only where or how the same data is stored, then verifies the run, and resumes or searches it.
What is not refused is compared with the same command on what was there before.
"""

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chaos.attack import arguments, attack
from chaos.interrupted import interrupted
from chaos.subjects import UNDISTURBED, run_on, said, undisturbed
from chaos.victims import SERIAL, TINY, TINY_ELASTIC, called, frames, same
from fedloom.platform.results.paths import list_runs
from fedloom.tiers.device_files import write_device_table
from fedloom.tiers.devices import generate_device_table

WRONG = ("silent", "tracebacks", "hangs", "many_lines", "touched", "differ")
BUDGET = "chaos.inputs:share_of"
ROOT, CACHE = "FEDLOOM_DATA", "FEDLOOM_CACHE"
REAL = ("a pixel", "another root", "a device", "the budget's file", "no data", "no table", "no budget's file")
HARMLESS = ("the same data anew", "the same data elsewhere", "an empty cache")
SEARCH = ("--macs", "103000", "--macs", "230000", "--json")
RUNS = {"fedoras": TINY, "superfednas": TINY_ELASTIC}


def share_of(round: int, rng: np.random.Generator, *, path: str) -> float:
    """The budget: the share that a file holds."""
    del round, rng
    return float(Path(path).read_text())


@dataclass(frozen=True)
class Inputs:
    """The files that the runs read."""

    folder: Path

    @property
    def overrides(self) -> list[str]:
        """The keys that name them."""
        return [
            *("data.dataset=npz", "data.options.path=digits.npz", f"tiers.device_table={self.folder / 'devices.csv'}"),
            *(f"tiers.budget.kind={BUDGET}", f"tiers.budget.options.path={self.folder / 'share.txt'}"),
        ]

    def write(self) -> None:
        """Writes all of them as they were when the runs began."""
        os.environ.update({ROOT: str(self.folder / "data"), CACHE: str(self.folder / "cache")})
        for name in ("data", "elsewhere", "other"):
            self.write_data(name)
        self.write_table()
        (self.folder / "share.txt").write_text("0.9")

    def write_data(self, name: str, sample: int | None = None, *, packed: bool = False) -> None:
        """Writes the digits, of which a pixel of a sample may be another."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = digits.images.astype(np.uint8), digits.target
        if sample is not None:
            x[sample, 4, 4] ^= 1
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        parts = {"train_x": x[:1400], "train_y": y[:1400], "test_x": x[1400:], "test_y": y[1400:]}
        (np.savez_compressed if packed else np.savez)(self.folder / name / "digits.npz", **parts)

    def write_table(self, slower: int | None = None) -> None:
        """Writes the table of devices, one of which may be slower."""
        table = generate_device_table(40, np.random.default_rng(1))
        rates = table.macs_per_s.copy()
        if slower is not None:
            rates[slower] *= 0.999
        columns: dict[str, Any] = {**vars(table), "macs_per_s": rates}
        write_device_table(self.folder / "devices.csv", type(table)(**columns))

    def change(self, what: str, rng: random.Random, spare: Path) -> None:
        """Changes one of them, or only its form or place; `spare` is a folder for the latter."""
        match what:
            case "a pixel":
                self.write_data("data", rng.randrange(1700))
            case "another root":
                self.write_data("other", rng.randrange(1700))
                os.environ[ROOT] = str(self.folder / "other")
            case "a device":
                self.write_table(rng.randrange(40))
            case "the budget's file":
                (self.folder / "share.txt").write_text("0.8")
            case "no data":
                (self.folder / "data" / "digits.npz").unlink()
            case "no table":
                (self.folder / "devices.csv").unlink()
            case "no budget's file":
                (self.folder / "share.txt").unlink()
            case "the same data anew":
                self.write_data("data", packed=True)
            case "the same data elsewhere":
                os.environ[ROOT] = str(self.folder / "elsewhere")
            case "an empty cache":
                os.environ[CACHE] = str(spare)


def main() -> None:
    """Makes as many changes as asked."""
    args = arguments(__doc__)
    folder = (args.folder / "inputs").absolute()
    inputs = Inputs(folder / "files")
    keys = [*SERIAL, *inputs.overrides]

    def blow(number: int, rng: random.Random) -> Counter[str]:
        inputs.write()
        method, name = rng.choice([("fedoras", "resume"), ("superfednas", "resume"), ("superfednas", "search")])
        what, own, place = rng.choice([*REAL, *HARMLESS]), folder / method, folder / f"attempt-{number}"
        whole = undisturbed(run_on(keys, RUNS[method]), own).outcome
        is_search, done = name == "search", own / UNDISTURBED / "results"
        begun, more = (done, SEARCH) if is_search else (interrupted(own, [*RUNS[method], *keys]).root, ())
        (run,) = list_runs(begun)
        words = [run.run_id, "--results", str(place / "results")]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(begun, place / "results")
        before = _contents(place / "results")
        found = said(place, [called([name, *words, *more], place, "before")]) if is_search else None
        inputs.change(what, rng, place / "cache")
        checked = called(["verify", *words], place, "verify")
        end = called([name, *words, *more], place, "after")
        if is_search:
            is_same = end.code == 0 and said(place, [end]) == found
        else:
            is_same = end.code == 0 and same(frames(place / "results", run.run_id), whole)
        is_refused, is_told = end.code == 2, checked.code == 2 or ": whole; " in checked.out
        counts = Counter(
            {
                "silent": int(what in REAL and not (is_refused and is_told)),
                "differ": int(what in HARMLESS and not (is_same and checked.code == 0)),
                "tracebacks": sum(each.has_traceback for each in (checked, end)),
                "hangs": sum(each.code == 124 for each in (checked, end)),
                "many_lines": int(is_refused and end.err.count("\n") != 1),
                "touched": int(is_refused and _contents(place / "results") != before),
                "refused": int(is_refused),
                "identical": int(is_same),
                f"{name} of {method}": 1,
                what: 1,
            }
        )
        if not any(counts[each] for each in WRONG):
            shutil.rmtree(place, ignore_errors=True)
        return counts

    attack("inputs", blow, args, WRONG)


def _contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".owner"))
    return {path: path.read_bytes() for path in files}


if __name__ == "__main__":
    main()
