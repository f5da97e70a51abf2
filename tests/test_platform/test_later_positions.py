"""The objectives of which only a text's later positions, or its last one, count."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.evaluation import evaluate
from fedloom.platform.clients.objectives import IGNORED, LastPosition, LaterPositions, check_objective
from fedloom.platform.clients.training import Seen
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import torch_stream


def batch() -> tuple[Tensor, Tensor]:
    """Two texts of six positions and five tokens, the second one padded after its fourth position."""
    generator = torch_stream(1, "test")
    targets = torch.randint(0, 5, (2, 6), generator=generator)
    targets[1, 4:] = IGNORED
    return torch.randn((2, 5, 6), generator=generator), targets


def test_only_positions_after_the_skipped_count() -> None:
    objective, (outputs, targets) = LaterPositions(skip=3), batch()
    places = [(0, 3), (0, 4), (0, 5), (1, 3)]
    by_hand = torch.stack([F.cross_entropy(outputs[n, :, t], targets[n, t]) for n, t in places])
    assert torch.as_tensor(objective.counted(outputs, targets)).item() == 4
    torch.testing.assert_close(objective.loss_sum(outputs, targets), by_hand.sum())
    torch.testing.assert_close(objective.loss(outputs, targets), by_hand.mean())
    assert objective.metric_sum(outputs, targets).item() == sum(
        int(outputs[n, :, t].argmax() == targets[n, t]) for n, t in places
    )


def test_a_batch_of_padding_alone_has_a_loss_of_zero_and_no_gradient() -> None:
    outputs, targets = batch()
    outputs.requires_grad_()
    loss = LaterPositions(skip=4).loss(outputs[1:], targets[1:])
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


def test_the_last_position_is_the_last_one_with_a_target() -> None:
    objective, (outputs, targets) = LastPosition(), batch()
    targets[0, :3] = IGNORED
    places = [(0, 5), (1, 3)]
    by_hand = torch.stack([F.cross_entropy(outputs[n, :, t], targets[n, t]) for n, t in places])
    torch.testing.assert_close(objective.losses(outputs, targets), by_hand)
    without = torch.full_like(targets[:1], IGNORED)
    outputs, targets = torch.cat([outputs, outputs[:1]]), torch.cat([targets, without])
    assert torch.as_tensor(objective.counted(outputs, targets)).item() == 2
    torch.testing.assert_close(objective.loss(outputs, targets), by_hand.mean())
    torch.testing.assert_close(objective.loss_sum(outputs, targets), by_hand.sum())


def test_the_score_on_texts_without_a_position_that_counts_is_unknown() -> None:
    outputs, targets = batch()
    score = evaluate(lambda _: outputs[1:], (torch.zeros((1, 6)), targets[1:]), LaterPositions(skip=4))
    assert math.isnan(score.loss)
    assert math.isnan(score.metric)
    assert score.samples == 1


def test_the_training_figures_of_texts_without_a_position_that_counts_are_unknown() -> None:
    seen, (outputs, targets) = Seen(torch.device("cpu"), norm=True), batch()
    seen.add(torch.tensor(0.0), outputs[1:], targets[1:], LaterPositions(skip=4))
    trained = seen.summed_up(1, 1)
    assert trained.loss_norm is not None
    assert all(map(math.isnan, (trained.loss, trained.accuracy, trained.loss_norm)))


def test_texts_that_are_too_short_and_images_are_refused() -> None:
    choice = ComponentSpec("later_positions", (("skip", 40),))
    with pytest.raises(ValueError, match=r"skip=40 needs texts with more positions than skip, given 35 positions"):
        check_objective(choice, torch.zeros((3, 35), dtype=torch.int64), 5)
    with pytest.raises(ValueError, match=r"needs texts with more positions than skip, given images"):
        check_objective(choice, torch.zeros(3, dtype=torch.int64), 5)
    check_objective(choice, torch.zeros((3, 41), dtype=torch.int64), 5)
