"""Data sets that a user brings: functions of arrays, `.npz`, folders of images, and torchvision's own."""

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.platform.clients.evaluation import confusion
from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset, StoredSamples
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.image_files import find_folders
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset, prepared_folder
from fedloom.platform.federation.ineffective_keys import clients_without_effect
from fedloom.platform.plugins import PluginError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (50, 6, 6), dtype=np.uint8)
LABELS = np.arange(50) % 5


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., DataConfig]:
    """A configuration of the data set `module:name`, a function that returns what is given."""

    def bring(given: Any, **options: Any) -> DataConfig:
        module = ModuleType("my_data")
        module.__dict__["mine"] = lambda _config: given
        module.__file__ = "my_data.py"
        monkeypatch.setitem(sys.modules, "my_data", module)
        values = {"num_clients": 4, "validation_share": 0.2, **options}
        return DataConfig(dataset="my_data:mine", cache=str(tmp_path / "cache"), root=str(tmp_path), **values)

    return bring


def opened(config: DataConfig, seed: int = 1) -> FederatedData:
    path = prepare_dataset(config, verify=True)
    return FederatedData.open(path, prepare_partition(config, Dataset.open(path), seed))


# -- functions ---------------------------------------------------------------------------------------------------------


def test_images_are_prepared_and_normalised_like_built_in_ones(brought: Callable[..., DataConfig]) -> None:
    names = ["a", "b", "c", "d", "e"]
    config = brought(Arrays((IMAGES, LABELS), (IMAGES[:10], LABELS[:10]), class_names=names))
    data = Dataset.open(prepare_dataset(config))
    assert (data.kind, data.input_shape, data.class_names) == ("image", (1, 6, 6), tuple(names))
    x, y = data.tensors("train", np.arange(50))
    assert y.tolist() == LABELS.tolist()
    scaled = IMAGES[:, None] / 255
    assert np.allclose(x.numpy(), (scaled - scaled.mean()) / scaled.std(), atol=1e-5)
    assert opened(config).num_clients == 4


def test_channels_may_come_last(brought: Callable[..., DataConfig]) -> None:
    colours = RNG.integers(0, 256, (20, 8, 6, 3), dtype=np.uint8)
    data = Dataset.open(prepare_dataset(brought(Arrays((colours, LABELS[:20]), (colours, LABELS[:20])))))
    assert data.input_shape == (3, 8, 6)
    assert np.load(data.path / "train_x.npy").tolist() == colours.transpose(0, 3, 1, 2).tolist()


def test_features_are_normalised_by_channel_or_as_said(brought: Callable[..., DataConfig]) -> None:
    x = RNG.normal(3.0, 2.0, (40, 7))
    config = brought(Arrays((x, LABELS[:40]), (x[:5], LABELS[:5])))
    data = Dataset.open(prepare_dataset(config))
    assert (data.kind, data.input_shape) == ("features", (7,))
    got, _ = data.tensors("train", np.arange(40))
    assert np.allclose(got.numpy(), (x - x.mean(axis=0)) / x.std(axis=0), atol=1e-4)
    assert opened(brought(Arrays((x, LABELS[:40])), partition="iid")).num_clients == 4
    said = Arrays((x, LABELS[:40]), (x[:5], LABELS[:5]), mean=[1.0] * 7, std=[2.0] * 7)
    got, _ = Dataset.open(prepare_dataset(brought(said))).tensors("train", np.arange(40))
    assert np.allclose(got.numpy(), (x - 1) / 2, atol=1e-5)


def test_clients_are_in_order_and_keep_what_is_theirs(brought: Callable[..., DataConfig]) -> None:
    writers = np.array(["zoe", "ada", "bob", "ada", "zoe"])[LABELS]
    given = {"train": (IMAGES, LABELS, writers), "test": (IMAGES[:10], LABELS[:10], writers[:10])}
    data = opened(brought(given, partition="natural", num_clients=3, validation_share=0.0))
    assert data.dataset.client_names == ("ada", "bob", "zoe")
    for client, name in enumerate(("ada", "bob", "zoe")):
        assert data.indices(client, "train").tolist() == np.flatnonzero(writers == name).tolist()
        with data.reading_test():
            assert data.indices(client, "test").tolist() == np.flatnonzero(writers[:10] == name).tolist()


