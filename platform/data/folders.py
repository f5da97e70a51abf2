"""Images in folders, one folder per class: `PART/CLASS/*.png`, or `CLASS/*.png` without a test part."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from fedloom.platform.data.artefact import ByteArray, Fields, IntArray
from fedloom.platform.data.decode import decode_image
from fedloom.platform.data.source import Source
from fedloom.platform.data.stratify import HELD_OUT_SHARE, held_out
from fedloom.platform.plugins import PluginError

PARTS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")

Listing = tuple[tuple[str, int], ...]
"""Names and sizes in bytes of the images of a class, sorted by name."""


@dataclass(frozen=True, slots=True)
class FolderSource(Source):
    """Images of `PART/CLASS/`, sorted by class and file name; created by `find_folders` or `find_cinic`.

    `shape` is (height, width) of all images; with `resized` images are scaled to it.
    """

    folder: Path
    listings: dict[str, tuple[Listing, ...]]
    class_names: tuple[str, ...] = field()  # without `field()` the base's property would be the default
    layout: str = field()
    shape: tuple[int, int] = field()
    grey: bool = False
    resized: bool = False
    scale: float = 255

    def identity(self) -> Fields:
        # Names and sizes, not contents: reading 180 000 small files from a cold disk takes minutes in every run, and an
        # image with other pixels rarely has the same size.
        digest = sha256()
        for part, listings in self.listings.items():
            for label, listing in zip(self.class_names, listings, strict=True):
                for name, size_bytes in listing:
                    digest.update(f"{part}/{label}/{name}\t{size_bytes}\n".encode())
        return {"layout": self.layout, "sha256_of_names_and_sizes": digest.hexdigest()}

    def labels(self, part: str) -> IntArray:
        counts = [len(listing) for listing in self.listings[part]]
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        files = self._files(part)
        images_NCHW = np.empty((len(rows), 1 if self.grey else 3, *self.shape), dtype=np.uint8)
        for i, row in enumerate(rows.tolist()):
            encoded = files[row].read_bytes()
            images_NCHW[i] = decode_image(encoded, str(files[row]), self.shape, grey=self.grey, resized=self.resized)
        return images_NCHW

    def _files(self, part: str) -> list[Path]:
        folders = (self.folder / part / label for label in self.class_names)
        listings = zip(folders, self.listings[part], strict=True)
        return [folder / name for folder, listing in listings for name, _ in listing]


@dataclass(frozen=True, slots=True)
class OwnFolders(FolderSource):
    """A user's own folders; without a test part, a fifth of each class is held out for testing."""

    together: bool = False
    """Whether `folder` has the class folders directly, so that the test part is drawn from them."""

    def identity(self) -> Fields:
        options = {"shape": list(self.shape), "grey": self.grey, "resized": self.resized}
        return {**FolderSource.identity(self), **options, "held_out": HELD_OUT_SHARE if self.together else 0}

    def labels(self, part: str) -> IntArray:
        if not self.together:
            return FolderSource.labels(self, part)
        return FolderSource.labels(self, "")[self._rows(part)]

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        if not self.together:
            return FolderSource.inputs(self, part, rows)
        return FolderSource.inputs(self, "", self._rows(part)[rows])

    def _rows(self, part: str) -> IntArray:
        train, test = held_out(FolderSource.labels(self, ""))
        return test if part == "test" else train


def find_folders(folder: Path, size: int | None, *, grey: bool) -> OwnFolders:
    """The images in a folder's class folders; PluginError naming what is missing.

    With a `size`, images are scaled to size x size; otherwise all must have the size of the first.
    """
    if not folder.is_dir():
        raise PluginError(f"data set 'folder': {folder} is no folder; set data.options.path")
    together = not (folder / "train").is_dir()
    classes = _subfolders(folder if together else folder / "train")
    if len(classes) < 2:
        raise PluginError(
            f"data set 'folder': {folder} has {len(classes)} class folders: expected train/CLASS/*.png and "
            "test/CLASS/*.png, or CLASS/*.png"
        )
    listings = {part: _listings(folder / part, classes) for part in ([""] if together else PARTS)}
    shape = (size, size) if size is not None else _shape_of_first(folder, listings, classes)
    return OwnFolders(folder, listings, classes, "image folders", shape, grey, size is not None, together=together)


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")))


def _listings(folder: Path, classes: Sequence[str]) -> tuple[Listing, ...]:
    if not folder.is_dir():
        raise PluginError(f"data set 'folder': {folder} not found: there is a train part, but no test part")
    foreign = sorted(set(_subfolders(folder)) - set(classes))
    if foreign:
        raise PluginError(f"data set 'folder': {folder / foreign[0]} is a class that the train part does not have")
    listings = tuple(list_images(folder / label) for label in classes)
    for label, listing in zip(classes, listings, strict=True):
        if not listing:
            raise PluginError(f"data set 'folder': {folder / label} has no images ({', '.join(SUFFIXES)})")
    return listings


def list_images(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Listing:
    """The images of a class; empty if the folder does not exist."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted((e.name, e.stat().st_size) for e in entries if e.name.lower().endswith(tuple(suffixes))))


def _shape_of_first(folder: Path, listings: Mapping[str, Sequence[Listing]], classes: Sequence[str]) -> tuple[int, int]:
    from PIL import Image

    part, first = next(iter(listings.items()))
    file = folder / part / classes[0] / first[0][0][0]
    try:
        with Image.open(file) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError) as error:
        raise PluginError(f"data set 'folder': {file} is not an image ({error})") from error
