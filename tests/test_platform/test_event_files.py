"""TensorBoard event files: what they hold, also of a resumed run, and that they stop nothing."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.event_files import EventFiles, final_scores, scalars
from fedloom.platform.federation.loop import InterruptedRunError, RoundProgress
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")

Tiny = Callable[..., RunConfig]
Curves = dict[str, dict[int, float]]


def events_in(file: Path) -> Iterator[Any]:
    """The events of one file: each is framed by its length, a checksum of that, and one of its content."""
    content, place = file.read_bytes(), 0
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        yield event_pb2.Event.FromString(content[place + 12 : place + 12 + length])
        place += 12 + length + 4
    assert place == len(content)


def read_events(folder: Path) -> tuple[Curves, dict[str, str]]:
    """Curves and texts as TensorBoard shows them: a session that starts at a step takes the place of what was there."""
    curves: Curves = {}
    texts: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        for number, event in enumerate(events_in(file)):
            if number == 0:
                assert event.file_version == "brain.Event:2"
            if event.HasField("session_log"):
                assert event.session_log.status == event_pb2.SessionLog.START
                curves = {tag: {s: v for s, v in c.items() if s < event.step} for tag, c in curves.items()}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curve = curves.setdefault(value.tag, {})
                    assert event.step not in curve, f"{value.tag} has step {event.step} twice"
                    curve[event.step] = value.simple_value
                else:
                    texts[value.tag] = value.tensor.string_val[0].decode()
    return {tag: curve for tag, curve in curves.items() if curve}, texts


def folder_of(config: RunConfig, run_id: str) -> Path:
    return Path(config.results) / "artifacts" / run_id / "tensorboard"


def expected_curves(config: RunConfig, run_id: str) -> Curves:
    """The same from the tables."""
    rounds = read_table(Path(config.results), "rounds", run_id=run_id)
    curves: Curves = {}
    for step, row in enumerate(rounds.to_dict("records")):
        for name in ("loss", "metric", "bytes_down", "bytes_up", "beta", "lr", "wall_s", "simulated_s"):
            if row[name] == row[name] and row[name] is not None:
                curves.setdefault(f"{row['stage']}/{name}", {})[step] = pytest.approx(float(row[name]), rel=1e-6)
    steps = {(row["stage"], row["round"]): step for step, row in enumerate(rounds.to_dict("records"))}
    found = read_table(Path(config.results), "evaluations", run_id=run_id)
    found = found[found["detail"].isna()]  # a matrix is no curve
    found = found[(found["stage"] == "evaluation") & found["client_id"].isna()]
    assert len(found) > 0
    last = {stage: step for (stage, _), step in steps.items()}
    for (stage, round_, split, metric), value in _means(config, run_id).items():
        step = steps.get((stage, round_), last[stage])  # of the model after the last round
        curves.setdefault(f"{stage}/{split}/{metric}", {})[step] = pytest.approx(value, rel=1e-6)
    for row in found.to_dict("records"):
        tag = "/".join(["evaluation", row["model"], row["tier"], row["split"], row["metric"]])
        curves[tag] = {steps[("evaluation", row["round"])]: pytest.approx(row["value"], rel=1e-6)}
    return curves


def _means(config: RunConfig, run_id: str) -> "pd.Series[float]":
    """The server's mean scores before the final evaluation, by stage, round, split and metric."""
    rows = read_table(Path(config.results), "evaluations", run_id=run_id)
    rows = rows[rows["detail"].isna() & (rows["stage"] != "evaluation") & rows["client_id"].isna()]
    return rows.groupby(["stage", "round", "split", "metric"])["value"].mean()


def test_a_run_writes_its_rounds_and_final_scores(tiny_config: Tiny) -> None:
    config = tiny_config(tensorboard=True)
    run_id = start_run(config, make_serial)
    curves, texts = read_events(folder_of(config, run_id))
    assert curves == expected_curves(config, run_id)
    assert list(curves["supernet/lr"]) == [0, 1]
    assert min(curves["search/tier1/wall_s"]) == 2, "the global step goes on over stages"
    assert any(tag.startswith("evaluation/fine_tuned/tier1/test/") for tag in curves)
    text = texts["configuration/text_summary"]
    assert json.loads(text.removeprefix("```\n").removesuffix("\n```"))["method"]["name"] == "fedoras"


def stop_after(rounds: int) -> Watcher:
    """A watcher that stops the run after so many rounds."""
    answers = iter([False] * (rounds - 1) + [True])
    return Watcher(should_stop=lambda: next(answers))


@pytest.mark.parametrize("every", [1, 100])
def test_a_resumed_run_continues_without_doubled_or_missing_steps(tiny_config: Tiny, every: int) -> None:
    config = tiny_config(tensorboard=True)
    config.method.finetune.rounds = config.method.rand_init.rounds = 0
    config.checkpoint.every = every
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, stop_after(3))
    run_id = list_runs(Path(config.results))[-1].run_id

    # As after a kill in the middle: rounds were told of, and the checkpoint is older.
    failing = Watcher(round=raise_at("search/tier1"))
    with pytest.raises(LookupError):
        resume_run(config, run_id, make_serial, failing)
    resume_run(config, run_id, make_serial)
    assert len(list(folder_of(config, run_id).iterdir())) >= 2
    curves, _ = read_events(folder_of(config, run_id))
    assert curves == expected_curves(config, run_id)