def test_numbered_clients_are_in_the_order_of_their_numbers(brought: Callable[..., DataConfig]) -> None:
    numbers = np.array([10, 9, 100, 1, 2])[LABELS]
    config = brought({"train": (IMAGES, LABELS, numbers)}, partition="natural", num_clients=5, validation_share=0)
    assert opened(config).dataset.client_names == ("1", "2", "9", "10", "100")


def test_clients_numbered_without_and_with_sign_are_the_same(brought: Callable[..., DataConfig]) -> None:
    clients = (LABELS % 2).astype(np.uint64) + 2**60
    given = {"train": (IMAGES, LABELS, clients), "test": (IMAGES, LABELS, clients.astype(np.int64))}
    data = opened(brought(given, partition="natural", num_clients=2, validation_share=0.0))
    assert data.dataset.client_names == (str(2**60), str(2**60 + 1))
    with data.reading_test():
        assert data.indices(1, "test").tolist() == data.indices(1, "train").tolist()


def test_clients_may_be_named_by_a_column_of_objects(brought: Callable[..., DataConfig]) -> None:
    names = np.array([f"client {label % 2}" for label in LABELS], dtype=object)
    config = brought({"train": (IMAGES, LABELS, names)}, partition="natural", num_clients=2, validation_share=0.0)
    assert opened(config).dataset.client_names == ("client 0", "client 1")


def test_clients_that_another_partition_leaves_out_are_said(brought: Callable[..., DataConfig]) -> None:
    config = brought({"train": (IMAGES, LABELS, LABELS % 2)}, num_clients=2)
    dataset = opened(config).dataset
    assert [*clients_without_effect(config, dataset)] == [
        f"the clients of data set {config.dataset} have no effect with data.partition=lda: they are for natural"
    ]
    assert [*clients_without_effect(replace(config, partition="natural"), dataset)] == []


def test_a_fifth_of_each_class_is_held_out_where_there_is_no_test_part(brought: Callable[..., DataConfig]) -> None:
    data = Dataset.open(prepare_dataset(brought(Arrays((IMAGES, LABELS)))))
    assert (data.num_samples("train"), data.num_samples("test")) == (40, 10)
    assert np.bincount(data.labels("test")).tolist() == [2] * 5
    assert Dataset.open(prepare_dataset(brought({"train": (IMAGES, LABELS)}))).hash == data.hash


def test_tokens_with_a_vocabulary(brought: Callable[..., DataConfig]) -> None:
    tokens = RNG.integers(0, 7, (30, 9))
    following = np.concatenate([tokens[:, 1:], np.full((30, 1), -100)], axis=1)
    config = brought(Arrays((tokens, following), class_names=list("abcdefg")), partition="iid", num_clients=3)
    data = opened(config)
    assert (data.dataset.kind, data.dataset.input_shape, data.dataset.num_classes) == ("tokens", (9,), 7)
    x, y = data.client(0, "train")
    assert (x[:, 1:] == y[:, :-1]).all()
    with pytest.raises(ValueError, match=r"data.partition=lda: .* has no class labels"):
        opened(brought(Arrays((tokens, following))))
    with pytest.raises(ValueError, match=r"data.balanced_classes=true: .* has no class labels to draw by; must be f"):
        opened(replace(config, balanced_classes=True))


