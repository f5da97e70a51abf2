"""Selects the model of a run to export: a model that the run kept, or a subnet of its supernet."""

from dataclasses import dataclass

from fedloom.experiments.runs.search import search_trained, trained_of
from fedloom.platform.federation.algorithm import SUPERNET
from fedloom.platform.federation.world import World
from fedloom.platform.methods.registry import method_of
from fedloom.platform.methods.superfednas import ALONE, SEARCHED, group_of
from fedloom.platform.results.checkpoint import list_models, load_model, run_checkpoint
from fedloom.platform.results.files import as_stored
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import read_table
from fedloom.platform.search.targets import MEASURES
from fedloom.platform.spaces.slices import Architecture, Weights, architecture_id, parse_architecture

OF_A_TIER = ("fine_tuned", "supernet_init", "rand_init")
"""Models that a run keeps for a tier, in order of preference."""
CUT = (SUPERNET, "supernet_init", SEARCHED)
"""Models in the tables that use the supernet's own weights, so that their scores hold for any equal subnet."""


@dataclass(frozen=True)
class Wanted:
    """The requested model: by tier, target or architecture, or by `model`, alone or with a tier; else the only one.

    `target` has the form "macs=1e9"; `architecture` is parsed by the space (`smallest`, "d=1,0,2,1 e=.14", "3-1-8-0").
    """

    tier: str | None = None
    target: str | None = None
    architecture: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Chosen:
    """A model to export.

    Attributes:
        label: the base of the file names.
        weights: the supernet's, or the model's own if it is `stand_alone`.
        source: the kept model, or the checkpoint, from which the weights are read.
        models: the names of the model in the table `evaluations`.
        tier: its tier in the tables; None for any.
    """

    label: str
    architecture: Architecture
    weights: Weights
    stand_alone: bool
    source: str
    models: tuple[str, ...]
    tier: str | None = None


def check_wanted(wanted: Wanted) -> None:
    """Raises ValueError if more than one model is requested."""
    choices = [wanted.tier, wanted.target, wanted.architecture]
    chosen = sum(choice is not None for choice in choices)
    if chosen == 0 or (chosen == 1 and (wanted.model is None or wanted.tier is not None)):
        return
    raise ValueError(
        "give at most one of --tier TIER, --target macs=1e9, --architecture TEXT and --model NAME (--tier and --model "
        "together choose among a tier's models)"
    )


def choose(paths: RunPaths, world: World, wanted: Wanted) -> Chosen:
    """Finds the requested model; raises ValueError that lists the run's models if it has no such model (yet)."""
    check_wanted(wanted)
    if world.config.dry_run:
        raise ValueError(f"run {paths.run_id} was a dry run: it trained nothing that could be exported")
    method, name = method_of(world.config.method), world.config.method.name
    if method.kind == "silos" and method.own == "nothing":
        raise ValueError(f"run {paths.run_id} keeps no model that could be exported (method {name})")
    if method.kind == "silos":
        raise ValueError(
            f"run {paths.run_id} trained networks that stay with their silos (method {name}); they lie in its "
            "checkpoint, client by client, and are not exported"
        )
    tiers = [t.name for t in world.tiers]
    if wanted.tier is not None and wanted.tier not in tiers:
        raise ValueError(f"no tier {wanted.tier!r} in this run: its tiers are {', '.join(tiers)}")
    if wanted.model is not None:
        return _named(paths, world, wanted.model, wanted.tier)
    if wanted.architecture is not None:
        architecture = world.space.parse(wanted.architecture)
        alone = group_of(architecture)
        if alone in list_models(paths):
            return _kept(paths, world, alone)
        return _cut(paths, world, architecture, architecture_id(architecture))
    if wanted.tier is not None and not _is_searched(paths, world):
        return _of_tier(paths, world, wanted.tier)
    if wanted == Wanted():
        return _only(paths, world)
    label = wanted.tier if wanted.tier is not None else target_label(wanted.target or "")
    return _cut(paths, world, _searched(paths, world, label), label.replace("=", "-"))


def target_label(text: str) -> str:
    """The canonical spelling of a target, such as macs=1e9; ValueError for other texts."""
    name, _, value = (part.strip() for part in str(text).partition("="))
    try:
        return f"{name}={float(value):.10g}"
    except ValueError:
        raise ValueError(f"--target {text!r}: give a measure and its limit, such as macs=1e9") from None


def _is_searched(paths: RunPaths, world: World) -> bool:
    """Whether the tiers' models are subnets of a supernet that the run kept."""
    return method_of(world.config.method).kind == "subnets" and SUPERNET in list_models(paths)


