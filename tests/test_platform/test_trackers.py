"""Trackers: every stored round once, also of resumed runs, and runs that end whatever a tracker does.

The first tests have a package in place of W&B that does what they want; the last ones read what the real packages have
written, where they are installed.
"""

import importlib.util
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.federation.config import RunConfig, TrackingConfig
from fedloom.platform.federation.event_files import scalars
from fedloom.platform.federation.loop import InterruptedRunError, RoundProgress
from fedloom.platform.federation.stopping import StopConfig
from fedloom.platform.federation.tracker_process import in_a_line
from fedloom.platform.federation.trackers import TrackedRun, Trackers, _history
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.results.paths import RunPaths, find_run, list_runs
from fedloom.platform.results.tables import read_runs
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import RunIdentity, Watcher, make_serial, resume_run, start_run

Tiny = Callable[..., RunConfig]
Curves = dict[str, dict[int, float]]

FAKE = """
import json, os, sys, time

def write(**values):
    with open(os.environ["FAKE_TRACKER"], "a") as file:
        file.write(json.dumps(values) + "\\n")

def does(what, step):
    if what.startswith("hang") and step == int(what[4:]): time.sleep(600)
    if what.startswith("raise") and step == int(what[5:]): raise RuntimeError("https://me:pw@host\\nis down")
    if what.startswith("exit") and step == int(what[4:]): os._exit(1)

class Settings:
    def __init__(self, **_): pass

class Artifact:
    def __init__(self, name, type): self.name = name
    def add_file(self, path): self.size = os.path.getsize(path)

class Run:
    url = "https://tracker/run"
    def log(self, values, step):
        does(os.environ.get("FAKE_DOES", ""), step)
        write(step=step, values=values)
    def log_artifact(self, artifact): write(model=artifact.name, size=artifact.size)
    def finish(self, exit_code): write(finished=exit_code)

def init(settings, **kwargs):
    print("a line that is no answer")
    does(os.environ.get("FAKE_DOES", ""), -1)
    write(begun=kwargs)
    return Run()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the package in W&B's place writes down what it is told."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    monkeypatch.setenv("FAKE_TRACKER", str(tmp_path / "told"))
    return tmp_path / "told"


def told(file: Path, what: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if what in line]


def curves_of(steps: list[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for line in steps:
        for name, value in line["values"].items():
            curve = curves.setdefault(name, {})
            assert line["step"] not in curve, f"{name} has step {line['step']} twice"
            curve[line["step"]] = value
    return curves


def expected_curves(config: RunConfig, run_id: str) -> Curves:
    """The same from the tables."""
    paths = RunPaths(Path(config.results), config.experiment, run_id)
    records = {
        table: json.loads(read_runs([paths], table).to_json(orient="records", double_precision=15))
        for table in ("rounds", "evaluations")
    }
    curves: Curves = {}
    last = {row["stage"]: row["round"] for row in records["rounds"]}
    for step, row in enumerate(records["rounds"]):
        at = (row["stage"], row["round"])
        scored = [r for r in records["evaluations"] if (r["stage"], min(r["round"], last[r["stage"]])) == at]
        for name, value in scalars([("rounds", row), *(("evaluations", r) for r in scored)]).items():
            curves.setdefault(name, {})[step] = pytest.approx(value, rel=1e-6)
    return curves


def tracked(tmp_path: Path, **changes: Any) -> Trackers:
    run = TrackedRun("run-1", "run-1", [], None, {"seed": 1})
    return Trackers(TrackingConfig(["wandb"], **changes), run, RunPaths(tmp_path, "demo", "run-1"), 0)


def rows(value: float) -> list[tuple[str, dict[str, Any]]]:
    return [("clients", {"stage": "train", "loss": 9.0}), ("rounds", {"stage": "train", "loss": value})]


@pytest.mark.parametrize(
    ("does", "sent", "says"),
    [
        ("", 5, []),
        (
            "raise-1",
            0,
            [
                "wandb: https://***@host is down; the run goes on without it",
                "5 of 5 rounds were not sent",
            ],
        ),
        ("raise3", 4, ["wandb: https://***@host is down", "1 of 5 rounds were not sent"]),
        ("exit3", 3, ["wandb: its process has ended; the run goes on without it", "2 of 5 rounds were not sent"]),
        ("hang3", 3, ["wandb: it has not answered for 1 s; the run goes on without it", "2 of 5 rounds were not sent"]),
    ],
)
def test_whatever_a_tracker_does_the_run_goes_on(
    tmp_path: Path,
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    does: str,
    sent: int,
    says: list[str],
) -> None:
    monkeypatch.setenv("FAKE_DOES", does)
    monkeypatch.setattr("fedloom.platform.federation.trackers.END_S", 1.0 if does.startswith("hang") else 20.0)
    trackers = tracked(tmp_path)
    began_s = time.monotonic()
    for number in range(5):
        trackers.add(rows(float(number)))
    assert time.monotonic() - began_s < 0.5, "no round waits for a tracker"
    if does.startswith("hang"):
        end_s = time.monotonic() + 20
        while len(fake.read_text().splitlines() if fake.exists() else ()) < 4 and time.monotonic() < end_s:
            time.sleep(0.02)
    began_s = time.monotonic()
    trackers.close("done")
    assert time.monotonic() - began_s < (3 if does.startswith("hang") else 20)
    lines = told(fake, "step") if fake.exists() else []
    steps = [number for number in range(5) if does != f"raise{number}"][:sent]
    assert [(line["step"], line["values"]) for line in lines] == [(n, {"train/loss": float(n)}) for n in steps]
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == len(says), texts
    assert all(text.startswith(begin) for text, begin in zip(texts, says, strict=True)), texts
    if not says:
        assert told(fake, "finished") == [{"finished": 0}]


def test_no_file_outside_the_run_is_sent_whatever_its_table_names(
    tmp_path: Path, fake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_text("a key")
    writer = RunWriter.create(tmp_path, "demo", "run-1")
    writer.paths.models.mkdir()
    (writer.paths.models / "m.safetensors").write_text("weights")
    for stage, file in (("strange", "../../secret"), ("train", "models/m.safetensors")):
        writer.add("models", stage=stage, tier="1", architecture="0", file=file)
    writer.close()
    tracked(tmp_path, models=True).close("done")
    assert told(fake, "model") == [{"model": "train-1-0", "size": 7}]
    assert told(fake, "finished")
    assert "a model is not sent to trackers: '../../secret' is no name of a file in" in caplog.text


def test_rounds_beyond_the_queue_are_counted(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_DOES", "hang0")
    monkeypatch.setattr("fedloom.platform.federation.trackers.MOST_WAITING", 3)
    monkeypatch.setattr("fedloom.platform.federation.trackers.END_S", 0.2)
    trackers = tracked(tmp_path)
    for number in range(50):
        trackers.add(rows(float(number)))
    trackers.close("failed")
    assert caplog.records[-1].getMessage().startswith("50 of 50 rounds were not sent to wandb")


def test_keys_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abc-4711-xyz")
    assert (
        in_a_line(ValueError("401 for abc-4711-xyz\nat https://user:pass@host/x"))
        == "401 for *** at https://***@host/x"
    )


# -- runs --------------------------------------------------------------------------------------------------------------


def stop_after(rounds: int) -> Watcher:
    """A watcher that stops the run after so many rounds."""
    answers = iter([False] * (rounds - 1) + [True])
    return Watcher(should_stop=lambda: next(answers))


def raise_at(stage: str) -> Watcher:
    def watch(progress: RoundProgress) -> None:
        if progress.stage == stage:
            raise LookupError(stage)

    return Watcher(round=watch)


def stopped_and_resumed(config: RunConfig) -> str:
    """A run that is stopped, breaks off with a checkpoint older than what it has sent, and is resumed."""
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, stop_after(3))
    run_id = list_runs(Path(config.results))[-1].run_id
    with pytest.raises(LookupError):
        resume_run(config, run_id, make_serial, raise_at("search/tier1"))
    resume_run(config, run_id, make_serial)
    return run_id


def test_a_resumed_run_sends_every_round_once(tiny_config: Tiny, fake: Path) -> None:
    config = tiny_config(tracking=TrackingConfig(["wandb"], models=True), tags=["paper"])
    config.checkpoint.every = 100
    run_id = stopped_and_resumed(config)
    curves, expected = curves_of(told(fake, "step")), expected_curves(config, run_id)
    repeated = "search/tier1/wall_s"  # the round was lost and repeated, which took another time
    assert curves.pop(repeated).keys() == expected.pop(repeated).keys()
    assert curves == expected
    begun = [line["begun"] for line in told(fake, "begun")]
    assert {line["id"] for line in begun} == {run_id}
    assert [line["resume"] for line in begun] == ["allow"] * 3
    assert begun[0]["tags"] == ["paper", config.experiment]
    assert begun[0]["config"]["method"]["name"] == "fedoras"
    assert not {"results", "tracking", "ray"} & set(begun[0]["config"]), "what is no science stays here"
    assert [line["finished"] for line in told(fake, "finished")] == [1, 1, 0]
    models = {line["model"]: line["size"] for line in told(fake, "model")}
    assert sorted(name.split("-")[:2] for name in models) == [["evaluation", "tier1"], ["evaluation", "tier2"]]
    assert min(models.values()) > 1000


def test_a_tracker_that_comes_later_gets_all_rounds_and_a_group(tiny_config: Tiny, fake: Path) -> None:
    config = tiny_config()
    identity = RunIdentity("alpha-1-0000", "alpha-1", 0, {"alpha": 1})
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, stop_after(3), identity)
    config.tracking.to = ["wandb"]
    resume_run(config, "alpha-1-0000", make_serial)
    assert curves_of(told(fake, "step")) == expected_curves(config, "alpha-1-0000")
    (begun,) = told(fake, "begun")
    assert begun["begun"]["group"] == "alpha-1"


def test_scores_after_a_round_are_at_its_step_whether_they_are_sent_at_once_or_later(
    tiny_config: Tiny, fake: Path
) -> None:
    train = TrainingConfig(rounds=3, clients_per_round=2, batch_size=16, evaluate_every=1)
    config = tiny_config(method=FedAvgConfig(train=train, evaluate=False), stop=StopConfig(patience=9))
    config.tracking.to = ["wandb"]
    start_run(config, make_serial)
    at_once = curves_of(told(fake, "step"))["fedavg/validation/accuracy"]
    fake.write_text("")
    config.tracking.to = []
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, stop_after(2), RunIdentity("later"))
    config.tracking.to = ["wandb"]
    resume_run(config, "later", make_serial)
    assert curves_of(told(fake, "step"))["fedavg/validation/accuracy"] == at_once
    assert [*at_once] == [0, 1, 2]


def test_final_scores_are_at_their_models_steps_in_a_run_that_may_end_early(tiny_config: Tiny, fake: Path) -> None:
    config = tiny_config(tracking=TrackingConfig(["wandb"]), stop=StopConfig(patience=9))
    run_id = start_run(config, make_serial)
    at_once = {step["step"]: step["values"].keys() for step in told(fake, "step")}
    assert {step: values.keys() for step, values in _history(find_run(Path(config.results), run_id), 0)} == at_once


def test_a_missing_package_is_refused_before_anything_is_written(
    tiny_config: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = tiny_config(tracking=TrackingConfig(["mlflow"]))
    with pytest.raises(ValueError, match=r'^tracking.to has mlflow, .*: pip install "fedloom\[mlflow\]"$'):
        start_run(config, make_serial)
    assert not Path(config.results).exists()


# -- the real packages -------------------------------------------------------------------------------------------------


def wandb_curves(run_id: str) -> Curves:
    """From the files of all of the run's offline parts; a file is a log of LevelDB with records of protobuf."""
    from wandb.proto import wandb_internal_pb2

    steps = []
    for file in sorted(Path("wandb").glob(f"offline-run-*-{run_id}/*.wandb")):
        for content in leveldb_records(file.read_bytes()[7:], 7):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == run_id
            if record.WhichOneof("record_type") == "history":
                values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                step = int(values["_step"])
                steps.append({"step": step, "values": {k: v for k, v in values.items() if not k.startswith("_")}})
    return curves_of(steps)