def test_classes_stored_as_bytes_are_counted_as_whole_numbers(brought: Callable[..., DataConfig]) -> None:
    classes = np.arange(30, dtype=np.uint8)  # 29 * 30 does not fit into a byte
    data = Dataset.open(prepare_dataset(brought(Arrays(({"a": FLOATS[:30]}, classes), ({"a": FLOATS[:30]}, classes)))))
    samples = StoredSamples(data, "test", np.arange(30))
    matrix = confusion([torch.arange(30)], samples.labels, data.class_names, "m", "0")
    assert [json.loads(str(m.detail)) for m in matrix] == [[str(k), str(k)] for k in range(30)]
    halves = replace(samples, label_map=torch.arange(30) // 15)
    assert halves.labels.tolist() == [0] * 15 + [1] * 15


def test_classes_without_sign_are_counted_as_others_are(brought: Callable[..., DataConfig]) -> None:
    variations = [
        opened(brought(Arrays(({"a": FLOATS}, LABELS.astype(kind))))).label_variation() for kind in ("i8", "u8")
    ]
    assert variations[0] == variations[1]


def test_the_content_decides_and_not_the_place(brought: Callable[..., DataConfig]) -> None:
    first = prepare_dataset(brought(Arrays((IMAGES, LABELS))))
    assert prepare_dataset(brought(Arrays((IMAGES.copy(), LABELS.copy())))) == first
    other = IMAGES.copy()
    other[3, 2, 1] ^= 1
    assert prepare_dataset(brought(Arrays((other, LABELS)))) != first
    assert prepare_dataset(brought(Arrays((IMAGES, LABELS), class_names=list("vwxyz")))) != first


def test_a_scale_may_be_a_number_of_numpys(brought: Callable[..., DataConfig]) -> None:
    scaled = prepare_dataset(brought(Arrays((IMAGES, LABELS), scale=100)))
    for kind in (np.uint8, np.int64):
        assert prepare_dataset(brought(Arrays((IMAGES, LABELS), scale=kind(100)))) == scaled  # type: ignore[arg-type]
    assert Dataset.open(prepare_dataset(brought(Arrays((IMAGES, LABELS), scale=np.float32(0.5))))).num_classes == 5


def test_memory_mapped_arrays_are_as_good(brought: Callable[..., DataConfig], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert prepare_dataset(brought(Arrays((mapped, LABELS)))) == prepare_dataset(brought(Arrays((IMAGES, LABELS))))


FLOATS = RNG.normal(size=(50, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returns NoneType: give Arrays"),
        ({"x": 1}, "returns a mapping that has no 'x': its keys are train, test, class_names"),
        ({}, "returns a mapping that lacks 'train'"),
        (Arrays((IMAGES, LABELS[:49])), "train has 50 inputs and 49 labels: one for each"),
        (Arrays((IMAGES, np.zeros((49, 2)))), "train has 50 inputs and 49 labels: one for each"),
        (Arrays((IMAGES, LABELS, LABELS[:3])), "train has 50 inputs and 3 clients: one for each"),
        (Arrays((IMAGES,)), r"train is tuple: give \(inputs, labels\)"),
        (Arrays((IMAGES[:0], LABELS[:0])), "train has no samples"),
        (Arrays((IMAGES[:2], LABELS[:2])), r"has too few samples to hold a fifth out for testing \(2\): give more"),
        (Arrays((IMAGES, LABELS - 1)), "has labels -1 to 3: expected 0 to 3"),
        (Arrays(([[0, 1, -100]] * 9, [[1, 2, -100]] * 9)), "has tokens -100 to 1: expected 0 to 2"),
        (Arrays((IMAGES, LABELS), class_names=["a", "b"]), "has labels 0 to 4: expected 0 to 1"),
        (Arrays((IMAGES, LABELS.astype(float))), "labels are float64 .*give whole numbers"),
        (Arrays((np.where(np.arange(200).reshape(50, 4) == 7, np.nan, FLOATS), LABELS)), "inputs hold NaN or infinity"),
        (Arrays((IMAGES.astype(str), LABELS)), "inputs are <U3 .*give numbers"),
        (Arrays((LABELS, LABELS)), r"inputs are int64 \(50,\): give numbers \(n, ...\)"),
        (
            Arrays((FLOATS, LABELS), (IMAGES, LABELS)),
            r"train holds x float32 \(4,\), y .*, test x uint8",
        ),
        (Arrays((FLOATS, LABELS), mean=[0.0]), "gives one of mean and std: give both, or neither"),
        (Arrays((FLOATS, LABELS), mean=[0.0], std=[1.0]), r"mean=\[0.0\]: give a finite number for each of 4 channels"),
        (Arrays((FLOATS, LABELS), mean=[0.0] * 4, std=[0.0] * 4), "std=.*give a finite number for each of 4 channels"),
        (Arrays((FLOATS, LABELS), (FLOATS, LABELS, LABELS)), "names clients for test only"),
        (Arrays((FLOATS, LABELS, FLOATS)), r"clients are float64 \(50, 4\): give a name or a whole number for each"),
        (Arrays((FLOATS, LABELS, [None] * 50)), r"clients are object \(50,\): give a name or a whole number for each"),
        (Arrays((None, LABELS)), r"inputs are object \(\): give numbers \(n, ...\)"),
        (Arrays((FLOATS, LABELS), scale=0), "scale=0: give a finite number greater than 0"),
        (Arrays((FLOATS, LABELS), scale="a"), "scale='a': give a finite number greater than 0"),  # type: ignore[arg-type]
        (Arrays((FLOATS, LABELS), class_names=5), "class_names=5: give a list of names"),  # type: ignore[arg-type]
        (Arrays(([[1], [1, 2]], [0, 1])), "fails: ValueError: setting an array element with a sequence"),
    ],
)
def test_what_is_no_data_set_is_one_line_that_names_it(
    brought: Callable[..., DataConfig], tmp_path: Path, given: Any, message: str
) -> None:
    with pytest.raises(PluginError, match=message) as refusal:
        prepare_dataset(brought(given))
    assert str(refusal.value).startswith("data set 'my_data:mine'")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "cache").exists()


def test_whose_the_test_samples_are_must_be_known(brought: Callable[..., DataConfig]) -> None:
    given = Arrays((IMAGES, LABELS, LABELS), (IMAGES, LABELS))
    with pytest.raises(ValueError, match=r"the test samples of .* have no known client: set data.test_share"):
        opened(brought(given, partition="natural"))
    assert opened(brought(given, partition="natural", test_share=0.2)).num_clients == 4
    with pytest.raises(ValueError, match=r"data.partition=natural: my_data-mine has no clients of its own"):
        opened(brought(Arrays((IMAGES, LABELS)), partition="natural"))


def test_errors_of_the_function_name_it_and_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "raising_data.py").write_text("def mine(config):\n    return 1 / 0\n\ndef wrong():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"data set 'raising_data:mine' fails: ZeroDivisionError.*line 2 of"):
        prepare_dataset(DataConfig(dataset="raising_data:mine", cache=str(tmp_path)))
    with pytest.raises(PluginError, match=r"data.dataset: data set 'raising_data:wrong' has the wrong parameters"):
        prepare_dataset(DataConfig(dataset="raising_data:wrong", cache=str(tmp_path)))
    with pytest.raises(PluginError, match=r"data.dataset: .*has no 'mein'; did you mean 'mine'"):
        prepare_dataset(DataConfig(dataset="raising_data:mein", cache=str(tmp_path)))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrays",
    [
        {"train_x": IMAGES, "train_y": LABELS, "test_x": IMAGES[:10], "test_y": LABELS[:10]},
        {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:10], "y_test": LABELS[:10]},
        {"train_images": IMAGES, "train_labels": LABELS[:, None], "test_images": IMAGES[:10],
         "test_labels": LABELS[:10, None], "val_images": IMAGES[:1], "val_labels": LABELS[:1]},
        {"x": IMAGES, "y": LABELS, "clients": LABELS, "class_names": np.array(list("abcde"))},
    ],
    ids=["fedloom", "keras", "medmnist", "one part"],
)  # fmt: skip
def test_npz_files(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "faces.npz", **arrays)
    config = DataConfig(
        dataset="npz", root=str(tmp_path), cache=str(tmp_path / "c"), num_clients=4, options={"path": "faces.npz"}
    )
    data = opened(config)
    assert data.dataset.num_samples("test") == 10
    assert data.dataset.num_classes == 5
    if "clients" in arrays:
        assert data.dataset.class_names == tuple("abcde")
        assert data.dataset.client_names == tuple("01234")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"faces.npz not found; set data.options.path"),
        (b"PK rubbish", r"faces.npz is not a file of arrays"),
        (b"", r"faces.npz is not a file of arrays \(No data left in file\)"),
        (b"PK\x03\x04 of which the rest is missing", r"faces.npz is not a file of arrays \(File is not a zip file\)"),
        ({"a": IMAGES}, r"faces.npz has a: expected train_x and train_y, or x and y"),
        ({"x": np.array([object()]), "y": LABELS}, r"faces.npz is not a file of arrays .*Object arrays"),
    ],
)
def test_an_npz_that_is_none_is_one_line(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "faces.npz").write_bytes(content)
    elif content is not None:
        np.savez(tmp_path / "faces.npz", **content)
    config = DataConfig(dataset="npz", root=str(tmp_path), cache=str(tmp_path / "c"), options={"path": "faces.npz"})
    with pytest.raises(PluginError, match=message):
        prepare_dataset(config)


