"""Which model of a run is exported: a tier's, a target's, a named one, or a subnet of the supernet."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments.analysis import load, per_model
from fedloom.experiments.analysis.compare import unit_values
from fedloom.experiments.export import selection
from fedloom.experiments.export.export import correct_by_sample, export
from fedloom.experiments.export.selection import Wanted, check_wanted, target_label
from fedloom.platform.results.tables import read_table
from fedloom.platform.spaces.slices import parse_architecture


def test_a_target_is_what_the_run_searched_for_it(runs: Any, out: Path) -> None:
    run = runs["none"]
    rows = read_table(run.results, "evaluations")
    (found,) = rows[rows["model"] == "searched"]["architecture"].unique()
    card = export(run.results, run.paths.run_id, Wanted(target="macs=2e5"), out, ["safetensors"]).card
    assert (card["architecture"]["id"], card["name"]) == (found, "macs-200000")
    assert 100e3 < card["macs"] <= 200e3
    assert {row["model"] for row in card["recorded"]} >= {"searched"}
    with pytest.raises(ValueError, match=r"subnets have 112288 \(smallest\) to 287392 \(largest\) MACs"):
        export(run.results, run.paths.run_id, Wanted(target="macs=3e6"), out)


def test_a_target_that_the_run_did_not_search_for_is_searched_now(runs: Any, out: Path) -> None:
    run = runs["none"]
    card = export(run.results, run.paths.run_id, Wanted(target="macs=2.5e5"), out, ["safetensors"]).card
    assert card["name"] == "macs-250000"
    assert 125e3 < card["macs"] <= 250e3


def test_a_tier_is_what_the_run_searched_for_it(runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs["none"]
    rows = pd.DataFrame({"model": ["searched", "searched", "supernet"], "tier": ["macs=1e+09", "tier1", "tier1"]})
    rows["architecture"] = ["0-0", "1-0", "0-1"]
    monkeypatch.setattr(selection, "read_table", lambda *_args, **_kwargs: rows)
    for wanted, text in ((Wanted(tier="tier1"), "1-0"), (Wanted(target="macs=1e9"), "0-0")):
        assert selection.choose(run.paths, run.world, wanted).architecture == parse_architecture(text)


def test_a_tier_s_only_model_need_not_be_named(runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs["depths"]
    card = export(run.results, run.paths.run_id, Wanted(tier="tier2"), out, ["safetensors", "pt2"]).card
    assert (card["name"], card["architecture"]["id"]) == ("tier2-depthfl", "1")
    several = ["tier1-small", "tier2-one", "tier2-two"]
    monkeypatch.setattr(selection, "list_models", lambda _: several)
    with pytest.raises(ValueError, match=r"keeps several models of tier2: choose one by --model: one, two$"):
        selection.choose(run.paths, run.world, Wanted(tier="tier2"))


def test_the_only_model_need_not_be_named_and_several_are_listed(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs["depths"]
    with pytest.raises(ValueError, match=r"several models: choose one by --model: tier1-depthfl, tier2-depthfl"):
        selection.choose(run.paths, run.world, Wanted())
    monkeypatch.setattr(selection, "list_models", lambda _: ["tier2-depthfl"])
    chosen = selection.choose(run.paths, run.world, Wanted())
    assert (chosen.label, chosen.tier) == ("tier2-depthfl", "tier2")


def test_samples_that_kept_models_have_right_are_as_many_as_the_run_recorded(runs: Any) -> None:
    for name in ("operators", "depths", "family"):
        run = runs[name]
        shares = {key: correct.mean() for key, (correct, _) in correct_by_sample(run.paths).items()}
        recorded = per_model(load(run.results)).set_index(["model", "tier", "subnet"])["accuracy"]
        assert shares == pytest.approx(recorded.to_dict())
    with pytest.raises(ValueError, match="runs with several models have no single model"):
        unit_values(load(runs["family"].results), "accuracy", "samples", "run")


@pytest.mark.parametrize(
    ("text", "label"), [("macs=1e+09", "macs=1000000000"), (" latency_s = 0.050", "latency_s=0.05")]
)
def test_a_target_is_read_as_the_tables_write_it(text: str, label: str) -> None:
    assert target_label(text) == label


@pytest.mark.parametrize("text", ["macs", "macs=", "macs=many", ""])
def test_a_target_without_a_limit_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="such as macs=1e9"):
        target_label(text)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(tier="a", target="macs=1"),
        Wanted(architecture="smallest", model="supernet"),
        Wanted(target="macs=1", model="supernet"),
        Wanted(tier="a", architecture="smallest", model="x"),
    ],
)
def test_one_model_is_exported(wanted: Wanted) -> None:
    with pytest.raises(ValueError, match="give at most one of --tier"):
        check_wanted(wanted)
