"""The time that `fedloom board` takes to list many runs and draw many curves, measured in a headless browser.

    python -m fedloom.experiments.benchmarks.board [--runs 3000] [--curves 50] [--rounds 1000] [--folder FOLDER]

Generates the results (unless FOLDER holds runs) from rows, without training, starts the board on them and opens it in
the system's Chromium. Prints a table and one JSON object with all figures on the last line. `first_list_s` is the time
from opening the page until all runs are listed, on a server that has just started and knows none of them; `list_s` is
the same on the next opening; `curves_s` is the time from choosing the runs' curves until they are on the screen, before
the server has read any of them; `curves_again_s` is the same for another axis. The package `playwright` drives the
browser.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.results.paths import Names, RunPaths, list_runs, write_names
from fedloom.platform.results.status import StatusFile, WrittenState
from fedloom.platform.results.tables import TABLES
from fedloom.platform.results.writer import RunWriter

PRESETS = ("fedavg_digits", "fedoras_digits", "heterofl_digits", "superfednas_digits")
LEARNING_RATES, ALPHAS = (0.01, 0.03, 0.1), (0.1, 1.0, 100.0)
TEMPLATES = 60
"""Runs whose tables are written; all others link to these tables and have a status and names of their own."""
ENDS: Sequence[tuple[WrittenState, str]] = (
    ("done", ""),
    ("done", ""),
    ("done", ""),
    ("failed", "supernet, round 12: 3 of 10 clients failed, 2 are tolerated: loss is not finite in layer_2"),
    ("interrupted", "stopped after the round in progress"),
)
CLIENTS, EVALUATE_EVERY = 10, 20


def write_many(root: Path, runs: int, rounds: int) -> list[str]:
    """Writes `runs` runs of `rounds` rounds each, of several methods and settings; returns their ids."""
    ids = [f"2026{1 + i // 700:02}{1 + i // 25 % 28:02}-{i % 24:02}3000-{_preset(i)}-{i:06x}" for i in range(runs)]
    templates: list[RunPaths] = []
    for i, run_id in enumerate(ids):
        paths = RunPaths(root, _preset(i), run_id)
        if i < TEMPLATES:
            templates.append(_template(paths, i, rounds))
        else:
            like = templates[i % len(templates)]
            paths = RunPaths(root, like.experiment, run_id)
            for table in TABLES:
                shutil.copytree(like.table(table), paths.table(table), copy_function=os.link)
            paths.artifacts.mkdir(parents=True)
        state, message = ENDS[i % len(ENDS)]
        status = StatusFile(paths.status)
        status.write(state, stage=_stage(paths.experiment), round=rounds - 1, rounds_total=rounds, message=message)
        if i % 3 == 0:
            write_names(paths.artifacts, Names(f"trial {i}" if i % 2 else None, ("paper", f"batch-{i // 500}")))
    return ids


def _preset(i: int) -> str:
    return PRESETS[i % len(PRESETS)]


def _stage(preset: str) -> str:
    return "supernet" if preset.startswith(("fedoras", "superfednas")) else "train"


def _template(paths: RunPaths, i: int, rounds: int) -> RunPaths:
    lr, alpha = LEARNING_RATES[i // 4 % 3], ALPHAS[i // 12 % 3]
    config = compose_config(
        [f"experiment={paths.experiment}", f"method.train.lr={lr}", f"data.alpha={alpha}", f"seed={i // 36}"]
    )
    writer = RunWriter.create(paths.root, paths.experiment, paths.run_id, flush_interval_s=3600.0)
    writer.update_run(
        method=config.method.name, dataset=config.data.dataset, config=json.dumps(asdict(config)), status="done",
        seeds=json.dumps({"training": i // 36}),
    )  # fmt: skip
    rng = np.random.default_rng(i)
    stage, top = _stage(paths.experiment), 0.95 - 0.1 * (lr == 0.01) - 0.15 * (alpha == 0.1) - 0.01 * (i % 4)
    for round_ in range(rounds):
        accuracy = float(top - (top - 0.1) * np.exp(-6.0 * round_ / rounds) + 0.01 * rng.standard_normal())
        loss, sent = 2.5 * (1.0 - accuracy), {"bytes_down": 40_000, "bytes_up": 20_000 + 1000 * (i % 4)}
        counts = {"clients_planned": CLIENTS, "clients_ok": CLIENTS, "clients_failed": 0, "macs": 10**7}
        writer.add(
            "rounds", stage=stage, round=round_, loss=loss, metric=accuracy, **sent, **counts, wall_s=0.1,
            simulated_s=2.0 + float(rng.random()), lr=lr,
        )  # fmt: skip
        if round_ % EVALUATE_EVERY == 0 or round_ == rounds - 1:
            row = {"stage": stage, "round": round_ + 1, "model": "supernet", "tier": "server", "split": "validation"}
            writer.add("evaluations", **row, metric="accuracy", value=accuracy - 0.02, samples=100)
    test = {"stage": "evaluation", "round": 0, "model": "global", "tier": "all", "split": "test", "samples": 100}
    writer.add("evaluations", **test, metric="accuracy", value=top - 0.02)
    writer.close()
    return writer.paths


# -- measuring ---------------------------------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LISTED = """(runs) => new Promise((resolve) => {
  const isListed = () => document.querySelectorAll("table.list tr[data-run]").length > 10
    && document.querySelector(".count").textContent.startsWith(runs + " runs");
  const look = () => isListed() ? resolve(performance.now()) : requestAnimationFrame(look);
  look();
})"""
"""Milliseconds from the opening of the page until the runs are listed."""
DRAWN = """([hash, curves, metric]) => new Promise((resolve) => {
  const begun = performance.now();
  location.hash = hash;
  const panel = () => document.querySelector(`section[data-metric="${metric}"][data-drawn="${curves}"] canvas`);
  const shown = () => resolve(performance.now() - begun);
  const look = () => requestAnimationFrame(panel() ? shown : look);
  look();
})"""
"""Milliseconds from the choice of curves until they are on the screen."""

IDLE = """async () => {
  const { version } = await (await fetch("api/runs")).json();
  return (await (await fetch("api/runs?since=" + version)).text()).length;
}"""
"""Bytes of the server's answer to a page that is up to date."""


