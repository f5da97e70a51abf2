"""`fedloom prepare`: prepares a data set and its partition before the runs that use them."""

from collections.abc import Sequence
from typing import Any

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.data.dataset import VALIDATION, Dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.sources import PUBLISHED, differences


def prepare(overrides: Sequence[str]) -> dict[str, Any]:
    """Writes or verifies the memory-mapped arrays and the partition, and returns a description of them.

    `dataset=NAME` is short for `data.dataset=NAME`.
    """
    config = compose_config([f"data.{o}" if o.startswith("dataset=") else o for o in overrides])
    path = prepare_dataset(config.data, verify=True)
    dataset = Dataset.open(path)
    partition = prepare_partition(config.data, dataset, config.seed_for("partition"))
    data = FederatedData.open(path, partition)
    found = differences(config.data, dataset)
    is_part = None not in (config.data.train_samples, config.data.test_samples)
    as_published = "not checked: both parts are sub-samples" if is_part else "yes"
    whole = ("; ".join(found) or as_published) if config.data.dataset in PUBLISHED else None
    sizes = {split: data.sizes(split) for split in ("train", "validation")}
    return {
        "dataset": config.data.dataset,
        "path": str(path),
        "hash": dataset.hash,
        "classes": dataset.num_classes,
        "train_samples": dataset.num_samples("train"),
        "test_samples": dataset.num_samples("test"),
        **({"validation_samples": dataset.num_samples(VALIDATION)} if dataset.has_validation else {}),
        **({} if whole is None else {"as_published": whole}),
        "partition": str(partition),
        "partition_hash": data.partition_hash,
        "clients": data.num_clients,
        "train_samples_per_client": [int(sizes["train"].min()), int(sizes["train"].max())],
        "validation_samples_per_client": [int(sizes["validation"].min()), int(sizes["validation"].max())],
    }
