"""Perplexity per tier: literal numbers on a small run written by hand, and the table that a text's report shows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.analysis.tables import Tables, load
from fedloom.experiments.analysis.tiers import pareto, per_tier, with_perplexity
from fedloom.experiments.report.tiers import columns_of, narrow_tier_block, tier_summaries
from fedloom.platform.results.writer import RunWriter

PLACE = {"stage": "evaluation", "round": 0, "tier": "tier1", "architecture": "0-1", "split": "test", "samples": 10}


def write_run(root: Path, perplexity: bool = True) -> Tables:
    """Of two candidates the one of the lower accuracy has the lower loss, by which the search ranks them."""
    method = {"name": "fedoras", "search": {"metric": "loss"}}
    config = {"tiers": {"count": 1, "upper_bounds": None, "cost": "macs"}, "method": method}
    writer = RunWriter.create(root, "demo", "r1")
    writer.update_run(config=json.dumps(config), status="done")
    for architecture, metric, loss in (("0-0", 0.5, 1.5), ("0-1", 0.4, 1.2)):
        row: dict[str, Any] = {"stage": "search/tier1", "round": 0, "tier": "tier1", "generation": 0, "feasible": True}
        writer.add("candidates", **row, architecture=architecture, macs=50, parameters=9, metric=metric, loss=loss)
    for model, value, own in (("fine_tuned", 3.0, (2.0, 6.0)), ("rand_init", 3.5, (3.0, 4.0))):
        writer.add("evaluations", **PLACE, model=model, metric="accuracy", value=0.3, client_id=None)
        if perplexity:
            writer.add("evaluations", **PLACE, model=model, metric="perplexity", value=value, client_id=None)
            for client_id, each in enumerate(own):
                writer.add("evaluations", **PLACE, model=model, metric="perplexity", value=each, client_id=client_id)
    writer.add("rounds", stage="evaluation", round=0, bytes_down=1, bytes_up=1, clients_planned=2)
    writer.close()
    return load(root)


def test_perplexities_stand_beside_accuracies(tmp_path: Path) -> None:
    tables = write_run(tmp_path)
    frame = with_perplexity(per_tier(tables), tables)
    tier = frame[frame["tier"] == "tier1"].iloc[0]
    assert tier["architecture"] == "0-1"
    assert (tier["perplexity_fine_tuned"], tier["perplexity_rand_init"], tier["perplexity_gain"]) == (3.0, 3.5, 0.5)
    assert tier["search_perplexity"] == pytest.approx(math.exp(1.2))
    names = [f"clients_fine_tuned_{what}" for what in ("mean", "std", "worst")]
    assert [tier[name] for name in names] == [4.0, 2.0, 6.0], "the worst client has the highest"
    everybody = frame[frame["tier"] == "all"].iloc[0]
    assert everybody["clients_rand_init_worst"] == 4.0


def test_the_search_by_loss_has_the_winner_by_loss(tmp_path: Path) -> None:
    tables = write_run(tmp_path)
    winners = pareto(tables).set_index("architecture")["is_winner"]
    assert winners.to_dict() == {"0-0": False, "0-1": True}


def test_a_texts_table_is_in_perplexity(tmp_path: Path) -> None:
    tables = write_run(tmp_path)
    (summary,) = tier_summaries(tables, {})
    block = narrow_tier_block(summary)
    heads = [head.replace("\n", " ").strip() for head in block.heads]
    assert heads == [
        "tier",
        "MACs",
        "params",
        "search",
        "fine- tuned",
        "rand- init",
        "gain",
        "client mean",
        "std",
        "worst",
    ]
    assert block.rows[0] == ("tier1", "50", "9", "3.32", "3.00", "3.50", "+0.50", "4.00", "2.00", "6.00")
    assert "gain: rand-init minus fine-tuned" in block.text


def test_runs_without_texts_have_no_further_columns(tmp_path: Path) -> None:
    tables = write_run(tmp_path, perplexity=False)
    plain = per_tier(tables)
    assert with_perplexity(plain, tables) is plain


def test_families_on_texts_have_no_tiers(tmp_path: Path) -> None:
    """A family's subnets belong to no tier, whoever has tested them."""
    tables = write_run(tmp_path)
    none = per_tier(tables).iloc[:0]
    assert with_perplexity(none, tables).empty


def test_the_gain_over_a_diverged_model_has_no_three_hundred_digits(tmp_path: Path) -> None:
    (summary,) = tier_summaries(write_run(tmp_path), {})
    (column,) = (column for column in columns_of(summary) if column.key == "perplexity_gain")
    assert [column.write(value) for value in (1e304, -1e304, 0.5, -0.5)] == ["+1.0e+304", "-1.0e+304", "+0.50", "-0.50"]
