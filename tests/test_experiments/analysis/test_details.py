"""Confusion matrices, figures per class and paragraphs from the tables, and what reports show of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiments.analysis.clients import confusions, paragraphs, per_class
from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.tables import Tables, load
from fedloom.experiments.report.clients import class_blocks, confusion_figure, paragraph_block, shares
from fedloom.experiments.report.runs import report_content
from fedloom.platform.results.writer import RunWriter

PAIRS = {("cat", "cat"): 3, ("cat", "dog"): 1, ("dog", "cat"): 2, ("dog", "dog"): 2, ("emu", "dog"): 2}


def write_run(root: Path) -> Tables:
    """Two tiers, whose fine-tuned models differ: the second takes no cat for a dog."""
    config = {"tiers": {"count": 2, "upper_bounds": None, "cost": "macs"}, "method": {"name": "fedoras", "search": {}}}
    writer = RunWriter.create(root, "demo", "r1")
    writer.update_run(config=json.dumps(config), status="done", seeds=json.dumps({"all": 1}))
    for model, tier in (("supernet_init", "tier1"), ("fine_tuned", "tier1"), ("fine_tuned", "tier2")):
        place: dict[str, Any] = {"stage": "evaluation", "round": 0, "model": model, "tier": tier, "split": "test"}
        place |= {"architecture": "0-1", "client_id": None}
        writer.add("evaluations", **place, metric="accuracy", value=0.5, samples=10)
        pairs = PAIRS if tier == "tier1" else {("cat", "cat"): 4, ("dog", "dog"): 4, ("emu", "emu"): 2}
        for (name, prediction), count in pairs.items():
            detail, samples = json.dumps([name, prediction]), {"cat": 4, "dog": 4, "emu": 2}[name]
            writer.add("evaluations", **place, metric="confusion", value=count, samples=samples, detail=detail)
        detail = json.dumps(["To be", f" or\nnot, says {tier}"])
        writer.add("evaluations", **place, metric="paragraph", value=1.25, samples=9, detail=detail)
    for stage in ("supernet", "evaluation"):
        writer.add("rounds", stage=stage, round=0, bytes_down=1, bytes_up=1, clients_planned=2, wall_s=1.0, macs=1)
    writer.close()
    return load(root)


def test_figures_of_every_class_are_those_of_its_pairs(tmp_path: Path) -> None:
    tables = write_run(tmp_path)
    pairs = confusions(tables).query("model == 'fine_tuned' and tier == 'tier1'")
    assert dict(zip(zip(pairs["class_name"], pairs["prediction"], strict=True), pairs["count"], strict=True)) == PAIRS
    assert pairs["share"].tolist() == [0.75, 0.25, 0.5, 0.5, 1.0]
    frame = per_class(tables).query("model == 'fine_tuned' and tier == 'tier1'").set_index("class_name")
    assert frame["samples"].to_dict() == {"cat": 4, "dog": 4, "emu": 2}
    assert frame["recall"].to_dict() == {"cat": 0.75, "dog": 0.5, "emu": 0.0}
    assert frame["precision"].tolist()[:2] == [pytest.approx(3 / 5), pytest.approx(2 / 5)]
    assert frame["precision"].isna().tolist() == [False, False, True], "no emu was predicted"
    assert frame["f1"].tolist() == [pytest.approx(6 / 9), pytest.approx(4 / 9), 0.0]


def test_paragraphs_say_what_was_given_and_what_was_written(tmp_path: Path) -> None:
    frame = paragraphs(write_run(tmp_path))
    assert frame["given"].unique().tolist() == ["To be"]
    assert frame["written"].tolist()[-1] == " or\nnot, says tier2"
    assert frame["loss"].tolist() == [1.25] * 3


def test_reports_show_the_models_that_the_method_ends_with(tmp_path: Path) -> None:
    tables = write_run(tmp_path)
    settings = settings_of(tables)
    (block,) = class_blocks(tables, settings)
    assert block.heads == ("class", "samples", "tier1", "tier2")
    assert block.rows == (("cat", "4", "75.0", "100.0"), ("dog", "4", "50.0", "100.0"), ("emu", "2", "0.0", "100.0"))
    texts = paragraph_block(tables, settings)
    assert [row[1:] for row in texts.rows] == [
        ("tier1", "[To be] or not, says tier1", "1.25"),
        ("tier2", "[To be] or not, says tier2", "1.25"),
    ]
    content = report_content(tables)
    assert [p.title for p in content.pictures if p.name == "confusion"] == ["Confusion matrix per tier"]
    titles = [b.title for b in content.blocks]
    assert "demo: classes" in titles
    assert "Written by the models" in titles


def test_a_figure_has_a_panel_per_tier_and_shares_of_each_class(tmp_path: Path) -> None:
    tables = write_run(tmp_path)
    frame = confusions(tables)
    own = frame.query("model == 'fine_tuned' and tier == 'tier1'")
    expected = [[0.75, 0.25, 0], [0.5, 0.5, 0], [0, 1, 0]]
    np.testing.assert_array_equal(shares(own, ["cat", "dog", "emu"]), expected)
    figure = confusion_figure(frame, settings_of(tables))
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["tier1", "tier2"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["cat", "dog", "emu"]
    assert {t.get_text() for t in figure.axes[0].texts} == {"75", "25", "50", "100"}
    np.testing.assert_array_equal(np.asarray(figure.axes[0].images[0].get_array()), expected)


def test_runs_without_either_have_neither(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    writer.close()
    tables = load(tmp_path)
    assert len(confusions(tables)) == len(per_class(tables)) == len(paragraphs(tables)) == 0
    assert class_blocks(tables, settings_of(tables)) == []
    assert paragraph_block(tables, settings_of(tables)).rows == ()
    assert confusion_figure(confusions(tables), settings_of(tables)) is None


def test_subnets_of_one_tier_stay_apart(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    place: dict[str, Any] = {"stage": "evaluation", "round": 0, "model": "supernet", "tier": "server", "split": "test"}
    for architecture, found in (("0-0", "cat"), ("0-1", "dog")):
        row = {**place, "architecture": architecture, "client_id": None}
        detail = json.dumps(["cat", found])
        writer.add("evaluations", **row, metric="confusion", value=3, samples=3, detail=detail)
    writer.close()
    tables = load(tmp_path)
    (block,) = class_blocks(tables, settings_of(tables))
    assert block.heads == ("class", "samples", "0-0", "0-1")
    assert block.rows == (("cat", "3", "100.0", "0.0"),)
