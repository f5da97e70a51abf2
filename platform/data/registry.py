"""The registry of data sets (built-in, torchvision's and a user's own), and the known sizes of the published ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
from annotated_types import Interval

from fedloom.platform.data.arrays import Arrays, TreeArrays, read_npz, source_of
from fedloom.platform.data.artefact import ByteArray, Fields, IntArray
from fedloom.platform.data.augment import AUGMENTATIONS, FEATURES_OF_SOUND
from fedloom.platform.data.config import BY_LABEL, PARTITIONS, DataConfig, data_root
from fedloom.platform.data.dataset import PARTS, Dataset
from fedloom.platform.data.image_files import (
    CINIC_FOLDERS,
    IMAGE_SIDE,
    LAYOUTS,
    FolderSource,
    PickleSource,
    find_cinic,
    find_folders,
    find_parquet,
    torchvision_datasets,
    torchvision_set,
)
from fedloom.platform.data.source import Source, stratified_rows
from fedloom.platform.data.speech import SpeechSource
from fedloom.platform.data.table_files import INPUT_COLUMNS, SHAPE, Layout, TableSource, find_table
from fedloom.platform.data.tokens import PtbSource, ShakespeareSource, TokenSource
from fedloom.platform.plugins import ComponentSpec, Registry
from fedloom.platform.seeding import stream
from fedloom.platform.settings import NOT_EMPTY, PATH, check_settings, component_specs


@dataclass(frozen=True)
class Published:
    """Where the files of a published data set are, and how large it is.

    Attributes:
        where: the files, below `data.root`, and where they come from.
        samples: number in the train and in the test part; for texts the number of tokens to be predicted.
        classes: number of classes, or of tokens in the vocabulary.
        even: whether all classes have equally many samples.
        clients: number of natural clients in both parts; None if there are none.
        coarse: number of classes in each of its label sets, by name.
    """

    where: str
    samples: tuple[int, int]
    classes: int
    even: bool = False
    clients: int | None = None
    coarse: Mapping[str, int] | None = None


PUBLISHED: Mapping[str, Published] = {
    "cifar10": Published(
        "cifar-10-python.tar.gz (170 498 071 bytes, as the authors and torchvision have it) or cifar-10-batches-py/ "
        "unpacked of it, or the hub's cifar10/train-*.parquet with test-*.parquet",
        (50_000, 10_000),
        10,
        even=True,
    ),
    "cifar100": Published(
        "cifar-100-python.tar.gz (169 001 437 bytes, as the authors and torchvision have it) or cifar-100-python/ "
        "unpacked of it, or the hub's cifar100/train-*.parquet with test-*.parquet",
        (50_000, 10_000),
        100,
        even=True,
        coarse={"coarse": 20},
    ),
    "cinic10": Published(
        "CINIC-10/ or cinic10/ with train/CLASS/*.png and test/CLASS/*.png, unpacked of CINIC-10.tar.gz, or the hub's "
        "cinic10/train-*.parquet with test-*.parquet",
        (90_000, 90_000),
        10,
        even=True,
    ),
    "ptb": Published(
        "ptb.train.txt and ptb.test.txt in ptb/ or simple-examples/data/, of Mikolov's simple-examples.tgz, or the "
        "hub's ptb/train-*.parquet with test-*.parquet",
        (929_588, 82_429),
        10_000,
    ),
    "shakespeare": Published(
        "shakespeare/shakespeare_train.h5 and shakespeare_test.h5, of TensorFlow Federated's shakespeare.tar.bz2",
        (2_390_736, 343_749),
        90,
        clients=715,
    ),
}
"""For other data sets, such as Speech Commands, the readers check that every word and part is there."""


def differences(config: DataConfig, dataset: Dataset) -> list[str]:
    """How a prepared data set differs from the published one, a line each; sizes of sub-samples are not compared."""
    known = PUBLISHED.get(config.dataset)
    if known is None:
        return []
    lines = []
    if dataset.num_classes != known.classes:
        what = "tokens in its vocabulary" if dataset.per_position else "classes"
        lines.append(f"it has {dataset.num_classes} {what}, published are {known.classes}")
    for name, count in (known.coarse or {}).items():
        names = dataset.label_sets[name].names if name in dataset.label_sets else ()
        if len(names) != count:
            lines.append(f"it has {len(names)} {name} classes, published are {count}")
    clients = len(dataset.client_names)
    if known.clients is not None and clients != known.clients:
        lines.append(f"it has {clients} clients, published are {known.clients}")
    for part, count, asked in zip(PARTS, known.samples, (config.train_samples, config.test_samples), strict=True):
        if asked is not None or config.options:  # options change how a text is cut
            continue
        labels = dataset.labels(part)
        predicted, what = (int((labels >= 0).sum()), "tokens") if labels.ndim == 2 else (len(labels), "samples")
        of_class = np.bincount(labels, minlength=known.classes) if known.even else np.zeros(1)
        if predicted != count:
            lines.append(f"its {part} part has {predicted} {what}, published are {count}: a file may be incomplete")
        elif of_class.min() != of_class.max():
            most, least = int(of_class.argmax()), int(of_class.argmin())
            lines.append(
                f"its {part} part has {of_class[most]} samples of class {most} and {of_class[least]} of {least}; "
                "published are as many of each"
            )
    return lines


# -- the data sets by name --------------------------------------------------------------------------------------------

FIXED_SEED = 0
"""Seed of splits and sub-samples, which are properties of the data set and independent of the run's seed."""
SYNTHETIC_CLASSES = 10
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
    return SyntheticSource(config.train_samples or 10_000, config.test_samples or 2_000)


