"""`fedloom export`: writes a run's model to files that need neither the run nor fedloom, with a model card."""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.experiments.export.formats import (
    FORMATS,
    INPUT,
    OUTPUT,
    Comparison,
    Encoded,
    Forward,
    check_agreement,
    check_formats,
    compare,
    encode,
)
from fedloom.experiments.export.selection import Chosen, Wanted, check_wanted, choose
from fedloom.experiments.runs.configuration import stored_config
from fedloom.platform.clients.evaluation import batches_of
from fedloom.platform.clients.networks import ESTIMATED, Subnet
from fedloom.platform.clients.objectives import logits_of
from fedloom.platform.clients.scoring import scored_subnet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.trees import Tree, first, mapped, rows_of
from fedloom.platform.federation.algorithm import SUPERNET
from fedloom.platform.federation.world import World
from fedloom.platform.methods.fedoras import FedorASConfig
from fedloom.platform.methods.superfednas import ALONE
from fedloom.platform.results.checkpoint import list_models
from fedloom.platform.results.files import content_hash, sync
from fedloom.platform.results.paths import RunPaths, find_run
from fedloom.platform.results.store import output_folder
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.resuming import what_is_computed
from fedloom.platform.runs.run import stored_world
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture, architecture_id, bytes_of
from fedloom.tiers.measure import latency_s_of

LONGEST_NAME = 100
CARD = "json"
Card = dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """The model card, equal to NAME.json, and the paths of the written files."""

    card: Card
    files: Mapping[str, Path]

    def summary(self) -> dict[str, Any]:
        """The facts that the terminal shows."""
        card = self.card
        scores = {f"{row['split']}_{row['metric']}": row["value"] for row in card["recorded"]}
        latency = card["latency"]
        return {
            "run": card["run_id"],
            "model": card["source"],
            "architecture": card["architecture"].get("label", card["architecture"]["id"]),
            "macs": card["macs"],
            "parameters": card["parameters"],
            "size_bytes": card["size_bytes"],
            **scores,
            "latency_s": f"{latency['median_s']:.3g} on {latency['device']}, {latency['threads']} thread(s)",
            "largest_difference": max(check["max_abs_difference"] for check in card["checks"].values()),
            **{kind: str(path) for kind, path in self.files.items()},
        }


def export(
    results: Path, run: str, wanted: Wanted, out: Path | None = None, formats: Sequence[str] = FORMATS[:2]
) -> Exported:
    """Writes the wanted model of a run as OUT/NAME.FORMAT and its card OUT/NAME.json.

    The default of `out` is RESULTS/exports/RUN. Every file is run on the whole validation set before any is written.
    Raises ValueError for an unknown run, model, architecture or format, and if a file's outputs differ from the
    model's.
    """
    check_wanted(wanted)
    check_formats(formats)
    run_id, config = stored_config(results, run)
    paths = find_run(results, run_id)
    folder = output_folder(results, out, f"exports/{run_id}")
    world = stored_world(paths, config)
    with _threads(config.executor.threads):
        chosen = choose(paths, world, wanted)
        return _export(paths, world, chosen, folder, formats)


def correct_by_sample(paths: RunPaths) -> dict[tuple[str, str, str], tuple[NDArray[np.bool_], str]]:
    """Runs the models that a run kept on its whole test set; returns which samples each classifies correctly.

    Keys are (model, tier, subnet) as in the table `evaluations`, values a boolean per sample and a hash of the labels.
    Supernets are left out. Raises ValueError if the run's data is missing, and for samples without a class label each,
    such as texts.
    """
    _, config = stored_config(paths.root, paths.run_id)
    world = stored_world(paths, config)
    worker = Worker(world.spec)
    correct = {}
    with _threads(config.executor.threads), torch.no_grad():
        for name in list_models(paths):
            if name == SUPERNET:
                continue
            chosen = choose(paths, world, Wanted(model=name))
            module = scored_subnet(worker, Subnet(chosen.architecture, chosen.stand_alone), chosen.weights)
            with worker.data.reading_test():
                data = worker.in_task(worker.central_data("test"), chosen.architecture)
                if data.per_position or not data.dataset.has_labels:
                    raise ValueError(f"run {paths.run_id}: samples have no class label each; compare over clients")
                logits, y = torch.cat([logits_of(module(x_B)) for x_B, _ in batches_of(data)]), data.labels
                classes = len(worker.class_names(chosen.architecture))
                if logits.shape[1:] != (classes,):
                    raise ValueError(
                        f"run {paths.run_id}: its outputs are no logits of {classes} classes; compare over clients"
                    )
            model = chosen.models[0] if len(chosen.models) == 1 else name
            # A family has several models of one name, one per subnet.
            subnet = architecture_id(chosen.architecture) if model == ALONE else ""
            key = (model, chosen.tier or "server", subnet)
            correct[key] = ((logits.argmax(dim=1) == y).numpy(), content_hash(y.numpy().tobytes()))
    return correct


