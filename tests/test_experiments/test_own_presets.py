"""What a user writes beside fedloom: presets, ablations, and the options of code of their own as keys."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.catalogue import known_keys
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config, config_from_dict
from fedloom.platform.results.tables import read_table

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
NAMES = ("lion", "power_of_choice", "head_first", "mixers", "prox")

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file into the folder that the commands are started from, beside some plug-ins; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in NAMES:
        shutil.copy(PLUGINS / f"{name}.py", tmp_path)

    def put(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return f"./{name}"

    yield put
    for name in NAMES:
        sys.modules.pop(name, None)


# -- presets -----------------------------------------------------------------------------------------------------------


def test_a_preset_without_another_changes_the_defaults(write: Write) -> None:
    config = compose_config([f"experiment={write('data: {num_clients: 7}')}"])
    assert (config.experiment, config.data.num_clients) == ("mine", 7)
    assert config.method == compose_config([]).method


@pytest.mark.parametrize("preset", ["fedavg_digits", "superfednas_digits", "spider_digits", "fedadam_digits"])
def test_a_preset_may_begin_with_one_of_fedlooms_of_any_method(write: Write, preset: str) -> None:
    own = write(f"defaults: [{preset}]\ndata: {{train_samples: 77}}\nmethod: {{train: {{rounds: 3}}}}\n")
    config, whole = compose_config([f"experiment={own}", "seed=4"]), compose_config([f"experiment={preset}"])
    assert (config.experiment, config.seed, config.data.train_samples, config.method.train.rounds) == ("mine", 4, 77, 3)
    whole.method.train.rounds = 3
    assert config.method == whole.method
    assert config.space == whole.space


def test_a_preset_may_choose_a_method_of_ones_own_and_set_options(write: Write) -> None:
    own = write(
        "defaults:\n  - override /method: head_first:METHOD\nexperiment: named\nmethod:\n  head_rounds: 5\n"
        "  train: {server: 'lion:lion', options: {server_lr: 0.5}}\n",
        "folder/deep.yml",
    )
    config = compose_config([f"experiment={own}", "method.train.rounds=9", "method.train.options.server_lr=0.25"])
    assert (config.experiment, config.method.name, config.method.head_rounds) == ("named", "head_first:METHOD", 5)
    assert (config.method.train.rounds, config.method.train.options) == (9, {"server_lr": 0.25})
    assert config_from_dict(json.loads(json.dumps(asdict(config)))) == config


def test_a_preset_is_read_anew(write: Write) -> None:
    for clients in (7, 8):
        assert compose_config([f"experiment={write(f'data: {{num_clients: {clients}}}')}"]).data.num_clients == clients


BAD: dict[str, tuple[str, str]] = {
    "key": (
        "defaults: [fedavg_digits]\ndata: {num_client: 7}",
        "unknown configuration key 'data.num_client'; did you me",
    ),
    "key of a method": (
        "method: {trian: {rounds: 1}}",
        "unknown configuration key 'method.trian'; did you mean 'method",
    ),
    "value": (
        "data: {num_clients: many}",
        "data.num_clients=many: must be an int",
    ),
    "preset": ("defaults: [fedavg_digit]", "which is no preset of fedloom's; did you mean 'fedavg_digits'?"),
    "preset of one's own": ("defaults: [./other.yaml]", "defaults has ./other.yaml, which is no preset of fedloom's"),
    "method": (
        "defaults: [{override /method: fedvag}]",
        "the method 'fedvag', which is not there; did you mean 'fedavg",
    ),
    "method that is not there": (
        "defaults: [{override /method: 'no:M'}]",
        "method 'no:M' cannot be imported: there is no",
    ),
    "other group": ("defaults: [{override /space: x}]", "it may choose only 'override /method'"),
    "method as a text": ("method: fedavg", "method is a text: choose it by defaults: [{override /method: fedavg}]"),
    "method by name": (
        "method: {name: fedavg}",
        "method.name=fedavg: a method is chosen by method=fedavg, which brings",
    ),
    "text for defaults": (
        "defaults: fedavg_digits",
        "defaults is 'fedavg_digits': give a list, such as [fedavg_digits]",
    ),
    "list": ("- a\n", "holds no keys; write a preset like fedloom's own"),
    "bracket": ("a: [1\nb: 2\n", "cannot be read as YAML: expected ',' or ']', but got ':' in line 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_preset_is_one_line(write: Write, case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(ValueError, match=r"^(experiment=./mine.yaml: |method[ .])") as refusal:
        compose_config([f"experiment={write(text)}"])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_preset_that_is_not_there(write: Write) -> None:
    with pytest.raises(ValueError, match=r"^experiment=./nowhere.yaml: there is no such file$"):
        compose_config(["experiment=./nowhere.yaml"])
    with pytest.raises(ValueError, match="experiment 'my own' cannot be a file name here"):
        compose_config([f"experiment={write('seed: 1', 'my own.yaml')}"])


# -- options as keys ---------------------------------------------------------------------------------------------------

CHOSEN = ["method=fedavg", "method.train.selection=power_of_choice:power_of_choice", "method.train.server=lion:lion"]


def test_options_are_keys_like_all_others(write: Write) -> None:
    given = ["method.train.options.candidates=5", "method.train.options.server_lr=0.5"]
    for options in (given, [f"+{option}" for option in given], ["method.train.options={candidates:5,server_lr:0.5}"]):
        assert compose_config([*CHOSEN, *options]).method.train.options == {"candidates": 5, "server_lr": 0.5}
    listed = {s.key: s for s in known_keys(["method.train.options", *CHOSEN])}
    assert listed["method.train.options.candidates"].help.startswith("selection rule power_of_choice:power_of_choice: ")
    assert listed["method.train.options.server_lr"].default == 1e-3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method.trian.options.mu=1",
            "unknown configuration key 'method.trian.options.mu'; did you mean 'method.train.options",
        ),
        (
            "method.train.optoins.mu=1",
            "unknown configuration key 'method.train.optoins.mu'; did you mean 'method.train",
        ),
        ("options.mu=1", "unknown configuration key 'options.mu'; did you mean"),
        ("data.options.x=[1", "data.options.x=[1 cannot be read"),
        ("results=s3://[bad", "results=s3://[bad cannot be read: put the URL in quotes, as in results='\"s3://bucket"),
        ("results=s3://b/x?SECRET_KEY=word", "results=s3://b/x?SECRET_KEY=... cannot be read: put the URL in quotes"),
    ],
)
def test_a_typing_mistake_before_an_option_is_no_option(write: Write, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        compose_config([*CHOSEN, override])
    assert message in str(refusal.value)


def test_an_option_is_not_blamed_for_another_mistake(write: Write) -> None:
    with pytest.raises(ValueError, match=r"unknown configuration key 'data.alfa'; did you mean 'data.alpha'"):
        compose_config([*CHOSEN, "method.train.options.candidates=5", "data.alfa=1"])


# -- ablations ---------------------------------------------------------------------------------------------------------


def planned(*arguments: str) -> dict[str, Any]:
    """By the trials' settings, as text, their configurations."""
    trials = plan_ablation([*arguments, "ablation.seeds=[1]"]).trials
    return {json.dumps(dict(t.setting)): config_from_dict(t.config) for t in trials}


