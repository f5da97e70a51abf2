"""Confusion matrices and written paragraphs of a final evaluation."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.evaluation import MOST_CLASSES, PROMPT, WRITTEN, confusion, joined, paragraph
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages

NAMES = ("<pad>", *"abcdefgh", "<oov>", "<bos>", "<eos>")


def test_a_confusion_counts_every_pair_that_occurs() -> None:
    targets, names = torch.tensor([0, 0, 1, 2, 2, 2]), ("up", "down", 'say "no"')
    found = confusion([torch.tensor([0, 1]), torch.tensor([1, 2, 2, 0])], targets, names, "fine_tuned", "1-2")
    pairs = {tuple(json.loads(str(m.detail))): (m.value, m.samples) for m in found}
    assert pairs == {
        ("up", "up"): (1, 2),
        ("up", "down"): (1, 2),
        ("down", "down"): (1, 1),
        ('say "no"', "up"): (1, 3),
        ('say "no"', 'say "no"'): (2, 3),
    }
    assert {(m.model, m.architecture, m.split, m.metric) for m in found} == {("fine_tuned", "1-2", "test", "confusion")}


def test_matrices_that_could_not_be_read_and_texts_have_none() -> None:
    many = [str(c) for c in range(MOST_CLASSES + 1)]
    assert confusion([torch.zeros(2).long()], torch.zeros(2).long(), many, "m", "0") == []
    assert confusion([torch.zeros(2).long()], torch.zeros(2, 3).long(), ["a", "b"], "m", "0") == []
    assert confusion([], torch.zeros(0).long(), ["a", "b"], "m", "0") == []


def cycling(x: Tensor) -> Tensor:
    """Logits of a model that is sure of the alphabet's next letter, and likes padding as much."""
    following = 1 + x % 8
    logits = torch.nn.functional.one_hot(following, len(NAMES)).float() * 50
    logits[..., 0] = 50
    return logits.transpose(1, 2)


def written(forward: Callable[[Tensor], Tensor], length: int = 30, seed: int = 3) -> Any:
    worker = cast(Worker, SimpleNamespace(spec=SimpleNamespace(training_seed=seed)))
    x = 1 + torch.arange(2 * length).reshape(2, length) % 8
    y = x.clone()
    x[0, 5:], y[0, 5:] = 0, -100  # the first text is shorter than a sequence
    return paragraph(worker, forward, (x, y), NAMES, "fine_tuned", "0")


def test_a_model_goes_on_with_the_beginning_of_the_first_whole_text() -> None:
    (found,) = written(cycling)
    given, text = json.loads(found.detail)
    alphabet = "abcdefgh" * 60
    begin = alphabet.index(given)
    assert len(given) == PROMPT
    assert given + text == alphabet[begin : begin + PROMPT + WRITTEN["characters"]]
    assert found.value == pytest.approx(0, abs=1e-6), "it was sure of what it wrote; padding is never drawn"
    assert found.samples == WRITTEN["characters"]


def test_outputs_by_name_are_written_from_their_logits() -> None:
    def named(x: Tensor) -> Any:
        return {"logits": cycling(x), "more": x}

    assert written(named) == written(cycling)


def test_what_is_written_depends_on_the_seed_alone() -> None:
    def unsure(x: Tensor) -> Tensor:
        return torch.zeros(len(x), len(NAMES), x.shape[1])

    first, again, other = (written(unsure, seed=seed)[0].detail for seed in (3, 3, 4))
    assert first == again != other
    letters = set(json.loads(first)[1])
    assert letters <= {*"abcdefgh", "\n"}
    assert written(unsure)[0].value == pytest.approx(np.log(9)), "eight letters and the end of a line"


def test_no_later_token_is_looked_at() -> None:
    seen: list[Tensor] = []

    def remembering(x: Tensor) -> Tensor:
        seen.append(x)
        return cycling(x)

    written(remembering)
    assert all(x.shape == (1, 30) for x in seen), "networks of a fixed length can be asked as well"
    assert seen[0][0, PROMPT - 1 :].unique().numel() == 1, "what is still to be written is filled with the last token"
    assert torch.equal(seen[-1][0, :-1], seen[-2][0, 1:]), "a long text is a window that moves on"


def test_texts_without_a_whole_sequence_are_left_out() -> None:
    worker = cast(Worker, SimpleNamespace(spec=SimpleNamespace(training_seed=3)))
    x, y = torch.ones(2, 5).long(), torch.full((2, 5), -100)
    assert paragraph(worker, cycling, (x, y), NAMES, "m", "0") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_model_writes_nothing(value: float) -> None:
    assert written(lambda x: torch.full((len(x), len(NAMES), x.shape[1]), value)) == []


def test_words_are_joined_by_spaces_and_special_tokens_left_out() -> None:
    assert joined(["the", "<unk>", "cat", "<eos>", "a"], by_character=False) == "the cat \n a"
    assert joined(["<bos>", "<", "a", "<eos>"], by_character=True) == "<a\n"


def test_a_run_leaves_a_matrix_for_every_model_that_sums_to_its_accuracy(
    tiny_config: Callable[..., RunConfig], results_of: Any
) -> None:
    results = results_of(tiny_config())
    rows = results["evaluations"]
    central = rows[(rows["stage"] == "evaluation") & rows["client_id"].isna() & (rows["split"] == "test")]
    for _, own in central.groupby(["model", "tier"]):
        pairs = own[own["metric"] == "confusion"]
        right = sum(v for v, d in zip(pairs["value"], pairs["detail"], strict=True) if len(set(json.loads(d))) == 1)
        assert pairs["value"].sum() == 80
        assert right / 80 == pytest.approx(own.loc[own["metric"] == "accuracy", "value"].item())
    assert rows.loc[rows["metric"] != "confusion", "detail"].isna().all()


def test_a_supernet_may_be_scored_along_no_path(tiny_config: Callable[..., RunConfig], step_through: Any) -> None:
    config = tiny_config()
    config.method.train.evaluate_paths, config.method.train.evaluate_every = 0, 1
    world = build_world(config)
    stepper = step_through(world, next(s for s in build_stages(world) if s.name == "supernet"), RunState())
    stepper.step()
    assert stepper.results[0].sums is not None
