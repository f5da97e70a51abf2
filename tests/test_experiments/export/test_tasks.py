"""Models of several tasks are exported with the classes of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedloom.experiments.export.export import export
from fedloom.experiments.export.selection import Wanted
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.paths import list_runs
from fedloom.platform.runs.run import make_serial, start_run


def test_a_tiers_card_has_its_labels(tmp_path: Path, tiny_config_in: Callable[..., RunConfig]) -> None:
    config = tiny_config_in(tmp_path / "results")
    config = replace(
        config,
        data=replace(config.data, label_sets={"pairs": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]}),
        space=replace(config.space, heads=[5, 10]),
        tiers=replace(config.tiers, tasks=["pairs", "all"]),
    )
    start_run(config, make_serial)
    (run,) = list_runs(Path(config.results))
    for tier, names in (("tier1", ["0 + 1", "2 + 3", "4 + 5", "6 + 7", "8 + 9"]), ("tier2", [*"0123456789"])):
        card = export(config.results, run.run_id, Wanted(tier=tier), tmp_path / tier, ["safetensors"]).card
        assert card["class_names"] == names
        recorded = next(r for r in card["recorded"] if (r["split"], r["metric"]) == ("validation", "accuracy"))
        assert card["measured"]["value"] == recorded["value"], "it is scored with the labels of its task"
