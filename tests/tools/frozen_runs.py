"""Tiny runs of every method, written down to the last bit: what a change of structure must leave as it was.

    python tests/tools/frozen_runs.py write OUT          with the fedloom that this Python has installed
    python tests/tools/frozen_runs.py write OUT spider   only the runs whose names contain `spider`
    python tests/tools/frozen_runs.py compare OLD NEW    exit code 1 and the differences, if there are any

Only the command line and the files that it leaves are used, so that the program works with any revision. Bits depend
on the machine's kind of processor and on torch: compare what one machine wrote.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file

DIGITS = ["data.dataset=digits", "tiers.paths=2000", "executor.chunk_size=2"]
FEDORAS = [
    "experiment=fedoras_digits", *DIGITS, "space.stem_channels=8", "tiers.count=2",
    "method.train.rounds=3", "method.train.epochs=2", "method.train.clients_per_round=6",
    "method.train.evaluate_every=2", "method.search.population=8", "method.search.offspring=6",
    "method.search.budget=18", "method.finetune.rounds=2", "method.finetune.epochs=1",
    "method.rand_init.rounds=2", "method.rand_init.epochs=1",
]  # fmt: skip
DEVICES = ["devices.dropout=0.2", "devices.availability=0.7", "devices.deadline_s=30"]
ELASTIC = [
    "experiment=superfednas_digits", *DIGITS, "space.stage_widths=[16,24]", "space.stage_strides=[2,2]",
    "space.depths=[1,1]", "space.expansions=[0.5,1.0,1.5]", "space.norm=batch", "tiers.count=2",
    "method.train.rounds=4", "method.train.epochs=1", "method.train.clients_per_round=6",
    "method.train.evaluate_every=2", "method.family=[smallest,largest]", "method.search.samples=20",
    "method.search.min_tau=-1", "method.search.population=10", "method.search.generations=3",
]  # fmt: skip
SPIDER = [
    "experiment=spider_digits", "data.train_samples=200", "data.num_clients=4", "space.channels=4", "tiers.paths=100",
    "method.train.rounds=4", "method.train.evaluate_every=1",
]  # fmt: skip
SILOS = [
    "data.dataset=digits", "data.alpha=0.2", "data.validation_share=0.25", "data.train_samples=200",
    "data.num_clients=4", "tiers.count=1", "tiers.paths=100", "method.train.batch_size=16", "method.train.rounds=4",
    "method.train.evaluate_every=1",
]  # fmt: skip
CELLS = ["space.name=darts_s2_small", "space.channels=4"]
RESNET = ["space.name=resnet18_small", "space.stem_channels=8", "space.input_shape=[1,8,8]"]
SEARCH = ["method.search.start=1", "method.search.every=1"]
VALIDATED = ["method.train.use_validation=false"]
CIFAR = ["data.dataset=cifar10", "data.train_samples=400", "data.test_samples=100", "data.augment=crop_flip"]
TEXT = [
    "experiment=superfednas_shakespeare", "data.train_samples=64", "data.test_samples=16", "data.num_clients=4",
    "data.partition=natural", "data.sequence_length=16", "space.input_shape=[16]", "space.channels=8",
    "space.embedding_size=8", "method.train.rounds=2", "method.train.clients_per_round=3", "method.train.epochs=1",
    "method.search.samples=0", "method.search.macs=[]", "method.search.macs_above=[]",
    "method.train.evaluate_every=1", "tiers.paths=100",
]  # fmt: skip

RUNS: dict[str, list[str]] = {
    "fedavg": ["method=fedavg", *DIGITS, "space.stem_channels=8", "method.train.rounds=3",
               "method.train.evaluate_every=2", "method.train.schedule=cosine"],
    "fedavg_cifar10": ["method=fedavg", *CIFAR, "space.name=resnet_elastic_small", "data.num_clients=4",
                       "tiers.count=1", "tiers.paths=100", "method.train.rounds=2",
                       "method.train.clients_per_round=2", "executor.chunk_size=3"],
    "fedoras": FEDORAS,
    "fedoras_fedavg_bytes": [*FEDORAS, "method.train.weighting=fedavg", "method.train.communication.unit=bytes",
                             "method.train.communication.value=60000", "method.train.paths=rejection"],
    "fedoras_federated": [*FEDORAS, "method.search.scoring=federated", "method.search.clients_per_round=3",
                          "method.search.scoring_rounds=2"],
    "fedoras_devices": [*FEDORAS, *DEVICES, "tiers.budget.kind=schedule", "tiers.budget.factors=[1.0,0.6]"],
    "fedoras_table": [*FEDORAS, "tiers.device_table=generated", "method.search.searcher=random"],
    "fedoras_cifar10": ["experiment=fedoras_cifar10_small", *CIFAR, "data.num_clients=10", "method.train.rounds=2",
                        "method.train.clients_per_round=4", "method.search.budget=6", "method.search.population=4",
                        "method.search.offspring=2", "method.finetune.rounds=1", "method.rand_init.rounds=1",
                        "method.finetune.clients_per_round=2", "method.rand_init.clients_per_round=2",
                        "tiers.paths=1000"],
    "superfednas": [*ELASTIC, "method.train.distribution.tier_aware=true"],
    "superfednas_random": [*ELASTIC, "method.train.distribution.heuristic=random", "method.train.shares.rule=overlap",
                           "method.train.weighting=plain", "method.search.predictor=none", "method.search.budget=8"],
    "superfednas_static": [*ELASTIC, "method.train.distribution.heuristic=static", "space.norm=group",
                           "method.search.macs=[110000.0]"],
    "multi_stage": [*ELASTIC, "method.train.travels=supernet", "method.train.shrinking.subnets_per_batch=2"],
    "ifedavg": [*ELASTIC, "method.separately=true"],
    "superfednas_shakespeare": TEXT,
    "superfednas_dry_run": ["experiment=superfednas_cifar10", *CIFAR, "dry_run=true", "method.train.rounds=20",
                            "tiers.paths=1000"],
    "fedoras_dry_run": [*FEDORAS, "dry_run=true"],
    "spider": [*SPIDER, *SEARCH, "method.gains.epochs=1", "method.gains.clients=2"],
    "spider_pruned": [*SPIDER, "method.search.start=0", "method.search.every=1", "method.train.rounds=12",
                      "method.search.prune_edges=true", "method.train.pull=0.1", "executor.chunk_size=3"],
    "milenas": [*SPIDER, "method.search.kind=milenas", "method.search.rounds=2", "method.gains.epochs=1",
                "method.gains.clients=2", "method.gains.start=own"],
    "local_adaptation": ["method=local_adaptation", *SILOS, *RESNET],
    "ditto": ["method=ditto", *SILOS, *RESNET, *VALIDATED],
    "ditto_darts": ["method=ditto", *SILOS, "space.name=darts_v2_small", "space.channels=4",
                    "space.input_shape=[1,8,8]"],
    "per_fedavg": ["method=per_fedavg", *SILOS, *RESNET, *VALIDATED],
    "knn_per": ["method=knn_per", *SILOS, *RESNET],
    "fedmn": ["method=fedmn", *SILOS, *CELLS, "method.train.pretraining_rounds=1", *VALIDATED],
    "global_nas": ["method=global_nas", *SILOS, *CELLS, *SEARCH],
    "fednas": ["method=fednas", *SILOS, *CELLS, "method.search.rounds=2"],
    "fedpnas": ["method=fedpnas", *SILOS, *CELLS, *SEARCH, "space.cells=4"],
}  # fmt: skip

TABLES = ("runs", "rounds", "clients", "candidates", "evaluations", "models")
ASIDE = {"run_id", "experiment", "started", "ended", "versions", "source_hash", "config", "wall_s", "overhead_s",
         "peak_memory_bytes", "attempts", "node", "traceback"}  # fmt: skip
"""Columns of real time, places and versions."""


def write(out: Path, only: str = "") -> None:
    """One folder per run: its tables, and a hash of every tensor of its checkpoint and of its kept models."""
    from fedloom.experiments.cli import main

    for name, overrides in RUNS.items():
        if only not in name:
            continue
        results = out / name / "results"
        try:
            once = {override.partition("=")[0]: override for override in overrides}.values()  # the last one counts
            main(["run", *once, "executor.kind=serial", f"results={results}", "--json"])
        except SystemExit as end:
            if end.code:
                raise SystemExit(f"{name}: exit code {end.code}") from None
        for table in TABLES:
            if (results / table).is_dir():
                pd.read_parquet(results / table).to_parquet(out / name / f"{table}.parquet")
        (out / name / "tensors.json").write_text(json.dumps(dict(_tensors(results / "artifacts")), indent=0))


def _tensors(artifacts: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(artifacts.rglob("*.safetensors")):
        kind, bag = file.parent.name, file.name.rpartition("-v")[0] or file.stem
        for name, tensor in sorted(load_file(file).items()):
            content = tensor.contiguous().view(-1).numpy().tobytes() if tensor.numel() else b""
            yield f"{kind}/{bag}/{name}", hashlib.sha256(content).hexdigest()[:16]


def compare(old: Path, new: Path) -> bool:
    """Prints what differs; True if nothing does."""
    same = True
    for folder in sorted(old.iterdir()):
        told = [*_table_differences(folder, new / folder.name), *_tensor_differences(folder, new / folder.name)]
        same &= not told
        print(f"{folder.name}: {'identical' if not told else ''}")  # noqa: T201
        for line in told:
            print(f"    {line}")  # noqa: T201
    return same


def _table_differences(old: Path, new: Path) -> Iterator[str]:
    for table in TABLES:
        frames = [_read(folder / f"{table}.parquet") for folder in (old, new)]
        a, b = frames
        if len(a) < len(b) and (places := _places_in(a, b)) is not None:
            yield f"{table}: {len(a)} rows, now {len(b)}: all old ones in order, and new ones between them"
            b = b.iloc[places].reset_index(drop=True)
        elif len(a) != len(b):
            yield f"{table}: {len(a)} rows, now {len(b)}"
        for column in a.columns:
            if column not in b.columns:
                yield f"{table}.{column} is gone"
                continue
            n = min(len(a), len(b))
            pairs = zip(a[column].astype(object)[:n], b[column].astype(object)[:n], strict=True)
            unlike = [(i, x, y) for i, (x, y) in enumerate(pairs) if not (x == y or (pd.isna(x) and pd.isna(y)))]
            if unlike:
                yield f"{table}.{column}: {len(unlike)} of {n} rows differ, the first: {unlike[0]!r:.300}"
        more = [c for c in b.columns if c not in a.columns]
        if more:
            yield f"{table}: new columns {', '.join(more)}"


def _places_in(a: pd.DataFrame, b: pd.DataFrame) -> list[int] | None:
    """Where the rows of `a` are among those of `b`, in their order; None if one of them is not."""
    columns = [c for c in a.columns if c in b.columns]
    wanted, there = (frame[columns].map(repr).agg("|".join, axis=1).tolist() for frame in (a, b))
    places = iter(range(len(there)))
    found = [next((i for i in places if there[i] == row), None) for row in wanted]
    return None if None in found else [i for i in found if i is not None]


def _read(file: Path) -> pd.DataFrame:
    frame = pd.read_parquet(file) if file.is_file() else pd.DataFrame()
    return frame.drop(columns=[c for c in frame.columns if c in ASIDE]).reset_index(drop=True)


def _tensor_differences(old: Path, new: Path) -> Iterator[str]:
    a, b = (json.loads((f / "tensors.json").read_text()) if (f / "tensors.json").is_file() else {} for f in (old, new))
    for text, names in (
        ("tensors are gone", [n for n in a if n not in b]),
        ("tensors are new", [n for n in b if n not in a]),
        ("tensors differ", [n for n in a if n in b and a[n] != b[n]]),
    ):
        if names:
            yield f"{len(names)} of {len(a)} {text}, the first: {names[0]}"


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), *sys.argv[3:4])
    else:
        sys.exit(not compare(Path(sys.argv[2]), Path(sys.argv[3])))
