"""Published data sets as archives and as Parquet, and what an incomplete one differs in."""

import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedloom.experiments.runs.describe import prepare
from fedloom.platform.data import registry
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.image_files import LAYOUTS, FolderSource, PickleSource
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import find_source
from fedloom.platform.data.source import Source
from fedloom.platform.data.tokens import PtbSource
from tests.test_platform.test_data_cinic import encoded, fake_cinic, pixels
from tests.test_platform.test_data_sources import FINE_TO_COARSE, fake_cifar, fake_cifar_with_coarse


def config(root: Path, dataset: str, **changes: Any) -> DataConfig:
    return DataConfig(dataset, root=str(root), cache=str(root / "cache"), num_clients=2, **changes)


def pack(root: Path, dataset: str) -> Path:
    """The folder of a small data set as an archive; the folder is gone."""
    folder = root / LAYOUTS[dataset].folder
    archive = root / LAYOUTS[dataset].archive
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return archive


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_archives_are_read_without_unpacking_them(tmp_path: Path, dataset: str) -> None:
    if dataset == "cifar10":
        fake_cifar(tmp_path)
    else:
        fake_cifar_with_coarse(tmp_path, FINE_TO_COARSE)
    unpacked = Dataset.open(prepare_dataset(config(tmp_path, dataset)))
    pack(tmp_path, dataset)
    packed = Dataset.open(prepare_dataset(config(tmp_path, dataset)))
    assert packed.hash == unpacked.hash, "unpacking changes nothing"
    assert unpacked.label_sets == packed.label_sets
    assert unpacked.class_names == packed.class_names
    for part in ("train", "test"):
        rows = np.arange(unpacked.num_samples(part))
        for one, other in zip(unpacked.tensors(part, rows), packed.tensors(part, rows), strict=True):
            assert one.equal(other)
    assert not (tmp_path / LAYOUTS[dataset].folder).exists()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_truncated_archives_are_named_and_nothing_is_left(tmp_path: Path, share: float) -> None:
    fake_cifar(tmp_path)
    archive = pack(tmp_path, "cifar10")
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"^\S+/cifar-10-python.tar.gz: \S+ cannot be read from it \(.*\); download"):
        prepare_dataset(config(tmp_path, "cifar10"))
    assert list((tmp_path / "cache").glob("*")) == []


def test_an_archive_of_something_else_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz"):
        pass
    source = find_source(config(tmp_path, "cifar100"))
    assert isinstance(source, PickleSource)
    with pytest.raises(ValueError, match=r"cifar-100-python.tar.gz: meta cannot be read from it"):
        source.labels("train")


