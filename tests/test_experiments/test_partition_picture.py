"""`fedloom prepare --picture`: what a partition's picture shows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.report.partition import class_counts, partition_figure
from fedloom.experiments.terminal import CONFIGURATION
from fedloom.platform.data.artefact import AnyArray, IntArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset


def opened(config: DataConfig) -> FederatedData:
    path = prepare_dataset(config)
    return FederatedData.open(path, prepare_partition(config, Dataset.open(path), 1))


def counts_of(data: FederatedData) -> IntArray:
    counts = class_counts(data)
    assert counts is not None
    return counts


def bars(axes: Any) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def test_few_clients_are_drawn_by_class() -> None:
    config = DataConfig(partition="shards", num_clients=20, validation_share=0.0)
    data = opened(config)
    counts = counts_of(data)
    labels = data.dataset.labels("train")
    assert np.array_equal(counts, [np.bincount(labels[data.indices(k, "train")], minlength=10) for k in range(20)])
    figure = partition_figure(config, data)
    assert figure.get_suptitle() == "digits, shards, 2 shards per client, 20 clients, seed 1"
    sizes, classes, _bar = figure.axes
    first, second = sizes.get_title(loc="left").split("\n")
    assert first == "training samples per client: 71 to 72, mean 71.9, variation 0.00"
    assert second.startswith("classes per client: 2 to ")
    assert bars(sizes) == counts.sum(axis=1).tolist()
    drawn: AnyArray = np.ma.getdata(np.ma.asarray(classes.collections[0].get_array())).reshape(10, 20)
    np.testing.assert_allclose(drawn, (counts / counts.sum(axis=1, keepdims=True)).T)
    assert sum(int(text.get_text() or 0) for text in classes.texts) == 1438


def test_many_clients_are_drawn_as_distributions() -> None:
    config = DataConfig(partition="quantity", num_clients=200, alpha=0.5, validation_share=0.0)
    data = opened(config)
    sizes, classes = partition_figure(config, data).axes
    assert sum(bars(sizes)) == 200
    numbers = np.bincount((counts_of(data) > 0).sum(axis=1), minlength=11)
    assert bars(classes) == numbers[1:].tolist()


def test_a_text_has_sizes_alone(tmp_path: Path) -> None:
    tokens = np.arange(120).reshape(12, 10) % 7
    np.savez(tmp_path / "text.npz", x=tokens, y=tokens)
    config = DataConfig("npz", partition="iid", num_clients=3, options={"path": str(tmp_path / "text.npz")})
    data = opened(config)
    assert class_counts(data) is None
    assert len(partition_figure(config, data).axes) == 1


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begin in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["prepare", "dataset=digits", "data.num_clients=5", "--picture", str(tmp_path / name)])
        assert (tmp_path / name).read_bytes().startswith(begin)
        assert str(tmp_path / name) in capsys.readouterr().out


@pytest.mark.parametrize(("name", "says"), [("a.jpg", "ends in .png or .pdf"), ("b/a.png", "is no folder; make it")])
def test_a_picture_that_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(SystemExit, match=f"^{CONFIGURATION}$"):
        main(["prepare", f"data.cache={cache}", "--picture", str(tmp_path / name)])
    assert says in capsys.readouterr().err
    assert not cache.exists()