def _named(paths: RunPaths, world: World, model: str, tier: str | None) -> Chosen:
    known = list_models(paths)
    if tier is None or f"{tier}-{model}" in known:
        return _kept(paths, world, model if tier is None else f"{tier}-{model}")
    if model in known and model.startswith(f"{tier}-"):
        return _kept(paths, world, model)
    of_tier = ", ".join(name for name in known if name.startswith(f"{tier}-"))
    raise ValueError(f"{tier} has no model {model!r} in run {paths.run_id}; its models: {of_tier or 'none'}")


def _of_tier(paths: RunPaths, world: World, tier: str) -> Chosen:
    known = list_models(paths)
    for model in OF_A_TIER:
        if f"{tier}-{model}" in known:
            return _kept(paths, world, f"{tier}-{model}")
    of_tier = [name for name in known if name.startswith(f"{tier}-")]
    if not known:
        raise ValueError(_nothing_yet(paths))
    if len(of_tier) > 1:
        models = ", ".join(name.removeprefix(f"{tier}-") for name in of_tier)
        raise ValueError(f"run {paths.run_id} keeps several models of {tier}: choose one by --model: {models}")
    if not of_tier:
        raise ValueError(f"run {paths.run_id} keeps no model of {tier}; its models: {', '.join(known)}")
    return _kept(paths, world, of_tier[0])


def _only(paths: RunPaths, world: World) -> Chosen:
    known = list_models(paths)
    if known == [SUPERNET]:
        raise ValueError(
            f"run {paths.run_id} keeps a supernet: give one of --tier, --target macs=1e9 and --architecture TEXT, or "
            f"--model {SUPERNET}"
        )
    if len(known) > 1:
        raise ValueError(f"run {paths.run_id} keeps several models: choose one by --model: {', '.join(known)}")
    return _kept(paths, world, known[0] if known else "")


def _kept(paths: RunPaths, world: World, name: str) -> Chosen:
    if not list_models(paths):
        raise ValueError(_nothing_yet(paths))
    weights, card = load_model(paths, name)
    architecture = parse_architecture(card["architecture"])
    world.space.validate(architecture)
    tier = card["tier"] or None
    model = ALONE if name == group_of(architecture) else name.removeprefix(f"{tier}-") if tier else name
    if model in CUT and _is_searched(paths, world):
        # The kept model has the supernet's running statistics; cutting it again computes the subnet's own.
        return _cut(paths, world, architecture, name)
    return Chosen(name, architecture, weights, True, name, (model,), tier)


def _cut(paths: RunPaths, world: World, architecture: Architecture, label: str) -> Chosen:
    """A subnet of the run's supernet, which is a kept model or, for methods that search once, in the checkpoint."""
    known = list_models(paths)
    if SUPERNET in known:
        return Chosen(label, architecture, load_model(paths, SUPERNET)[0], False, SUPERNET, CUT)
    if as_stored(paths.checkpoint / STATE_FILE).exists():
        checkpoint = run_checkpoint(paths)
        tensors = checkpoint.groups[SUPERNET].tensors if SUPERNET in checkpoint.groups else {}
        needed = {piece.source for piece in world.space.slices(architecture).values()}  # FedDF has several networks
        if needed <= tensors.keys() and checkpoint.data["stage"] > 0:
            return Chosen(label, architecture, tensors, False, "checkpoint", CUT)
    if not known:
        raise ValueError(_nothing_yet(paths))
    raise ValueError(
        f"run {paths.run_id} has no supernet to cut this from: choose one of its models, --model {' or '.join(known)}"
    )


def _nothing_yet(paths: RunPaths) -> str:
    status = read_status(paths.status)
    stage = f" in stage {status.stage}" if status.stage else ""
    return (
        f"run {paths.run_id} keeps no model yet (it is {status.state}{stage}): wait until its training has ended, or "
        f"continue it with fedloom resume {paths.run_id}"
    )


def _searched(paths: RunPaths, world: World, label: str) -> Architecture:
    """The winner of the run's own search for a tier or a target."""
    rows = read_table(paths.root, "evaluations", run_id=paths.run_id)
    rows = rows[(rows["model"] == SEARCHED) & rows["tier"].notna()]
    known = [target_label(name) if "=" in name else name for name in rows["tier"]]
    winners = rows.loc[[name == label for name in known], "architecture"]
    if len(winners):
        return world.space.parse(str(winners.iloc[-1]))
    # A target that the run did not search for is searched now, which needs no training.
    measure, _, value = label.partition("=")
    if measure not in MEASURES:
        names = ", ".join(dict.fromkeys(known)) or "nothing"
        raise ValueError(
            f"run {paths.run_id} did not search for {label}; it searched for: {names}; give --target macs=VALUE, or "
            "cut any subnet with --architecture"
        )
    targets = {measure: [float(value)]}
    subnets = search_trained(trained_of(paths, world), targets.get("macs", []), targets.get("latency_s", []))
    if not subnets:
        raise ValueError(f"no subnet of run {paths.run_id} was found for {label}: choose another target")
    return subnets[0].architecture