def cinic10(config: DataConfig) -> Source:
    """CINIC-10 from its published folders or as Parquet."""
    root = data_root(config)
    tables = [find_parquet(root / name, "cinic10") for name in CINIC_FOLDERS]
    # Folders are the original format, and so come first.
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
    padded_lines: Annotated[bool, "cut every line separately, and predict its padding, as FedorAS seems to"] = False,
    roles: Annotated[list[Annotated[str, NOT_EMPTY]] | None, "patterns of roles' names, PLAY_ROLE; null: all"] = None,
) -> TokenSource:
    """Shakespeare's plays by character, one client per role, as published for TensorFlow Federated."""
    source = ShakespeareSource.find(
        data_root(config), config.sequence_length, padded_lines=padded_lines, roles=tuple(roles or ("*",))
    )
    return source or _not_found(config)


def ptb(config: DataConfig) -> TokenSource:
    """The Penn Treebank by words."""
    return PtbSource.find(data_root(config), config.sequence_length) or _not_found(config)


def speech_commands(
    config: DataConfig,
    *,
    classes: Annotated[int, Interval(ge=12, le=35), "12 (ten words, others, silence) or 35"] = 12,
    features: FEATURES_OF_SOUND = "htk",
    silence: Annotated[
        float | None,
        Interval(ge=0, le=1),
        "speech: clips of silence as a share of a speaker's spoken clips; null: each second of noise once",
    ] = 0.1,
) -> Source:
    """Speech Commands, one client per speaker, as 40 MFCC of 51 frames; needs fedloom[speech] to be prepared.

    The validation speakers' clips are the validation data if clients hold none back (`data.validation_share=0`).
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
) -> FolderSource:
    """Image files in folders, one folder per class."""
    return find_folders(_existing(config, path), size, grey=grey)


def table(
    config: DataConfig,
    *,
    path: Annotated[
        str, PATH, "a .csv, .parquet or .arrow file, or a folder of them, such as Hugging Face's save_to_disk writes"
    ],
    x: INPUT_COLUMNS = None,
    y: Annotated[str, NOT_EMPTY, "the column of labels"] = "label",
    client: Annotated[str | None, NOT_EMPTY, "the column of natural clients"] = None,
    size: Annotated[int | None, IMAGE_SIDE, "scale images to size x size; null: all are of one size"] = None,
    grey: Annotated[bool, "one channel instead of three"] = False,
    shape: SHAPE = None,
) -> TableSource:
    """Tables of numbers, vectors or images: CSV, Parquet, or a data set that Hugging Face's `datasets` saved."""
    shared = {*AUGMENTATIONS.options_of(config.augment)}
    return find_table(_existing(config, path), Layout(x or (), y, client, size, grey, shape), shared)


def npz(
    config: DataConfig, *, path: Annotated[str, PATH, "the file; arrays train_x, train_y, test_x, test_y"]
) -> Arrays:
    """One .npz file of NumPy."""
    return read_npz(_existing(config, path))