def write_hub(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_cinic10_is_read_as_parquet(tmp_path: Path) -> None:
    for part, seeds in (("train", range(4)), ("test", range(4, 6))):
        images = pa.array([{"bytes": encoded(s), "path": None} for s in seeds])
        labels = pa.array([s % 2 for s in seeds], pa.int64())
        write_hub(tmp_path / "cinic10" / "data" / f"{part}-00000-of-00001.parquet", {"image": images, "label": labels})
    source = find_source(config(tmp_path, "cinic10"))
    assert isinstance(source, Source)
    assert source.labels("train").tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(source.inputs("test", np.array([1]))[0], pixels(5))


def test_ptb_is_read_as_parquet(tmp_path: Path) -> None:
    for part, lines in (("train", ["the cat sat", "a <unk>"]), ("test", ["the cat"])):
        write_hub(tmp_path / "ptb" / "penn_treebank" / f"{part}-00000-of-00001.parquet", {"sentence": lines})
    more = tmp_path / "ptb" / "penn_treebank" / "train-00001-of-00002.parquet"
    write_hub(more, {"sentence": ["the dog"]})
    source = find_source(config(tmp_path, "ptb", sequence_length=4))
    assert isinstance(source, PtbSource)
    assert "dog" in source.vocabulary, "all files of a part are read"
    more.unlink()
    source = find_source(config(tmp_path, "ptb", sequence_length=4))
    assert isinstance(source, PtbSource)
    tokens = source.sequences("train").x[0]
    assert [source.vocabulary[t] for t in tokens] == ["the", "cat", "sat", "<eos>"]
    write_hub(tmp_path / "ptb" / "penn_treebank" / "train-00000-of-00001.parquet", {"text": ["the"]})
    with pytest.raises(ValueError, match=r"train-00000-of-00001.parquet: cannot be read .*; expected a Parquet file"):
        prepare_dataset(config(tmp_path, "ptb", partition="iid"))


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "cinic10", "ptb", "shakespeare"])
def test_what_is_missing_is_told_with_the_file_that_belongs_there(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(ValueError, match="not found under") as caught:
        find_source(config(tmp_path, dataset))
    assert registry.PUBLISHED[dataset].where in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prepare_says_what_differs_from_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cifar_with_coarse(tmp_path, FINE_TO_COARSE)
    given = ["dataset=cifar100", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}", "data.num_clients=2"]
    told = prepare(given)["as_published"]
    assert told.split("; ") == [
        "it has 10 classes, published are 100",
        "it has 5 coarse classes, published are 20",
        "its train part has 20 samples, published are 50000: a file may be incomplete",
        "its test part has 20 samples, published are 10000: a file may be incomplete",
    ]
    small = replace(registry.PUBLISHED["cifar100"], samples=(20, 20), classes=10, coarse={"coarse": 5})
    monkeypatch.setitem(registry.PUBLISHED, "cifar100", small)  # type: ignore[arg-type]
    assert prepare(given)["as_published"] == "yes"
    assert "as_published" not in prepare(["dataset=digits", f"data.cache={tmp_path / 'cache'}"])
    assert prepare([*given, "data.train_samples=10"])["as_published"] == "yes", "a sub-sample is asked for"
    both = [*given, "data.train_samples=10", "data.test_samples=10"]
    assert prepare(both)["as_published"] == "not checked: both parts are sub-samples"


def test_classes_of_unequal_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cifar(tmp_path)
    small = replace(registry.PUBLISHED["cifar10"], samples=(100, 20))
    monkeypatch.setitem(registry.PUBLISHED, "cifar10", small)  # type: ignore[arg-type]
    data = config(tmp_path, "cifar10")
    dataset = Dataset.open(prepare_dataset(data))
    assert registry.differences(data, dataset) == []
    labels = dataset.labels("train").copy()
    labels[labels == 3] = 4
    monkeypatch.setattr(Dataset, "labels", lambda _self, part: labels if part == "train" else np.arange(20) % 10)
    assert registry.differences(data, dataset) == [
        "its train part has 20 samples of class 4 and 0 of 3; published are as many of each"
    ]


def test_folders_of_cinic10_are_found_beside_others_of_its_name(tmp_path: Path) -> None:
    fake_cinic(tmp_path, "cinic10")
    write_hub(tmp_path / "CINIC-10" / "test-0.parquet", {"image": [1], "label": [1]})
    assert isinstance(find_source(config(tmp_path, "cinic10")), FolderSource)


def test_a_data_set_prepared_before_gets_its_label_sets_and_keeps_its_hash(tmp_path: Path) -> None:
    fake_cifar_with_coarse(tmp_path, FINE_TO_COARSE)
    path = prepare_dataset(config(tmp_path, "cifar100"))
    before = Dataset.open(path)
    (path / "label_sets.json").unlink()
    assert Dataset.open(path).label_sets == {}
    assert prepare_dataset(config(tmp_path, "cifar100")) == path
    again = Dataset.open(path)
    assert (again.label_sets, again.hash) == (before.label_sets, before.hash)
    (path / "label_sets.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"label_sets.json is damaged: delete it, and prepare again"):
        Dataset.open(path)
