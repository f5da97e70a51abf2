"""The benchmark of pfl-research's case: its values, a tiny run, and what it says of frameworks that are not there."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from fedloom.experiments.benchmarks import pfl_cell
from fedloom.experiments.benchmarks.cases import PflCnn
from fedloom.experiments.benchmarks.pfl_cell import CASE, SMALL, config_of


def test_the_case_is_the_published_one() -> None:
    config = config_of(CASE, "results")
    train = config.method.train
    assert (config.data.num_clients, config.data.train_samples, config.data.partition) == (1000, 50_000, "iid")
    assert (train.clients_per_round, train.epochs, train.batch_size) == (50, 1, 10)
    assert (train.lr, train.momentum, train.weight_decay, train.server) == (0.1, 0.0, 0.0, "replace")
    assert sum(p.numel() for p in PflCnn(10).parameters()) == 896 + 18_496 + 1_605_760 + 1_290


@pytest.mark.slow
@pytest.mark.ray
def test_two_rounds_of_a_few_clients() -> None:
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.pfl_cell", "--small", "--rounds", "2"]
    command += ["--repeats", "1", "--variants", "plain", "fedloom"]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = json.loads(out.strip().splitlines()[-1])
    assert figures["case"]["clients"] == SMALL.clients
    assert list(figures["variants"]) == ["plain", "fedloom"]
    for row in figures["variants"].values():
        assert row["round_s"] > 0
        assert 0 <= row["accuracy"][0] <= 1


@pytest.mark.skipif(find_spec("pfl") is not None, reason="pfl-research is installed")
def test_a_framework_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pfl_cell", "--variants", "pfl"])
    pfl_cell.main()
    out, err = capsys.readouterr()
    assert err == "pfl is not measured: the module pfl is not installed\n"
    assert json.loads(out.strip().splitlines()[-1])["variants"] == {}
