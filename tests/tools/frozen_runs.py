"""Tiny runs of every method, written down to the last bit: what a change of structure must leave as it was.

    python tests/tools/frozen_runs.py write OUT          with the fedloom that this Python has installed
    python tests/tools/frozen_runs.py write OUT spider   only the runs whose names contain `spider`
    python tests/tools/frozen_runs.py compare OLD NEW    exit code 1 and the differences, if there are any

Only the command line and the files that it leaves are used, so that the program works with any revision. Bits depend
on the machine's kind of processor and on torch: compare what one machine wrote.
"""

import difflib
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
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

ROUNDS = [
    "tiers.paths=2000", "method.train.rounds=3", "method.train.clients_per_round=5", "method.train.epochs=1",
    "method.train.evaluate_every=2", "data.num_clients=12", "executor.chunk_size=2",
]  # fmt: skip
FEDAVG = ["experiment=fedavg_digits", *ROUNDS, "space.stem_channels=8"]
PERSONAL = [*(o for o in ROUNDS if "tiers" not in o), "space.stem_channels=8"]
TRANSFER = [
    "experiment=fedoras_digits_from_scratch", *ROUNDS, "method.start_from=frozen", "results=OUT/fedoras/results",
    "method.model=tier2-fine_tuned", "space.stem_channels=8", "tiers.count=2",
]  # fmt: skip

ADAPTERS = [
    "experiment=heterofl_vit_digits", *ROUNDS[1:], "space.embedding_size=8", "space.attention_heads=2",
    "space.lora.ranks=[1,2,4]", "space.lora.layers=[stages.*]", "space.lora.trained=[head.*]",
    "tiers.upper_bounds=[71248,76368,86608]",
]  # fmt: skip

