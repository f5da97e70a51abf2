"""Data sets in tables: CSV, Parquet, and what Hugging Face's `datasets` saves."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedloom.platform.data import table_files
from fedloom.platform.data.artefact import AnyArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.partition import Partition, prepare_partition
from fedloom.platform.data.prepare import prepare_dataset, prepared_folder
from fedloom.platform.plugins import PluginError

RNG = np.random.default_rng(0)
ROWS = 40
NUMBERS = pa.table(
    {
        "height": RNG.normal(size=ROWS).round(3),
        "age": RNG.integers(18, 90, ROWS),
        "rank": [str(8 + row % 4) for row in range(ROWS)],
        "hospital": [("York", "Bath", "Hull")[row % 3] for row in range(ROWS)],
        "pulse": [[1.0 * row, row + 0.5] for row in range(ROWS)],
    }
)
PLAIN = NUMBERS.drop_columns(["pulse"])
PIXELS = RNG.integers(0, 256, (12, 4, 5), dtype=np.uint8)


def encoded(pixels: AnyArray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def config(tmp_path: Path, path: Path, **options: Any) -> DataConfig:
    return DataConfig(dataset="table", cache=str(tmp_path / "cache"), options={"path": str(path), **options})


def opened(tmp_path: Path, path: Path, **options: Any) -> Dataset:
    return Dataset.open(prepare_dataset(config(tmp_path, path, **options), verify=True))


def stored(data: Dataset, part: str) -> AnyArray:
    return data.stored(part, np.arange(data.num_samples(part)))[0].numpy()


def saved_as_by_hugging_face(folder: Path, table: pa.Table, names: list[str], name: str = "data-00000.arrow") -> None:
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def of_images(labels: list[int]) -> pa.Table:
    images = [{"bytes": encoded(PIXELS[row]), "path": None} for row in range(len(labels))]
    holds = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.table(
        {"image": pa.array(images, holds), "label": labels, "user": [row % 2 for row in range(len(labels))]}
    )


def test_columns_of_a_csv_file(tmp_path: Path) -> None:
    pa.csv.write_csv(PLAIN, tmp_path / "t.csv")
    data = opened(tmp_path, tmp_path / "t.csv", y="rank", client="hospital")
    assert (data.kind, data.input_shape, data.client_names) == ("features", (2,), ("Bath", "Hull", "York"))
    assert data.class_names == ("8", "9", "10", "11"), "whole numbers are in their own order"
    assert (data.num_samples("train"), data.num_samples("test")) == (32, 8)
    x, y, clients = (np.concatenate(pair) for pair in zip(*_parts(data), strict=True))
    rows = {tuple(row) for row in np.column_stack([x, y, clients]).tolist()}
    whole = np.column_stack([PLAIN["height"], PLAIN["age"], np.arange(ROWS) % 4, (2 - np.arange(ROWS) % 3 * 2) % 3])
    assert rows == {tuple(row) for row in whole.astype(np.float32).tolist()}


def _parts(data: Dataset) -> list[tuple[AnyArray, AnyArray, AnyArray]]:
    return [(stored(data, part), data.labels(part), data.clients(part)) for part in ("train", "test")]


def test_its_clients_are_those_of_a_natural_partition(tmp_path: Path) -> None:
    pq.write_table(NUMBERS, tmp_path / "t.parquet")
    chosen = config(tmp_path, tmp_path / "t.parquet", y="rank", client="hospital", x=["age"])
    chosen.partition, chosen.num_clients, chosen.validation_share = "natural", 3, 0.0
    data = Dataset.open(prepare_dataset(chosen))
    partition = Partition.open(prepare_partition(chosen, data, 0), data)
    for client in range(3):
        assert set(data.clients("train")[partition.indices(client, "train")]) == {client}


def test_columns_are_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pq.write_table(NUMBERS, tmp_path / f"{part}-0.parquet")
    data = opened(tmp_path, tmp_path, y="rank", x=["age", "height"])
    assert np.array_equal(stored(data, "test"), np.column_stack([NUMBERS["age"], NUMBERS["height"]]).astype("f4"))
    vectors = opened(tmp_path, tmp_path, y="rank", x=["pulse"], shape=[1, 2, 1])
    assert vectors.input_shape == (1, 2, 1)
    assert np.array_equal(stored(vectors, "train")[:, 0, :, 0], np.array(NUMBERS["pulse"].to_pylist(), "f4"))


def test_the_index_of_a_pandas_table_is_no_input(tmp_path: Path) -> None:
    rows = pd.DataFrame({"age": range(10), "label": ["a", "b"] * 5})
    rows.sample(frac=1, random_state=0).to_parquet(tmp_path / "shuffled.parquet")
    rows.rename_axis("patient").set_index("age", append=True).to_parquet(tmp_path / "named.parquet")
    rows.to_csv(tmp_path / "t.csv")
    assert pq.read_schema(tmp_path / "shuffled.parquet").names == ["age", "label", "__index_level_0__"]
    assert opened(tmp_path, tmp_path / "shuffled.parquet").input_shape == (1,)
    assert opened(tmp_path, tmp_path / "t.csv").input_shape == (1,)
    with pytest.raises(PluginError, match=r"named.parquet has no column of inputs beside label"):
        opened(tmp_path, tmp_path / "named.parquet")
    assert opened(tmp_path, tmp_path / "named.parquet", x=["age"]).input_shape == (1,)


@pytest.mark.parametrize("has_parts", [True, False])
def test_images_that_hugging_face_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_parts: bool) -> None:
    labels = [0, 1, 1, 0, 2, 2, 0, 1, 2, 0, 1, 2]
    for part in ("train", "test") if has_parts else ("",):
        saved_as_by_hugging_face(tmp_path / "saved" / part, of_images(labels), ["eel", "dog", "cat", "ant"])
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"")
    data = opened(tmp_path, tmp_path / "saved", client="user")
    assert (data.kind, data.input_shape, data.client_names) == ("image", (3, 4, 5), ("0", "1"))
    assert data.class_names == ("eel", "dog", "cat", "ant"), (
        "in the order of their labels, with those that are not there"
    )
    if has_parts:
        assert data.labels("test").tolist() == labels
        assert np.array_equal(stored(data, "test")[:, 1], PIXELS)
    monkeypatch.setattr(table_files, "ROWS", 3)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "other"))
    again = Dataset.open(
        prepare_dataset(DataConfig("table", options={"path": str(tmp_path / "saved"), "client": "user"}))
    )
    assert again.hash == data.hash, "the same in pieces of any size"


def test_what_datasets_itself_saves(tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets", reason="Hugging Face's datasets are read without their library")
    names = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["b", "a"]), "user": hub.Value("int64")})
    table = of_images([0, 1, 1, 0, 0, 1, 0, 1]).to_pydict()
    hub.DatasetDict({part: hub.Dataset.from_dict(table, names) for part in ("train", "test")}).save_to_disk(
        tmp_path / "s"
    )
    data = opened(tmp_path, tmp_path / "s", client="user", grey=True)
    assert (data.class_names, data.client_names) == (("b", "a"), ("0", "1"))
    assert np.array_equal(stored(data, "test")[:, 0], PIXELS[:8])


def test_both_parts_hold_samples_of_one_shape(tmp_path: Path) -> None:
    for part, length in (("train", 3), ("test", 4)):
        pq.write_table(pa.table({"v": [[0.5] * length] * 4, "label": [0, 1] * 2}), tmp_path / f"{part}.parquet")
    with pytest.raises(ValueError, match=r"a sample of the train part has shape \(3,\), one of the test part \(4,\)"):
        opened(tmp_path, tmp_path)
    assert [*(tmp_path / "cache").iterdir()] == [], "a second try must not find what the first one wrote"


def test_a_table_that_names_image_files(tmp_path: Path) -> None:
    for row, pixels in enumerate(PIXELS):
        (tmp_path / f"{row}.png").write_bytes(encoded(pixels))
    lines = [f"{row}.png,{'ab'[row % 2]},ward {row % 3}" for row in range(len(PIXELS))]
    (tmp_path / "t.csv").write_text("\n".join(["file,label,ward", *lines]))
    data = opened(tmp_path, tmp_path / "t.csv", x=["file"], client="ward", size=4)
    assert (data.input_shape, data.client_names) == ((3, 4, 4), ("ward 0", "ward 1", "ward 2"))
    (tmp_path / "3.png").write_bytes(encoded(PIXELS[:, 0]))
    assert opened(tmp_path, tmp_path / "t.csv", x=["file"], client="ward", size=4).hash != data.hash
    (tmp_path / "3.png").unlink()
    with pytest.raises(PluginError, match=r"t.csv names the image 3.png, which .* does not have"):
        opened(tmp_path, tmp_path / "t.csv", x=["file"])


def test_other_pixels_in_an_uncompressed_file_that_a_table_names_are_noticed(tmp_path: Path) -> None:
    for row, pixels in enumerate(PIXELS):
        (tmp_path / f"{row}.bmp").write_bytes(encoded(pixels, "BMP"))
    (tmp_path / "t.csv").write_text("\n".join(["file,label", *[f"{row}.bmp,{row % 2}" for row in range(len(PIXELS))]]))
    before = prepared_folder(config(tmp_path, tmp_path / "t.csv"))
    (tmp_path / "3.bmp").write_bytes(encoded(255 - PIXELS[3], "BMP"))
    assert prepared_folder(config(tmp_path, tmp_path / "t.csv")) != before


@pytest.mark.parametrize(
    "column",
    [
        pa.array([f"{row}.png" for row in range(12)], pa.large_string()),
        pa.array([f"{row}.png" for row in range(12)]).dictionary_encode(),
        pa.array([encoded(pixels) for pixels in PIXELS], pa.large_binary()),
    ],
    ids=["pandas", "categories", "polars"],
)
def test_images_in_columns_of_other_types_of_texts_and_bytes(tmp_path: Path, column: pa.Array) -> None:
    for row, pixels in enumerate(PIXELS):
        (tmp_path / f"{row}.png").write_bytes(encoded(pixels))
    pq.write_table(pa.table({"file": column, "label": [0, 1] * 6}), tmp_path / "train.parquet")
    pq.write_table(pa.table({"file": column, "label": [0, 1] * 6}), tmp_path / "test.parquet")
    assert np.array_equal(stored(opened(tmp_path, tmp_path), "train")[:, 2], PIXELS)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,label\n1,x\n", {"y": "class"}, r"t.csv has no column class: choose data.options.y of a, label"),
        ("a,label\n1,x\n", {"x": ["b"]}, r"has no column b: choose data.options.x of a, label"),
        ("a,label\n1,x\n", {"client": "who"}, r"has no column who: choose data.options.client of"),
        (
            "a,b,label\n1,p,x\n1,p,x\n1,p,x\n",
            {},
            r"t.csv cannot be read \(column b: .*'p'.*; data.options.x names columns",
        ),
        ("a,label\n1,x\n,y\n,y\n", {}, r"column a of .*t.csv lacks values, or has infinite ones: fill them in"),
        ("a,label\n1,x\n2,\n", {}, r"column label of .*t.csv lacks values: give one for every row"),
        ("a,label\n1,x\n", {}, r"t.csv has too few samples to hold a fifth out for testing \(1\): give more"),
        ("label\nx\n", {}, r"t.csv has no column of inputs beside label"),
        ("a,a,label\n1,2,x\n", {}, r"t.csv has several columns a: give each a name of its own"),
        (b"\xe4,label\n1,x\n", {}, r"t.csv cannot be read \('utf-8' codec can't decode byte 0xe4"),
        (
            "a,label\n1,x\n2,y\n3,y\n",
            {"shape": [2]},
            r"a row of .*t.csv has 1 numbers: data.options.shape must",
        ),
        ("a,label\n1,x\n", {"grey": True}, r"data.options.grey has no effect on columns of numbers: leave it out"),
        ("a,label\nb,x\n", {"shape": [1]}, r"data.options.shape has no effect on columns of images: leave it out"),
        ("", {}, r"t.csv cannot be read \(Empty CSV file\)"),
        (None, {}, r"t.csv is no table and has none: data.options.path is a file \(.csv, .parquet, .arrow\)"),
    ],
)
def test_bad_tables_are_one_line(tmp_path: Path, content: Any, options: Any, message: str) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PluginError, match=message) as caught:
        opened(tmp_path, tmp_path / "t.csv", **options)
    assert "\n" not in str(caught.value)


def shrink(x_B: Tensor, generator: torch.Generator, *, size: int = 2) -> Tensor:
    return x_B / size


def test_an_option_of_the_augmentation_is_allowed_where_the_table_has_no_use_for_it(tmp_path: Path) -> None:
    pq.write_table(PLAIN, tmp_path / "t.parquet")
    of_table = config(tmp_path, tmp_path / "t.parquet", y="rank", x=["height"], size=3)
    with pytest.raises(PluginError, match=r"data\.options\.size has no effect on columns of numbers"):
        prepare_dataset(of_table)
    assert prepare_dataset(replace(of_table, augment=f"{__name__}:shrink")).exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 of which the rest is missing PAR1")
    with pytest.raises(PluginError, match=r"t.parquet cannot be read \(Parquet file size is 38 bytes"):
        opened(tmp_path, tmp_path / "t.parquet")


def test_bad_columns_are_one_line(tmp_path: Path) -> None:
    table = pa.table({"v": [[1.0], [1.0, 2.0]], "s": [[1, 2], [3, 4]], "label": [0.5, 1.0], "class": ["a", "b"]})
    table = pa.concat_tables([table] * 3)
    pq.write_table(table, tmp_path / "t.parquet")
    for options, message in (
        ({"x": ["s"]}, r"column label of .* holds double: give texts or whole numbers"),
        (
            {"x": ["v"], "y": "class"},
            r"column v of .* holds vectors of 2 lengths, or empty ones: all rows must be alike",
        ),
        ({"x": ["class"], "y": "class"}, r"names the image a, which"),
        ({"x": ["label", "class"], "y": "class"}, r"column class of .* holds string: data.options.x names columns"),
    ):
        with pytest.raises(PluginError, match=message):
            opened(tmp_path, tmp_path / "t.parquet", **options)
    saved_as_by_hugging_face(tmp_path / "s", of_images([0, 1, 2]), ["a", "b"])
    with pytest.raises(PluginError, match=r"column label holds 2: its classes are 0 to 1"):
        opened(tmp_path, tmp_path / "s")