def raise_at(stage: str) -> Callable[[RoundProgress], None]:
    def told(progress: RoundProgress) -> None:
        if progress.stage == stage:
            raise LookupError(stage)

    return told


def test_missing_package_is_refused_before_anything_is_written(
    tiny_config: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = tiny_config(tensorboard=True)
    with pytest.raises(ValueError, match=r"^tensorboard=true needs the package tensorboardX: install it, or set tens"):
        start_run(config, make_serial)
    assert not Path(config.results).exists()


@pytest.mark.parametrize("when", ["opening", "writing"])
def test_a_disk_that_refuses_stops_no_run(
    tiny_config: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    from tensorboardX.event_file_writer import EventsWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    write = EventsWriter.write_event

    def full_after_two(self: EventsWriter, event: Any) -> None:
        full() if event.step == 2 else write(self, event)

    if when == "opening":
        monkeypatch.setattr(EventsWriter, "__init__", full)
    else:
        monkeypatch.setattr(EventsWriter, "write_event", full_after_two)
    train = TrainingConfig(rounds=3, clients_per_round=3, batch_size=16)
    config = tiny_config(tensorboard=True, method=FedAvgConfig(architecture="0-1-2", train=train))
    run_id = start_run(config, make_serial)
    assert read_table(Path(config.results), "runs", run_id=run_id)["status"].tolist() == ["done"]
    warnings = [r.message for r in caplog.records if "TensorBoard" in r.message]
    place = folder_of(config, run_id)
    assert warnings == [f"no more TensorBoard events of this run are written: {place}: no space left on device"]
    if when == "writing":
        curves, _ = read_events(folder_of(config, run_id))
        assert {step for curve in curves.values() for step in curve} == {0, 1}


# -- what becomes a scalar ---------------------------------------------------------------------------------------------


def test_missing_values_are_left_out() -> None:
    row = {"stage": "supernet", "round": 3, "loss": 0.5, "metric": None, "bytes_down": 7, "beta": None, "macs": 4}
    assert scalars([("clients", {"stage": "supernet", "loss": 9.0}), ("rounds", row)]) == {
        "supernet/loss": 0.5,
        "supernet/bytes_down": 7.0,
    }


def score(**changes: Any) -> dict[str, Any]:
    row = {"stage": "evaluation", "round": 0, "model": "m", "tier": "tier1", "architecture": "3-1", "client_id": None}
    return {**row, "split": "test", "metric": "accuracy", "value": 0.5, **changes}


def test_final_scores_are_the_servers_by_tier_or_architecture() -> None:
    found = [score(), score(client_id=4, value=0.25), score(tier="server", split=None, metric="macs", value=12)]
    assert final_scores(found) == {"evaluation/m/tier1/test/accuracy": 0.5, "evaluation/m/3-1/macs": 12.0}


def test_models_that_only_clients_score_have_their_mean() -> None:
    found = [
        score(client_id=0, value=0.25),
        score(client_id=1, value=0.75, tier="tier2"),
        score(client_id=1, model="n"),
    ]
    assert final_scores(found) == {
        "evaluation/m/mean_over_clients/test/accuracy": 0.5,
        "evaluation/n/mean_over_clients/test/accuracy": 0.5,
    }


def test_scores_of_other_stages_are_means_of_the_servers_over_architectures() -> None:
    scores = [
        score(stage="supernet", value=0.25),
        score(stage="supernet", value=0.75, architecture="0-1"),
        score(stage="supernet", value=1.0, client_id=3),
        score(stage="supernet", split=None, metric="macs", value=12),
        score(stage="later", value=0.25),
        score(stage="later", value=0.5, round=1),
        score(stage="personal", split="validation", client_id=3),
        score(value=None),
    ]
    assert scalars([("evaluations", row) for row in scores]) == {
        "supernet/test/accuracy": 0.5,
        "later/test/accuracy": 0.5,
        "personal/validation/accuracy": 0.5,
    }


def test_steps_are_counted_also_where_nothing_is_written(tmp_path: Path) -> None:
    events = EventFiles(tmp_path / "events", 5, {})
    for name in ("a", "b"):
        events.add([("clients", {"stage": name}), ("rounds", {"stage": name, "loss": 1.0})])
    events.add([("candidates", {"stage": "b"})])
    events.add([("rounds", {"stage": "c", "loss": 2.0})])
    events.close()
    events.close()
    events.add([("rounds", {"stage": "c", "loss": 3.0})])  # nobody listens any more
    curves, _ = read_events(tmp_path / "events")
    assert curves == {"a/loss": {5: 1.0}, "b/loss": {6: 1.0}, "c/loss": {7: 2.0}}
