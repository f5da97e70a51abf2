"""Torchvision's classification data sets, by the names of their Python classes."""

import inspect
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any

import numpy as np

from fedloom.platform.data.artefact import AnyArray, ByteArray, Fields, IntArray
from fedloom.platform.data.config import DataConfig, data_root
from fedloom.platform.data.source import Source
from fedloom.platform.plugins import PluginError, in_one_line
from fedloom.platform.settings import NOT_EMPTY, Range

LABELS = ("targets", "labels", "_labels", "y")
"""The attributes in which torchvision's data sets store their labels."""
TEST_SPLITS = ("test", "val", "valid")
IMAGE_SIDE = Range(least=1, most=10_000)
"""Pixels to which images may be scaled."""


def torchvision_datasets() -> Any:
    """The module `torchvision.datasets`; ValueError if torchvision is incompatible with torch."""
    # Imported here because a torchvision built for another torch fails on import, and few data sets need it.
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"torchvision does not fit the installed torch ({error}); install the torchvision release made for it "
            "(pip install --upgrade torch torchvision), or use files that are there already"
        ) from error
    return datasets


def torchvision_set(
    name: str,
    config: DataConfig,
    *,
    size: Annotated[int | None, IMAGE_SIDE, "scale images to size x size; null: as they are"] = None,
    split: Annotated[str | None, NOT_EMPTY, "torchvision's own `split` where it says which set, as for EMNIST"] = None,
) -> "TorchvisionSource":
    """The data set `torchvision:NAME`, from files under data.root, or downloaded with data.download=true."""
    blame = f"data set 'torchvision:{name}'"
    kind = getattr(torchvision_datasets(), name, None)
    if not inspect.isclass(kind):
        raise PluginError(f"{blame}: torchvision.datasets has no {name!r}")
    parts = {part: _opened(kind, part, config, split, blame) for part in ("train", "test")}
    return TorchvisionSource(name, parts, size)


def _opened(kind: Any, part: str, config: DataConfig, split: str | None, blame: str) -> Any:
    parameters = inspect.signature(kind).parameters
    given: dict[str, Any] = {"split": split} if split is not None else {}
    if "download" in parameters:
        given["download"] = config.download
    if "train" in parameters:
        choices: list[dict[str, Any]] = [{"train": part == "train"}]
    elif "split" in parameters and split is None:
        choices = [{"split": s} for s in (("train",) if part == "train" else TEST_SPLITS)]
    elif "image_set" in parameters:
        choices = [{"image_set": s} for s in (("train",) if part == "train" else TEST_SPLITS)]
    else:
        raise PluginError(f"{blame}: it does not say which of its samples train; use data.dataset=folder or npz")
    root, problem = data_root(config), ""
    for choice in choices:
        try:
            return kind(str(root), **choice, **given)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            problem = problem or in_one_line(error).partition(" (line ")[0]
    download = "" if config.download else ", or set data.download=true"
    raise PluginError(f"{blame} cannot be opened in {root}: {problem}; set data.root to where its files lie{download}")


class TorchvisionSource(Source):
    """A torchvision data set without transforms."""

    scale: float = 255

    def __init__(self, name: str, parts: dict[str, Any], size: int | None) -> None:
        self.name, self.parts, self.size = name, parts, size
        self._labels = {part: _labels(found, f"data set 'torchvision:{name}'") for part, found in parts.items()}
        self._names = self._found_names()

    @property
    def class_names(self) -> Sequence[str]:
        """Torchvision's class names; numbers if it has none."""
        return self._names

    def _found_names(self) -> tuple[str, ...]:
        count = 1 + max(int(y.max()) for y in self._labels.values())
        names = getattr(self.parts["train"], "classes", None)
        texts = tuple(" / ".join(n) if isinstance(n, tuple) else str(n) for n in names) if names else ()
        return texts if len(texts) >= count else tuple(map(str, range(count)))

    def identity(self) -> Fields:
        # No hashes of the images: torchvision checks the files when it downloads them.
        labels = {part: sha256(y.tobytes()).hexdigest() for part, y in self._labels.items()}
        return {"layout": f"torchvision {self.name}", "sha256_of_labels": labels, "size": self.size}

    def labels(self, part: str) -> IntArray:
        return self._labels[part]

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        images = [self._pixels(self.parts[part][row][0], part, row) for row in rows.tolist()]
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise PluginError(
                f"data set 'torchvision:{self.name}' has images of different sizes, such as {sorted(shapes)[:2]}: set "
                "data.options.size"
            )
        return np.stack(images)

    def _pixels(self, image: Any, part: str, row: int) -> ByteArray:
        from PIL import Image

        if not isinstance(image, Image.Image):
            raise PluginError(
                f"data set 'torchvision:{self.name}': sample {row} of {part} is {type(image).__name__}, not an image"
            )
        if image.mode not in ("L", "RGB"):
            image = image.convert("RGB")
        if self.size is not None:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _labels(found: Any, blame: str) -> IntArray:
    """The labels (n,), read without decoding images if the data set stores them separately."""
    known = next((getattr(found, name) for name in LABELS if getattr(found, name, None) is not None), None)
    if known is None:
        known = [found[row][1] for row in range(len(found))]
    try:
        labels = np.asarray(known).reshape(-1).astype(np.int64)
    except (TypeError, ValueError):
        labels = np.array([], dtype=np.int64)
    if len(labels) != len(found) or not len(labels) or labels.min() < 0:
        raise PluginError(f"{blame}: its targets are not one class per image; it is no classification set")
    return labels
