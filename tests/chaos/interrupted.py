"""A run that was interrupted, kept as it was, to be copied and attacked."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.victims import ended, start

AFTER_ROUNDS = 3


@dataclass(frozen=True)
class Template:
    """The results folder of an interrupted run."""

    root: Path
    run_id: str


def interrupted(folder: Path, overrides: Sequence[str]) -> Template:
    """A run that was killed in its fourth round; made once per folder, with rows in the journal."""
    root = folder / "interrupted"
    if not (root / "artifacts").exists():
        shutil.rmtree(root, ignore_errors=True)
        part = folder / "begun"
        shutil.rmtree(part, ignore_errors=True)
        process = start(["run", *overrides, f"results={part}"], folder, "interrupted")
        out = folder / "interrupted.out"
        while process.poll() is None and out.read_text().count("\nsupernet ") < AFTER_ROUNDS:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        ended(process, folder, "interrupted")
        part.rename(root)
    (run,) = (root / "artifacts").iterdir()
    return Template(root, run.name)
