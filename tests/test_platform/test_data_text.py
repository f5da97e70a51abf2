import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import find_source
from fedloom.platform.data.source import uniform_rows
from fedloom.platform.data.tokens import (
    CHARACTERS,
    IGNORED_LABEL,
    VOCABULARY,
    TokenPart,
    compact,
    cut,
    encode,
    make_vocabulary,
)

ROLES = {
    "train": {"PLAY_B": ["To be,", "or not"], "PLAY_A": ["Who's there?"], "PLAY_C": ["O!"]},
    "test": {"PLAY_B": ["To die"], "PLAY_A": ["Nay, answer me:"]},
}


def write_shakespeare(root: Path, roles: dict[str, dict[str, list[str]]] | None = None, kind: str = "S") -> None:
    """Writes lines in the published layout, as text of fixed (S) or of variable length (O)."""
    (root / "shakespeare").mkdir(parents=True, exist_ok=True)
    for part, clients in (roles or ROLES).items():
        with h5py.File(root / "shakespeare" / f"shakespeare_{part}.h5", "w") as file:
            for name, lines in clients.items():
                raw = [line.encode() for line in lines]
                data = np.array(raw) if kind == "S" else raw
                dtype = None if kind == "S" else h5py.string_dtype()
                file.create_dataset(f"examples/{name}/snippets", data=data, dtype=dtype)


def write_ptb(root: Path, train: str, test: str, folder: str = "ptb") -> None:
    (root / folder).mkdir(parents=True)
    (root / folder / "ptb.train.txt").write_text(train)
    (root / folder / "ptb.test.txt").write_text(test)


def config(root: Path, dataset: str, **options: Any) -> DataConfig:
    return DataConfig(
        **{"dataset": dataset, "root": str(root), "cache": str(root / "cache"), "partition": "iid", **options}
    )


def text_of(x: torch.Tensor, vocabulary: tuple[str, ...]) -> str:
    return "".join(vocabulary[i] for i in x.flatten().tolist())


# -- sequences --------------------------------------------------------------------------------------------------------


def test_a_text_is_cut_into_sequences_and_their_successors() -> None:
    x, y = cut(np.array([1, 2, 3, 4, 5, 6]), length=3, padding=0)
    assert x.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert y.tolist() == [[2, 3, 4], [5, 6, -100]]


def test_a_text_that_fits_is_not_padded() -> None:
    x, y = cut(np.array([1, 2, 3, 4, 5]), length=2, padding=0)
    assert x.tolist() == [[1, 2], [3, 4]]
    assert y.tolist() == [[2, 3], [4, 5]]


