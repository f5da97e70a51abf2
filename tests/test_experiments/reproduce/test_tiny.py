"""A tiny item from the command line: run, run again, changed, killed, refused; and the board and its page."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.ablation import launch
from fedloom.experiments.cli import main
from fedloom.experiments.reproduce.items import load_given
from fedloom.experiments.reproduce.plan import Asked, parts_of
from fedloom.experiments.reproduce.records import read_record
from fedloom.experiments.store.ablations import FOLDER, Ablation, Trial, ablation_ids, read_ablation
from fedloom.experiments.store.trials import TrialState, trial_states
from fedloom.platform.results.paths import ARTIFACTS

TINY, ON = (str(Path(__file__).parent / "tiny" / f"tab{number}.yaml") for number in (1, 2))

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `fedloom reproduce`: exit code, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the item's own runs at the small scale, which they are whatever share of a CPU they are given."""
    folder = tmp_path_factory.mktemp("reproduced")
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", TINY, "tiers.num_cpus=[0.5]", "--results", str(folder)])
    assert ended.value.code == 0
    return folder


def shown(command: Command, results: Path, *arguments: str) -> dict[str, Any]:
    code, out, _ = command(TINY, "--show", "--json", "--results", str(results), *arguments)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_table_has_published_and_measured_numbers_and_the_claims_states(command: Command, results: Path) -> None:
    found = shown(command, results)
    assert (found["scale"], found["changed"], found["missing"], found["runs"]) == (
        "small", False, [], {"done": 6, "planned": 6}
    )  # fmt: skip
    rows = {(row["quantity"], row["setting"]): row for row in found["rows"]}
    assert rows["accuracy", "short"]["published"] == {"value": 50, "std": 2.5}
    assert rows["accuracy", "short"]["measured"]["seeds"] == 3
    assert rows["growth", ""]["measured"]["mean"] == pytest.approx(2.0)
    assert rows["growth", ""]["difference"] == pytest.approx(0.0)
    assert rows["parameters", "long"]["measured"]["seeds"] == 0  # counted
    assert rows["rival", "short"]["measured"] is None
    assert [claim["state"] for claim in found["claims"]] == ["shown", "contradicted", "contradicted"]
    assert found["claims"][0]["in_the_paper"] == "shown"


def test_the_text_names_setting_state_and_reason(command: Command, results: Path) -> None:
    code, out, _ = command(TINY, "--results", str(results))
    assert code == 0
    assert "running" not in out  # all trials were done
    for words in ("Nobody, Tab. 1", "fedavg_digits", "50.00 (sd 2.500)", "Longer training sends less.", "contradicted"):
        assert words in out


def test_changed_runs_are_others_and_do_not_count(command: Command, results: Path) -> None:
    found = shown(command, results, "seeds=[1]", "data.alpha=100")
    assert (found["changed"], found["runs"]) == (True, {"done": 0, "planned": 2})
    assert {claim["state"] for claim in found["claims"]} == {"not run"}
    assert shown(command, results, "seeds=[1,2,3]", "executor.threads=1")["changed"] is True
    assert shown(command, results, "seeds=[1,2,3]", "executor.actors=1", "tags=[mine]")["runs"]["done"] == 6
    for cpus, words in (("[0.5]", ""), ("[1]", "tiers.num_cpus=[1]: these runs keep the shares of devices with which")):
        code, _, err = command(TINY, f"tiers.num_cpus={cpus}", "--results", str(results))
        assert (code, words in err, err.count("keep the shares")) == (0, True, bool(words))
    _, out, _ = command("--scoreboard", TINY, "--json", "--results", str(results))
    (item,) = json.loads(out)["items"]
    assert [claim["small"] for claim in item["claims"]] == ["shown", "contradicted", "contradicted"]
    assert [claim["paper"] for claim in item["claims"]] == ["not run", "not run", "–"]