RUNS: dict[str, list[str]] = {
    "fedavg": ["method=fedavg", *DIGITS, "space.stem_channels=8", "method.train.rounds=3",
               "method.train.evaluate_every=2", "method.train.schedule=cosine"],
    "top_k": [*FEDAVG, "method.train.processors=[clip,top_k,uniform]", "method.train.options.bits=4"],
    "qsgd_down": [*FEDAVG, "method.train.processors=[qsgd]", "method.train.options.direction=both"],
    "heterofl_top_k": ["experiment=heterofl_digits", *ROUNDS[1:], "method.train.processors=[top_k]"],
    "fedavg_cifar10": ["method=fedavg", *CIFAR, "space.name=resnet_elastic_small", "data.num_clients=4",
                       "tiers.count=1", "tiers.paths=100", "method.train.rounds=2",
                       "method.train.clients_per_round=2", "executor.chunk_size=3"],
    "fedoras": [*FEDORAS, "name=frozen"],
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
    "ofa": ["experiment=ofa_digits", *ELASTIC[1:], "method.train.rounds=5", "method.train.depth_share=0.2"],
    "compofa": ["experiment=compofa_digits", *ELASTIC[1:], "tiers.rho_high=0.5", "method.search.samples=0"],
    "ifedavg": [*ELASTIC, "method.separately=true"],
    "superfednas_shakespeare": TEXT,
    "superfednas_vit": ["experiment=superfednas_vit_digits", *ROUNDS, "space.embedding_size=8", "tiers.count=2",
                        "method.family=[smallest,largest]", "method.search.samples=0"],
    "fjord_gpt": ["experiment=fjord_gpt_shakespeare_small", "data.train_samples=64", "data.test_samples=16",
                  "data.num_clients=4", "data.sequence_length=16", "space.input_shape=[16]", "space.embedding_size=8",
                  "tiers.upper_bounds=[40000,80000]", "method.train.rounds=2",
                  "method.train.clients_per_round=3", "method.train.epochs=1", "method.train.evaluate_every=1"],
    "hetlora": [*ADAPTERS, "method=hetlora", "method.penalty=2.0"],
    "flexlora": [*ADAPTERS, "method=flexlora"],
    "flora": [*ADAPTERS, "method=flora", "space.lora.merged=true"],
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
    "pfedme": ["experiment=pfedme_digits", *SILOS, "space.stage_widths=[4,8]", *VALIDATED],
    "fedmask": ["experiment=fedmask_digits", *SILOS, "space.stage_widths=[4,8]", "space.norm=batch", *VALIDATED],
    "knn_per": ["method=knn_per", *SILOS, *RESNET],
    **{name: [f"experiment={name}_digits", *PERSONAL] for name in ("fedper", "lg_fedavg", "fedbn", "apfl", "fedproto")},
    "fedrep": ["experiment=fedrep_digits", *PERSONAL, "method.train.epochs=2", "method.train.personal_epochs=1"],
    "fedmn": ["method=fedmn", *SILOS, *CELLS, "method.train.pretraining_rounds=1", *VALIDATED],
    "global_nas": ["method=global_nas", *SILOS, *CELLS, *SEARCH],
    "fednas": ["method=fednas", *SILOS, *CELLS, "method.search.rounds=2"],
    "fedpnas": ["method=fedpnas", *SILOS, *CELLS, *SEARCH, "space.cells=4"],
    "fedavg_gpu_shares": [*FEDAVG, "executor.stack_clients=off", "tiers.count=2", "method.tier=2"],
    "fedavg_stacked": [*FEDAVG, "executor.stack_clients=3", "executor.chunk_size=4"],
    "fedavg_bfloat16": [*FEDAVG, "executor.precision=bfloat16"],
    "fedavg_private": [*FEDAVG, "method.train.privacy.clip=1.0", "method.train.privacy.noise=0.8",
                       "method.train.privacy.weight_cap=40"],
    "fedavg_stopped": [*FEDAVG, "method.train.rounds=6", "method.train.evaluate_every=1", "stop.patience=1"],
    "apfl_stopped": ["experiment=apfl_digits", *PERSONAL, "method.train.rounds=6", "method.train.evaluate_every=1",
                     "method.train.use_validation=false", "stop.patience=1"],
    "fedavg_attacked": [*FEDAVG, "attack.share=0.3", "attack.name=sign_flip"],
    "fedavg_krum": [*FEDAVG, "method.train.aggregator=multi_krum", "attack.share=0.3", "attack.name=alie"],
    "fedavg_flipped": [*FEDAVG, "method.train.aggregator=trimmed_mean", "attack.share=0.3",
                       "attack.name=label_flip"],
    "superfednas_rfa": [*ELASTIC, "method.train.aggregator=rfa", "attack.share=0.3", "attack.name=inner_product"],
    "fedavg_secure": [*FEDAVG, "method.train.privacy.secure=true", "devices.dropout=0.2",
                      "method.train.selection=tier_quota"],
    "fedavg_traced": [*FEDAVG, "devices.availability_table=generated", "devices.availability_period_s=10",
                      "devices.jitter=0.3", "devices.server_bytes_per_s=1e6"],
    "over_selected": [*FEDAVG, *DEVICES, "method.train.arrivals=2"],
    "fedbuff": [*ELASTIC, *DEVICES, "method.train.asynchronous=fedbuff", "method.train.arrivals=3"],
    "fedasync": [*FEDAVG, *DEVICES, "method.train.asynchronous=fedasync", "method.train.arrivals=1"],
    "fedavg_lossy": [*FEDAVG, *DEVICES, "executor.failures.policy=tolerate", "executor.failures.max_share=1"],
    "fedavg_steps": [*FEDAVG, "method.train.schedule=steps", "method.train.idle_momentum=true",
                     "method.train.loss_norms=true", "data.balanced_classes=true", "method.train.weight_decay=0.001",
                     "method.train.clip_norm=1.0"],
    "oort": [*FEDAVG, *DEVICES, "method.train.selection=oort", "method.train.loss_norms=true"],
    "pyramidfl": [*FEDAVG, *DEVICES, "method.train.selection=pyramidfl", "method.train.loss_norms=true"],
    "round_robin": [*FEDAVG, "method.train.selection=round_robin"],
    "tier_quota": [*FEDAVG, "tiers.count=2", "method.train.selection=tier_quota"],
    **{name: [f"experiment={name}_digits", *ROUNDS] for name in (
        "fedprox", "feddyn", "scaffold", "fednova", "fedadam", "fedyogi", "fedadagrad", "fedavgm", "zerofl",
        "heterofl", "fjord", "fedrolex", "splitmix", "feddf", "depthfl", "scalefl")},
    "random_nas": ["experiment=random_nas_digits", *ROUNDS, "space.stem_channels=8", "method.models=1"],
    "fedoras_tasks": [*FEDORAS, "data.label_sets={pairs:[0,0,1,1,2,2,3,3,4,4]}", "space.heads=[5,10]",
                      "tiers.tasks=[pairs,all]"],
    "fedoras_private": [*FEDORAS, "method.train.privacy.clip=0.5", "method.train.privacy.noise=0.6",
                        "method.train.privacy.weight_cap=50", "method.train.min_contributors=1"],
    "fedoras_secure": [*FEDORAS, "method.train.privacy.secure=true", "devices.dropout=0.1"],
    "from_scratch": [*TRANSFER, "method.from_scratch=true"],
    "transfer": [*TRANSFER, "method.from_scratch=false"],
    "superfednas_tracking": [*ELASTIC, "method.train.distribution.heuristic=tracking_sandwich",
                             "method.train.shares.rule=overlap"],
    "spider_resident": [*SPIDER, *SEARCH, "executor.kind=ray", "executor.resident=true", "executor.actors=2"],
    "ablation": ["ablate", "ablation=init", *FEDORAS[:-4], "method.finetune.epochs=1", "method.rand_init.epochs=1",
                 "ablation.axes.rounds.settings={a:{method.finetune.rounds: 1, method.rand_init.rounds: 2},"
                 "b: {method.finetune.rounds: 2,method.rand_init.rounds: 1}}", "ablation.seeds=[1]"],
}  # fmt: skip
REPORTED = ("fedoras", "superfednas", "spider", "ablation")
"""Runs whose report's tables are compared, too."""
COUNTED = ("fedoras/fig8", "fedoras/tab18", "superfednas/fig3", "superfed/fig6", "spider/space")
"""Items of `reproduce` that are counted in seconds."""

