"""CINIC-10 as its authors publish it: one folder per part and class, one PNG per image (Darlow et al. 2018)."""

from pathlib import Path

from fedloom.platform.data.folders import PARTS, FolderSource, Listing, list_images

FOLDERS = ("CINIC-10", "cinic10")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The class folders in the order of their labels."""
IMAGE_SHAPE = (32, 32)


def find_cinic(root: Path) -> FolderSource | None:
    """The source in `CINIC-10/` or `cinic10/` under `root`; None if neither exists.

    The original's validation set `valid` is not read: as for all data sets, a client's validation samples are taken
    from its training samples.
    Raises ValueError naming the folder that is missing, empty, or not one of the published classes.
    """
    there = [root / name for name in FOLDERS if (root / name).is_dir()]
    if not there:
        return None
    folder = next((folder for folder in there if (folder / PARTS[0]).is_dir()), there[0])
    listings = {part: _list_part(folder / part) for part in PARTS}
    return FolderSource(folder, listings, CLASSES, "CINIC-10 folders", IMAGE_SHAPE)


def _list_part(folder: Path) -> tuple[Listing, ...]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: not found; CINIC-10 has the folders train and test: unpack the archive again")
    # Another folder would not change the labels, but shows that this is not the published data set.
    foreign = sorted(f.name for f in folder.iterdir() if f.is_dir() and f.name not in CLASSES)
    if foreign:
        raise ValueError(f"{folder / foreign[0]}: not a class of CINIC-10; expected {', '.join(CLASSES)}")
    return tuple(_list_class(folder / label) for label in CLASSES)


def _list_class(folder: Path) -> Listing:
    if not folder.is_dir():
        raise ValueError(f"{folder}: not found; CINIC-10 has one folder per class: unpack the archive again")
    images = list_images(folder, (".png",))
    if not images:
        raise ValueError(f"{folder}: has no .png files; unpack the archive again")
    return images