def test_the_page_has_claims_numbers_and_figures(command: Command, results: Path, tmp_path: Path) -> None:
    code, out, _ = command("--scoreboard", TINY, "--results", str(results), "--out", str(tmp_path / "page"))
    assert (code, "1 shown, 2 contradicted" in out) == (0, True)
    page, text = ((tmp_path / "page" / name).read_text() for name in ("report.html", "report.md"))
    for words in ("Twice the rounds send twice the bytes.", "contradicted", "50.00 (sd 2.500)"):
        assert words in page.replace("\N{NO-BREAK SPACE}", " ")
        assert words in text
    assert (tmp_path / "page" / "tiny-tab1-small.png").stat().st_size > 1000
    assert "<h2>Runs</h2>" not in page


def test_the_list_says_what_an_item_needs_and_how_it_stands(command: Command, results: Path) -> None:
    code, out, _ = command("--list", TINY, "fedoras/tab8", "--json", "--results", str(results))
    tiny, counted = json.loads(out)["items"]
    assert code == 0
    assert tiny["needs"]["small"]["data"] == ["digits"]
    assert tiny["claims"][0]["small"] == "shown"
    assert (counted["needs"]["paper"]["macs"], counted["needs"]["paper"]["missing"]) == (0.0, [])


def test_runs_start_from_those_of_another_setting_seed_by_seed(command: Command, results: Path) -> None:
    code, out, _ = command(ON, "--results", str(results), "--json")
    found = json.loads(out)
    assert (code, found["missing"], found["runs"]) == (0, [], {"done": 9, "planned": 9})  # none of "short"
    before, after = (part.ablation_id for part in parts_of(load_given(ON), Asked("small")))
    longer = {trial.seed: trial.run_id for trial in trials_of(results, before) if trial.setting["setting"] == "long"}
    for trial in trials_of(results, after):
        assert trial.config["method"]["start_from"] == longer[trial.seed]
        assert f"method.start_from={longer[trial.seed]}" in trial.overrides


def test_of_another_items_runs_only_those_are_run_that_are_needed(command: Command, tmp_path: Path) -> None:
    (plan,) = parts_of(load_given(TINY), Asked("small", seeds=(1,)))

    def after(item: str, *options: str) -> tuple[int, dict[str, str]]:
        code, *_ = command(item, "seeds=[1]", *options, "--results", str(tmp_path))
        states = trial_states(tmp_path, read_ablation(tmp_path / FOLDER / plan.ablation_id))
        return code, {str(state.trial.setting["setting"]): state.state for state in states}

    assert after(ON) == (0, {"short": "waiting", "long": "done"})
    assert after(TINY, "--show")[1]["short"] == "waiting"
    _, out, _ = command(ON, "seeds=[1]", "--show", "--json", "--results", str(tmp_path))
    assert (json.loads(out)["runs"], json.loads(out)["missing"]) == ({"done": 3, "planned": 3}, [])
    assert after(TINY) == (0, {"short": "done", "long": "done"})


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("failed", 3, "left out: going on, fresh: the runs from which they start are not all done"),
        ("no data", 2, "no data"),
    ],
)
def test_what_starts_from_runs_that_are_not_there_is_left_out(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int, said: str
) -> None:
    if end == "no data":
        lacks = {part.ablation_id: f"{end}: put it there" for part in parts_of(load_given(TINY), Asked("small"))}
        monkeypatch.setattr(
            "fedloom.experiments.reproduce.command._missing", lambda part, _wanted: lacks.get(part.ablation_id, "")
        )
    else:
        monkeypatch.setattr("fedloom.experiments.reproduce.command.run_part", lambda *_args: end)
    ended, _, errors = command(ON, "--results", str(tmp_path))
    assert (ended, said in errors, errors.count("left out")) == (code, True, int(end == "failed"))


def trials_of(results: Path, ablation_id: str) -> tuple[Trial, ...]:
    return read_ablation(results / FOLDER / ablation_id).trials


