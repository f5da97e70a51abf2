from pathlib import Path

import pytest

from fedloom.platform.data.config import DataConfig, cache_root, data_root
from fedloom.platform.data.registry import check


def test_the_defaults_pass() -> None:
    check(DataConfig())


@pytest.mark.parametrize(
    ("dataset", "partition"),
    [("cifar10", "iid"), ("cinic10", "lda"), ("ptb", "iid"), ("shakespeare", "iid"), ("shakespeare", "natural")],
)
def test_what_a_data_set_allows_passes(dataset: str, partition: str) -> None:
    check(DataConfig(dataset=dataset, partition=partition))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, "data.alpha=-1: must be greater than 0"),
        ({"alpha": float("nan")}, "data.alpha=nan: must be greater than 0"),
        ({"validation_share": 1.0}, r"data.validation_share=1.0: must be 0 or more and below 1"),
        ({"validation_share": -0.1}, r"data.validation_share=-0.1: must be 0 or more and below 1"),
        ({"num_clients": 0}, "data.num_clients=0: must be between 1 and 100000000$"),
        ({"train_samples": 0}, "data.train_samples=0: must be between 1 and 1000000000, or null"),
        ({"test_samples": -5}, "data.test_samples=-5: must be between 1 and 1000000000, or null"),
        (
            {"dataset": "cifar"},
            "data.dataset: unknown data set 'cifar': known are cifar10, cifar100, cinic10, digits, folder, npz, ptb, "
            "shake",
        ),
        ({"sequence_length": 0}, "data.sequence_length=0: must be between 1 and 1000000"),
        ({"sequence_length": 80}, "data.sequence_length=80: it is not for digits; leave it out"),
        (
            {"sequence_length": 80, "dataset": "npz", "options": {"path": "x.npz"}},
            "data.sequence_length=80: it is not for npz; leave it out",
        ),
        (
            {"partition": "dirichlet"},
            "data.partition=dirichlet: must be one of lda, lda_sequential, dirichlet_classes, shards",
        ),
        (
            {"partition": "natural"},
            "data.partition=natural: digits has no clients of its own; must be one of lda, .*, shards, quantity, iid$",
        ),
        (
            {"dataset": "shakespeare"},
            "data.partition=lda: shakespeare has no class labels to draw by; must be one of quantity, iid, natural$",
        ),
        (
            {"dataset": "shakespeare", "partition": "dirichlet_classes"},
            "data.partition=dirichlet_classes: shakespeare has no class labels to draw by; must be one of quantity",
        ),
        ({"dataset": "ptb"}, "data.partition=lda: ptb has no class labels to draw by; must be one of quantity, iid$"),
        (
            {"dataset": "ptb", "partition": "natural"},
            "data.partition=natural: ptb has no clients of its own; must be one of quantity, iid$",
        ),
        (
            {"dataset": "ptb", "partition": "iid", "augment": "crop_flip"},
            "data.augment=crop_flip: ptb is text; must be none",
        ),
        (
            {"augment": "flip"},
            "data.augment: unknown augmentation 'flip': known are crop_flip, crop_flip_cutout, .*, none, or mod",
        ),
    ],
)
def test_a_bad_option_is_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(DataConfig(**options))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_folders_come_from_the_option_then_the_environment_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", "/from/environment")
    assert data_root(DataConfig(root="/option")) == Path("/option")
    assert data_root(DataConfig()) == Path("/from/environment")
    monkeypatch.delenv("FEDLOOM_DATA")
    monkeypatch.delenv("FEDLOOM_CACHE", raising=False)
    assert data_root(DataConfig()) == Path("data")
    assert cache_root(DataConfig()) == Path.home() / ".cache" / "fedloom"
