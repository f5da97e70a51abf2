"""Misspelt keys and names, and keys that are given twice."""

import json

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.overrides import SYNONYMS, last_values, meant
from fedloom.platform.settings import settings_of

KEYS = [setting.key for setting in settings_of(compose_config(["method=fedoras"]))] + ["experiment", "method"]


@pytest.mark.parametrize("command", ["run", "describe", "prepare", "ablate"])
@pytest.mark.parametrize("mistake", ["experiment=fedoras_digitz", "method=fedavvg", "data.alfa=3"])
def test_a_typo_is_told_with_what_was_meant(command: str, mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["ablation=beta_schedule"] if command == "ablate" else []
    with pytest.raises(SystemExit) as ending:
        main([command, *given, *(["experiment=superfednas_digits"] if command == "ablate" else []), mistake])
    assert ending.value.code == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_number_is_neither_true_nor_false() -> None:
    config = compose_config(["executor.resident=1", "dry_run=yes", "tensorboard=${dry_run}", "space.tied=null"])
    assert (config.executor.resident, config.dry_run, config.tensorboard, config.space.tied) == (True, True, True, None)
    assert compose_config(["method=transfer", "method.start_from=1.10"]).method.start_from == "1.10"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^executor\.resident=2: must be true or false$"):
        compose_config(["executor.resident=2"])
    with pytest.raises(ValueError, match=r"^method\.train\.rounds=true: must be an int$"):
        compose_config(["method.train.rounds=true"])


@pytest.mark.parametrize(
    ("given", "suggested"),
    {
        "method.train.learning_rate": ["method.train.lr"],
        "method.finetune.learning_rate": ["method.finetune.lr"],
        "lr": ["method.train.lr"],
        "learningRate": ["method.train.lr"],
        "num_rounds": ["method.train.rounds"],
        "rounds": ["method.train.rounds"],
        "train.comm_round": ["method.train.rounds"],
        "batchsize": ["method.train.batch_size"],
        "batch-size": ["method.train.batch_size"],
        "bs": ["method.train.batch_size"],
        "clients": ["method.train.clients_per_round", "data.num_clients", "tiers.clients"],
        "local_epochs": ["method.train.epochs"],
        "epoch": ["method.train.epochs"],
        "optimizer": ["method.train.optimizer"],
        "method.train.optim": ["method.train.optimizer", "method.train.server"],
        "method.train.fraction": ["method.train.clients_per_round"],
        "alpha": ["data.alpha"],
        "data.dirichlet_alpha": ["data.alpha"],
        "dataset": ["data.dataset"],
        "model": ["space.name"],
        "algorithm": ["method"],
        "random_seed": ["seed"],
        "num_gpus": ["ray.num_gpus"],
        "num_workers": ["executor.actors"],
        "mu": ["method.train.options.mu"],
        "server_lr": ["method.train.options.server_lr"],
        "method.trian.lr": ["method.train.lr"],
        "methd.train.lrr": ["method.train.lr"],
        "weight_deacy": ["method.train.weight_decay"],
        "output_dir": ["results"],
        "exekutor.kind": ["executor.kind"],
        "qqq": [],
    }.items(),
)
def test_what_a_key_may_have_meant(given: str, suggested: list[str]) -> None:
    expected = f"; did you mean {' or '.join(map(repr, suggested))}?" if suggested else ""
    assert meant(given, KEYS) == expected


def test_every_synonym_leads_to_a_key_that_is_there() -> None:
    for key, names in SYNONYMS.items():
        for name in names.split(", "):
            assert repr(key)[:-1] in meant(name, KEYS) or f".{key}'" in meant(name, KEYS)


def test_of_a_key_that_is_given_twice_the_last_value_holds(caplog: pytest.LogCaptureFixture) -> None:
    assert last_values(["seed=1", "seed", "name=a", "name=a", "+seed=2"]) == ["seed", "name=a", "+seed=2"]
    assert caplog.messages == ["seed is given twice: +seed=2 is used, as it comes last"]


def test_the_last_preset_and_seed_of_a_command_line_are_the_run_s(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["experiment=spider_digits", "seed=1", "data.alpha=7", "experiment=fedavg_digits", "--json", "seed=2"]
    with pytest.raises(SystemExit):
        main(["keys", "seed", "method.name", "data.alpha", *words])
    assert {found["key"]: found["default"] for found in json.loads(capsys.readouterr().out)["keys"]} == {
        "seed": 2,
        "method.name": "fedavg",
        "data.alpha": 7.0,
    }
    assert caplog.messages == [
        "experiment is given twice: experiment=fedavg_digits is used, as it comes last",
        "seed is given twice: seed=2 is used, as it comes last",
    ]
