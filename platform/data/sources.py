"""Where data come from: one small reader per published layout, behind one protocol for images and one for text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from fedloom.platform.data.artefact import ByteArray, Fields, IntArray
from fedloom.platform.data.cifar_parquet import find_parquet
from fedloom.platform.data.cifar_pickle import LAYOUTS, PickleSource
from fedloom.platform.data.cinic import CinicSource
from fedloom.platform.data.config import DataConfig, data_root
from fedloom.platform.data.ptb import PtbSource
from fedloom.platform.data.shakespeare import ShakespeareSource
from fedloom.platform.data.stratify import stratified_rows
from fedloom.platform.data.tokens import TokenSource
from fedloom.platform.plugins import Slot
from fedloom.platform.seeding import stream

FIXED_SEED = 0
"""Splits and sub-samples belong to the data set, not to the run: no seed of the user's changes them."""
SYNTHETIC_CLASSES = 10
SYNTHETIC_SAMPLES = {"train": 10_000, "test": 2_000}
DIGITS_TEST_SHARE = 0.2


class Source(Protocol):
    """Images and labels as published; parts are "train" and "test"."""

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def scale(self) -> int:
        """The pixel value that stands for 1.0."""
        ...

    def identity(self) -> Fields:
        """What determines the content, without paths of this machine."""
        ...

    def labels(self, part: str) -> IntArray:
        """Labels (n,) of all samples of the part."""
        ...

    def images(self, part: str, rows: IntArray) -> ByteArray:
        """Images (len(rows), C, H, W) of the given samples of the part."""
        ...


def find_source(config: DataConfig) -> Source:
    """The reader for the images of `config.dataset`, from the folder of the originals where it needs one.

    Raises ValueError saying where it looked, or naming the file that is not in the published layout.
    """
    if config.dataset == "digits":
        return DigitsSource.load()
    if config.dataset == "synthetic":
        samples = SYNTHETIC_SAMPLES
        return SyntheticSource(config.train_samples or samples["train"], config.test_samples or samples["test"])
    if config.dataset == "cinic10":
        layout = "CINIC-10/ or cinic10/ with train/CLASS/*.png and test/CLASS/*.png"
        return CinicSource.find(data_root(config)) or _not_found(config, layout)
    return _find_cifar(config.dataset, data_root(config), config.download)


def find_text(config: DataConfig) -> TokenSource:
    """The reader for the text of `config.dataset`; raises ValueError as `find_source`."""
    root, length = data_root(config), config.sequence_length
    if config.dataset == "shakespeare":
        layout = "shakespeare/shakespeare_train.h5 and shakespeare_test.h5"
        return ShakespeareSource.find(root, length) or _not_found(config, layout)
    return PtbSource.find(root, length) or _not_found(
        config, "ptb.train.txt and ptb.test.txt in ptb/ or simple-examples/data/"
    )


def _not_found(config: DataConfig, layout: str) -> NoReturn:
    only_cifar = "; data.download=true fetches CIFAR alone" if config.download else ""
    raise ValueError(
        f"{config.dataset} not found under {data_root(config)}: looked for {layout}; "
        f"set FEDLOOM_DATA or data.root{only_cifar}"
    )


def _find_cifar(dataset: str, root: Path, download: bool) -> Source:
    pickles = PickleSource(root / LAYOUTS[dataset].folder, LAYOUTS[dataset])
    # The originals first: Parquet copies may have been re-compressed.
    if not pickles.missing_files():
        return pickles
    parquet = find_parquet(root / dataset, dataset)
    if parquet is not None:
        return parquet
    if download:
        _download(dataset, root)
        return pickles
    if pickles.folder.is_dir():
        raise ValueError(f"{pickles.folder}: {pickles.missing_files()[0]} is missing; unpack the archive again")
    raise ValueError(
        f"{dataset} not found under {root}: looked for {pickles.folder.name}/ and "
        f"{dataset}/train-*.parquet with test-*.parquet; set FEDLOOM_DATA or data.root, or data.download=true"
    )


def _download(dataset: str, root: Path) -> None:
    datasets = _torchvision_datasets()
    root.mkdir(parents=True, exist_ok=True)
    try:
        {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[dataset](root, download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"data.download=true: {dataset} could not be fetched into {root} ({error}); "
            f"put {LAYOUTS[dataset].folder}/ there by hand"
        ) from error


def _torchvision_datasets() -> Any:
    # Here and not at the top: a torchvision built for another torch fails on import, and only downloads need it.
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"torchvision does not fit the installed torch ({error}); install the torchvision release made for it "
            "(pip install --upgrade torch torchvision), or set data.download=false and put the files there by hand"
        ) from error
    return datasets


@dataclass(frozen=True, slots=True, eq=False)
class DigitsSource:
    """The 1797 handwritten digits of scikit-learn, 1x8x8, values 0..16, split 80/20 once and for all."""

    x: ByteArray
    y: IntArray
    rows: dict[str, IntArray]
    class_names: tuple[str, ...] = tuple(str(d) for d in range(10))
    scale: int = 16

    @classmethod
    def load(cls) -> "DigitsSource":
        """Reads the file that comes with scikit-learn."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = digits.images.astype(np.uint8)[:, None]
        y = digits.target.astype(np.int64)
        test = stratified_rows(y, round(DIGITS_TEST_SHARE * len(y)), stream(FIXED_SEED, "digits test split"))
        train = np.setdiff1d(np.arange(len(y)), test)
        return cls(x, y, {"train": train, "test": test})

    def identity(self) -> Fields:
        return {"layout": "scikit-learn digits", "test_share": DIGITS_TEST_SHARE}

    def labels(self, part: str) -> IntArray:
        return self.y[self.rows[part]]

    def images(self, part: str, rows: IntArray) -> ByteArray:
        return self.x[self.rows[part][rows]]


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """Random images of CIFAR's shape: a pattern per class plus noise, so that there is something to learn."""

    train_samples: int
    test_samples: int
    class_names: tuple[str, ...] = tuple(f"class {c}" for c in range(SYNTHETIC_CLASSES))
    scale: int = 255

    def identity(self) -> Fields:
        return {"layout": "synthetic", "train_samples": self.train_samples, "test_samples": self.test_samples}

    def labels(self, part: str) -> IntArray:
        samples = self.train_samples if part == "train" else self.test_samples
        return stream(FIXED_SEED, "synthetic labels", part).permutation(samples) % SYNTHETIC_CLASSES

    def images(self, part: str, rows: IntArray) -> ByteArray:
        y = self.labels(part)
        patterns = stream(FIXED_SEED, "synthetic patterns").integers(
            0, 128, (SYNTHETIC_CLASSES, 3, 32, 32), dtype=np.uint8
        )
        x = stream(FIXED_SEED, "synthetic noise", part).integers(0, 128, (len(y), 3, 32, 32), dtype=np.uint8)
        for label, pattern in enumerate(patterns):
            x[y == label] += pattern
        return x if len(rows) == len(y) else x[rows]


DATASETS: Slot[Any] = Slot(
    "data set",
    dict.fromkeys(("digits", "cifar10", "cifar100", "synthetic", "cinic10", "shakespeare", "ptb")),
    ("root",),
)