def test_an_ablation_varies_a_plug_ins_option(write: Write) -> None:
    base = write("defaults: [fedavg_digits]\nmethod: {train: {server: 'lion:lion'}}", "base.yaml")
    own = write("axes: {rate: {key: method.train.options.server_lr, values: [0.5, 0.25]}}")
    trials = planned(f"ablation={own}", f"experiment={base}")
    assert {s: c.method.train.options for s, c in trials.items()} == {
        '{"rate": 0.5}': {"server_lr": 0.5},
        '{"rate": 0.25}': {"server_lr": 0.25},
    }
    assert {c.experiment for c in trials.values()} == {"base"}


def test_an_ablation_varies_methods_and_presets_of_ones_own(write: Write) -> None:
    own = write("axes: {m: {key: method, values: [fedavg, 'head_first:METHOD']}}")
    trials = planned(f"ablation={own}")
    assert [c.method.name for c in trials.values()] == ["fedavg", "head_first:METHOD"]
    for name, clients in (("a", 7), ("b", 8)):
        write(f"data: {{num_clients: {clients}}}", f"{name}.yaml")
    own = write("axes: {e: {key: experiment, values: [./a.yaml, './b.yaml']}}")
    assert [(c.experiment, c.data.num_clients) for c in planned(f"ablation={own}").values()] == [("a", 7), ("b", 8)]


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (
            "{key: method.train.options.server_lr, values: [0.1, -1.0]}",
            "options.server_lr=-1.0: must be greater than 0",
        ),
        (
            "{key: method.train.options.server_lr, values: [0.1, much]}",
            "server_lr=much: must be a float (an option of",
        ),
        ("{key: method.train.options.sever_lr, values: [0.1]}", "not an option of .*; did you mean 'server_lr'"),
        ("{key: method.train.server, values: ['lion:loin']}", "server rule 'lion:loin' cannot be imported"),
    ],
)
def test_a_wrong_option_is_refused_before_the_first_trial(
    write: Write, capfd: pytest.CaptureFixture[str], axis: str, message: str
) -> None:
    own = write(f"axes: {{x: {axis}}}\nseeds: [1]\n")
    chosen = [] if "values: ['lion" in axis else ["method.train.server=lion:lion"]
    run = ["experiment=fedavg_digits", "ray.address=local", "space.name=mixers:mixers", "tiers.paths=50", *chosen]
    with pytest.raises(SystemExit) as ending:
        main(("ablate", f"ablation={own}", *run))
    err = capfd.readouterr().err
    assert ending.value.code == 2
    last = err.splitlines()[-1]
    assert last.startswith("fedloom: trial ")
    assert message.partition(".*")[0] in last
    assert message.partition(".*")[2] in last
    assert not Path("results").exists()


def test_a_run_of_a_preset_of_ones_own(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    own = write(
        "defaults: [{override /method: 'head_first:METHOD'}]\ndata: {num_clients: 6}\nspace: {name: 'mixers:mixers'}\n"
        "tiers: {count: 1, paths: 50}\nexecutor: {kind: serial}\nmethod: {train: {rounds: 1, clients_per_round: 2}}\n"
    )
    with pytest.raises(SystemExit) as ending:
        main(("run", "--json", f"experiment={own}", "method.head_rounds=1"))
    assert ending.value.code == 0, capfd.readouterr().err
    run_id = json.loads(capfd.readouterr().out.splitlines()[-1])["run_id"]
    assert run_id.split("-")[2] == "mine"
    runs = read_table(Path("results"), "runs", run_id=run_id)
    assert (runs["experiment"].tolist(), runs["method"].tolist()) == (["mine"], ["head_first:METHOD"])
    assert read_table(Path("results"), "rounds", run_id=run_id)["stage"].tolist() == ["head", "whole", "evaluation"]
