import io
import json
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.image_files import LAYOUTS
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import find_source
from fedloom.platform.data.source import LabelSet, Source, stratified_rows

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


PurePickler: Any = vars(pickle)["_Pickler"]


class Python2Pickler(PurePickler):  # type: ignore[misc]
    """Writes text and bytes as Python 2 strings, as in the published files."""

    dispatch: ClassVar[dict[type, Any]] = dict(PurePickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = save_string
    dispatch[bytes] = save_string


def dump(path: Path, content: object) -> None:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    path.write_bytes(file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def fake_cifar(root: Path, dataset: str = "cifar10", per_batch: int = 20) -> dict[str, Any]:
    """Writes a small data set in the published layout; returns its training images and labels."""
    rng = np.random.default_rng(0)
    layout = LAYOUTS[dataset]
    folder = root / layout.folder
    folder.mkdir(parents=True)
    written: dict[str, list[Any]] = {"x": [], "y": []}
    for file in (*layout.train, *layout.test):
        x = rng.integers(0, 256, (per_batch, 3072), dtype=np.uint8)
        y = [i % 10 for i in range(per_batch)]
        dump(folder / file, {"batch_label": file, layout.labels_key: y, "data": x, "filenames": ["a.png"] * per_batch})
        if file in layout.train:
            written["x"].append(x.reshape(-1, 3, 32, 32))
            written["y"] += y
    dump(folder / layout.meta, {layout.names_key: list(NAMES), "num_vis": 3072})
    return {"x": np.concatenate(written["x"]), "y": np.array(written["y"])}


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def write_parquet(path: Path, images: list[bytes], labels: list[int], label: str = "label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image, "path": None} for image in images]
    img = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"img": img, label: pa.array(labels, pa.int64())}), path)


def test_digits_split_is_fixed_and_stratified() -> None:
    source = find_source(DataConfig())
    train, test = source.labels("train"), source.labels("test")
    assert (len(train), len(test), source.scale) == (1438, 359, 16)
    shares = np.bincount(test) / (np.bincount(train) + np.bincount(test))
    assert np.abs(shares - 0.2).max() < 0.006
    images = source.inputs("train", np.array([0, 5]))
    assert images.shape == (2, 1, 8, 8)
    assert images.dtype == np.uint8
    assert images.max() <= 16
    again = find_source(DataConfig())
    assert np.array_equal(again.inputs("test", np.arange(359)), source.inputs("test", np.arange(359)))


def test_synthetic_images_are_the_same_each_time_in_any_number() -> None:
    source = find_source(DataConfig(dataset="synthetic", train_samples=105, test_samples=7))
    assert np.bincount(source.labels("train")).tolist() == [11] * 5 + [10] * 5
    x = source.inputs("train", np.arange(105))
    assert x.shape == (105, 3, 32, 32)
    assert np.array_equal(source.inputs("train", np.array([3, 90])), x[[3, 90]])
    assert source.inputs("test", np.arange(7)).shape == (7, 3, 32, 32)


def test_a_stratified_sample_keeps_shares_exactly() -> None:
    labels = np.array([0] * 60 + [1] * 30 + [2] * 10)
    rows = stratified_rows(labels, 10, np.random.default_rng(0))
    assert np.bincount(labels[rows]).tolist() == [6, 3, 1]
    assert np.array_equal(rows, np.unique(rows))
    assert len(stratified_rows(labels, 7, np.random.default_rng(0))) == 7
    assert np.array_equal(stratified_rows(labels, 100, np.random.default_rng(0)), np.arange(100))


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_the_authors_pickles_are_read_as_published(tmp_path: Path, dataset: str) -> None:
    written = fake_cifar(tmp_path, dataset)
    source = find_source(DataConfig(dataset=dataset, root=str(tmp_path)))
    assert source.class_names == NAMES
    assert np.array_equal(source.labels("train"), written["y"])
    rows = np.arange(len(written["y"]))
    assert np.array_equal(source.inputs("train", rows), written["x"])
    assert source.inputs("test", np.array([0])).shape == (1, 3, 32, 32)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    fake_cifar(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    source = find_source(DataConfig(dataset="cifar10", root=str(tmp_path)))
    with pytest.raises(ValueError, match=r"data_batch_3: not a published CIFAR batch \(refers to os.system\)"):
        source.labels("train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a published CIFAR batch"),
        (b"\x00garbage", "not a published CIFAR batch"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({"labels": [1]}), r"keys \['labels'\]; expected data and labels"),
        (pickle.dumps({"labels": [1], "data": [0] * 3072}), "data is not uint8"),
    ],
)
def test_a_damaged_pickle_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    fake_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    source = find_source(DataConfig(dataset="cifar10", root=str(tmp_path)))
    with pytest.raises(ValueError, match=f"test_batch: {message}"):
        source.labels("test")


