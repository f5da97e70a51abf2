"""`fedloom describe`: size, costs and tiers of a space; `fedloom prepare`: a data set and its partition."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import VALIDATION, Dataset
from fedloom.platform.data.feature_skew import skewed_dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import PUBLISHED, differences
from fedloom.platform.federation.tasks import task_names
from fedloom.platform.federation.tiers import measure_costs, sampled_costs, split_into_tiers
from fedloom.platform.methods.fedoras import PUBLISHED_RATIOS, FedorASConfig, epochs_per_operator
from fedloom.platform.spaces.registry import SPACES, build_space
from fedloom.tiers.measure import COUNTED_AS_MACS
from fedloom.tiers.tier import share_of_models


def describe(overrides: Sequence[str]) -> dict[str, Any]:
    """Describes a space: architectures, parameters, MACs, tier upper bounds and the share of models per tier.

    `space=NAME` is short for `space.name=NAME` with the number of classes that the space is designed for. Parameters
    and MACs are those of the whole supernet, of its fixed part, and of the largest path (in an elastic space, of the
    smallest and the largest subnet). Bounds are in the unit of the tiers' cost. For FedorAS, also how many epochs train
    an operator of the supernet, as a multiple of those in rand-init's network.
    """
    config = compose_config([text for override in overrides for text in _in_full(override)])
    space = build_space(config.space)
    measured, parameters = measure_costs(config.tiers, space), space.cost_table("parameters")
    macs, cost = measured.macs, measured.budget
    tiers = split_into_tiers(config, space, cost)
    names, heads = task_names(config, len(tiers)), config.space.heads
    if names and len(names) != len(heads or ()):  # only the data set knows their numbers of classes
        shown = "null" if heads is None else heads
        raise ValueError(f"space.heads={shown}: give the number of classes of each task ({', '.join(names)})")
    uppers = [t.upper for t in tiers]
    costs = sampled_costs(space.genome, cost, config.tiers.paths)
    description: dict[str, Any] = {
        "space": config.space.name,
        "input_shape": list(space.input_shape),
        "architectures": space.num_architectures,
        "parameters": {"fixed": int(parameters.fixed), "largest": int(parameters.largest)},
        "macs": {"fixed": int(macs.fixed), "smallest": int(macs.smallest), "largest": int(macs.largest)},
        "macs_count": COUNTED_AS_MACS,
        "tier_cost": cost.measure,
        "tier_upper_bounds": uppers,
        "share_of_models": [float(s) for s in np.round(share_of_models(costs, uppers), 6)],
    }
    if isinstance(config.method, FedorASConfig) and not space.slices_tensors:
        ratio = epochs_per_operator(config, space)
        facts = {"supernet_to_rand_init": ratio and round(ratio, 2), "published": PUBLISHED_RATIOS}
        description["epochs_per_operator"] = facts
    for name, figures in space.figures().items():
        description[name] = {**description["macs"], **figures} if name == "macs" else figures
    return description


def _in_full(override: str) -> list[str]:
    name = override.removeprefix("space=")
    if name == override:
        return [override]
    design = getattr(SPACES.known.get(name), "args", (None,))[-1]  # of `from_design`; a user's own space has none
    classes = getattr(design, "num_classes", None)
    return [f"space.name={name}", *([] if classes is None else [f"space.num_classes={classes}"])]


def prepare(
    overrides: Sequence[str], draw: Callable[[DataConfig, FederatedData], object] | None = None
) -> dict[str, Any]:
    """Writes or verifies the memory-mapped arrays and the partition, and returns a description of them.

    `dataset=NAME` is short for `data.dataset=NAME`. `draw` is called with the configuration of the data and the data.
    """
    config = compose_config([f"data.{o}" if o.startswith("dataset=") else o for o in overrides])
    seed = config.seed_for("partition")
    dataset = skewed_dataset(config.data, Dataset.open(prepare_dataset(config.data, verify=True)), seed)
    dataset.verify()
    partition = prepare_partition(config.data, dataset, seed)
    data = FederatedData.open(dataset.path, partition)
    if draw is not None:
        draw(config.data, data)
    published: dict[str, str] = {}
    if config.data.dataset in PUBLISHED:
        is_part = None not in (config.data.train_samples, config.data.test_samples)
        otherwise = "not checked: both parts are sub-samples" if is_part else "yes"
        published = {"as_published": "; ".join(differences(config.data, dataset)) or otherwise}
    sizes = {split: data.sizes(split) for split in ("train", "validation")}
    return {
        "dataset": config.data.dataset,
        "path": str(dataset.path),
        "hash": dataset.hash,
        "classes": dataset.num_classes,
        "train_samples": dataset.num_samples("train"),
        "test_samples": dataset.num_samples("test"),
        **({"validation_samples": dataset.num_samples(VALIDATION)} if dataset.has_validation else {}),
        **published,
        "partition": str(partition),
        "partition_hash": data.partition_hash,
        "clients": data.num_clients,
        "train_samples_per_client": [int(sizes["train"].min()), int(sizes["train"].max())],
        "validation_samples_per_client": [int(sizes["validation"].min()), int(sizes["validation"].max())],
    }
