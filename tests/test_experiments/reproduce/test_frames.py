"""Frames that only items read: names that every scale has, and how much searched cells differ."""

import pandas as pd
import pytest

from fedloom.experiments.analysis.subnets import Labels
from fedloom.experiments.analysis.tables import load_paths
from fedloom.experiments.reproduce import frames
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import SpaceConfig


def test_subnets_are_named_by_the_ends_of_their_space_and_ranked_by_macs(monkeypatch: pytest.MonkeyPatch) -> None:
    space = build_space(SpaceConfig(name="resnet_elastic_small"))
    assert isinstance(space, ElasticSpace)
    ends = ["-".join(map(str, end)) for end in (space.largest, space.smallest)]
    rows = [
        ("x", "a", "supernet", ends[0], "d=2 e=1", 50.0),
        ("x", "a", "supernet", ends[1], "d=0 e=.25", 10.0),
        ("x", "a", "supernet", "1-0-0-0", "between", 20.0),
        ("x", "a", "searched", ends[0], "d=2 e=1", 50.0),
        ("x", "b", "alone", "1-0-0-0", "between", 20.0),
    ]
    given = pd.DataFrame(rows, columns=["experiment", "run_id", "model", "architecture", "label", "macs"])
    monkeypatch.setattr(frames, "labels_of", lambda _tables: Labels({"a": space, "b": space}))
    monkeypatch.setattr(frames, "subnets", lambda _tables, _labels: given)
    found = frames.subnets_by_size(load_paths(()))
    assert found["size"].tolist() == ["largest", "smallest", "between", "", "between"]
    assert found["rank"].tolist() == [3, 1, 2, 1, 1]


def test_cells_are_compared_whole_and_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("x", "a", 0, "0/1/0/1"), ("x", "a", 1, "0/1/1/1"), ("x", "a", 2, "0/1/0/1"), ("x", "b", 0, "0/0/0/0")]
    given = pd.DataFrame(rows, columns=["experiment", "run_id", "client_id", "architecture"])
    monkeypatch.setattr(frames, "latest_architectures", lambda _tables: given)
    found = frames.cells(load_paths(()))
    columns = ["run_id", "silos", "distinct", "distinct_normal", "distinct_reduction"]
    assert found[columns].to_numpy().tolist() == [["a", 3, 2, 1, 2], ["b", 1, 1, 1, 1]]
