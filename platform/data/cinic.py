"""CINIC-10 as its authors publish it: one folder per part and class, one PNG per image (Darlow et al. 2018)."""

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from fedloom.platform.data.artefact import ByteArray, Fields, IntArray
from fedloom.platform.data.decode import decode_rgb

FOLDERS = ("CINIC-10", "cinic10")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The class folders in their order, which is that of the labels."""
PARTS = ("train", "test")
IMAGE_SHAPE_HWC = (32, 32, 3)

Listing = tuple[tuple[str, int], ...]
"""Names and sizes in bytes of a class folder's images, in order of the names."""


@dataclass(frozen=True, slots=True)
class CinicSource:
    """The folders `train` and `test`, 90 000 images each; made by `CinicSource.find`.

    `valid`, the original's own validation set, is not read: every client's validation samples come from its training
    samples, as for all data sets here. Samples are in order of class and file name.
    """

    folder: Path
    listings: dict[str, tuple[Listing, ...]]
    class_names: tuple[str, ...] = CLASSES
    scale: int = 255

    @classmethod
    def find(cls, root: Path) -> "CinicSource | None":
        """The source in `CINIC-10/` or `cinic10/` under `root`; None if neither is there.

        Raises ValueError naming the folder that is missing, empty, or not one of the published classes.
        """
        for name in FOLDERS:
            if (root / name).is_dir():
                return cls(root / name, {part: _list_part(root / name / part) for part in PARTS})
        return None

    def identity(self) -> Fields:
        # Names and sizes, not contents: to read and hash 180 000 small files takes minutes on a cold disk, in every
        # run, and a PNG whose pixels differ is hardly ever of the same size.
        digest = sha256()
        for part, listings in self.listings.items():
            for label, listing in zip(CLASSES, listings, strict=True):
                for name, size_bytes in listing:
                    digest.update(f"{part}/{label}/{name}\t{size_bytes}\n".encode())
        return {"layout": "CINIC-10 folders", "sha256_of_names_and_sizes": digest.hexdigest()}

    def labels(self, part: str) -> IntArray:
        counts = [len(listing) for listing in self.listings[part]]
        return np.repeat(np.arange(len(CLASSES), dtype=np.int64), counts)

    def images(self, part: str, rows: IntArray) -> ByteArray:
        files = self._files(part)
        images_NCHW = np.empty((len(rows), 3, 32, 32), dtype=np.uint8)
        for i, row in enumerate(rows.tolist()):
            images_NCHW[i] = decode_rgb(files[row].read_bytes(), str(files[row]), IMAGE_SHAPE_HWC)
        return images_NCHW

    def _files(self, part: str) -> list[Path]:
        folders = (self.folder / part / label for label in CLASSES)
        listings = zip(folders, self.listings[part], strict=True)
        return [folder / name for folder, listing in listings for name, _ in listing]


def _list_part(folder: Path) -> tuple[Listing, ...]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: not found; CINIC-10 has the folders train and test: unpack the archive again")
    # A folder more would shift no label here, but says that this is not the published set.
    foreign = sorted(f.name for f in folder.iterdir() if f.is_dir() and f.name not in CLASSES)
    if foreign:
        raise ValueError(f"{folder / foreign[0]}: not a class of CINIC-10; expected {', '.join(CLASSES)}")
    return tuple(_list_class(folder / label) for label in CLASSES)


def _list_class(folder: Path) -> Listing:
    if not folder.is_dir():
        raise ValueError(f"{folder}: not found; CINIC-10 has one folder per class: unpack the archive again")
    with os.scandir(folder) as entries:
        images = sorted((e.name, e.stat().st_size) for e in entries if e.name.endswith(".png"))
    if not images:
        raise ValueError(f"{folder}: has no .png files; unpack the archive again")
    return tuple(images)
