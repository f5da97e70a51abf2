"""Checkpoints: exact tensors, only what changed is written, and a crash leaves one whole state."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.platform.results import checkpoint as checkpoint_module
from fedloom.platform.results.checkpoint import check_same_config, load_checkpoint, save_checkpoint
from fedloom.platform.results.files import hashed_json, read_file
from fedloom.platform.spaces.slices import TensorGroup

WEIGHTS = {
    "z": torch.arange(6.0).reshape(2, 3),
    "a": torch.tensor(7, dtype=torch.int64),
    "half": torch.tensor([1.5, math.nan, math.inf], dtype=torch.bfloat16),
    "double": torch.tensor([1e-300], dtype=torch.float64),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)  # the order too
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def loaded(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(folder).groups[name].tensors)


def test_a_checkpoint_gives_back_exactly_what_was_saved(tmp_path: Path) -> None:
    data = {"round": 3, "scores": [0.1, math.inf], "name": "ä", "none": None, "deep": {"a": [1, {"b": True}]}}
    save_checkpoint(
        tmp_path / "checkpoint", {"supernet": TensorGroup(WEIGHTS, 5), "no-tensors": TensorGroup({}, 0)}, data
    )
    found = load_checkpoint(tmp_path / "checkpoint")
    assert found.data == data
    assert found.groups["supernet"].version == 5
    assert_same(dict(found.groups["supernet"].tensors), WEIGHTS)
    assert dict(found.groups["no-tensors"].tensors) == {}


def test_views_of_shared_memory_are_stored_as_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"whole": base, "column": base[:, 1], "turned": base.T, "row": base[2], "same": base}
    save_checkpoint(tmp_path, {"views": TensorGroup(views, 0)}, {})
    assert_same(loaded(tmp_path, "views"), views)


def test_a_parameter_is_stored_without_its_gradient(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"p": TensorGroup({"w": torch.nn.Parameter(torch.ones(2))}, 0)}, {})
    assert not loaded(tmp_path, "p")["w"].requires_grad


def test_only_groups_of_a_new_version_are_written_again(tmp_path: Path) -> None:
    groups = {name: TensorGroup({"w": torch.full((2,), float(i))}, 0) for i, name in enumerate(["a", "b"])}
    saved = save_checkpoint(tmp_path, groups, {"round": 0})
    first = {path.name: path.stat().st_ino for path in tmp_path.glob("*.safetensors")}
    groups["b"] = TensorGroup({"w": torch.full((2,), 9.0)}, 1)
    saved = save_checkpoint(tmp_path, groups, {"round": 1}, saved)
    second = {path.name: path.stat().st_ino for path in tmp_path.glob("*.safetensors")}
    assert len(second) == 2  # the old file of b is gone
    assert [name for name in second if first.get(name) == second[name]] == [saved["a"].file]
    assert loaded(tmp_path, "b")["w"].tolist() == [9.0, 9.0]
    save_checkpoint(tmp_path, {"a": groups["a"]}, {"round": 2}, saved)
    assert [path.stat().st_ino for path in tmp_path.glob("*.safetensors")] == [first[saved["a"].file]]
    assert sorted(load_checkpoint(tmp_path).groups) == ["a"]


def test_a_checkpoint_can_be_moved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "old", {"w": TensorGroup(WEIGHTS, 0)}, {"round": 1})
    assert str(tmp_path) not in (tmp_path / "old" / "state.json").read_text()
    (tmp_path / "old").rename(tmp_path / "new")
    assert load_checkpoint(tmp_path / "new").data == {"round": 1}


@pytest.mark.parametrize(
    ("function", "step"),
    [*(("replace", n) for n in range(3)), *(("fsync", n) for n in range(6)), *(("unlink", n) for n in range(2))],
)
def test_a_crash_between_any_two_steps_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, step: int
) -> None:
    """The n-th call that changes or syncs something stops the process; old or new can be loaded, and saving goes on."""
    old = {name: TensorGroup({"w": torch.zeros(2)}, 0) for name in ("a", "b")}
    new = {name: TensorGroup({"w": torch.ones(2)}, 1) for name in ("a", "b")}
    saved = save_checkpoint(tmp_path, old, {"round": 0})
    target = {"replace": (os, "replace"), "fsync": (os, "fsync"), "unlink": (Path, "unlink")}[function]
    original, calls = getattr(*target), []

    def crashing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == step + 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(*target, crashing)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, new, {"round": 1}, saved)
    found = load_checkpoint(tmp_path)
    number = found.data["round"]
    for group in found.groups.values():
        assert group.tensors["w"].tolist() == [float(number)] * 2
    # The resumed run saves another content under the version that the crashed save may have left behind.
    again = {name: TensorGroup({"w": torch.full((2,), 5.0)}, 1 + number) for name in ("a", "b")}
    save_checkpoint(tmp_path, again, {"round": 5})
    assert loaded(tmp_path, "a")["w"].tolist() == [5.0, 5.0]
    assert len(list(tmp_path.iterdir())) == 3


def test_the_crash_test_reaches_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append(args), replace(*args)))
    save_checkpoint(tmp_path, {"a": TensorGroup(WEIGHTS, 0), "b": TensorGroup(WEIGHTS, 0)}, {})
    assert [Path(target).name.split("-")[0] for _, target in calls] == ["a", "b", "state.json"]


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_damage_is_named_in_one_line(tmp_path: Path) -> None:
    refused(tmp_path, "there is no checkpoint in")
    saved = save_checkpoint(tmp_path, {"w": TensorGroup(WEIGHTS, 0)}, {"round": 1})
    path, state = tmp_path / saved["w"].file, tmp_path / "state.json"
    content, text = path.read_bytes(), state.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for damaged in (content[:-1], b"", bytes(flipped)):
        path.write_bytes(damaged)
        refused(tmp_path, r"w-v0-\w+.safetensors is damaged .its content does not have the recorded hash.: restore")
    path.unlink()
    refused(tmp_path, "is damaged .No such file or directory")
    path.write_bytes(content)
    for broken in (text[:-5], b"", b"[]", b"{}", b"\xff", b'{"checkpoint_version": 1}'):
        state.write_bytes(broken)
        refused(tmp_path, "state.json is damaged")
    state.write_bytes(b'{"checkpoint_version": 1, "bags": {}, "data": {}}')
    refused(tmp_path, "written by an earlier version")
    state.write_bytes(hashed_json({"checkpoint_version": 2, "bags": {"w": {"file": "x"}}, "data": {}}))
    refused(tmp_path, "state.json is damaged")
    state.write_bytes(hashed_json({"checkpoint_version": 99, "bags": {}, "data": {}}))
    refused(tmp_path, "written by a newer version")


def test_a_checkpoint_that_its_run_replaces_while_it_is_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_checkpoint(tmp_path, {"w": TensorGroup({"w": torch.zeros(2)}, 0)}, {"round": 0})

    def read(path: Path, *most_bytes: int) -> bytes:
        if path.name == saved["w"].file:  # which the next checkpoint deletes
            save_checkpoint(tmp_path, {"w": TensorGroup({"w": torch.ones(2)}, 1)}, {"round": 1}, saved)
        return read_file(path, *most_bytes)

    monkeypatch.setattr(checkpoint_module, "read_file", read)
    found = load_checkpoint(tmp_path)
    assert (found.data, found.groups["w"].tensors["w"].tolist()) == ({"round": 1}, [1.0, 1.0])


def test_what_cannot_be_stored_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"w": TensorGroup(WEIGHTS, 0)}, {"round": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    for groups, data, message in (
        ({"w": TensorGroup(WEIGHTS, 1)}, {"tensor": torch.ones(1)}, "cannot be written as JSON"),
        ({"../w": TensorGroup(WEIGHTS, 1)}, {}, "group '../w' cannot be a file name here"),
        ({"w": TensorGroup({"s": torch.ones(2).to_sparse()}, 1)}, {}, "cannot be saved as safetensors"),
        ({"w": TensorGroup({"c": torch.ones(2, dtype=torch.complex128)}, 1)}, {}, "complex128.* cannot be saved"),
    ):
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path, groups, data)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert load_checkpoint(tmp_path).data == {"round": 1}


def test_no_pickle_is_read_or_written() -> None:
    source = Path(checkpoint_module.__file__).read_text()
    assert "pickle" not in source.replace("never pickle", "")
    assert "torch.load" not in source.replace("safetensors.torch.load", "")
    assert "torch.save" not in source.replace("safetensors.torch.save", "")


def test_the_same_configuration_passes_whatever_its_containers() -> None:
    saved = {"seed": 1, "space": {"layers": [1, 2]}, "x": math.nan, "empty": {}, "phases": [{"lr": 1, "epochs": 2}]}
    same = {"x": math.nan, "space": {"layers": (1, 2)}, "seed": 1, "empty": {}, "phases": [{"epochs": 2, "lr": 1}]}
    check_same_config(saved, same)


def test_another_configuration_is_shown_by_its_keys() -> None:
    saved = {"seed": 1, "train": {"lr": 0.1, "epochs": 5}, "name": "a", "gone": True}
    given = {"seed": 2, "train": {"lr": 0.1, "epochs": 6}, "name": "a", "new": {"k": [1]}}
    with pytest.raises(ValueError, match="checkpoint") as caught:
        check_same_config(saved, given)
    assert str(caught.value) == (
        "checkpoint of another configuration: seed 1 -> 2, train.epochs 5 -> 6, gone true -> absent, "
        "new.k absent -> [1]; resume with the saved values or start a new run"
    )
    check_same_config({"seed": 1}, {"seed": 1, "new": {"k": [1]}}, later=True)
    with pytest.raises(ValueError, match="gone true -> absent;"):
        check_same_config({"gone": True}, {"new": {"k": [1]}}, later=True)
    with pytest.raises(ValueError, match=r"k0 0 -> 1, k1 0 -> 1, k2 0 -> 1, k3 0 -> 1, k4 0 -> 1 and 4 more;"):
        check_same_config({f"k{i}": 0 for i in range(9)}, {f"k{i}": 1 for i in range(9)})