def test_killed_and_started_again_it_ends_with_the_same_table(command: Command, results: Path, tmp_path: Path) -> None:
    (plan,) = parts_of(load_given(TINY), Asked("small"))
    (tmp_path / "ablations" / plan.ablation_id).mkdir(parents=True)  # as if it had been killed before its first file
    run = [sys.executable, "-m", "fedloom.experiments.cli", "reproduce", TINY, "--results", str(tmp_path)]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, env=os.environ, start_new_session=True)
    give_up_s = time.monotonic() + 120
    while not [*tmp_path.glob("artifacts/*/status.json")] and process.poll() is None:
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert shown(command, tmp_path)["runs"]["done"] < 6
    code, *_ = command(TINY, "--results", str(tmp_path))
    assert code == 0
    assert shown(command, tmp_path) == shown(command, results)
    assert ablation_ids(tmp_path) == [plan.ablation_id]


LONG_ROUND = """
import os, signal, sys, threading, time
from pathlib import Path
from fedloom.experiments.ablation import trial
from fedloom.experiments.cli import main
from fedloom.experiments.runs import launch

def interrupt():
    while not [*Path(sys.argv[2]).glob("artifacts/*/costs.json")]:
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)

trial.STOP_TIMEOUT_S = launch.KILLED_S = 0.0
threading.Thread(target=interrupt, daemon=True).start()
main(["reproduce", sys.argv[1], "method.train.epochs=5000", "--results", sys.argv[2]])
"""