def _existing(config: DataConfig, path: str) -> Path:
    """The given path if it exists, otherwise the path relative to the folder of the originals if that exists."""
    as_given = Path(path).expanduser()
    below = data_root(config) / as_given
    return below if not as_given.exists() and below.exists() else as_given


class _Known(dict[str, DataSet]):
    """The built-in data sets by name, and torchvision's by `torchvision:NAME`."""

    def __missing__(self, name: str) -> DataSet:
        if not name.startswith(TORCHVISION):
            raise KeyError(name)
        return partial(torchvision_set, name.removeprefix(TORCHVISION))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(TORCHVISION))


_BUILT_IN = (digits, cifar10, cifar100, synthetic, cinic10, shakespeare, ptb, speech_commands, folder, table, npz)
DATASETS: Registry[DataSet] = Registry("data set", _Known({f.__name__: f for f in _BUILT_IN}), ("config",))


def data_slots(config: DataConfig) -> dict[str, tuple[Registry[Any], str]]:
    """The registries and the names chosen from them that share `data.options`, by key."""
    return {"dataset": (DATASETS, config.dataset), "augment": (AUGMENTATIONS, config.augment)}


def data_choices(config: DataConfig) -> tuple[ComponentSpec, ComponentSpec]:
    """Data set and augmentation with their options; ValueError with the key of an unknown one."""
    slots = data_slots(config)
    for key, (slot, name) in slots.items():
        try:
            slot.find(name)
        except ValueError as error:
            raise type(error)(f"data.{key}: {error}") from error
    dataset, augment = component_specs([*slots.values()], config.options, "data.options")
    return dataset, augment


def find_source(config: DataConfig) -> Source | TokenSource | TreeArrays:
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
        datasets = torchvision_datasets()
        try:
            root.mkdir(parents=True, exist_ok=True)
            {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[dataset](root, download=True)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"data.download=true: {dataset} could not be fetched into {root} ({error}); "
                f"put {LAYOUTS[dataset].folder}/ there by hand"
            ) from error
        return pickles
    if pickles.folder.is_dir():
        raise ValueError(f"{pickles.folder}: {pickles.missing_files()[0]} is missing; unpack the archive again")
    raise ValueError(
        f"{dataset} not found under {root}: looked for {PUBLISHED[dataset].where}; set FEDLOOM_DATA or data.root, or "
        "data.download=true"
    )


# -- data sets without files ------------------------------------------------------------------------------------------


class DigitsSource(Source):
    """The 1797 handwritten digits of scikit-learn, 1x8x8, values 0..16, with a fixed 80/20 split.

    Read only to be prepared, because importing scikit-learn takes as long as importing torch.
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


# -- checks of the options that need no data --------------------------------------------------------------------------

TEXTS = ("shakespeare", "ptb")
WITH_CLIENTS = ("shakespeare", "speech_commands")
"""Data sets that are published with natural clients."""
OF_ITS_OWN = ("folder", "table", "npz")
"""Data sets whose content is known only after reading, like a user's own."""


def check(config: DataConfig) -> None:
    """Raises a one-line ValueError for the first option that is out of range or does not fit the data set."""
    check_settings(config, "data.")
    data_choices(config)
    dataset = config.dataset
    if dataset in [*DATASETS.known] and dataset not in OF_ITS_OWN:
        lacks = {*(BY_LABEL if dataset in TEXTS else ()), *(() if dataset in WITH_CLIENTS else ("natural",))}
        if config.partition in lacks:
            what = "has no class labels to draw by" if config.partition in BY_LABEL else "has no clients of its own"
            allowed = ", ".join(partition for partition in PARTITIONS if partition not in lacks)
            raise ValueError(f"data.partition={config.partition}: {dataset} {what}; must be one of {allowed}")
        if dataset in TEXTS and config.augment != "none" and config.augment in AUGMENTATIONS.known:
            raise ValueError(f"data.augment={config.augment}: {dataset} is text; must be none")
    if dataset in [*DATASETS.known] and dataset not in TEXTS and config.sequence_length is not None:
        raise ValueError(f"data.sequence_length={config.sequence_length}: it is not for {dataset}; leave it out")
    if config.test_share is not None and not config.validation_share + config.test_share < 1:
        raise ValueError(
            f"data.validation_share={config.validation_share} and data.test_share={config.test_share}: must sum to "
            "less than 1; the rest of a client's data trains"
        )
