"""The registry of data sets: built-in ones, torchvision's and a user's own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np

from fedloom.platform.data.arrays import Arrays, source_of
from fedloom.platform.data.artefact import ByteArray, Fields, IntArray
from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.augment_sound import FEATURES_OF_SOUND
from fedloom.platform.data.cifar_pickle import LAYOUTS, PickleSource
from fedloom.platform.data.cinic import FOLDERS as CINIC_FOLDERS
from fedloom.platform.data.cinic import find_cinic
from fedloom.platform.data.config import DataConfig, data_root
from fedloom.platform.data.folders import OwnFolders, find_folders
from fedloom.platform.data.image_parquet import find_parquet
from fedloom.platform.data.npz import read_npz
from fedloom.platform.data.ptb import PtbSource
from fedloom.platform.data.published import PUBLISHED
from fedloom.platform.data.shakespeare import ShakespeareSource
from fedloom.platform.data.source import Source
from fedloom.platform.data.speech import SpeechSource
from fedloom.platform.data.stratify import stratified_rows
from fedloom.platform.data.tokens import TokenSource
from fedloom.platform.data.torchvision_sets import IMAGE_SIDE, torchvision_datasets, torchvision_set
from fedloom.platform.plugins import ComponentSpec, Registry
from fedloom.platform.seeding import stream
from fedloom.platform.settings import PATH, Range, component_specs

FIXED_SEED = 0
"""Seed of splits and sub-samples, which are properties of the data set and independent of the run's seed."""
SYNTHETIC_CLASSES = 10
SYNTHETIC_SAMPLES = {"train": 10_000, "test": 2_000}
DIGITS_TEST_SHARE = 0.2
TORCHVISION = "torchvision:"

DataSet = Callable[..., Source | TokenSource | Arrays | Mapping[str, Any]]
"""Makes a data set from the configuration `data`; keyword parameters are options (`data.options.NAME`).

A user's own function returns `Arrays`, or a mapping with the same fields.
"""


def digits(config: DataConfig) -> Source:
    """The 1797 handwritten digits of scikit-learn, 1x8x8."""
    del config
    return DigitsSource()


def synthetic(config: DataConfig) -> Source:
    """Random images of CIFAR-10's shape, a pattern per class plus noise, in any number."""
    samples = SYNTHETIC_SAMPLES
    return SyntheticSource(config.train_samples or samples["train"], config.test_samples or samples["test"])


def cinic10(config: DataConfig) -> Source:
    """CINIC-10 from its published folders or as Parquet."""
    root = data_root(config)
    tables = [find_parquet(root / name, "cinic10") for name in CINIC_FOLDERS]
    # Folders are the original.
    if any((root / name / "train").is_dir() for name in CINIC_FOLDERS) or not any(tables):
        return find_cinic(root) or _not_found(config)
    return next(filter(None, tables))


def cifar10(config: DataConfig) -> Source:
    """CIFAR-10 from the authors' files or as Parquet; data.download=true fetches it."""
    return _find_cifar("cifar10", data_root(config), config.download)


def cifar100(config: DataConfig) -> Source:
    """CIFAR-100 from the authors' files or as Parquet; data.download=true fetches it."""
    return _find_cifar("cifar100", data_root(config), config.download)


def shakespeare(
    config: DataConfig,
    *,
    padded_lines: Annotated[bool, "cut every line alone, and predict its padding, as FedorAS seems to"] = False,
) -> TokenSource:
    """Shakespeare's plays by character, one client per role, as published for TensorFlow Federated."""
    found = ShakespeareSource.find(data_root(config), config.sequence_length, padded_lines=padded_lines)
    return found or _not_found(config)


def ptb(config: DataConfig) -> TokenSource:
    """The Penn Treebank by words."""
    return PtbSource.find(data_root(config), config.sequence_length) or _not_found(config)


def speech_commands(
    config: DataConfig,
    *,
    classes: Annotated[int, Range(least=12, most=35), "12 (ten words, others, silence) or 35"] = 12,
    features: FEATURES_OF_SOUND = "htk",
    silence: Annotated[
        float | None,
        Range(least=0, most=1),
        "speech: clips of silence as a share of a speaker's others; null: the noise's seconds, once each",
    ] = 0.1,
) -> Source:
    """Speech Commands, one client per speaker, as 40 MFCC of 51 frames; needs fedloom[speech] to be prepared.

    Clips of the validation speakers are the validation data if clients give none (`data.validation_share=0`).
    """
    layout = "speech_commands/ or speech_commands_v0.02/ with WORD/SPEAKER_nohash_N.wav"
    options = {"features": features, "silence": silence, "has_validation": config.validation_share == 0}
    return SpeechSource.find(data_root(config), classes, **options) or _not_found(config, layout)


def folder(
    config: DataConfig,
    *,
    path: Annotated[str, PATH, "folder with train/CLASS/*.png and test/CLASS/*.png, or with CLASS/*.png"],
    size: Annotated[int | None, IMAGE_SIDE, "scale images to size x size; null: all are of one size"] = None,
    grey: Annotated[bool, "one channel instead of three"] = False,
) -> OwnFolders:
    """Image files in folders, one folder per class."""
    return find_folders(_place(config, path), size, grey=grey)


def npz(
    config: DataConfig, *, path: Annotated[str, PATH, "the file; arrays train_x, train_y, test_x, test_y"]
) -> Arrays:
    """One .npz file of NumPy."""
    return read_npz(_place(config, path))


