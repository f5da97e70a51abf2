"""The arithmetic of kNN-Per: nearest labels, leaving one out, the mixing weight and its scores."""

import numpy as np
import pytest
import torch

from fedloom.platform.methods import knn_per
from fedloom.platform.methods.knn_per import best_share, nearest_labels, score_of


def test_nearest_labels_in_literal_numbers() -> None:
    features = torch.tensor([[1.0], [3.0], [100.0]])
    found = nearest_labels(torch.tensor([[0.0]]), features, torch.tensor([2, 0, 1]), 3, neighbours=2, scale=1.0)
    # Distances 1 and 3, sigma 2: exp(-.5) and exp(-1.5), as e : 1.
    assert found.tolist() == [pytest.approx([1 / (1 + np.e), 0.0, np.e / (1 + np.e)])]
    half = nearest_labels(torch.tensor([[0.0]]), features, torch.tensor([2, 0, 1]), 3, neighbours=2, scale=0.5)
    assert half.tolist() == [pytest.approx([1 / (1 + np.e**2), 0.0, np.e**2 / (1 + np.e**2)])]


def test_neighbours_in_the_same_place_count_alike_and_fewer_samples_than_k_are_all_taken() -> None:
    same = nearest_labels(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 0, 0, 1]), 2, 10, 1.0)
    assert same.tolist() == [pytest.approx([0.75, 0.25])] * 2


def test_left_out_of_the_store_a_sample_is_no_neighbour_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_per, "BATCH", 4)  # blocks of queries, the last one smaller
    features = torch.tensor(np.random.default_rng(3).normal(size=(11, 3)))
    labels = torch.arange(11) % 4
    found = nearest_labels(features, features, labels, 4, 3, 1.0, leave_one_out=True)
    for i in range(11):
        others = torch.arange(11) != i
        by_hand = nearest_labels(features[[i]], features[others], labels[others], 4, 3, 1.0)
        torch.testing.assert_close(found[[i]], by_hand)
    alone = nearest_labels(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([2]), 4, 10, 1.0, leave_one_out=True)
    assert alone.tolist() == [[0.0] * 4]


def test_the_share_is_the_best_and_the_smallest_of_equals() -> None:
    right, wrong = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    y = torch.tensor([1])
    assert best_share(right, wrong, y) == 0.6, "at .5 it is a draw, which goes to the first class"
    assert best_share(wrong, right, y) == 0.0
    assert best_share(right, right, y) == 0.0
    assert best_share(wrong, wrong, y) == 0.0
    near = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    predicted = torch.tensor([[0.55, 0.45], [0.3, 0.7]])
    # The first is right from .1 on, the second, of class 1, only below 2/7: .1 and .2 are equally good.
    assert best_share(near, predicted, torch.tensor([1, 1])) == 0.1
    assert best_share(near[:0], predicted[:0], torch.tensor([], dtype=torch.long)) == 0.0


def test_scores_of_probabilities_in_literal_numbers() -> None:
    score = score_of(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double(), torch.tensor([1, 1]))
    assert score.loss == pytest.approx(-(np.log(0.75) + np.log(0.5)) / 2)
    assert (score.metric, score.samples) == (0.5, 2)