def module_of(paths: RunPaths, wanted: Wanted) -> nn.Module:
    """The wanted model of a run as a module in evaluation mode, with its weights; errors are those of `export`."""
    check_wanted(wanted)
    _, config = stored_config(paths.root, paths.run_id)
    world = stored_world(paths, config)
    with _threads(config.executor.threads):
        return _module(Worker(world.spec), world, choose(paths, world, wanted))


def _module(worker: Worker, world: World, chosen: Chosen) -> nn.Module:
    method = world.config.method
    statistics = method.search.statistics if isinstance(method, FedorASConfig) else ESTIMATED
    return scored_subnet(worker, Subnet(chosen.architecture, chosen.stand_alone, statistics), chosen.weights)


def _export(paths: RunPaths, world: World, chosen: Chosen, folder: Path, formats: Sequence[str]) -> Exported:
    worker = Worker(world.spec)
    module = _module(worker, world, chosen)
    data = worker.in_task(worker.central_data("validation"), chosen.architecture)
    if len(data) < 2:
        raise ValueError(
            f"this run has {len(data)} samples of validation data, too few to check an export: export a run with a "
            "larger data.validation_share"
        )
    sample = data.tensors(slice(2))[0]
    encoded = encode(module, sample, formats)
    files = {kind: file.forward for kind, file in encoded.items()}
    comparison = compare(_reference(worker, chosen, module), files, data, worker.objective)
    check_agreement(comparison)
    name = chosen.label
    if len(name) > LONGEST_NAME:
        name = f"{name[:80]}-{content_hash(name.encode())[:16]}"
    names = worker.class_names(chosen.architecture)
    card = with_files(model_card(paths, world, chosen, module, sample, comparison, names), name, encoded)
    contents = {kind: file.content for kind, file in encoded.items()}
    return Exported(card, _write(folder, name, {**contents, CARD: json.dumps(card, indent=1).encode()}))