TABLES = ("runs", "rounds", "clients", "candidates", "evaluations", "models")
ASIDE = {"run_id", "experiment", "started", "ended", "versions", "source_hash", "config", "wall_s", "overhead_s",
         "peak_memory_bytes", "attempts", "node", "traceback", "ablation", "supernet", "supernet_run_id"}  # fmt: skip
"""Columns of real time, places, versions and ids; a supernet's key depends on the source."""


def write(out: Path, only: str = "") -> None:
    """One folder per run: its tables, and a hash of every tensor of its checkpoint and of its kept models."""
    from fedloom.experiments.cli import main

    def run(*arguments: str) -> str:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                main([*arguments])
        except SystemExit as end:
            if end.code:
                raise SystemExit(f"fedloom {' '.join(arguments)}: exit code {end.code}") from None
        return printed.getvalue()

    for name, given in RUNS.items():
        if only not in name:
            continue
        command, *overrides = given if given[0] == "ablate" else ["run", *given]
        overrides = ["executor.kind=serial", f"results={out / name / 'results'}", *overrides]
        once = {key: value for key, _, value in (override.partition("=") for override in overrides)}  # the last one
        results = Path(once["results"].replace("OUT", str(out)))
        run(command, *(f"{key}={value}" for key, value in {**once, "results": results}.items()), "--json")
        if name in REPORTED:
            run("report", f"--results={results}", f"--out={out / name / 'report'}", "--json")
        (out / name).mkdir(exist_ok=True)
        for table in TABLES:
            if (results / table).is_dir():
                pd.read_parquet(results / table).to_parquet(out / name / f"{table}.parquet")
        (out / name / "tensors.json").write_text(json.dumps(dict(_tensors(results / "artifacts")), indent=0))
    if only in "counted":
        answers = {
            item: json.loads(run("reproduce", item, f"--results={out / 'counted'}", "--json")) for item in COUNTED
        }
        (out / "counted").mkdir(exist_ok=True)
        (out / "counted" / "values.json").write_text(json.dumps(answers, indent=1, sort_keys=True))


def _report(folder: Path) -> list[str]:
    """The lines of the run's report without ids, dates, versions and times."""
    file = folder / "report" / "report.md"
    text = re.sub(r"\d{8}-\d{6}-[\w.]+-[0-9a-f]{6}", "RUN", file.read_text() if file.is_file() else "")
    lines = [re.sub(r" [\d.]+ (s|ms|min|h) \|$", "", line) for line in text.splitlines()]
    lines = [re.sub(r"[\d.]+ [kMG]B", "BYTES", line) for line in lines]  # among them the memory of this machine
    return [line for line in lines if not re.match(r"\| (versions|source hash|started|ended|created|overrides) ", line)]


def _values(folder: Path) -> list[str]:
    file = folder / "values.json"
    return file.read_text().splitlines() if file.is_file() else []


def _text_differences(old: Path, new: Path) -> Iterator[str]:
    for text, read in (("report", _report), ("counted values", _values)):
        changed = [line for line in difflib.ndiff(read(old), read(new)) if line[:1] in "+-"]
        if changed:
            yield f"{text}: {len(changed)} lines differ, the first: {changed[:2]!r:.300}"


def _tensors(artifacts: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(artifacts.rglob("*.safetensors")):
        kind, group = file.parent.name, file.name.rpartition("-v")[0] or file.stem
        for name, tensor in sorted(load_file(file).items()):
            content = tensor.contiguous().view(-1).numpy().tobytes() if tensor.numel() else b""
            yield f"{kind}/{group}/{name}", hashlib.sha256(content).hexdigest()[:16]


def compare(old: Path, new: Path) -> bool:
    """Prints what differs; True if nothing does."""
    same = True
    for folder in sorted(old.iterdir()):
        pair = (folder, new / folder.name)
        told = [*_table_differences(*pair), *_tensor_differences(*pair), *_text_differences(*pair)]
        same &= not told
        print(f"{folder.name}: {'identical' if not told else ''}")
        for line in told:
            print(f"    {line}")
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
