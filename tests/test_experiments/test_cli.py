"""The command line: help at once, exit codes, and what it prints."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from math import inf, nan
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray.exceptions import GetTimeoutError, RayError

from fedloom.experiments import cli
from fedloom.experiments.arguments import RESUME_HELP, build_parser, parse
from fedloom.experiments.cli import HANDLERS, main
from fedloom.experiments.runs.launch import _interrupt, _lost_server, _Shown, attaching
from fedloom.experiments.runs.presets import experiments
from fedloom.experiments.show import RunView
from fedloom.experiments.terminal import (
    CLIENTS_FAILED,
    CONFIGURATION,
    INFRASTRUCTURE,
    INTERRUPTED,
    OK,
    of_run_end,
    show_facts,
    write_json,
)
from fedloom.platform.federation.loop import AT_ONCE, RoundProgress, Validated
from fedloom.platform.runs.logs import as_bytes, as_time, round_line
from fedloom.platform.runs.resuming import FREE_ON_RESUME
from fedloom.platform.runs.run import NOT_BEGUN, RunEnd

COMMANDS = (
    "run",
    "resume",
    "attach",
    "search",
    "describe",
    "calibrate",
    "prepare",
    "tables",
    "report",
    "export",
    "status",
)

EVERY_HELP = """
import contextlib, io, json, sys
from fedloom.experiments.cli import main
answers = {}
for arguments in (["--help"], *([command, "--help"] for command in sys.argv[1:])):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(arguments)
        except SystemExit as ending:
            answers[" ".join(arguments)] = [ending.code, out.getvalue()]