def _reference(worker: Worker, chosen: Chosen, module: nn.Module) -> Forward:
    """The supernet with the architecture, or the module itself if it stands alone or has own running statistics."""
    if chosen.stand_alone or worker.space.keeps_statistics:
        return module
    supernet = worker.load_whole(chosen.weights, None)
    worker.set_mode(supernet, training=False)
    return lambda x: supernet(x, chosen.architecture)


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Sets the run's number of threads for the block, since it affects the order of sums and so the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(folder: Path, name: str, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Writes all files or none: complete in a temporary folder first, then renamed, the card last."""
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    files = {kind: folder / f"{name}.{kind}" for kind in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_files(folder, name, files, contents)
    except OSError:
        for parent in new:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    return files


def _write_files(folder: Path, name: str, files: Mapping[str, Path], contents: Mapping[str, bytes]) -> None:
    replaces = (folder / f"{name}.{CARD}").exists()
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as staging:
        for kind, path in files.items():
            (Path(staging) / path.name).write_bytes(contents[kind])
            sync(Path(staging) / path.name)
        for path in files.values():
            os.replace(Path(staging) / path.name, path)
    for kind in FORMATS:
        # Deletes files of other formats from an earlier export of this name, which the new card does not list.
        if replaces and kind not in files:
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    sync(folder)


# -- the model card --------------------------------------------------------------------------------------------------

CARD_VERSION = 1
EVALUATION = "evaluation"


def model_card(
    paths: RunPaths,
    world: World,
    chosen: Chosen,
    module: nn.Module,
    sample: Tree,
    comparison: Comparison,
    class_names: Sequence[str],
) -> Card:
    """The card of a model as JSON data, without the entries of its files."""
    space, dataset = world.space, world.data.dataset
    computed = json.dumps(what_is_computed(asdict(world.config)), sort_keys=True)
    x = mapped(itemgetter(slice(1)), sample)
    return {
        "card_version": CARD_VERSION,
        "run_id": paths.run_id,
        "experiment": paths.experiment,
        "config_hash": content_hash(computed.encode()),
        "method": world.config.method.name,
        "dataset": dataset.name,
        "source": chosen.source,
        "architecture": describe_architecture(space, chosen.architecture),
        "macs": int(world.macs_table.cost(chosen.architecture)),
        "parameters": int(space.cost_table("parameters").cost(chosen.architecture)),
        "size_bytes": bytes_of(module.state_dict()),
        **_inputs(sample, free_length=dataset.per_position),
        "output": {"name": OUTPUT, "classes_dimension": 1},
        "preprocessing": preprocessing(dataset),
        "class_names": list(class_names),
        "recorded": recorded(paths, chosen),
        "latency": {
            **asdict(latency_s_of(module, x)),
            "device": str(first(x).device),
            "threads": torch.get_num_threads(),
            "batch_size": rows_of(x),
        },
        "versions": {package: version(package) for package in ("fedloom", "torch")},
        "measured": {
            "split": "validation",
            "metric": "accuracy",
            "value": comparison.correct / comparison.targets,
            "correct": comparison.correct,
            "targets": comparison.targets,
        },
        "checks": {
            kind: {**asdict(agreement), "compared_with": "the run's model on its validation data"}
            for kind, agreement in comparison.agreements.items()
        },
    }


def _inputs(sample: Tree, *, free_length: bool) -> Card:
    """The model's `input`, or its `inputs` by name."""

    def described(name: str, tensor: Tensor) -> Card:
        shape = list(tensor.shape[1:])
        return {
            "name": name,
            "shape": ["batch", *(["length"] if free_length else shape)],
            "trained_shape": shape,
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }

    if isinstance(sample, Tensor):
        return {"input": described(INPUT, sample)}
    return {"inputs": [described(name, tensor) for name, tensor in sample.items()]}


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
    if not dataset.normalises:
        is_text = dataset.per_position and isinstance(dataset.input_shape, tuple)
        rule = "the place of each token in class_names" if is_text else "as the data set gives them"
        return {"kind": dataset.kind, "rule": rule}
    values = {"scale": dataset.scale, "mean": list(dataset.mean), "std": list(dataset.std)}
    return {"kind": dataset.kind, "rule": "(pixel / scale - mean) / std, channels first", **values}


def recorded(paths: RunPaths, chosen: Chosen) -> list[Card]:
    """The central measurements of this model in the run's final evaluation.

    Scores from during training are left out, because they belong to other weights.
    """
    rows = read_table(paths.root, "evaluations", run_id=paths.run_id)
    is_final = rows["architecture"].eq(architecture_id(chosen.architecture)) & rows["model"].isin(chosen.models)
    is_final &= rows["stage"].eq(EVALUATION) & rows["client_id"].isna() & rows["split"].notna() & rows["detail"].isna()
    if chosen.tier is not None:
        is_final &= rows["tier"].eq(chosen.tier)
    last = rows[is_final].drop_duplicates(["split", "metric"], keep="last")
    return [
        {
            **{name: row[name] for name in ("model", "split", "metric")},
            "value": float(row["value"]) if math.isfinite(row["value"]) else None,  # JSON has no NaN
            "samples": int(row["samples"]),
        }
        for row in last.to_dict("records")
    ]


def with_files(card: Card, name: str, encoded: Mapping[str, Encoded]) -> Card:
    """Adds each file's name, size and hash to the card, and the number of tokens that it requires, if fixed."""
    files = {
        kind: {"file": f"{name}.{kind}", "sha256": content_hash(file.content), "size_bytes": len(file.content)}
        | ({} if file.length is None else {"length": file.length})
        for kind, file in encoded.items()
    }
    return {"name": name, **card, "files": files}