def _place(config: DataConfig, path: str) -> Path:
    """The given path if it exists, otherwise the path relative to the folder of the originals if that exists."""
    given = Path(path).expanduser()
    below = data_root(config) / given
    return below if not given.exists() and below.exists() else given


class _Known(Mapping[str, DataSet]):
    """The built-in data sets by name, and torchvision's by `torchvision:NAME`."""

    def __init__(self, named: Mapping[str, DataSet]) -> None:
        self._named = named

    def __getitem__(self, name: str) -> DataSet:
        if name.startswith(TORCHVISION):
            return partial(torchvision_set, name.removeprefix(TORCHVISION))
        return self._named[name]

    def __contains__(self, name: object) -> bool:
        return name in self._named or (isinstance(name, str) and name.startswith(TORCHVISION))

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


DATASETS: Registry[DataSet] = Registry(
    "data set",
    _Known(
        {
            f.__name__: f
            for f in (digits, cifar10, cifar100, synthetic, cinic10, shakespeare, ptb, speech_commands, folder, npz)
        }
    ),
    ("config",),
)


def data_choices(config: DataConfig) -> tuple[ComponentSpec, ComponentSpec]:
    """Data set and augmentation with their options; ValueError with the key of an unknown one."""
    slots: dict[str, tuple[Registry[Any], str]] = {
        "dataset": (DATASETS, config.dataset),
        "augment": (AUGMENTATIONS, config.augment),
    }
    for key, (slot, name) in slots.items():
        try:
            slot.find(name)
        except ValueError as error:
            raise type(error)(f"data.{key}: {error}") from error
    dataset, augment = component_specs([*slots.values()], config.options, "data.options")
    return dataset, augment


def find_source(config: DataConfig) -> Source | TokenSource:
    """The source of the data set `config.dataset`.

    Raises ValueError with the places searched, or naming the file that is not in the published layout; PluginError for
    a user's function that does not return a data set.
    """
    dataset, _ = data_choices(config)
    return source_of(DATASETS.make(dataset)(config), config.dataset)


def _not_found(config: DataConfig, layout: str = "") -> NoReturn:
    layout = layout or PUBLISHED[config.dataset].where
    only = "; data.download=true fetches CIFAR and torchvision's alone" if config.download else ""
    raise ValueError(
        f"{config.dataset} not found under {data_root(config)}: looked for {layout}; "
        f"set FEDLOOM_DATA or data.root{only}"
    )


def _find_cifar(dataset: str, root: Path, download: bool) -> Source:
    pickles = PickleSource(root / LAYOUTS[dataset].folder, LAYOUTS[dataset])
    # The originals have priority, because Parquet copies may have been re-compressed.
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
        f"{dataset} not found under {root}: looked for {PUBLISHED[dataset].where}; set FEDLOOM_DATA or data.root, or "
        "data.download=true"
    )


def _download(dataset: str, root: Path) -> None:
    datasets = torchvision_datasets()
    try:
        root.mkdir(parents=True, exist_ok=True)
        {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[dataset](root, download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"data.download=true: {dataset} could not be fetched into {root} ({error}); "
            f"put {LAYOUTS[dataset].folder}/ there by hand"
        ) from error


class DigitsSource(Source):
    """The 1797 handwritten digits of scikit-learn, 1x8x8, values 0..16, with a fixed 80/20 split.

    They are read only to be prepared: importing scikit-learn takes as long as torch.
    """

    class_names = tuple(str(d) for d in range(10))
    scale: float = 16

    @cached_property
    def _samples(self) -> tuple[ByteArray, IntArray]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)

    @cached_property
    def _rows(self) -> dict[str, IntArray]:
        _, y = self._samples
        test = stratified_rows(y, round(DIGITS_TEST_SHARE * len(y)), stream(FIXED_SEED, "digits test split"))
        return {"train": np.setdiff1d(np.arange(len(y)), test), "test": test}

    def identity(self) -> Fields:
        return {"layout": "scikit-learn digits", "test_share": DIGITS_TEST_SHARE}

    def labels(self, part: str) -> IntArray:
        return self._samples[1][self._rows[part]]

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        return self._samples[0][self._rows[part][rows]]


@dataclass(frozen=True, slots=True)
class SyntheticSource(Source):
    """Random images of CIFAR's shape: a learnable pattern per class plus noise."""

    train_samples: int
    test_samples: int
    class_names: tuple[str, ...] = tuple(f"class {c}" for c in range(SYNTHETIC_CLASSES))
    scale: float = 255

    def identity(self) -> Fields:
        return {"layout": "synthetic", "train_samples": self.train_samples, "test_samples": self.test_samples}

    def labels(self, part: str) -> IntArray:
        samples = self.train_samples if part == "train" else self.test_samples
        return stream(FIXED_SEED, "synthetic labels", part).permutation(samples) % SYNTHETIC_CLASSES

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        y = self.labels(part)
        patterns = stream(FIXED_SEED, "synthetic patterns").integers(
            0, 128, (SYNTHETIC_CLASSES, 3, 32, 32), dtype=np.uint8
        )
        x = stream(FIXED_SEED, "synthetic noise", part).integers(0, 128, (len(y), 3, 32, 32), dtype=np.uint8)
        for label, pattern in enumerate(patterns):
            x[y == label] += pattern
        return x if len(rows) == len(y) else x[rows]