def test_a_truncated_pickle_is_named(tmp_path: Path) -> None:
    fake_cifar(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "test_batch"
    whole = batch.read_bytes()
    source = find_source(DataConfig(dataset="cifar10", root=str(tmp_path)))
    for length in range(1, len(whole), len(whole) // 40):
        batch.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="test_batch: not a published CIFAR batch"):
            source.labels("test")


def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path) -> None:
    fake_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(ValueError, match="cifar-10-batches-py: data_batch_4 is missing"):
        find_source(DataConfig(dataset="cifar10", root=str(tmp_path)))


def test_a_missing_data_set_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cifar10 not found under") as error:
        find_source(DataConfig(dataset="cifar10", root=str(tmp_path)))
    for part in (
        str(tmp_path),
        "cifar-10-batches-py/",
        "cifar10/train-*.parquet",
        "FEDLOOM_DATA",
        "data.download=true",
    ):
        assert part in str(error.value)


def test_a_download_without_a_fitting_torchvision_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=r"torchvision does not fit the installed torch .*pip install"):
        find_source(DataConfig(dataset="cifar10", root=str(tmp_path), download=True))


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")

    def unreachable(self: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(datasets.CIFAR100, "download", unreachable)
    with pytest.raises(ValueError, match=r"cifar100 could not be fetched into .*no route.*cifar-100-python/"):
        find_source(DataConfig(dataset="cifar100", root=str(tmp_path), download=True))


def test_parquet_shards_are_read_in_order_and_only_where_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    images = [png(p) for p in pixels]
    write_parquet(
        tmp_path / "cifar100" / "train-00001-of-00002.parquet", [*images[3:4], b"broken"], [7, 8], "fine_label"
    )
    write_parquet(tmp_path / "cifar100" / "train-00000-of-00002.parquet", images[:3], [4, 5, 6], "fine_label")
    write_parquet(tmp_path / "cifar100" / "test-00000-of-00001.parquet", images[4:], [99], "fine_label")
    source = find_source(DataConfig(dataset="cifar100", root=str(tmp_path)))
    assert source.labels("train").tolist() == [4, 5, 6, 7, 8]
    assert len(source.class_names) == 100
    chosen = source.inputs("train", np.array([3, 1, 2]))
    assert np.array_equal(chosen, pixels[[3, 1, 2]].transpose(0, 3, 1, 2))
    with pytest.raises(ValueError, match=r"train-00001-of-00002.parquet: row 1 is not an image"):
        source.inputs("train", np.arange(5))


def test_class_names_come_from_the_schema_of_the_hub(tmp_path: Path) -> None:
    image = png(np.zeros((32, 32, 3), dtype=np.uint8))
    for part in ("train", "test"):
        path = tmp_path / "cifar10" / "plain_text" / f"{part}-00000-of-00001.parquet"
        write_parquet(path, [image], [0])
        info = {"info": {"features": {"label": {"names": list(NAMES), "_type": "ClassLabel"}}}}
        pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": json.dumps(info)}), path)
    assert find_source(DataConfig(dataset="cifar10", root=str(tmp_path))).class_names == NAMES


def test_foreign_parquet_is_named_with_what_was_expected(tmp_path: Path) -> None:
    image = png(np.zeros((32, 32, 3), dtype=np.uint8))
    config = DataConfig(dataset="cifar10", root=str(tmp_path))
    train, test = (tmp_path / "cifar10" / f"{part}-0.parquet" for part in ("train", "test"))
    write_parquet(test, [image], [0])
    write_parquet(train, [image], [0], label="fine_label")
    with pytest.raises(
        ValueError, match=r"train-0.parquet: columns img, fine_label; expected .*img\{bytes,path\} \(or"
    ):
        find_source(config)
    train.write_bytes(b"PAR1 not at all")
    with pytest.raises(ValueError, match=r"train-0.parquet: cannot be read .*expected a Parquet file") as error:
        find_source(config)
    assert "\n" not in str(error.value)
    write_parquet(train, [image], [10])
    with pytest.raises(ValueError, match=r"train-0.parquet: labels 10..10; expected 0..9"):
        find_source(config).labels("train")
    write_parquet(train, [png(np.zeros((28, 28, 3), dtype=np.uint8))], [1])
    with pytest.raises(ValueError, match=r"train-0.parquet: row 0 has shape \(28, 28, 3\)"):
        find_source(config).inputs("train", np.array([0]))


def test_a_parquet_file_with_damaged_pages_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    images = [png(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(20)]
    for part in ("train", "test"):
        write_parquet(tmp_path / "cifar10" / f"{part}-0.parquet", images, [0] * 20)
    train = tmp_path / "cifar10" / "train-0.parquet"
    damaged = bytearray(train.read_bytes())
    damaged[4:2000] = b"\xff" * 1996
    train.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"train-0.parquet: "):
        find_source(DataConfig(dataset="cifar10", root=str(tmp_path))).inputs("train", np.arange(20))


def test_the_real_cifar10_is_prepared(tmp_path: Path) -> None:
    root = os.environ.get("FEDLOOM_DATA")
    if not root or not list(Path(root).glob("cifar10/train-*.parquet")):
        pytest.skip("needs CIFAR-10 in Parquet: set FEDLOOM_DATA to the folder that holds cifar10/")
    config = DataConfig(dataset="cifar10", cache=str(tmp_path), train_samples=2000, test_samples=500)
    dataset = Dataset.open(prepare_dataset(config))
    assert dataset.input_shape == (3, 32, 32)
    assert dataset.class_names == NAMES
    assert np.bincount(dataset.labels("train")).tolist() == [200] * 10
    assert np.bincount(dataset.labels("test")).tolist() == [50] * 10
    # The published statistics of the whole set; 2000 images come close.
    assert np.abs(np.array(dataset.mean) - [0.4914, 0.4822, 0.4465]).max() < 0.02
    assert np.abs(np.array(dataset.std) - [0.2470, 0.2435, 0.2616]).max() < 0.02


FINE_TO_COARSE = [4, 1, 4, 0, 1, 2, 2, 3, 3, 0]
"""The coarser class of each of ten classes."""


def test_the_published_superclasses_of_cifar100_are_read_with_their_names(tmp_path: Path) -> None:
    folder, names = fake_cifar_with_coarse(tmp_path, FINE_TO_COARSE)
    found = find_source(DataConfig(dataset="cifar100", root=str(tmp_path)))
    assert isinstance(found, Source)
    assert found.label_sets["coarse"] == LabelSet(tuple(FINE_TO_COARSE), tuple(names))
    data = DataConfig(dataset="cifar100", root=str(tmp_path), cache=str(tmp_path / "cache"), num_clients=2)
    assert Dataset.open(prepare_dataset(data)).label_sets == found.label_sets
    plain = find_source(DataConfig())
    assert isinstance(plain, Source)
    assert plain.label_sets == {}
    content = pickle.loads((folder / "train").read_bytes(), encoding="latin1")
    content["coarse_labels"][0] += 1
    dump(folder / "train", content)
    with pytest.raises(ValueError, match=r"train: samples of class 0 have different coarse labels"):
        _ = found.label_sets


def fake_cifar_with_coarse(root: Path, of: list[int]) -> tuple[Path, list[str]]:
    """A small CIFAR-100 in the published layout, of ten classes, with superclasses."""
    fake_cifar(root, "cifar100")
    folder, names = root / LAYOUTS["cifar100"].folder, [f"kind {c}" for c in range(5)]
    meta = pickle.loads((folder / "meta").read_bytes(), encoding="latin1")
    dump(folder / "meta", {**meta, "coarse_label_names": names})
    content = pickle.loads((folder / "train").read_bytes(), encoding="latin1")
    dump(folder / "train", {**content, "coarse_labels": [of[c] for c in content["fine_labels"]]})
    return folder, names


def test_the_superclasses_of_parquet_are_read_where_their_column_is(tmp_path: Path) -> None:
    images = [png(np.zeros((32, 32, 3), np.uint8))] * 3
    for part in ("train", "test"):
        path = tmp_path / "cifar100" / f"{part}-00000-of-00001.parquet"
        write_parquet(path, images, [0, 1, 2], "fine_label")
        assert pq.read_table(path).num_rows == 3
    source = find_source(DataConfig(dataset="cifar100", root=str(tmp_path)))
    assert isinstance(source, Source)
    assert source.label_sets == {}
    path = tmp_path / "cifar100" / "train-00000-of-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("coarse_label", pa.array([3, 19, 3], pa.int64())), path)
    assert source.label_sets["coarse"].of[:3] == (3, 19, 3)
    assert len(source.label_sets["coarse"].names) == 20
