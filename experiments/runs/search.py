"""`fedloom search`: finds the best subnets of a trained supernet for new targets, without training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from fedloom.experiments.runs.configuration import stored_config
from fedloom.experiments.terminal import console, write_json
from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import SUPERNET
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.methods.registry import method_of
from fedloom.platform.methods.target_search import SAMPLES, Found, search_supernet
from fedloom.platform.results.checkpoint import list_models, load_model
from fedloom.platform.results.paths import RunPaths, find_run
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import stored_world
from fedloom.platform.search.targets import UNFITTED, Sample, TargetSearchConfig
from fedloom.platform.spaces.slices import Weights, architecture_id, parse_architecture

DEFAULT_SAMPLES = 200
"""Number of subnets to measure if the run measured none."""


@dataclass(frozen=True)
class Trained:
    """A trained supernet and the subnets that its run measured."""

    run_id: str
    world: World
    config: TargetSearchConfig
    weights: Weights
    samples: tuple[Sample, ...]

    def changed(self, **settings: float | str | None) -> "Trained":
        """A copy with changed settings of the search; None keeps the run's own setting."""
        changes = {name: value for name, value in settings.items() if value is not None}
        return replace(self, config=replace(self.config, **changes))  # type: ignore[arg-type]


def search_trained(trained: Trained, macs: Sequence[float], latency_s: Sequence[float]) -> list[Found]:
    """Finds the winner for every target, verified on validation data.

    The accuracies that the run measured are used again, unless more samples are requested; latencies are measured on
    this machine. The predictor is the run's, or an MLP if the run fitted none. Raises ValueError with one line for
    targets outside the space, and if a predictor does not reach `min_tau`.
    """
    if not macs and not latency_s:
        raise ValueError("give at least one target: --macs 1e9 or --latency-s 0.02")
    predictor = "mlp" if trained.config.predictor in UNFITTED else trained.config.predictor
    config = replace(
        trained.config, macs=list(macs), macs_above=[], latency_s=list(latency_s), front=0, predictor=predictor
    )
    # A small space has fewer subnets than samples are asked for.
    wanted = min(config.samples, trained.world.space.num_architectures)
    samples = trained.samples if len(trained.samples) >= wanted else ()
    executor = SerialExecutor(Worker(trained.world.spec))  # on the CPU wherever it was trained
    return search_supernet(trained.world, config, trained.weights, samples, executor)


def load_trained(results: Path, run: str) -> Trained:
    """Loads the supernet of a run and its measured subnets.

    Raises ValueError for an unknown run and under the conditions of `trained_of`.
    """
    run_id, config = stored_config(results, run)
    paths = find_run(results, run_id)
    _check_method(config, run_id)
    return trained_of(paths, stored_world(paths, config))


def trained_of(paths: RunPaths, world: World) -> Trained:
    """The supernet of a run whose world is already built.

    Raises ValueError if the method trains no elastic supernet or if the training has not ended.
    """
    search = _check_method(world.config, paths.run_id)
    if SUPERNET not in list_models(paths):
        if world.config.dry_run:
            raise ValueError(f"run {paths.run_id} was a dry run: it trained nothing that could be searched")
        raise ValueError(f"run {paths.run_id} keeps no supernet yet: wait until its training has ended, or resume it")
    weights, _ = load_model(paths, SUPERNET)
    wanted = search if search.samples else replace(search, samples=DEFAULT_SAMPLES)
    return Trained(paths.run_id, world, wanted, weights, tuple(measured_samples(paths)))


def _check_method(config: RunConfig, run_id: str) -> TargetSearchConfig:
    """The search configuration of the run; ValueError if its method trains no elastic supernet."""
    method = config.method
    search = getattr(method, "search", None)
    if not method_of(method).searchable(method) or not isinstance(search, TargetSearchConfig):
        raise ValueError(f"run {run_id} trained no elastic supernet: choose a run of method superfednas or ofa")
    return search


def measured_samples(paths: RunPaths) -> list[Sample]:
    """The subnets that the run measured to train its predictors."""
    rows = read_table(paths.root, "candidates", run_id=paths.run_id)
    rows = rows[rows["tier"] == SAMPLES]
    return [
        Sample(parse_architecture(name), loss, metric)
        for name, loss, metric in zip(rows["architecture"], rows["loss"], rows["metric"], strict=True)
    ]


def found_json(winners: Sequence[Found], world: World) -> list[dict[str, Any]]:
    """The winners as JSON values, with readable labels."""
    return [
        {**asdict(f), "architecture": architecture_id(f.architecture), "label": world.space.label(f.architecture)}
        for f in winners
    ]


def show(trained: Trained, winners: Sequence[Found], asked: int, as_json: bool) -> None:
    """Prints the winners, one per line, and the number of targets without one; or one JSON object."""
    values = found_json(winners, trained.world)
    if as_json:
        write_json({"run_id": trained.run_id, "found": values, "not_found": asked - len(winners)})
        return
    table, by_loss = Table(box=None), trained.config.metric == "loss"
    predicted, validation = ("predicted loss", "validation loss") if by_loss else ("predicted", "validation")
    for column in ("target", "subnet", "MACs", "params", predicted, validation, "latency ms"):
        table.add_column(column, justify="left" if column in ("target", "subnet") else "right")
    for v in values:
        latency = "" if v["latency_s"] is None else f"{1000 * v['latency_s']:.2f}"
        measured = v["loss" if by_loss else "metric"]
        figures = (f"{v['macs']:,.0f}", f"{v['parameters']:,}", f"{v['predicted']:.4f}", f"{measured:.4f}", latency)
        table.add_row(v["target"], v["label"], *figures)
    console().print(table)
    if asked > len(winners):
        near = f"no predicted latency is at most {100 * trained.config.tolerance:g} % below the target"
        why = f"{near}, or all measured ones are above it: raise --tolerance"
        console().print(f"targets without a subnet: {asked - len(winners)} of {asked}; {why}")
