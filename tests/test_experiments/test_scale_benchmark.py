"""The scale benchmark: its clients change nothing, its constants' arithmetic, and that all of its parts run."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from fedloom.experiments.benchmarks import scale
from fedloom.experiments.benchmarks.scale import (
    LARGE,
    SMALL,
    Figures,
    ScaleCase,
    Server,
    measure,
    run_config,
    server_of,
)
from fedloom.platform.results.checkpoint import load_checkpoint


def test_clients_that_do_nothing_change_nothing_and_have_their_rows(tmp_path: Path) -> None:
    case = ScaleCase(registered=30, cohort=5, rounds=3, parameters=100, reads=True)
    figures = measure(case, run_config(case, str(tmp_path / "cache"), str(tmp_path / "results")))
    (state,) = (tmp_path / "results" / "artifacts").rglob("state.json")
    weights = load_checkpoint(state.parent).groups["noop"].tensors
    assert len(weights) == 10
    assert all(torch.equal(tensor, torch.ones(10)) for tensor in weights.values())
    assert (figures["rounds_rows"], figures["clients_rows"]) == (3, 15)
    assert list(figures["resident_bytes"]) == [1, 2, 3]


def test_constants_come_from_differences_of_figures() -> None:
    figures = {
        "cohorts": [{"cohort": 10, "cpu_ms": 30.0}, {"cohort": 100, "cpu_ms": 210.0}],
        "supernets": [
            {"parameters": 250_000_000, "clients": 1, "cpu_s": 3.0},
            {"parameters": 250_000_000, "clients": 5, "cpu_s": 11.0},
        ],
        "actors": [
            {"kind": "simulated", "chunk_size": 1, "rest_ms": 0.0, "cpu_us_per_client": 3000.0},
            {"kind": "simulated", "chunk_size": 10, "rest_ms": 0.0, "cpu_us_per_client": 1200.0},
            {"kind": "simulated", "chunk_size": 1, "rest_ms": 50.0, "cpu_us_per_client": 9000.0},
        ],
    }
    assert server_of(figures) == Server(
        pytest.approx(0.01), pytest.approx(0.001), pytest.approx(0.002), pytest.approx(1e-9), pytest.approx(2e-9)
    )
    assert server_of({"cohorts": figures["cohorts"]}) is None


def figures_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["scale", "--small", "--repeats", "1", *options])
    scale.main()
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


def test_every_part_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; what a case costs to start is no matter here."""

    def here(case: ScaleCase, folder: str) -> Figures:
        with TemporaryDirectory(dir=folder) as results:
            figures: Figures = json.loads(json.dumps(measure(case, run_config(case, folder, results))))
            return figures

    monkeypatch.setattr(scale, "run_in_process", here)
    figures = figures_of(capsys, monkeypatch)
    assert list(figures) == [*LARGE, "server"]
    assert {part: len(figures[part]) for part in LARGE} == {part: len(cases) for part, cases in SMALL.items()}
    assert [row["client_rows"] for row in figures["rounds"]] == [10 * row["rounds"] for row in figures["rounds"]]


@pytest.mark.slow
def test_cases_run_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = figures_of(capsys, monkeypatch, "--parts", "rounds")
    assert [row["rounds"] for row in figures["rounds"]] == [1, 20]