heavy = [name for name in ("torch", "ray", "numpy", "hydra", "pandas") if name in sys.modules]
print(json.dumps({"answers": answers, "heavy": heavy}))
"""


def test_help_answers_without_the_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_HELP, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["heavy"] == []
    assert {code for code, _ in found["answers"].values()} == {0}
    assert all(text.startswith("usage: fedloom") for _, text in found["answers"].values())
    for command in COMMANDS:
        assert command in found["answers"]["--help"][1]
    for preset in experiments():
        assert preset in found["answers"]["run --help"][1]


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run", "--fast"], ["resume"], ["report", "--out"]])
def test_a_command_line_that_is_none_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedloom: ")
    assert line.endswith("--help says what is allowed")


def test_options_may_stand_between_overrides() -> None:
    parser = build_parser(HANDLERS)
    args = parse(
        parser, ["resume", "RUN", "--results", "r", "executor.actors=2", "--changed-plugins", "ray.num_cpus=1"]
    )
    assert (args.run, args.overrides) == ("RUN", ["executor.actors=2", "ray.num_cpus=1"])
    assert parse(parser, ["report", "A", "--out", "o", "B"]).runs == ["A", "B"]
    for wrong in (["export", "RUN", "--tier", "tier1", "x=1"], ["run", "x=1", "--fast", "y=2"]):
        with pytest.raises(SystemExit) as ending:
            parse(parser, wrong)
        assert ending.value.code == CONFIGURATION


def test_the_home_folder_is_found_where_the_shell_leaves_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse(build_parser(HANDLERS), ["report", "A", "--results=~/x"]).results == Path("/home/me/x")


def test_a_path_is_neither_cut_nor_broken(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/{'results/' * 30}tier1.pt2"
    show_facts({"pt2": path, "test_accuracy": 0.5}, as_json=False)
    assert capsys.readouterr().out.splitlines() == [f" pt2            {path}", " test accuracy  0.5"]


def test_a_large_number_is_written_without_an_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    show_facts({"tier_upper_bounds": [301469.25, 1286984.0], "largest_difference": 6.5e-07}, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        " tier upper bounds   301,469  1,286,984",
        " largest difference  6.5e-07",
    ]


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"mean": nan, "values": (1.0, inf), "runs": [{"loss": -inf}], "name": "inf"})
    assert capsys.readouterr().out == '{"mean": null, "values": [1.0, null], "runs": [{"loss": null}], "name": "inf"}\n'


def test_resume_says_which_keys_may_change() -> None:
    known = {
        key.removesuffix(".*") for key in re.findall(r"[a-z_]+(?:\.[a-z_*]+)*", RESUME_HELP.partition("These can: ")[2])
    }
    assert known == set(FREE_ON_RESUME)


def shell(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fedloom.experiments.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_version_is_the_packages() -> None:
    done = shell("--version")
    assert (done.returncode, done.stdout) == (OK, f"fedloom {metadata.version('fedloom')}\n")


def test_quiet_prints_nothing_but_errors() -> None:
    assert shell("tables").stdout
    done = shell("tables", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (OK, "", "")
    wrong = shell("tables", "walks", "--quiet")
    assert (wrong.returncode, wrong.stdout) == (CONFIGURATION, "")
    assert wrong.stderr.startswith("fedloom: there is no table 'walks'")


def test_a_run_that_ends_without_a_message_leaves_no_empty_place_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    RunView().end(RunEnd("one", "interrupted"), "results")
    RunView().end(RunEnd("one", "interrupted", "stopped after round 3 of supernet"), "results")
    RunView().end(RunEnd("one", "infrastructure", "a disk is full"), "results")
    RunView().end(RunEnd("one", "detached", attaching("one", "there", "HEAD:6379")), "there")
    assert capsys.readouterr().err.splitlines() == [
        "fedloom: run interrupted; continue with: fedloom resume one",
        "fedloom: run interrupted: stopped after round 3 of supernet; continue with: fedloom resume one",
        "fedloom: run stopped: a disk is full; continue with: fedloom resume one",
        "fedloom: run one goes on; watch it with: fedloom attach one --results there --address HEAD:6379; "
        "end it with: fedloom attach one --results there --address HEAD:6379 --stop",
    ]


def test_a_lost_server_is_one_short_line() -> None:
    text = "The actor died unexpectedly before finishing this task. More.\n\tclass_name: ServerActor\n" + 600 * "x"
    line = _lost_server(RayError(text))
    assert "\n" not in line
    assert line == (
        "the run's server process is gone (The actor died unexpectedly before finishing this task): Ray was stopped, "
        "or the process or its node died"
    )


def test_the_cause_of_a_lost_server_is_cut_between_words() -> None:
    line = _lost_server(RayError(f"the actor is{60 * ' gone'}"))
    assert f"(the actor is{20 * ' gone'} ...): Ray was stopped" in line


@pytest.mark.parametrize(("run_id", "message"), [("", NOT_BEGUN), ("one", AT_ONCE)])
def test_a_run_that_is_interrupted_while_it_starts_loses_no_round(
    run_id: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_vain(*_: object, **__: object) -> None:
        raise GetTimeoutError

    monkeypatch.setattr("ray.get", in_vain)
    monkeypatch.setattr("ray.kill", lambda _: None)
    shown = _Shown(RunView())
    shown.run_id = run_id
    assert _interrupt(Mock(), Mock(), shown) == RunEnd(run_id, "interrupted", message)


def test_exit_codes_are_distinct_and_as_documented() -> None:
    kinds = {"done": OK, "refused": CONFIGURATION, "failed": CLIENTS_FAILED}
    kinds |= {"infrastructure": INFRASTRUCTURE, "interrupted": INTERRUPTED}
    assert {kind: of_run_end(kind) for kind in kinds} == kinds
    assert list(kinds.values()) == [0, 2, 3, 4, 130]
    assert of_run_end("detached") == INTERRUPTED


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("one\n  two"), 2, "fedloom: one two\n"),
        (ConnectionError("no Ray at 'there'"), 2, "fedloom: no Ray at 'there'\n"),
        (KeyboardInterrupt(), 130, "fedloom: interrupted\n"),
    ],
)
def test_what_a_command_raises_becomes_one_line_and_a_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDLOOM_TRACEBACK", raising=False)
    monkeypatch.setitem(cli.HANDLERS, "status", Mock(side_effect=error))
    with pytest.raises(SystemExit) as ending:
        main(["status"])
    assert ending.value.code == code
    assert capsys.readouterr().err == line


def test_a_developer_can_ask_for_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_TRACEBACK", "1")
    monkeypatch.setitem(cli.HANDLERS, "status", Mock(side_effect=ValueError("here")))
    with pytest.raises(ValueError, match="here"):
        main(["status"])


def test_every_command_prints_json_on_request() -> None:
    for command in COMMANDS:
        needed = ["x"] if command in ("resume", "attach", "search", "export", "new") else []
        assert build_parser(HANDLERS).parse_args([command, "--json", *needed]).json


def test_a_round_is_one_line() -> None:
    progress = RoundProgress("supernet", 1, 4, 0.5, 0.25, 9, 10, 3_200_000, 12, 65.0)
    accuracies = "loss 0.5000  clients' train accuracy 0.2500"
    expected = f"supernet              2/4  clients 9/10  {accuracies}  down 3.2 MB up 12 B  65.00 s"
    assert round_line(progress) == expected
    assert round_line(replace(progress, left_s=754.0, stage_left_s=130.0)) == f"{expected}  left 12:34"
    assert round_line(replace(progress, stage_left_s=130.0)) == f"{expected}  left 2:10 in this stage"
    assert round_line(replace(progress, left_s=0.0, stage_left_s=0.0)) == expected
    search = RoundProgress("search/tier1", 2, 7, None, None, 0, 0, 0, 0, 1.0, counted="generations")
    assert round_line(search) == "search/tier1          3/7 generations  1.00 s"


def test_a_line_says_of_what_its_accuracies_are() -> None:
    progress = RoundProgress("evaluation", 0, 1, 0.5, 0.25, 9, 9, 0, 0, 1.0, metric_of="test")
    assert "loss 0.5000  clients' test accuracy 0.2500  1.00 s" in round_line(progress)
    scored = RoundProgress("spider", 3, 4, None, 0.9968, 9, 9, 0, 0, 1.0, validated=Validated(0.875, 4))
    assert "clients' train accuracy 0.9968  validation 0.8750 after 4  1.00 s" in round_line(scored)
    untrained = replace(progress, validated=Validated(0.875, None))
    assert "clients' test accuracy 0.2500  validation 0.8750  1.00 s" in round_line(untrained)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (999_950, "1 MB"), (2.5e12, "2.5 TB")]
)
def test_sizes_for_people(value: float, text: str) -> None:
    assert as_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.4, "0:00"), (125, "2:05"), (3_725, "1:02:05")])
def test_times_for_people(value: float, text: str) -> None:
    assert as_time(value) == text


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device"), 4, "fedloom: mine: no space left on device\n"),
        (OSError(5, "Input/output error", "a.npy"), 4, "fedloom: a.npy: input/output error\n"),
        (OSError(20, "Not a directory", Path("f/g")), 2, "fedloom: f/g: not a directory\n"),
        (OSError(36, "File name too long", "x" * 999), 2, f"fedloom: {'x' * 118}...{'x' * 119}: file name too long\n"),
        (OSError("in its own words"), 4, "fedloom: in its own words\n"),
        (MemoryError("1 TiB"), 4, "fedloom: not enough memory (1 TiB): ask for less, or use a larger machine\n"),
    ],
)
def test_what_the_machine_refuses_is_one_line_and_an_exit_code(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not a function of this file, whose errors would be those of the user's own code.
    monkeypatch.setitem(cli.HANDLERS, "status", Mock(side_effect=error))
    with pytest.raises(SystemExit) as ending:
        cli.main(["status", "--results", "mine"])
    assert (ending.value.code, capsys.readouterr().err) == (code, line)


def test_a_run_that_nobody_reads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    silenced: list[int] = []
    monkeypatch.setattr("fedloom.experiments.terminal.stop_printing", lambda: silenced.append(1))

    class Closed:
        def started(self, run_id: str, supernet_of: str) -> None:
            raise BrokenPipeError

        def round(self, progress: object) -> None:
            raise SystemExit(1)

    view = cli._WhileRead(Closed())
    view.started("run", "")
    view.round(None)
    assert len(silenced) == 2


SEEN_ON_A_TERMINAL = """
import os, pty, subprocess, sys
mine, its = pty.openpty()
command = [sys.executable, "-m", "fedloom.experiments.cli", *sys.argv[1:]]
process = subprocess.Popen(command, stdout=its, stderr=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"})
os.close(its)
said = b""
try:
    while part := os.read(mine, 4096):
        said += part
except OSError:  # Linux says so of a terminal that its last writer has left
    pass
print(repr(said.decode().split("\\r\\n")))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "experiment=fedavg_digits", "tiers.count=0"], ["loading torch and the configuration"]),
        (["run", "experiment=fedavg_digits", "tiers.count=0", "--json"], []),
        (["run", "experiment=fedavg_digits", "tiers.count=0", "--quiet"], []),
        (["resume", "2099"], ["looking up the run"]),
    ],
)
def test_a_terminal_is_told_at_once_what_is_being_done(tmp_path: Path, arguments: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEEN_ON_A_TERMINAL, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == repr([*said, ""])


INTERRUPTING = """
import sys
from fedloom.experiments.__main__ import main

interrupted, sys.argv = sys.argv[1], ["fedloom", "run", "experiment=fedavg_digits"]


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            raise KeyboardInterrupt


sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.parametrize("module", ["fedloom.experiments.cli", "argparse", "hydra", "fedloom.platform.runs.run"])
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTING, module]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (run.returncode, run.stderr) == (130, "fedloom: interrupted\n")
    assert not [*tmp_path.rglob("*")]