def measure(folder: Path, curves: int) -> dict[str, Any]:
    """Starts a board on a results folder and a browser, and returns the figures."""
    from playwright.sync_api import sync_playwright

    runs = [paths.run_id for paths in list_runs(folder)]
    command = [sys.executable, "-m", "fedloom.experiments", "board", "--results", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board, sync_playwright() as driver:
        assert board.stdout is not None
        url = json.loads(board.stdout.readline())["url"]
        path = next(path for name in BROWSERS if (path := shutil.which(name)))
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        figures: dict[str, Any] = {"runs": len(runs), "curves": curves}
        for name in ("first_list_s", "list_s"):
            page.goto("about:blank")
            page.goto(url)
            figures[name] = round(page.evaluate(LISTED, len(runs)) / 1000, 3)
        begun_s = time.monotonic()
        page.wait_for_selector("#link:text-is('live')", timeout=600_000)
        figures["all_tables_read_s"] = round(time.monotonic() - begun_s, 1)
        chosen = f"view=curves&metrics=loss&runs={','.join(runs[:curves])}"
        for name, axis in (("curves_s", "rounds"), ("curves_again_s", "hours")):
            page.evaluate("document.querySelector('section.panel')?.removeAttribute('data-drawn')")
            figures[name] = round(page.evaluate(DRAWN, [f"{chosen}&axis={axis}", curves, "loss"]) / 1000, 3)
        page.wait_for_timeout(4000)
        figures["idle_answer_bytes"] = page.evaluate(IDLE)
        figures["page_bytes"] = page.evaluate("performance.memory.usedJSHeapSize")
        browser.close()
        board.terminate()
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the results and prints how long the board takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--curves", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not list_runs(folder):
            write_many(folder, args.runs, args.rounds)
        figures = measure(folder, args.curves)
    for name, value in figures.items():
        print(f"{name:20} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
