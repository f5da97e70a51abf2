"""The staleness of asynchronous rounds in reports, on rows of literal numbers."""

import json
from typing import Any

import pytest

from fedloom.experiments import analysis
from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.report.staleness import stale_updates, staleness_block, staleness_figure


def test_updates_that_arrived_are_counted_by_their_staleness(runs: Any) -> None:
    for run_id, old in (("r1", [0, 1, 1, 4]), ("r2", [None, None])):
        writer = runs.begin(run_id, 1)
        writer.update_run(config=json.dumps({"seed": 1, "method": {"name": run_id}}))
        for i, staleness in enumerate([*old, 9]):
            status = "ok" if i < len(old) else "dropped"
            row = {"client_id": i, "status": status, "staleness": staleness if run_id == "r1" else None}
            writer.add("clients", stage="train", round=i, **row, ended_s=10.0 * (i + 1))
        writer.close()
    tables = analysis.load(runs.root, ["r1", "r2"])
    settings = settings_of(tables)
    (row,) = staleness_block(tables, settings).rows
    assert row[1:] == ("4", "1.5", "1", "3.5", "4", "10 s")
    figure = staleness_figure(stale_updates(tables), settings)
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert line.get_ydata() == pytest.approx([25.0, 50.0, 0.0, 0.0, 25.0])
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4]


def test_rounds_that_wait_for_all_have_no_section(runs: Any) -> None:
    runs.write("r1", 0.5, 1)
    tables = analysis.load(runs.root)
    assert staleness_block(tables, settings_of(tables)).rows == ()
    assert staleness_figure(stale_updates(tables), settings_of(tables)) is None
