"""The examples of the pages do what they say; those that a run tries before it begins are in test_readmes, too."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.platform.averaging.weighting import Work, weighting_rule
from fedloom.platform.clients.objectives import OBJECTIVES
from fedloom.platform.clients.training import LocalSGD, Optimizer
from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.registry import find_source
from fedloom.platform.data.source import Source
from fedloom.platform.data.speech import mfcc
from fedloom.platform.data.tokens import TokenSource
from fedloom.platform.federation.tiers import BUDGETS
from fedloom.platform.methods.distribution import Distribution, distribute
from fedloom.platform.methods.shares import SharesConfig, Sharing, shares_of
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.search.base import Interval
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.predictors import fit_predictor
from fedloom.platform.search.registry import build_searcher
from fedloom.platform.spaces.genome import PlainGenome
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


def test_a_power_of_the_samples_weighs_and_what_was_not_trained_does_not() -> None:
    rule = weighting_rule(ComponentSpec("power_weights:power", (("exponent", 0.5),)))
    assert rule(Work(4, 16, {"stem": 16, "operator": 9, "other": 0})) == {"stem": 4.0, "operator": 3.0, "other": 0.0}


def test_adagrad_divides_by_the_root_of_all_squares_so_far() -> None:
    x = torch.zeros(1, requires_grad=True)
    optimizer = Optimizer(LocalSGD(1, 1, 0.5, optimizer=ComponentSpec("adagrad:adagrad")), {"x": x})
    for gradient, expected in ((3.0, -0.5), (4.0, -0.5 - 0.5 * 4 / 5)):
        x.grad = torch.tensor([gradient])
        optimizer.step()
        assert x.item() == pytest.approx(expected)


def test_one_square_of_every_image_is_erased() -> None:
    erase = AUGMENTATIONS.make(ComponentSpec("erasing:erase", (("size", 3),)))
    erased = erase(torch.ones(5, 2, 8, 8), torch.Generator().manual_seed(1))
    assert (erased == 0).sum(dim=(1, 2, 3)).tolist() == [18] * 5


def test_smoothing_changes_the_loss_of_training_alone() -> None:
    smoothed = OBJECTIVES.make(ComponentSpec("smoothed:Smoothed", (("smoothing", 0.5),)))
    logits, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    plain = torch.nn.functional.cross_entropy(logits, targets)
    assert smoothed.loss(logits, targets) == pytest.approx(plain.item() + 0.5)  # half of the label on both classes
    assert smoothed.loss_sum(logits, targets) == plain


def test_a_device_in_use_has_a_part_of_its_budget() -> None:
    budget = BUDGETS.make(ComponentSpec("in_use:in_use", (("left", 0.25), ("probability", 0.5))))
    rng = np.random.default_rng(0)
    assert {budget(0, rng) for _ in range(20)} == {1.0}
    drawn = [budget(1, rng) for _ in range(1000)]
    assert drawn.count(0.25) == pytest.approx(500, abs=60)
    assert set(drawn) == {0.25, 1.0}


def test_who_can_gets_the_largest() -> None:
    space = build_space(SpaceConfig(name="widths:widths"))
    table = space.cost_table("macs")
    budgets = (table.largest, 2000.0)
    distribution = Distribution(space, table, 0, (3, 8), budgets, (), {}, np.random.default_rng(0))
    given = distribute(ComponentSpec("largest_first:largest_first"), distribution)
    assert given[3] == space.largest
    assert table.cost(given[8]) <= 2000


def test_the_largest_is_favoured() -> None:
    shares = shares_of(
        ComponentSpec("favoured:favoured", (("factor", 3.0),)), Sharing(SharesConfig(), 0, 1, (False, True, False))
    )
    assert list(shares.values) == [1.0, 3.0, 1.0]
    assert shares.schedules == {"factor": 3.0}


def test_hill_climbing_finds_the_top_and_replays() -> None:
    options = (4,) * 5
    table = CostTable("macs", 1.0, ((0.0, 1.0, 2.0, 3.0),) * 5)
    config = SearchConfig(searcher="hill:HillClimbing", offspring=8, mutation=0.3)
    problem = SearchProblem(options, PlainGenome(options), table, Interval(0, 10), 1, 200, config)
    searcher = build_searcher(problem)
    while candidates := searcher.ask():
        scores = [float(sum(a)) for a in candidates]  # as good as dear: 9 is the most that the interval holds
        searcher.tell(candidates, scores, scores)
        assert all(table.cost(a) <= 10 for a in candidates)
    assert len(searcher.history) == len({s.architecture for s in searcher.history}) == 200
    assert max(s.metric for s in searcher.history) == 9
    again = build_searcher(problem)
    again.restore(searcher.state())
    assert again.history == searcher.history


def test_ridge_regression_ranks_what_is_linear() -> None:
    rng = np.random.default_rng(0)
    features = rng.integers(0, 2, (60, 6)).astype(float)
    fitted = fit_predictor(
        features, features @ np.arange(6.0), seed=1, fit=ComponentSpec("ridge:ridge", (("strength", 0.1),))
    )
    assert fitted.tau > 0.95


def test_a_subnet_of_widths_is_the_first_units_of_the_supernet() -> None:
    space = build_space(SpaceConfig(name="widths:widths", options={"least": 4, "doublings": 2}))
    weights = space.initial_weights(torch.Generator().manual_seed(0))
    cut = extract(weights, space.slices((1,)))
    assert {name: tuple(t.shape) for name, t in cut.items()} == {
        "hidden.weight": (8, 64),
        "hidden.bias": (8,),
        "logits.weight": (10, 8),
        "logits.bias": (10,),
    }
    supernet, subnet, x = space.build_supernet(), space.build_subnet((1,)), torch.randn(3, 1, 8, 8)
    supernet.load_state_dict(weights)
    subnet.load_state_dict({name: tensor.clone() for name, tensor in cut.items()})
    assert torch.equal(supernet(x, (1,)), subnet(x))


def test_letters_of_users_and_of_any_text(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": ["abba", "cab", "b" * 9], "user": ["ann", "bob", "ann"]})
    frame.to_parquet(tmp_path / "mine.parquet")
    options = {"path": str(tmp_path / "mine.parquet"), "most": 2}
    config = DataConfig("letters:letters", options=options, sequence_length=5)
    source = find_source(config)
    assert isinstance(source, TokenSource)
    assert source.vocabulary == ("<pad>", "<other>", "b", "a")
    assert source.client_names == ("ann", "bob")
    parts = [source.sequences(part) for part in ("train", "test")]
    # Ann's 4 + 1 + 9 characters are three sequences of five, Bob's three are one.
    clients = [client for part in parts if part.client is not None for client in part.client.tolist()]
    assert sorted(clients) == [0, 0, 0, 1]
    texts = {tuple(row) for part in parts for row in part.x.tolist()}
    assert (3, 2, 2, 3, 1) in texts, "abba, and the line's end is another character"
    assert (1, 3, 0, 0, 0) in texts, "ca of cab: the last one is only a target"
    (tmp_path / "plain.txt").write_text("to be or not to be " * 20)
    plain = find_source(replace(config, options={"path": str(tmp_path / "plain.txt")}))
    assert isinstance(plain, TokenSource)
    assert plain.client_names == ()
    by_word = find_source(replace(config, options={"path": str(tmp_path / "plain.txt"), "words": True, "most": 3}))
    assert isinstance(by_word, TokenSource)
    assert by_word.vocabulary == ("<pad>", "<other>", "to", "be", "or")
    with pytest.raises(ValueError, match=r"nowhere.parquet: not found; give a file with the columns text and user"):
        find_source(replace(config, options={"path": "nowhere.parquet"}))


def test_sounds_of_speakers(tmp_path: Path) -> None:
    pytest.importorskip("librosa", reason="needs librosa: pip install 'fedloom[speech]'")
    soundfile = pytest.importorskip("soundfile", reason="needs soundfile: pip install 'fedloom[speech]'")
    second = np.sin(np.arange(16_000) / 9)
    for name in ("ann/yes_0", "ann/no_0", "bob/no_0", "bob/no_1", "bob/yes_0"):
        path = tmp_path / "mine" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, (0.5 * second).astype(np.float32), 16_000)
    config = DataConfig("sounds:sounds", options={"path": str(tmp_path / "mine")})
    source = find_source(config)
    assert isinstance(source, Source)
    assert (source.client_names, source.class_names) == (("ann", "bob"), ("no", "yes"))
    x = source.inputs("train", np.arange(1))
    assert x.shape == (1, 1, 40, 51)
    np.testing.assert_allclose(x[0, 0], mfcc((0.5 * second).astype(np.float32)), atol=0.5)  # files have 16 bits
    with pytest.raises(ValueError, match=r"has no SPEAKER/WORD_\*.wav; give the folder of the speakers' folders"):
        find_source(replace(config, options={"path": str(tmp_path)}))
    soundfile.write(tmp_path / "mine" / "ann" / "no_9.wav", np.zeros((100, 2)), 16_000)
    with pytest.raises(ValueError, match=r"no_9.wav: is 16000 Hz, 2 channels; expected 16000 Hz, 1 channel: convert"):
        find_source(config)