@given(tokens=st.lists(st.integers(1, 9), max_size=40), length=st.integers(1, 12))
def test_every_token_but_the_first_is_a_label_once_and_follows_its_input(tokens: list[int], length: int) -> None:
    x, y = cut(np.array(tokens, dtype=np.int64), length, padding=0)
    assert x.shape == y.shape == (-(-max(0, len(tokens) - 1) // length), length)
    pairs = [(a, b) for a, b in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True) if b != IGNORED_LABEL]
    assert pairs == list(pairwise(tokens))
    assert (x[y == IGNORED_LABEL] == 0).all()
    assert (y[:-1] != IGNORED_LABEL).all()


@pytest.mark.parametrize(
    ("size", "x_type", "y_type"),
    [
        (5, "uint8", "int8"),
        (90, "uint8", "int8"),
        (128, "uint8", "int8"),
        (129, "uint8", "int16"),
        (256, "uint8", "int16"),
        (257, "uint16", "int16"),
        (10_000, "uint16", "int16"),
        (40_000, "uint16", "int32"),
        (70_000, "uint32", "int32"),
    ],
)
def test_the_types_on_disk_hold_the_vocabulary(size: int, x_type: str, y_type: str) -> None:
    x, y = np.array([[0, size - 1]]), np.array([[size - 1, IGNORED_LABEL]])
    small = compact(TokenPart(x, y), size)
    assert (str(small.x.dtype), str(small.y.dtype)) == (x_type, y_type)
    assert small.x.tolist() == x.tolist()
    assert small.y.tolist() == y.tolist()


def test_a_uniform_sample_takes_each_row_as_often() -> None:
    chosen = [uniform_rows(8, 2, np.random.default_rng(seed)) for seed in range(800)]
    assert all(len(np.unique(rows)) == 2 and rows[0] < rows[1] for rows in chosen)
    counts = np.bincount(np.concatenate(chosen), minlength=8)
    assert ((counts - 200) ** 2 / 200).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


# -- Shakespeare ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_the_published_one() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 90
    assert len(CHARACTERS) == 86
    assert (VOCABULARY[0], VOCABULARY[1], VOCABULARY[86]) == ("<pad>", "d", "\r")
    assert VOCABULARY[87:] == ("<oov>", "<bos>", "<eos>")


def test_lines_are_encoded_with_their_ends() -> None:
    # 88 begins and 89 ends a line; d, h, l are 1, 2, 3; a brace and both bytes of an accent are unknown.
    assert encode([b"hd", b"", b"l}", "é".encode()]).tolist() == [88, 2, 1, 89, 88, 89, 88, 3, 87, 89, 88, 87, 87, 89]
    assert encode([]).tolist() == []


@pytest.mark.parametrize("kind", ["S", "O"])
def test_shakespeare_is_prepared_by_role(tmp_path: Path, kind: str) -> None:
    write_shakespeare(tmp_path, kind=kind)
    dataset = Dataset.open(prepare_dataset(config(tmp_path, "shakespeare", sequence_length=5)))
    assert (dataset.kind, dataset.input_shape, dataset.num_classes) == ("tokens", (5,), 90)
    assert dataset.class_names == VOCABULARY
    assert dataset.client_names == ("PLAY_A", "PLAY_B", "PLAY_C")
    # 14, 16 and 4 tokens: 13, 15 and 3 labels.
    assert dataset.clients("train").tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert dataset.clients("test").tolist() == [0, 0, 0, 0, 1, 1]
    x, y = dataset.tensors("train", np.arange(3, 6))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((3, 5), torch.int64, (3, 5), torch.int64)
    assert text_of(x, VOCABULARY) == "<bos>To be,<eos><bos>or not"
    assert text_of(y, VOCABULARY) == "To be,<eos><bos>or not<eos>"
    x, y = dataset.tensors("train", np.array([6]))
    assert text_of(x, VOCABULARY) == "<bos>O!<pad><pad>"
    assert y.tolist()[0][3:] == [-100, -100]
    assert np.load(dataset.path / "train_x.npy").dtype == np.uint8
    assert np.load(dataset.path / "train_y.npy").dtype == np.int8


def test_lines_may_be_cut_alone_with_padding_to_be_predicted(tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    data = config(tmp_path, "shakespeare", sequence_length=5, options={"padded_lines": True})
    whole = Dataset.open(prepare_dataset(config(tmp_path, "shakespeare", sequence_length=5)))
    dataset = Dataset.open(prepare_dataset(data))
    assert dataset.hash != whole.hash
    rows = np.flatnonzero(dataset.clients("train") == 1)
    x, y = dataset.tensors("train", rows)
    # "To be," and "or not" have eight tokens each with their ends: seven labels, two sequences.
    assert x.shape == (4, 5)
    assert text_of(x[:2], dataset.class_names) == "<bos>To be,<pad><pad><pad>"
    assert text_of(y[:2], dataset.class_names) == "To be,<eos><pad><pad><pad>"
    assert text_of(y[2:], dataset.class_names) == "or not<eos><pad><pad><pad>"


def test_the_length_of_sequences_is_a_part_of_the_data_set(tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    paths = [prepare_dataset(config(tmp_path, "shakespeare", sequence_length=n)) for n in (None, 80, 5)]
    assert paths[0] == paths[1] != paths[2]
    assert Dataset.open(paths[0]).input_shape == (80,)
    assert Dataset.open(paths[0]).hash != Dataset.open(paths[2]).hash


def test_torch_ignores_the_padding(tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    dataset = Dataset.open(prepare_dataset(config(tmp_path, "shakespeare", sequence_length=5)))
    _, y = dataset.tensors("train", np.array([6]))
    logits = torch.randn(1, 90, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(F.cross_entropy(logits, y), F.cross_entropy(logits[..., :3], y[:, :3]))


def test_a_part_of_the_sequences_keeps_each_with_its_client(tmp_path: Path) -> None:
    write_shakespeare(tmp_path)
    whole = Dataset.open(prepare_dataset(config(tmp_path, "shakespeare", sequence_length=5)))
    options = config(tmp_path, "shakespeare", sequence_length=5, train_samples=4, test_samples=2)
    some = Dataset.open(prepare_dataset(options))
    assert (some.num_samples("train"), some.num_samples("test")) == (4, 2)
    rows = {
        tuple(x): c
        for x, c in zip(whole.tensors("train", np.arange(7))[0].tolist(), whole.clients("train"), strict=True)
    }
    kept = some.tensors("train", np.arange(4))[0].tolist()
    assert [rows[tuple(x)] for x in kept] == some.clients("train").tolist()
    with pytest.raises(ValueError, match=r"data.train_samples=8: shakespeare has 7 train samples; ask for fewer"):
        prepare_dataset(config(tmp_path, "shakespeare", sequence_length=5, train_samples=8))


def no_test_file(folder: Path) -> None:
    (folder / "shakespeare_test.h5").unlink()


def no_hdf5(folder: Path) -> None:
    (folder / "shakespeare_train.h5").write_bytes(b"nothing of the kind")


def truncated(folder: Path) -> None:
    whole = (folder / "shakespeare_train.h5").read_bytes()
    (folder / "shakespeare_train.h5").write_bytes(whole[: len(whole) // 2])


def no_examples(folder: Path) -> None:
    with h5py.File(folder / "shakespeare_train.h5", "w") as file:
        file["other"] = [1]


def no_clients(folder: Path) -> None:
    with h5py.File(folder / "shakespeare_train.h5", "w") as file:
        file.create_group("examples")


def no_snippets(folder: Path) -> None:
    with h5py.File(folder / "shakespeare_train.h5", "a") as file:
        del file["examples/PLAY_C/snippets"]


def numbers(folder: Path) -> None:
    with h5py.File(folder / "shakespeare_train.h5", "a") as file:
        file["examples/PLAY_D/snippets"] = [1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            no_test_file,
            r"shakespeare_test.h5: not found; shakespeare needs shakespeare_train.h5 and shakespeare_test.h5",
        ),
        (no_hdf5, r"shakespeare_train.h5: cannot be read .*expected HDF5 with /examples/CLIENT/snippets"),
        (truncated, r"shakespeare_train.h5: cannot be read .*expected HDF5"),
        (no_examples, r"shakespeare_train.h5: has no group /examples with clients"),
        (no_clients, r"shakespeare_train.h5: has no group /examples with clients"),
        (no_snippets, r"shakespeare_train.h5: /examples/PLAY_C has no lines of text"),
        (numbers, r"shakespeare_train.h5: /examples/PLAY_D has no lines of text"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_shakespeare(tmp_path)
    damage(tmp_path / "shakespeare")
    with pytest.raises(ValueError, match=message) as error:
        prepare_dataset(config(tmp_path, "shakespeare"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_the_real_shakespeare_is_prepared(tmp_path: Path) -> None:
    root = os.environ.get("FEDLOOM_DATA")
    if not root or not (Path(root) / "shakespeare" / "shakespeare_train.h5").is_file():
        pytest.skip("needs federated Shakespeare in HDF5: set FEDLOOM_DATA to the folder that holds shakespeare/")
    dataset = Dataset.open(prepare_dataset(config(Path(root), "shakespeare", cache=str(tmp_path))))
    assert len(dataset.client_names) == 715
    assert (dataset.input_shape, dataset.num_classes) == ((80,), 90)
    y = dataset.labels("train")
    # All lines' characters with two tokens more per line, less the first token of every role.
    assert (y != IGNORED_LABEL).sum() == 2_391_451 - 715
    assert np.bincount(y[y >= 0], minlength=90)[[88, 89]].tolist() == [16_068 - 715, 16_068]
    assert np.bincount(y[y >= 0], minlength=90)[87] <= 2  # closing braces
    x, _ = dataset.tensors("train", np.array([0]))
    assert text_of(x, VOCABULARY).startswith("<bos>Yonder comes my master, your brother.<eos><bos>Come not within")


# -- Penn Treebank ----------------------------------------------------------------------------------------------------


def test_words_are_ranked_by_frequency_then_alphabet() -> None:
    words = [*"bacabdd", "<unk>", "<unk>", "b"]
    assert make_vocabulary(words) == ("b", "<unk>", "a", "d", "c")
    assert make_vocabulary(words, size=3) == ("b", "<unk>", "a")
    assert make_vocabulary(["a", "b", "a"]) == ("a", "b", "<unk>")
    assert make_vocabulary(["a", "b", "a"], size=2) == ("a", "<unk>")
    assert len(make_vocabulary([str(i) for i in range(12_000)])) == 10_000


@pytest.mark.parametrize("folder", ["ptb", "simple-examples/data"])
def test_ptb_is_prepared_as_one_text(tmp_path: Path, folder: str) -> None:
    write_ptb(tmp_path, " the cat <unk> the \n a cat \n", " the dog \n", folder)
    dataset = Dataset.open(prepare_dataset(config(tmp_path, "ptb", sequence_length=4)))
    assert dataset.class_names == ("<eos>", "cat", "the", "<unk>", "a")
    assert (dataset.kind, dataset.input_shape, dataset.num_classes, dataset.client_names) == ("tokens", (4,), 5, ())
    x, y = dataset.tensors("train", np.arange(2))
    assert x.tolist() == [[2, 1, 3, 2], [0, 4, 1, 0]]
    assert y.tolist() == [[1, 3, 2, 0], [4, 1, 0, -100]]
    x, y = dataset.tensors("test", np.array([0]))
    assert x.tolist() == [[2, 3, 0, 0]]
    assert y.tolist() == [[3, 0, -100, -100]]
    with pytest.raises(ValueError, match="ptb has no clients of its own"):
        dataset.clients("train")


def test_the_sequences_of_ptb_are_35_long_unless_told(tmp_path: Path) -> None:
    write_ptb(tmp_path, "a b c\n" * 100, "a\n")
    dataset = Dataset.open(prepare_dataset(config(tmp_path, "ptb")))
    assert dataset.input_shape == (35,)
    assert dataset.num_samples("train") == 12  # 399 labels


def test_missing_and_empty_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ptb not found under .*ptb.train.txt and ptb.test.txt in ptb/.*data.root"):
        find_source(config(tmp_path, "ptb"))
    with pytest.raises(ValueError, match=r"shakespeare not found under .*shakespeare/shakespeare_train.h5"):
        find_source(config(tmp_path, "shakespeare"))
    write_ptb(tmp_path, "a b\n", " \n\n")
    with pytest.raises(ValueError, match=r"ptb.test.txt: has no text"):
        prepare_dataset(config(tmp_path, "ptb"))
    (tmp_path / "ptb" / "ptb.test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"ptb.test.txt: not UTF-8 text"):
        prepare_dataset(config(tmp_path, "ptb"))
    (tmp_path / "ptb" / "ptb.test.txt").unlink()
    with pytest.raises(ValueError, match=r"ptb.test.txt: not found; ptb needs ptb.train.txt and ptb.test.txt"):
        prepare_dataset(config(tmp_path, "ptb"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dataset", ["ptb", "shakespeare"])
def test_text_that_is_prepared_is_not_cut_again(tmp_path: Path, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ptb(tmp_path, "a b c\n", "a\n")
    write_shakespeare(tmp_path)
    first = prepare_dataset(config(tmp_path, dataset))

    def fail(*arguments: object, **named: object) -> None:
        raise AssertionError("cut again")

    monkeypatch.setattr("fedloom.platform.data.tokens.cut", fail)
    assert prepare_dataset(config(tmp_path, dataset), verify=True) == first
