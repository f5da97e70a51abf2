"""Consistency checks of the data options that need no data."""

from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.config import BY_LABEL, PARTITIONS, DataConfig
from fedloom.platform.data.sources import DATASETS, data_choices
from fedloom.platform.settings import check_settings

TEXTS = ("shakespeare", "ptb")
WITH_CLIENTS = ("shakespeare", "speech_commands")
"""Data sets that are published with natural clients."""
OF_ITS_OWN = ("folder", "npz")
"""Data sets whose content is known only after reading, like a user's own."""


def check(config: DataConfig) -> None:
    """Raises a one-line ValueError for the first option that is out of range or does not fit the data set."""
    check_settings(config, "data.")
    data_choices(config)
    if config.dataset in [*DATASETS.known] and config.dataset not in OF_ITS_OWN:
        _check_partition(config.partition, config.dataset)
        _check_kind(config)
    _check_shares(config)


def _check_partition(partition: str, dataset: str) -> None:
    lacks = {**dict.fromkeys(BY_LABEL, dataset in TEXTS), "natural": dataset not in WITH_CLIENTS, "iid": False}
    if lacks[partition]:
        what = "has no class labels to draw by" if partition in BY_LABEL else "has no clients of its own"
        allowed = ", ".join(p for p in PARTITIONS if not lacks[p])
        raise ValueError(f"data.partition={partition}: {dataset} {what}; must be one of {allowed}")


def _check_kind(config: DataConfig) -> None:
    if config.dataset not in TEXTS and config.sequence_length is not None:
        raise ValueError(f"data.sequence_length={config.sequence_length}: {config.dataset} holds images; leave it out")
    if config.dataset in TEXTS and config.augment != "none" and config.augment in AUGMENTATIONS.known:
        raise ValueError(f"data.augment={config.augment}: {config.dataset} is text; must be none")


def _check_shares(config: DataConfig) -> None:
    validation, test = config.validation_share, config.test_share
    if test is not None and not validation + test < 1:
        raise ValueError(
            f"data.validation_share={validation} and data.test_share={test}: must sum to less than 1; "
            "the rest of a client's data trains"
        )
