"""The model card of an exported file: everything that a user of the file needs without the run."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.experiments.export.comparison import Agreement, Comparison
from fedloom.experiments.export.formats import INPUT, OUTPUT, Encoded
from fedloom.experiments.export.selection import Chosen
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.federation.world import World
from fedloom.platform.results.files import content_hash
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import what_is_computed
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture, architecture_id, bytes_of
from fedloom.tiers.measure import latency_s_of

CARD_VERSION = 1
EVALUATION = "evaluation"

Card = dict[str, Any]


def model_card(
    paths: RunPaths,
    world: World,
    chosen: Chosen,
    module: nn.Module,
    sample: Tensor,
    comparison: Comparison,
    class_names: Sequence[str],
) -> Card:
    """The card of a model as JSON data, without the entries of its files."""
    config = asdict(world.config)
    dataset = world.data.dataset
    return {
        "card_version": CARD_VERSION,
        "run_id": paths.run_id,
        "experiment": paths.experiment,
        "config_hash": content_hash(json.dumps(what_is_computed(config), sort_keys=True).encode()),
        "method": world.config.method.name,
        "dataset": dataset.name,
        "source": chosen.source,
        "architecture": describe_architecture(world.space, chosen.architecture),
        "macs": int(world.macs_table.cost(chosen.architecture)),
        "parameters": int(world.space.cost_table("parameters").cost(chosen.architecture)),
        "size_bytes": bytes_of(module.state_dict()),
        "input": _tensor(INPUT, world.space.input_shape, sample.dtype, dataset.kind),
        "output": {"name": OUTPUT, "classes_dimension": 1},
        "preprocessing": preprocessing(dataset),
        "class_names": list(class_names),
        "recorded": recorded(paths, chosen),
        "latency": _latency(module, sample[:1]),
        "versions": {package: version(package) for package in ("fedloom", "torch")},
    } | _checked(comparison)


def describe_architecture(space: SearchSpace, architecture: Architecture) -> Card:
    """The choices of an architecture and their meaning: depths and expansions, or the operator of every layer."""
    choices = [int(option) for option in architecture]
    return {
        "space": space.name,
        "id": architecture_id(architecture),
        "choices": choices,
        **space.meaning(architecture),
    }


def preprocessing(dataset: Dataset) -> Card:
    """The conversion of raw data to the model's input; for images (pixel / scale - mean) / std, per channel."""
    if dataset.kind == "tokens":
        return {"kind": dataset.kind, "rule": "the place of each token in class_names"}
    values = {"scale": dataset.scale, "mean": list(dataset.mean), "std": list(dataset.std)}
    return {"kind": dataset.kind, "rule": "(pixel / scale - mean) / std, channels first", **values}


def recorded(paths: RunPaths, chosen: Chosen) -> list[Card]:
    """The central measurements of this model in the run's final evaluation.

    Scores from during training are left out, because they belong to other weights.
    """
    rows = read_table(paths.root, "evaluations", run_id=paths.run_id)
    own = rows["architecture"].eq(architecture_id(chosen.architecture)) & rows["model"].isin(chosen.models)
    own &= rows["stage"].eq(EVALUATION) & rows["client_id"].isna() & rows["split"].notna() & rows["detail"].isna()
    if chosen.tier is not None:
        own &= rows["tier"].eq(chosen.tier)
    last = rows[own].drop_duplicates(["split", "metric"], keep="last")
    columns = ("model", "split", "metric", "value", "samples")
    return [_plain(row, columns) for row in last.to_dict("records")]


def _plain(row: Mapping[Any, Any], columns: Sequence[str]) -> Card:
    values = {name: row[name] for name in columns}
    # JSON has no NaN.
    values["value"] = float(values["value"]) if math.isfinite(values["value"]) else None
    return values | {"samples": int(values["samples"])}


def with_files(card: Card, name: str, encoded: Mapping[str, Encoded]) -> Card:
    """Adds the names, sizes and hashes of the files to the card, and the only length of tokens that a file takes."""
    files = {
        kind: {"file": f"{name}.{kind}", "sha256": content_hash(file.content), "size_bytes": len(file.content)}
        | ({} if file.length is None else {"length": file.length})
        for kind, file in encoded.items()
    }
    return {"name": name, **card, "files": files}


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Card:
    free: list[str | int] = ["batch", *(["length"] if kind == "tokens" else shape)]
    return {"name": name, "shape": free, "trained_shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def _latency(module: nn.Module, x: Tensor) -> Card:
    measured = latency_s_of(module, x)
    place = {"device": str(x.device), "threads": torch.get_num_threads(), "batch_size": len(x)}
    return {**asdict(measured), **place}


def _checked(comparison: Comparison) -> Card:
    accuracy = {"split": "validation", "metric": "accuracy", "value": comparison.correct / comparison.targets}
    checks = {kind: _agreement(found) for kind, found in comparison.agreements.items()}
    return {"measured": {**accuracy, "correct": comparison.correct, "targets": comparison.targets}, "checks": checks}


def _agreement(found: Agreement) -> Card:
    return {**asdict(found), "compared_with": "the run's model on its validation data"}


__all__ = ["Card", "describe_architecture", "model_card", "preprocessing", "recorded", "with_files"]