def leveldb_records(content: bytes, begin: int) -> Iterator[bytes]:
    """Blocks of 32 KiB with parts of records: checksum, length and kind (whole, first, middle, last), then the part."""
    at, record = 0, b""
    while at + 7 <= len(content):
        in_block = (begin + at) % 2**15
        if 2**15 - in_block < 7:
            at += 2**15 - in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def trackio_curves(run_id: str) -> Curves:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("fedloom", run_id)
    return curves_of([{"step": log["step"], "values": {k: v for k, v in log.items() if "/" in k}} for log in logs])


def mlflow_curves(run_id: str) -> Curves:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("fedloom")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (run_id, "FINISHED")
    assert run.data.params["method.name"] == "fedoras"
    steps = []
    for name in run.data.metrics:
        steps += [{"step": m.step, "values": {name: m.value}} for m in client.get_metric_history(run.info.run_id, name)]
    return curves_of(steps)


def aim_curves(run_id: str) -> Curves:
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    for name in aim.Repo(".").list_all_runs():
        RepoIndexManager.get_index_manager(aim.Repo(".")).index(name)  # as Aim's page does when it starts
    (run,) = aim.Repo(".").iter_runs()
    assert run.name == run_id
    assert run["fedloom", "config", "method", "name"] == "fedoras"
    steps = []
    for metric in run.metrics():
        frame = metric.dataframe()
        steps += [{"step": s, "values": {metric.name: v}} for s, v in zip(frame["step"], frame["value"], strict=True)]
    return curves_of(steps)


READ: Mapping[str, Callable[[str], Curves]] = {
    "wandb": wandb_curves,
    "trackio": trackio_curves,
    "mlflow": mlflow_curves,
    "aim": aim_curves,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_real_trackers_have_what_the_tables_have(
    tiny_config: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedloom.platform.federation.trackers.END_S", 60.0)
    for variable, value in {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }.items():
        monkeypatch.setenv(variable, value)
    config = tiny_config(tracking=TrackingConfig([name], models=name != "aim"))
    run_id = stopped_and_resumed(config)
    assert [r.getMessage() for r in caplog.records if name in r.getMessage()] == []
    curves = READ[name](run_id)
    # What holds no slash or has other characters is renamed by none of them.
    assert curves == expected_curves(config, run_id)