def test_interrupted_in_a_long_round_it_ends_with_the_exit_code_of_that(tmp_path: Path) -> None:
    """Torch would abort a process that ends while the thread of the run still computes."""
    command = [sys.executable, "-c", LONG_ROUND, TINY, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert "digits: 1 running, 5 waiting" in ended.stdout


def test_an_interrupted_item_does_not_repeat_what_failed(
    command: Command, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = parts_of(load_given(TINY), Asked("small"))
    shutil.copytree(results / FOLDER, tmp_path / FOLDER)  # the plan of the item, and none of its runs
    begun: list[str] = []

    def resumed(ablation: Ablation, _results: str, _view: object, needed: list[int]) -> launch.AblationEnd:
        begun.append(f"resumed {needed}")
        return launch.AblationEnd(ablation.ablation_id, "interrupted", ())

    monkeypatch.setattr(launch, "resume_ablation", resumed)
    monkeypatch.setattr(launch, "retry_failed", lambda *_: begun.append("repeated"))
    trials = read_ablation(results / FOLDER / plan.ablation_id).trials
    states = [TrialState(trials[0], "failed"), TrialState(trials[1], "interrupted")]
    monkeypatch.setattr("fedloom.experiments.reproduce.command.trial_states", lambda *_: states)
    command(TINY, "executor.kind=ray", "--results", str(tmp_path))
    assert begun == ["resumed [0, 1, 2, 3, 4, 5]"]


def test_data_that_is_not_there_is_one_line_and_exit_code_2(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    text = Path(TINY).read_text().replace("experiment: fedavg_digits", "experiment: fedoras_cifar100")
    (folder / "tab2.yaml").write_text(text)
    code, out, err = command(str(folder / "tab2.yaml"), f"data.root={tmp_path}", "--results", str(tmp_path / "results"))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "cifar100 not found under" in err
    assert "cifar-100-python" in err
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_run_says_why(command: Command, tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    file = tmp_path / "paper" / "tab3.yaml"
    file.write_text(
        "title: T\nsource: S\nmissing: fedloom has no such data set\n"
        "quantities: {a: {published: {s: 1}}}\nclaims: [{text: It is so., at_least: {of: a, value: 0}}]\n"
    )
    code, out, _ = command(str(file), "--json", "--results", str(tmp_path))
    found = json.loads(out)
    assert (code, found["missing"]) == (0, ["fedloom has no such data set"])
    assert [(c["state"], c["in_the_paper"]) for c in found["claims"]] == [("not run", "shown")]
    _, out, _ = command("--list", str(file), "--results", str(tmp_path))
    assert "cannot be run" in out
    _, out, _ = command("--scoreboard", str(file), "--json", "--results", str(tmp_path))
    (item,) = json.loads(out)["items"]
    assert item["claims"][0]["why"] == "fedloom has no such data set"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fedoras/tab66"], "no such item: fedoras/tab66; did you mean 'fedoras/tab6'?"),
        (["tab6"], "did you mean 'fedoras/tab6'?"),
        (["nowhere/tab6.yaml"], "there is no such file"),
        ([], "give one item, such as fedoras/tab6"),
        (["fedoras/tab6", "fedoras/tab8"], "2 items were given"),
        (["fedoras/tab6", "scale=huge"], "there are paper and small"),
        (["federations/robust", "scale=paper"], "federations/robust has only the scale small; leave scale out"),
        (["fedoras/tab6", "seeds=[1,1]"], "give different whole numbers"),
        (["fedoras/tab6", "seed=3"], "give seeds=[1,2] instead"),
        (["fedoras/tab6", "name=mine"], "give tags=[WORD] instead"),
        (["fedoras/tab6", "data.alpha=3"], "the settings of fedoras/tab6 vary this key"),
        (["fedoras/tab6", "method.train.round=3"], "unknown configuration key 'method.train.round'"),
        (["fedoras/tab6", "--out", "x"], "give --scoreboard with it"),
        (["--list", "scale=small"], "leave it out"),
    ],
)
def test_mistakes_are_one_line(command: Command, tmp_path: Path, arguments: list[str], said: str) -> None:
    code, out, err = command(*arguments, "--results", str(tmp_path / "results"))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The tiny item as a file of the user's own, beside which it may be recorded."""
    file = tmp_path / "tiny" / "tab1.yaml"
    file.parent.mkdir()
    file.write_text(Path(TINY).read_text())
    return file


def read(command: Command, *arguments: str) -> dict[str, Any]:
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_recorded_values_stand_for_runs_that_are_not_here(command: Command, results: Path, own: Path) -> None:
    code, out, err = command(str(own), "--record", "--results", str(results))
    assert (code, err) == (0, "")
    assert str(own.parent / "recorded" / "tab1.small.json") in out.replace("\n", "")
    elsewhere = ("--results", str(own.parent / "elsewhere"))
    here, recorded = (
        read(command, str(own), "--show", *a) for a in (("--results", str(results)), ("--recorded", *elsewhere))
    )
    assert (here.pop("recorded"), recorded.pop("recorded").startswith("recorded on 20")) == (None, True)
    assert (here.pop("repeated") is None, recorded.pop("repeated")) == (False, None)
    assert (here.pop("runs"), recorded.pop("runs")) == ({"done": 6, "planned": 6}, {"done": 0, "planned": 6})
    assert recorded == here
    assert {c["state"] for c in read(command, str(own), "--show", *elsewhere)["claims"]} == {"not run"}
    (item,) = read(command, "--scoreboard", "--recorded", str(own), *elsewhere)["items"]
    assert [claim["small"] for claim in item["claims"]] == ["shown", "contradicted", "contradicted"]
    assert [claim["paper"] for claim in item["claims"]] == ["not run", "not run", "–"]
    assert (item["recorded"]["paper"], item["recorded"]["small"][:11]) == (None, "recorded on")
    _, out, _ = command("--list", "--recorded", str(own), *elsewhere)
    assert "(recorded)" in out
    code, _, err = command(str(own), "--show", "--recorded", "seeds=[7]", *elsewhere)
    assert (code, "no record of runs changed by overrides" in err) == (2, True)


def test_a_record_with_runs_that_are_no_longer_needed_is_whole(command: Command, results: Path, own: Path) -> None:
    item = own.parent / "tab3.yaml"
    claim = "{text: It learns., at_least: {of: {of: accuracy, setting: long}, value: 0}}"
    read_from = "{from: models, value: accuracy, where: {model: fedavg}, times: 100}"
    item.write_text(
        f"title: T\nsource: S\nruns_of: tiny/tab1\nquantities: {{accuracy: {{read: {read_from}}}}}\nclaims: [{claim}]\n"
    )
    recording = (str(item), "--record", "--show", "--results", str(results))
    file = Path(read(command, *recording)["kept"])
    content = json.loads(file.read_bytes())
    assert content["runs"] == [3, 3]
    listing = ("--list", "--recorded", str(item), "--results", str(own.parent / "elsewhere"))
    hours = {}
    for runs, settings in ((6, {"short": {"": {"1": 3.0, "2": 3.0, "3": 3.0}}}), (3, {})):
        values = {"accuracy": {**content["values"]["accuracy"], **settings}}
        file.write_text(json.dumps({**content, "runs": [runs, runs], "hours": 7.0, "values": values}))
        shown = read(command, str(item), "--show", "--recorded", "--results", str(own.parent / "elsewhere"))
        assert (f"from {runs} runs" in shown["recorded"], shown["missing"]) == (True, [])
        hours[runs] = read(command, *listing)["items"][0]["needs"]["small"]["recorded_hours"]
        assert read(command, *recording)["kept"] == str(file)
        assert json.loads(file.read_bytes())["values"] == content["values"]
    assert hours == {6: None, 3: 7.0}, "what the needed runs took is not known if others were recorded with them"


def test_runs_are_compared_with_what_was_recorded(command: Command, results: Path, own: Path) -> None:
    assert read(command, str(own), "--show", "--results", str(results))["repeated"] is None
    first = read(command, str(own), "--record", "--show", "--results", str(results))
    assert first["repeated"] is None, "a record is not compared with itself"
    file = Path(first["kept"])
    same = read(command, str(own), "--show", "--results", str(results))["repeated"]
    assert same["equal"] == same["values"] >= 12
    assert same["spots"] == 0  # no other seed was recorded
    content = json.loads(file.read_bytes())
    for places in [places for settings in content["values"].values() for places in settings.values()]:
        for seeds in places.values():
            seeds |= {f"1{seed}": value for seed, value in seeds.items()}
    file.write_text(json.dumps(content))
    same = read(command, str(own), "--show", "--results", str(results))["repeated"]
    assert same["within"] == same["spots"] == same["values"] / 3
    content["values"]["bytes"]["short"][""]["2"] += 1e6
    content["values"]["accuracy"]["long"][""] = {str(seed): 200.0 + seed for seed in (1, 2, 3, 11, 12, 13)}
    file.write_text(json.dumps(content))
    other = read(command, str(own), "--show", "--results", str(results))["repeated"]
    assert (other["equal"], other["within"]) == (same["equal"] - 4, same["within"] - 1)
    _, out, _ = command(str(own), "--show", "--results", str(results))
    assert (
        f"{other['equal']} of {other['values']} values measured again are equal to the record's to the bit"
        in " ".join(out.split())
    )
    content["reads"] = "0"
    file.write_text(json.dumps(content))
    assert read(command, str(own), "--show", "--results", str(results))["repeated"] is None


def test_a_quantity_of_which_no_run_has_a_value_is_named(command: Command, results: Path, own: Path) -> None:
    assert read(command, str(own), "--show", "--results", str(results))["missing"] == []
    own.write_text(own.read_text().replace("kind: method}", "kind: methods}"))
    found = read(command, str(own), "--show", "--results", str(results))
    assert found["missing"] == ["bytes: no run has a value of it"]
    assert found["claims"][0]["state"] == "not run"


def test_a_record_of_some_runs_says_so_and_what_is_missing(command: Command, results: Path, own: Path) -> None:
    found = read(command, str(own), "--record", "--show", "--results", str(results))
    file = Path(found["kept"])
    content = json.loads(file.read_bytes())
    seeds = content["values"]["bytes"]["short"][""]
    (row,) = (row for row in found["rows"] if (row["quantity"], row["setting"]) == ("bytes", "short"))
    assert ([*seeds], sum(seeds.values()) / 3) == (["1", "2", "3"], pytest.approx(row["measured"]["mean"], rel=1e-5))
    file.write_text(json.dumps({**content, "runs": [1, 6]}))
    elsewhere = ("--recorded", "--results", str(own.parent / "elsewhere"))
    assert "trials are not begun" in read(command, str(own), "--show", *elsewhere)["missing"][0]
    _, out, _ = command("--list", str(own), *elsewhere)
    assert "(recorded, 1 of 6 runs)" in " ".join(out.split())
    _, out, _ = command("--scoreboard", str(own), *elsewhere)
    assert "tiny/tab1 (small scale, 1 of 6 runs)" in " ".join(out.split())


def test_a_record_of_other_runs_does_not_count(command: Command, results: Path, own: Path, tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("defaults: [fedavg_digits]\nmethod: {train: {lr: 0.1}}\n")
    text = own.read_text().replace("experiment: fedavg_digits", f"experiment: {preset}")
    text = text.replace("seeds: [1, 2, 3]", "seeds: [1]")
    own.write_text(text)
    elsewhere = ("--results", str(tmp_path / "elsewhere"))
    assert command(str(own), "--record", *elsewhere)[0] == 0
    shown = (str(own), "--show", "--recorded", "--results", str(tmp_path / "nowhere"))
    assert read(command, *shown)["recorded"] is not None
    own.write_text(text.replace("rounds: 2}", "rounds: 3}"))
    assert read(command, *shown)["recorded"] is None
    own.write_text(text.replace("value: bytes_up", "value: bytes_down"))  # the same runs, read differently
    other = read(command, *shown)
    assert (other["recorded"], "or reads them in another way" in other["missing"][-1]) == (None, True)
    code, _, err = command(str(own), "--record", *elsewhere)
    assert (code, "has 2 runs of what the item ran or read before: delete the file" in " ".join(err.split())) == (
        2,
        True,
    )
    own.write_text(text)
    preset.write_text("defaults: [fedavg_digits]\nmethod: {train: {lr: 0.2}}\n")
    old = read(command, *shown)
    assert old["recorded"] is None
    assert "tab1.small.json is not used: it records other runs" in old["missing"][-1]
    (file,) = own.parent.glob("recorded/*")
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps({**content, "earlier": {content["ablations"][0]: {"method.train.lr": 0.1}}}))
    assert ", with earlier presets: method.train.lr=0.1; " in read(command, *shown)["recorded"]
    _, out, _ = command("--scoreboard", *(s for s in shown if s != "--show"))
    assert "tiny/tab1 (small scale, earlier presets)" in " ".join(out.split())
    file.write_text(json.dumps({**content, "earlier": {content["ablations"][0]: {"method.train.lr": 0.3}}}))
    assert read(command, *shown)["recorded"] is None
    file.unlink()
    for more in ((), ("--show",)):  # the runs are those of the old preset: their values are not the new one's
        code, _, err = command(str(own), "--record", *more, *elsewhere)
        assert (code, err.count("\n")) == (2, 1)
        assert ") in method.train.lr: run the item in another results folder" in err


def test_items_with_the_same_runs_are_recorded_one_by_one(command: Command, results: Path, own: Path) -> None:
    other = own.with_name("tab2.yaml")
    quantities = own.read_text().partition("quantities:")[2]
    other.write_text(f"title: Other\nsource: Nobody, Tab. 2\nruns_of: tiny/tab1\nquantities:{quantities}")
    assert command(str(other), "--record", "--show", "--results", str(results))[0] == 0
    assert [file.name for file in own.parent.glob("recorded/*")] == ["tab2.small.json"]
    shown = ("--show", "--recorded", "--results", str(own.parent / "elsewhere"))
    assert (read(command, str(other), *shown)["recorded"] is None, read(command, str(own), *shown)["recorded"]) == (
        False,
        None,
    )


def test_a_record_keeps_its_values_when_an_item_runs_more(command: Command, results: Path, own: Path) -> None:
    assert command(str(own), "--record", "--show", "--results", str(results))[0] == 0
    first = (own.parent / "recorded" / "tab1.small.json").read_bytes()
    text = own.read_text()
    head, tail = text.partition("quantities:")[::2]
    more = head.replace("short:", "again:").replace("      long: {method.train.rounds: 2}\n", "")
    other = own.with_name("tab2.yaml")
    other.write_text(more.replace("note:", "runs_of: tiny/tab1\nnote:") + "quantities:" + tail)
    record = own.parent / "recorded" / "tab2.small.json"
    record.write_bytes(first)  # of tab1's runs alone, as it was before there were more
    shown = (str(other), "--show", "--recorded", "--results", str(own.parent / "elsewhere"))
    found = read(command, *shown)
    assert found["recorded"].startswith("recorded on")
    assert "from 6 of 9 runs" in found["recorded"]
    assert found["missing"] == ["digits: 3 trials are not begun"]

    alone = own.parent / "alone" / "tiny" / "tab2.yaml"  # the same runs as a file of their own: only these are run
    alone.parent.mkdir(parents=True)
    alone.write_text(more + "quantities:\n  bytes:" + tail.partition("  bytes:")[2].partition("  growth:")[0])
    there = ("--results", str(own.parent / "there"))
    assert command(str(alone), *there)[0] == 0
    assert command(str(other), "--show", "--record", *there)[0] == 0
    both, before = json.loads(record.read_bytes()), json.loads(first)
    assert both["claims"] == before["claims"]
    assert (both["runs"], [*both["values"]["bytes"]]) == ([9, 9], ["short", "long", "again"])
    assert both["ablations"][:1] == before["ablations"]
    assert both["values"]["bytes"]["long"] == before["values"]["bytes"]["long"]
    assert both["hours"] >= before["hours"]
    found = read(command, *shown)
    assert ("from 9 runs" in found["recorded"], found["missing"]) == (True, [])
    record.write_bytes(first)
    other.write_text(other.read_text().replace("by: 100", "by: -100"))  # after the values that judge it were seen
    assert command(str(other), "--show", "--record", *there)[0] == 0
    assert json.loads(record.read_bytes())["claims"] == before["claims"][:2]
    assert command(str(other), "--show", "--record", *there)[0] == 0  # a folder with fewer runs takes none away
    again = json.loads(record.read_bytes())
    assert (again["runs"], again["values"]) == ([9, 9], both["values"])
    assert again["hours"] == pytest.approx(both["hours"], rel=0.3)  # of runs from elsewhere it is their part


def test_runs_of_one_ablation_are_recorded_from_several_folders(
    command: Command, results: Path, own: Path, tmp_path: Path
) -> None:
    assert command(str(own), "--record", "--show", "--results", str(results))[0] == 0
    (file,) = own.parent.glob("recorded/*")
    whole = json.loads(file.read_bytes())
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, lacking in zip(folders, (("long", 3), ("short", 1)), strict=True):
        shutil.copytree(results, folder)
        (part,) = parts_of(load_given(str(own)), Asked("small"))
        (lost,) = (
            t
            for t in read_ablation(folder / FOLDER / part.ablation_id).trials
            if (t.setting["setting"], t.seed) == lacking
        )
        shutil.rmtree(folder / ARTIFACTS / lost.run_id)
    for folder, runs in zip(folders, ([5, 6], [6, 6]), strict=True):
        if folder == folders[0]:
            file.unlink()
        assert command(str(own), "--record", "--show", "--results", str(folder))[0] == 0
        assert json.loads(file.read_bytes())["runs"] == runs
    assert {**json.loads(file.read_bytes()), "hours": whole["hours"]} == whole
    assert json.loads(file.read_bytes())["hours"] == pytest.approx(whole["hours"], rel=0.3)

    other = own.with_name("tab2.yaml")  # takes the run that the folder lacks from tab1's record, under its own name
    quantities = own.read_text().partition("quantities:")[2].replace("  bytes:", "  traffic:")
    quantities = quantities.replace("{of: bytes,", "{of: traffic,")
    head = "title: Other\nsource: Nobody, Tab. 2\nruns_of: tiny/tab1\nquantities:"
    other.write_text(f"{head}{quantities}")
    beside = file.with_name("tab2.small.json")
    assert command(str(other), "--record", "--show", "--results", str(folders[0]))[0] == 0
    found = json.loads(beside.read_bytes())
    renamed = {"accuracy": whole["values"]["accuracy"], "traffic": whole["values"]["bytes"]}
    assert (found["runs"], found["values"], found["code"]) == ([6, 6], renamed, whole["code"])
    assert found["hours"] == pytest.approx(whole["hours"], rel=0.3)
    beside.unlink()
    more = "  down:\n    unit: MB\n    read: {from: communication_by_kind, value: bytes_down, where: {kind: method}}\n"
    other.write_text(f"{head}\n{more}{quantities[1:]}")
    assert command(str(other), "--record", "--show", "--results", str(folders[0]))[0] == 0
    assert json.loads(beside.read_bytes())["runs"] == [5, 6]  # tab1's record does not say how many bytes went down


def test_no_claim_is_recorded_as_older_than_its_values_if_it_was_made_later(
    command: Command, results: Path, own: Path
) -> None:
    assert command(str(own), "--record", "--show", "--results", str(results))[0] == 0
    (file,) = own.parent.glob("recorded/*")
    content = json.loads(file.read_bytes())
    shown = (str(own), "--show", "--recorded", "--results", str(own.parent / "elsewhere"))
    assert [claim["changed_since"] for claim in read(command, *shown)["claims"]] == [False] * 3
    # All claims were made after the values, or nobody knows: each stays so however often the runs are recorded.
    for claims, changed in (([], True), (None, False)):
        file.write_text(json.dumps({**content, "claims": claims}))
        for _ in range(2):
            assert command(str(own), "--record", "--show", "--results", str(results))[0] == 0
            assert json.loads(file.read_bytes())["claims"] == claims
            assert [claim["changed_since"] for claim in read(command, *shown)["claims"]] == [changed] * 3
    del content["claims"]
    file.write_text(json.dumps(content))
    assert read_record(file).claims is None


def test_a_damaged_record_is_one_line_and_a_whole_one_is_kept(command: Command, results: Path, own: Path) -> None:
    assert command(str(own), "--record", "--show", "--results", str(results))[0] == 0
    (file,) = own.parent.glob("recorded/*")
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps({**content, "computed": "0123456789abcdef"}))
    code, _, err = command(str(own), "--record", "--show", "--results", str(results))
    assert (code, f"{file} has 6 runs of what the item ran or read before: delete the file" in err) == (2, True)
    changes = (
        {"values": 3}, {"more": 1}, {"hours": None}, {"hours": "x"}, {"ablations": []},
        {"runs": [float("inf"), 1]}, {"runs": [0, 6]},
    )  # fmt: skip
    for text in ("[]", *(json.dumps({**content, **change}) for change in changes), "{"):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is damaged: delete it, and record again[^\n]*$"):
            read_record(file)
    for asked in (("--list", "--recorded"), ("--record",), ("--show", "--recorded")):
        code, _, err = command(str(own), *asked, "--results", str(own.parent / "elsewhere"))
        assert (code, err.count("\n"), f"{file} is damaged: delete it, and record again" in err) == (2, 1, True)
    assert command("--list", str(own), "--results", str(results))[0] == 0  # it asks for no record


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--record", "--scoreboard"), "give it alone, or with --show"),
        (("--record", "--show"), "none of its runs is done"),
        (("--record", "seeds=[1]"), "runs changed by overrides are not recorded"),
        (("--recorded",), "give --show, --list or --scoreboard"),
    ],
)
def test_what_cannot_be_recorded(command: Command, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = command(TINY, *arguments, "--results", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert not [*tmp_path.iterdir()]
