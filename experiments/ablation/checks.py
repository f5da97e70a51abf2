"""Everything about trials that can be refused before any is started: their configurations, data, and size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.experiments.ablation.needs import Bundles, Cluster, bundles_of_trial
from fedloom.experiments.ablation.store import Trial
from fedloom.experiments.config import config_from_dict
from fedloom.platform.config import RunConfig
from fedloom.platform.run import planned_stages
from fedloom.platform.supernets import supernet_key
from fedloom.platform.world import World, build_world
from fedloom.tiers.tier import Tier, make_tiers


@dataclass(frozen=True)
class Checked:
    """A trial that can run: the bundles of its placement group, and the key of a supernet that it may share."""

    trial: Trial
    bundles: Bundles
    supernet: str | None
    at_once: int
    """How many of its kind the cluster holds at the same time."""


def checked_trials(trials: Sequence[Trial], root: Path, cluster: Cluster) -> list[Checked]:
    """The trials with what they need.

    Raises ValueError naming the trial: what is missing of the cluster first, which takes no time to find out.
    """
    configs = [_config(trial, root) for trial in trials]
    for trial, config in zip(trials, configs, strict=True):
        _look_at_size(trial, config, cluster, len(trials))
    return [_checked(t, config, cluster, len(trials)) for t, config in zip(trials, configs, strict=True)]


def _config(trial: Trial, root: Path) -> RunConfig:
    config = config_from_dict(trial.config)
    config.results = str(root)
    return config


def _look_at_size(trial: Trial, config: RunConfig, cluster: Cluster, trials: int) -> None:
    """The need as far as the configuration alone tells it: resident clients may be numbered by the data."""
    if config.executor.resident and config.data.num_clients is None:
        return
    try:
        bundles_of_trial(config, _tiers(config), config.data.num_clients or 1, cluster, trials)
    except ValueError as error:
        raise _of(trial, error) from error


def _tiers(config: RunConfig) -> tuple[Tier, ...]:
    """The tiers with their CPUs and GPU shares; their bounds do not matter here."""
    count = len(config.tiers.upper_bounds) if config.tiers.upper_bounds is not None else config.tiers.count
    num_gpus = config.tiers.num_gpus if config.tiers.num_gpus is not None else 0.0
    num_cpus = config.tiers.num_cpus if config.tiers.num_cpus is not None else 1.0
    return make_tiers([float(i) for i in range(1, count + 1)], num_gpus=num_gpus, num_cpus=num_cpus)


def _checked(trial: Trial, config: RunConfig, cluster: Cluster, trials: int) -> Checked:
    try:
        world = build_world(config)
        planned_stages(world)
        bundles = bundles_of_trial(config, world.tiers, world.num_clients, cluster, trials)
    except ValueError as error:
        raise _of(trial, error) from error
    return Checked(trial, bundles, _shared(config, world), _at_once(bundles, cluster))


def _shared(config: RunConfig, world: World) -> str | None:
    return supernet_key(config, world) if config.reuse_supernet else None


def _at_once(bundles: Bundles, cluster: Cluster) -> int:
    """Roughly, by the sums alone."""
    sizes: Mapping[str, float] = {n: sum(b.get(n, 0.0) for b in bundles) for n in ("CPU", "GPU")}
    return max(1, min((int(cluster.total(n) / size + 1e-6) for n, size in sizes.items() if size), default=1))


def _of(trial: Trial, error: ValueError) -> ValueError:
    return ValueError(f"trial {trial.index} ({trial.label()}): {error}")