def write_images(folder: Path, parts: tuple[str, ...], size: int = 5, suffix: str = "png") -> None:
    for part in parts:
        for label, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for i in range(5):
                pixels = np.full((size, size, 3), 40 * label + i, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.{suffix}")


@pytest.mark.parametrize("parts", [("train", "test"), ("",)])
def test_folders_of_images(tmp_path: Path, parts: tuple[str, ...]) -> None:
    write_images(tmp_path / "pets", parts)
    (tmp_path / "pets" / parts[0] / "cat" / "._0.png").write_bytes(b"of macOS")
    options = {"path": str(tmp_path / "pets")}
    config = DataConfig(dataset="folder", cache=str(tmp_path / "c"), num_clients=2, options=options)
    data = opened(config).dataset
    assert data.class_names == ("cat", "dog")
    expected = (10, 10) if parts == ("train", "test") else (8, 2)
    assert (data.num_samples("train"), data.num_samples("test")) == expected
    x = np.load(data.path / "train_x.npy")
    assert x.shape[1:] == (3, 5, 5)
    assert (x[:, 0, 0, 0] // 40 == data.labels("train")).all()
    grey = DataConfig(dataset="folder", cache=str(tmp_path / "c"), options={**options, "size": 3, "grey": True})
    assert Dataset.open(prepare_dataset(grey)).input_shape == (1, 3, 3)


def test_other_pixels_in_uncompressed_files_are_noticed(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", ("",), suffix="BMP")
    options = {"path": str(tmp_path / "pets")}
    config = DataConfig(dataset="folder", cache=str(tmp_path / "c"), options=options)
    before = prepared_folder(config)
    assert prepared_folder(config) == before
    Image.fromarray(np.full((5, 5, 3), 200, dtype=np.uint8)).save(tmp_path / "pets" / "dog" / "4.BMP")
    assert prepared_folder(config) != before


def test_folders_of_compressed_images_keep_their_identity(tmp_path: Path) -> None:
    for name, content in (("cat", b"12"), ("dog", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(content)
    found = find_folders(tmp_path, 5, grey=False).identity()
    assert found["sha256_of_names_and_sizes"] == sha256(b"/cat/0.png\t2\n/dog/0.png\t1\n").hexdigest()


def test_folders_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    config = DataConfig(dataset="folder", cache=str(tmp_path / "c"), options={"path": str(tmp_path / "pets")})
    with pytest.raises(PluginError, match=r"pets is no folder; set data.options.path"):
        prepare_dataset(config)
    (tmp_path / "pets").mkdir()
    with pytest.raises(PluginError, match=r"pets has 0 class folders: expected train/CLASS"):
        prepare_dataset(config)
    write_images(tmp_path / "pets", ("train",))
    with pytest.raises(PluginError, match=r"test not found: there is a train part, but no test part"):
        prepare_dataset(config)
    write_images(tmp_path / "pets", ("test",))
    (tmp_path / "pets" / "test" / "cow").mkdir()
    with pytest.raises(PluginError, match=r"cow is a class that the train part does not have"):
        prepare_dataset(config)
    (tmp_path / "pets" / "test" / "cow").rmdir()
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(tmp_path / "pets" / "train" / "cat" / "9.png")
    with pytest.raises(ValueError, match=r"9.png has shape \(4, 4, 3\); expected \(5, 5, 3\)"):
        prepare_dataset(config)
    deep = np.full((5, 5), 300, dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "pets" / "train" / "cat" / "9.png")
    with pytest.raises(ValueError, match=r"9.png has more than 8 bits per pixel: convert it to 8 bits"):
        prepare_dataset(config)
    with pytest.raises(ValueError, match=r"data.options.path is missing: give a text .an option of data set folder"):
        prepare_dataset(DataConfig(dataset="folder", cache=str(tmp_path / "c")))


# -- torchvision -------------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    """The format of MNIST."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_a_set_of_torchvision_from_its_files(tmp_path: Path) -> None:
    x, y = RNG.integers(0, 256, (30, 28, 28), dtype=np.uint8), np.arange(30) % 10
    for part, prefix in (("train", "train"), ("test", "t10k")):
        raw = tmp_path / "FashionMNIST" / "raw"
        write_idx(raw / f"{prefix}-images-idx3-ubyte", x if part == "train" else x[:20])
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", y if part == "train" else y[:20])
    config = DataConfig(
        dataset="torchvision:FashionMNIST", root=str(tmp_path), cache=str(tmp_path / "c"), num_clients=3
    )
    data = opened(config).dataset
    assert data.class_names[:2] == ("T-shirt/top", "Trouser")
    assert (data.num_samples("train"), data.num_samples("test"), data.input_shape) == (30, 20, (1, 28, 28))
    assert np.load(data.path / "train_x.npy")[:, 0].tolist() == x.tolist()
    assert data.labels("train").tolist() == y.tolist()
    write_idx(raw / "t10k-images-idx3-ubyte", x[10:])
    assert prepared_folder(config) != data.path, "other images of the same labels are other data"


def test_a_set_of_torchvision_whose_base_class_is_told_the_part(tmp_path: Path) -> None:
    for part in ("train", "test"):
        raw = tmp_path / "EMNIST" / "raw" / f"emnist-letters-{part}"
        write_idx(raw.with_name(f"{raw.name}-images-idx3-ubyte"), np.zeros((30, 28, 28), dtype=np.uint8))
        write_idx(raw.with_name(f"{raw.name}-labels-idx1-ubyte"), 1 + np.arange(30) % (26 if part == "train" else 2))
    config = DataConfig(
        dataset="torchvision:EMNIST", root=str(tmp_path), cache=str(tmp_path / "c"), options={"split": "letters"}
    )
    data = Dataset.open(prepare_dataset(config))
    assert (data.class_names[:3], data.num_classes) == (("N/A", "a", "b"), 27)
    assert (data.labels("train").max(), data.labels("test").max()) == (26, 2)


def test_a_set_of_torchvision_that_stores_more_than_classes(tmp_path: Path) -> None:
    raw, y = tmp_path / "QMNIST" / "raw", np.arange(30) % 10
    for part in ("train", "test"):
        write_idx(raw / f"qmnist-{part}-images-idx3-ubyte", np.zeros((30, 28, 28), dtype=np.uint8))
        write_idx(raw / f"qmnist-{part}-labels-idx2-int", np.stack([y, *[y + 1] * 7], axis=1))
    config = DataConfig(dataset="torchvision:QMNIST", root=str(tmp_path), cache=str(tmp_path / "c"))
    assert Dataset.open(prepare_dataset(config)).labels("train").tolist() == y.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FashionMNIST", r"'torchvision:FashionMNIST' cannot be opened in .*not found.*or set data.download=true"),
        ("OxfordIIITPet", r"'torchvision:OxfordIIITPet' cannot be opened in .*not found.*or set data.download=true"),
        ("FashionMINST", r"torchvision.datasets has no 'FashionMINST'"),
        ("ImageFolder", r"'torchvision:ImageFolder': it does not say which of its samples train; use data.dataset=f"),
    ],
)
def test_a_set_of_torchvision_that_is_not_there_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    config = DataConfig(dataset=f"torchvision:{name}", root=str(tmp_path), cache=str(tmp_path / "c"))
    with pytest.raises(PluginError, match=message) as refusal:
        prepare_dataset(config)
    assert "\n" not in str(refusal.value)
