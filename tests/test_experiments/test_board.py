"""`fedloom board`: what it lists and draws, follows, refuses, and how it looks in a browser while runs come and go."""

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fedloom.experiments.analysis.outcomes import outcomes
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.benchmarks.board import write_many
from fedloom.experiments.board import index as index_module, views
from fedloom.experiments.board.index import Index
from fedloom.experiments.board.server import LEAST_TOKEN, Board, check_address
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.results.paths import Names, RunPaths, write_names
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import make_serial, start_run
from tools.generated_ablation import Fates, write_planned

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TOKEN = "correct-horse-battery-staple"


def add_run(root: Path, run_id: str, *, state: str = "done", **config: Any) -> RunWriter:
    """A run with two rounds by hand: 3 and 5 MB, one and two simulated hours."""
    writer = RunWriter.create(root, "tiny", run_id, flush_interval_s=3600.0)
    writer.update_run(
        method="fedavg", dataset="digits", status=state, config=json.dumps({"experiment": "tiny", **config})
    )
    for round_, (sent, hours, loss) in enumerate([(1_000_000, 1, 2.0), (2_000_000, 2, 1.0)]):
        row = {"stage": "train", "round": round_, "clients_planned": 2, "clients_ok": 1, "clients_failed": 1}
        writer.add("rounds", **row, bytes_down=2_000_000 + 0 * round_, bytes_up=sent + 1_000_000 * round_,
                   simulated_s=3600.0 * hours, loss=loss, metric=0.5)  # fmt: skip
        for client, status in ((0, "ok"), (7, "failed")):
            writer.add(
                "clients", stage="train", round=round_, client_id=client, tier="tier1", status=status, metric=0.25
            )
        for accuracy in (0.4, 0.6):
            score = {"model": "global", "tier": "server", "split": "validation", "metric": "accuracy"}
            writer.add(
                "evaluations", stage="train", round=round_ + 1, **score, value=accuracy + 0.1 * round_, samples=1
            )
    writer.close()
    StatusFile(writer.paths.status).write(state, stage="train", round=1, rounds_total=2)  # type: ignore[arg-type]
    return writer


def read_all(index: Index) -> dict[str, Any]:
    """All that the index lists, when nothing waits to be read."""
    index.refresh()
    while index.read_next():
        pass
    return {run["id"]: run for run in index.changes("")["runs"]}


# -- the list ----------------------------------------------------------------------------------------------------------


def test_only_what_changed_is_read_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a1", "b2", "c3"):
        add_run(tmp_path, name)
    index = Index(tmp_path)
    assert read_all(index).keys() == {"a1", "b2", "c3"}
    first = index.changes("")
    reads: list[Path] = []
    own = index_module.read_status
    monkeypatch.setattr(index_module, "read_status", lambda path: reads.append(path) or own(path))
    assert index.parts_read == 3
    for _ in range(5):
        index.refresh()
        assert not index.read_next()
    assert (reads, index.changes(first["version"])["runs"], index.parts_read) == ([], [], 3)
    paths = RunPaths(tmp_path, "tiny", "b2")
    StatusFile(paths.status).write("failed", message="no space left")
    index.refresh()
    changed = index.changes(first["version"])
    assert [(run["id"], run["state"], run["message"]) for run in changed["runs"]] == [("b2", "failed", "no space left")]
    assert reads == [paths.status]
    assert index.read_next()
    assert index.parts_read == 3, "its tables are as they were"
    shutil.rmtree(paths.table("runs"))
    for table in paths.tables():
        shutil.rmtree(table)
    index.refresh()
    assert index.changes(changed["version"])["gone"] == ["b2"]
    assert index.changes("another.7")["whole"], "a page of another server gets everything"


def test_what_is_damaged_is_listed_as_such_beside_the_others(tmp_path: Path) -> None:
    for name in ("a1", "b2", "c3", "d4"):
        add_run(tmp_path, name)
    RunPaths(tmp_path, "tiny", "b2").status.write_bytes(b'{"state": "runn')
    (part,) = RunPaths(tmp_path, "tiny", "c3").table("evaluations").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    RunPaths(tmp_path, "tiny", "d4").status.unlink()
    runs = read_all(Index(tmp_path))
    assert {name: run["state"] for name, run in runs.items()} == {
        "a1": "done",
        "b2": "unknown",
        "c3": "done",
        "d4": "unknown",
    }
    assert "is not a status file" in runs["b2"]["message"]
    assert "is not a readable Parquet file" in runs["c3"]["problem"]
    assert runs["a1"]["problem"] is None
    drawn = views.curves(views.Reader(), views_paths(tmp_path, "a1", "c3"), "", SCORES, "rounds")["curves"]
    assert drawn["a1"]["y"] == [0.5, 0.6]
    assert (drawn["c3"]["y"], "not a readable Parquet" in drawn["c3"]["problem"]) == ([], True)


def test_a_run_that_may_not_be_read_is_listed_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in the folder of somebody else is, for all but the superuser."""
    from fedloom.experiments.board.index import stamp_of

    def refused(path: Path) -> Any:
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied")
        return stamp_of(path)

    for name in ("20260101-000000-open", "20260101-000001-closed"):
        add_run(tmp_path, name)
    monkeypatch.setattr("fedloom.experiments.board.index.stamp_of", refused)
    listed = read_all(Index(tmp_path))
    assert listed["20260101-000000-open"]["state"] == "done"
    closed = listed["20260101-000001-closed"]
    assert (closed["state"], closed["message"]) == ("unknown", "[Errno 13] Permission denied")


def test_the_accuracy_of_the_list_is_that_of_the_outcomes(trained: RunPaths) -> None:
    listed = read_all(Index(trained.root))[trained.run_id]
    frame = outcomes(load(trained.root))
    assert listed["accuracy"] == pytest.approx(frame["accuracy"].iloc[0])
    assert listed["state"] == "done"


# -- views -------------------------------------------------------------------------------------------------------------

SCORES = "server/validation/accuracy"


def views_paths(root: Path, *names: str) -> list[RunPaths]:
    return [RunPaths(root, "tiny", name) for name in names]


def test_curves_over_rounds_megabytes_and_hours(tmp_path: Path) -> None:
    writer = add_run(tmp_path, "a1")
    reader = views.Reader()

    def curve(metric: str, axis: str) -> tuple[list[float], list[float]]:
        drawn = views.curves(reader, [writer.paths], "", metric, axis)["curves"]["a1"]
        return drawn["x"], drawn["y"]

    assert curve("loss", "rounds") == ([1, 2], [2.0, 1.0])
    assert curve("loss", "megabytes") == ([3, 8], [2.0, 1.0])
    assert curve("loss", "hours") == ([1, 3], [2.0, 1.0])
    assert curve(SCORES, "megabytes") == ([3, 8], [0.5, 0.6])
    assert curve("no/such/metric", "rounds") == ([], [])
    known = views.metrics(reader, [writer.paths])
    assert known["stages"] == ["train"]
    assert {"loss", "metric", "bytes_up", SCORES} <= {*known["metrics"]}
    assert "epsilon" not in known["metrics"], "no round has a value of it"
    with pytest.raises(ValueError, match=r"axis=days: there are rounds, megabytes, hours"):
        curve("loss", "days")


def test_clients_score_their_models_after_the_round(tmp_path: Path) -> None:
    writer = add_run(tmp_path, "a1")
    score = {"model": "personal", "client_id": 7, "split": "validation", "metric": "accuracy", "samples": 1}
    for round_, value in enumerate((0.2, 0.3)):
        writer.add("evaluations", stage="train", round=round_, **score, value=value)
    writer.close()
    for axis, x in (("rounds", [1, 2]), ("megabytes", [3, 8])):
        drawn = views.curves(views.Reader(), [writer.paths], "", "clients/validation/accuracy", axis)["curves"]["a1"]
        assert (drawn["x"], drawn["y"]) == (x, [0.2, 0.3])


def test_outcomes_of_trials_are_shown_without_reading_their_clients(tmp_path: Path) -> None:
    ablation = write_planned(tmp_path, ["ablation=comm_budget", "experiment=fedoras_digits"], rounds=1, candidates=2)
    first = ablation.trials[0]
    (part,) = RunPaths(tmp_path, first.experiment, first.run_id).table("clients").iterdir()
    part.write_bytes(b"damaged")
    view = views.ablation_view(views.Reader(), tmp_path, ablation.folder(tmp_path))
    assert (view["trials"][0]["message"], view["trials"][0]["outcomes"]["accuracy"] > 0) == ("", True)


def test_the_row_of_a_final_score_is_no_round(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "tiny", "a1")
    for round_, planned in enumerate((4, 4, 0)):
        writer.add("rounds", stage="train", round=round_, clients_planned=planned, loss=1.0)
    writer.close()
    assert views.curves(views.Reader(), [writer.paths], "", "loss", "rounds")["curves"]["a1"]["x"] == [1, 2]


def test_the_validation_of_a_run_is_the_mean_over_what_its_last_round_scored(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "tiny", "a1")
    for round_, values in enumerate(((0.1, 0.2), (0.4, 0.6))):
        for index, value in enumerate(values):
            place = {"stage": "supernet", "round": round_, "architecture": str(index), "split": "validation"}
            writer.add("evaluations", **place, model="supernet", metric="accuracy", value=value, samples=9)
    writer.close()
    rows = index_module.read_columns(writer.paths, "evaluations", index_module.EVALUATION_COLUMNS)
    assert index_module._accuracies(rows) == {"accuracy": None, "validation": 0.5}


def test_a_run_that_took_its_supernet_has_the_curve_of_its_training(tmp_path: Path) -> None:
    first, second = (RunWriter.create(tmp_path, "tiny", name) for name in ("a1", "b2"))
    first.add("rounds", stage="supernet", round=0, clients_planned=1, loss=3.0)
    second.add("rounds", stage="search/tier1", round=0, clients_planned=1, loss=9.0)
    for writer in (first, second):
        writer.update_run(supernet_run_id="a1", config="{}")
        writer.close()
    runs, reader = [first.paths, second.paths], views.Reader()
    drawn = views.curves(reader, runs, "", "loss", "rounds")["curves"]
    assert [drawn[name]["y"] for name in ("a1", "b2")] == [[3.0], [3.0]]
    assert views.curves(reader, runs[1:], "search/tier1", "loss", "rounds")["curves"]["b2"]["y"] == [9.0]
    assert views.metrics(reader, runs[1:])["stages"] == ["supernet"]


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    for name, lr, seed in (("a1", 0.1, 1), ("b2", 0.1, 2), ("c3", 0.5, 1)):
        add_run(tmp_path, name, seed=seed, method={"train": {"lr": lr, "epochs": 3}})
    reader, runs = views.Reader(), views_paths(tmp_path, "a1", "b2", "c3")
    assert views.labels(reader, runs) == {"a1": "lr=0.1, seed=1", "b2": "lr=0.1, seed=2", "c3": "lr=0.5, seed=1"}
    rows = {row["key"]: row for row in views.differences(reader, runs)["rows"]}
    assert rows["method.train.lr"] == {"key": "method.train.lr", "values": ["0.1", "0.1", "0.5"], "differs": True}
    assert not rows["method.train.epochs"]["differs"]


def test_clients_with_their_ends_and_measures(tmp_path: Path) -> None:
    writer = add_run(tmp_path, "a1")
    view = views.clients(views.Reader(), writer.paths, "", "metric")
    ends = [view["states"][code] for code in view["state"]]
    assert list(zip(view["round"], view["client"], ends, view["value"], strict=True)) == [
        (0, 0, "ok", 0.25), (0, 7, "failed", 0.25), (1, 0, "ok", 0.25), (1, 7, "failed", 0.25)
    ]  # fmt: skip
    assert view["tiers"] == {"0": "tier1", "7": "tier1"}


def test_a_clients_accuracy_is_that_of_the_final_model(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "tiny", "a1")
    for model, value in (("supernet_init", 0.2), ("fine_tuned", 0.9), ("rand_init", 0.1)):
        score = {"model": model, "tier": "tier1", "split": "test", "metric": "accuracy", "samples": 5}
        writer.add("evaluations", stage="evaluation", round=0, client_id=3, **score, value=value)
    writer.close()
    assert views.clients(views.Reader(), writer.paths, "", "")["accuracy"] == {"3": 0.9}


def test_fronts_by_tier_without_what_could_not_be_scored(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "tiny", "a1")
    for tier, macs, feasible in (("samples", 3, True), ("tier10", 5, True), ("tier2", 7, True), ("tier2", 9, False)):
        row = {"architecture": "0-1", "metric": 0.5, "on_front": True}
        writer.add("candidates", stage="search", round=0, tier=tier, macs=macs, feasible=feasible, **row)
    writer.close()
    tiers = views.fronts(views.Reader(), writer.paths)["tiers"]
    assert [(tier["tier"], tier["macs"], tier["architecture"]) for tier in tiers] == [
        ("tier2", [7], ["0-1"]), ("tier10", [5], ["0-1"]), ("samples", [3], ["0-1"])
    ]  # fmt: skip


def test_tables_are_remembered_until_they_change_and_forgotten_when_they_are_many(tmp_path: Path) -> None:
    writers = [add_run(tmp_path, name) for name in ("a1", "b2")]
    runs, reader = [writer.paths for writer in writers], views.Reader()
    for _ in range(3):
        views.curves(reader, runs, "", "loss", "rounds")
    assert reader.read == 4, "the rounds and the configurations of both"
    writers[1].add("rounds", stage="train", round=2, clients_planned=2, loss=0.5)
    writers[1].close()
    assert views.curves(reader, runs, "", "loss", "rounds")["curves"]["b2"]["y"] == [2.0, 1.0, 0.5]
    assert reader.read == 5
    small = views.Reader(most_bytes=1)
    for _ in range(2):
        views.curves(small, runs, "", "loss", "rounds")
    assert small.read == 8, "of four tables one fits"


# -- who is answered ---------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A board that is served from a thread."""

    board: Board
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, Any, str]:
        """The status, the headers and the text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    def json(self, path: str) -> Any:
        status, _, text = self.ask(path)
        assert status == 200, text
        return json.loads(text)


@contextmanager
def served(results: Path, host: str = "127.0.0.1", token: str = "") -> Iterator[Served]:
    """The board of a folder; it looks at the results whenever it is asked."""
    loop = asyncio.new_event_loop()
    board = Board(results, host, token)
    board.refresh_s = 0.0
    runner = web.AppRunner(board.app)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    board.index.start()
    try:
        yield Served(board, port)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        board.index.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def test_foreign_hosts_and_methods_are_refused(tmp_path: Path) -> None:
    add_run(tmp_path, "a1")
    with served(tmp_path) as site:
        for host in ("localhost", "127.0.0.1:9000", "[::1]:8270", "LOCALHOST:1"):
            assert site.ask("/api/runs", Host=host)[0] == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example:8270", "localhost.evil.example", "", "[", "10.0.0.7"):
            assert site.ask("/api/runs", Host=host)[0] == 403, host
        for method in ("POST", "PUT", "DELETE"):
            assert site.ask("/api/runs", method)[0] == 405
        _, headers, text = site.ask("/")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        assert not re.findall(r"<script>|\son\w+=|style=|https?:", text), "nothing inline, nothing from elsewhere"


def test_paths_never_leave_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    add_run(results, "a1")
    (tmp_path / "report.html").write_text("secret")
    report = results / "reports" / "a1" / "report.html"
    with served(results) as site:
        site.json("/api/runs")
        for name in ("..", "%2e%2e", "..%2f..", "a1%2f..%2f..", "a1/../..", "", "a1%00", "nobody"):
            status, _, text = site.ask(f"/report/{name}")
            assert status in (400, 404), name
            assert "secret" not in text
        for query in ("run=../../etc", "run=", "run=a1&run=a2", "", "run=%00", "run=" + "x" * 5000):
            assert site.ask(f"/api/run?{query}")[0] == 400, query
        for name in ("../reports", "..", "a1"):
            assert site.ask(f"/api/ablation?ablation={name}")[0] == 400
        assert site.ask("/report/a1")[2] == "there is no report yet: fedloom report a1 writes it"
        report.parent.mkdir(parents=True)
        report.symlink_to(tmp_path / "report.html")
        assert site.ask("/report/a1")[0] == 404, "no link is followed"
        report.unlink()
        report.write_text("<h1>fine</h1>")
        status, headers, text = site.ask("/report/a1")
        assert (status, text) == (200, "<h1>fine</h1>")
        assert headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results"], "nothing was written"


def test_with_a_token_nothing_is_shown_without_it(tmp_path: Path) -> None:
    add_run(tmp_path, "a1")
    with served(tmp_path, token=TOKEN) as site:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"fedloom_board={TOKEN}"}):
            assert site.ask("/api/runs", **headers)[0] == 401
            assert "Token" in site.ask("/", **headers)[2]
        assert site.ask("/report/a1")[0] == 401
        assert site.ask("/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        status, headers, _ = site.ask("/login", "POST", "token=wrong", **form)
        assert (status, headers["Set-Cookie"]) == (401, None)
        status, headers, _ = site.ask("/login", "POST", f"token={TOKEN}", **form)
        cookie = headers["Set-Cookie"]
        assert status == 303
        assert "SameSite=Strict" in cookie
        assert "HttpOnly" in cookie
        assert TOKEN not in cookie
        assert site.ask("/api/runs", Cookie=cookie.partition(";")[0])[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_other_interfaces_need_a_token_that_cannot_be_guessed(host: str) -> None:
    with pytest.raises(ValueError, match="is reached from other machines: give FEDLOOM_BOARD_TOKEN"):
        check_address(host, "")
    with pytest.raises(ValueError, match=f"the token has 5 characters: give at least {LEAST_TOKEN}"):
        check_address(host, "short")
    check_address(host, TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_address(host, "")


def test_an_unchanged_view_is_not_sent_again(tmp_path: Path) -> None:
    writer = add_run(tmp_path, "a1")
    with served(tmp_path) as site:
        site.json("/api/runs")
        for path in (
            "/api/curves?run=a1",
            "/api/clients?run=a1",
            "/api/differences?run=a1",
            "/api/run?run=a1",
            "/page.js",
        ):
            tag = site.ask(path)[1]["ETag"]
            assert site.ask(path, If_None_Match=tag)[::2] == (304, "")
        tag = site.ask("/api/curves?run=a1")[1]["ETag"]
        writer.add("rounds", stage="train", round=2, clients_planned=2, loss=0.5)
        writer.close()
        status, _, text = site.ask("/api/curves?run=a1", If_None_Match=tag)
        assert status == 200
        assert json.loads(text)["curves"]["a1"]["y"] == [2.0, 1.0, 0.5]


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "tiny", "a1")
    row = {"stage": "train", "round": 0, "client_id": 1, "status": "failed"}
    writer.add("clients", **row, loss=float("inf"), metric=float("nan"))
    writer.close()
    with served(tmp_path) as site:
        site.json("/api/runs")
        assert "Infinity" not in site.ask("/api/clients?run=a1&measure=loss")[2]
        assert site.json("/api/clients?run=a1&measure=loss")["value"] == [None]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_its_url_ends_without_a_traceback_and_says_what_it_cannot_have(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedloom.experiments", "board", "--results", str(tmp_path)]
    running = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)", running.stdout.readline())[0])
    assert json.loads(_text_at(port, "/api/runs"))["runs"] == []
    taken = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, timeout=60)
    assert (taken.returncode, taken.stdout, len(taken.stderr.splitlines())) == (2, "", 1)
    assert f"127.0.0.1:{port} cannot be served" in taken.stderr
    assert "give another --port or --host" in taken.stderr
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=60)
    assert (running.returncode, out, errors) == (0, "", "")


def _text_at(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


# -- in a browser ------------------------------------------------------------------------------------------------------

RUNNER = """
import json, os, sys
from fedloom.experiments.runs.configuration import config_from_dict
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import RunIdentity, Watcher, make_serial, resume_run, start_run

def tell(done):
    print(done.stage, done.round, flush=True)
    sys.stdin.readline()

for name in ("create", "resume"):  # rows reach the tables at once
    getattr(RunWriter, name).__func__.__defaults__ = (0.0, 250_000)
while line := sys.stdin.readline():
    how, _, config = line.partition(" ")
    if pid := os.fork():
        print("ended", os.waitpid(pid, 0)[1], flush=True)
        continue
    print(os.getpid(), flush=True)
    config, watcher = config_from_dict(json.loads(config)), Watcher(round=tell)
    if how == "resume":
        resume_run(config, "live", make_serial, watcher)
    else:
        start_run(config, make_serial, watcher, RunIdentity(run_id="live"))
    os._exit(0)
"""
"""Runs that wait for a line after each round, so that they can be looked at, and killed, at a known one."""


class Runner:
    """The process whose children are the runs; it imports torch while other tests run."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", RUNNER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module", autouse=True)
def runner() -> Iterator[Runner]:
    """What starts runs beside this process."""
    started = Runner()
    yield started
    started.process.kill()
    started.process.communicate()


def tiny_fedavg(tiny_config_in: Callable[..., RunConfig], folder: Path) -> RunConfig:
    train = TrainingConfig(rounds=3, clients_per_round=3, epochs=1, batch_size=16, evaluate_every=1)
    return tiny_config_in(folder, method=FedAvgConfig(architecture="smallest", train=train))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_config_in: Callable[..., RunConfig]) -> RunPaths:
    """A run of FedAvg that is done."""
    folder = tmp_path_factory.mktemp("trained")
    return RunPaths(folder, "tiny", start_run(tiny_fedavg(tiny_config_in, folder), make_serial))


@pytest.fixture(scope="module")
def chromium(browser: str) -> Iterator[Any]:
    """The system's browser, driven by Playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=shutil.which(browser), args=["--no-sandbox"])
        yield running
        running.close()


class Opened:
    """A page of the board, with what its scripts complained of."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url, self.complaints = page, url, []
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def show(self, **state: str) -> Any:
        """Goes to a view, as a shared link does."""
        self.page.goto(self.url + "#" + "&".join(f"{name}={value}" for name, value in state.items()))
        return self.page


@pytest.fixture
def open_board(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a board in a window of its own; at the end no page may have complained."""
    contexts, pages = [], []

    def opened(site: Served, **options: Any) -> Opened:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1300, "height": 800}, **options}))
        contexts[-1].set_default_timeout(15_000)
        pages.append(Opened(contexts[-1].new_page(), site.url))
        return pages[-1]

    yield opened
    complaints = [text for page in pages for text in page.complaints]
    for context in contexts:
        context.close()
    assert complaints == []


def rows_of(page: Any) -> list[str]:
    return [row.get_attribute("data-run") for row in page.locator("table.list tbody tr[data-run]").all()]


def test_a_run_is_followed_while_it_is_written_killed_and_resumed(
    tmp_path: Path, tiny_config_in: Callable[..., RunConfig], open_board: Callable[..., Opened], runner: Runner
) -> None:
    config = json.dumps(asdict(tiny_fedavg(tiny_config_in, tmp_path)))
    with served(tmp_path) as site:
        page = open_board(site).show(view="runs")
        page.wait_for_selector("text=No runs yet")
        runner.say(f"start {config}")
        pid = int(runner.hear())
        assert runner.hear() == "fedavg 0"
        page.wait_for_selector("tr[data-run=live] .state[data-state=running]")
        page.click("tr[data-run=live] input")
        page.click(".selection a:text-is('curves')")
        drawn = "section[data-metric=loss] tbody td.number:last-child:text-is('{}')"
        page.wait_for_selector(drawn.format(1), state="attached")
        runner.say("")
        assert runner.hear() == "fedavg 1"
        page.wait_for_selector(drawn.format(2), state="attached")
        assert page.locator("#chosen .state").get_attribute("data-state") == "running"
        os.kill(pid, signal.SIGKILL)
        assert runner.hear() == "ended 9"
        page.wait_for_selector("#chosen .state[data-state=dead]")
        runner.say(f"resume {config}")
        int(runner.hear())
        assert runner.hear() == "fedavg 2"
        page.wait_for_selector("#chosen .state[data-state=running]")
        runner.say("\n" * 5)
        page.wait_for_selector("#chosen .state[data-state=done]")
        page.wait_for_selector(drawn.format(3), state="attached")
        page.click("#chosen a.name")
        page.wait_for_selector("main:has-text('fedloom report live')")


def test_hostile_names_are_text_and_views_are_shared_by_their_url(
    tmp_path: Path, open_board: Callable[..., Opened]
) -> None:
    for name in ("a1", "b2", "c3"):
        writer = add_run(tmp_path, name, method={"train": {HOSTILE: name, "lr": 0.1}})
        write_names(writer.paths.artifacts, Names(HOSTILE, (HOSTILE, "tag")))
        StatusFile(writer.paths.status).write("failed", stage=HOSTILE, message=HOSTILE)
    with served(tmp_path) as site:
        board = open_board(site)
        page = board.show(view="runs", runs="a1,,c3")
        for view in ("runs", "curves", "clients", "fronts", "differences", "run", "ablations"):
            page = board.show(view=view, runs="a1,,c3")
            page.wait_for_selector("#link[data-state=live]")
            page.wait_for_timeout(100)
            assert page.title().startswith("fedloom board")
            assert page.locator("img, main script").count() == 0
        page = board.show(view="runs", runs="a1,,c3")
        page.wait_for_selector("table.list tr.chosen")
        assert [row.is_checked() for row in page.locator("table.list input").all()] == [True, False, True]
        line = "tr[data-run={}] .swatch line"
        colours = [page.locator(line.format(name)).get_attribute("stroke") for name in ("a1", "c3")]
        assert colours[0] != colours[1]
        page.click("tr[data-run=a1] input")
        page.click("tr[data-run=b2] input")
        assert re.findall(r"runs=([^&]*)", page.url) == ["b2%2C%2Cc3"], "the colour of a run that stays is the same"
        assert page.locator(line.format("c3")).get_attribute("stroke") == colours[1]
        page.reload()
        page.wait_for_selector("tr[data-run=b2].chosen")


def test_thousands_of_runs_are_a_few_rows_that_are_searched_sorted_and_moved_through(
    tmp_path: Path, open_board: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.experiments.benchmarks.board.TEMPLATES", 4)
    ids = write_many(tmp_path, 400, 2)
    with served(tmp_path) as site:
        page = open_board(site).show(view="runs")
        page.wait_for_selector(".count:has-text('400 runs')")
        assert 10 < len(rows_of(page)) < 60
        assert rows_of(page)[0] == max(ids)
        page.fill("#search", "batch-0 fedoras")
        page.wait_for_selector(".count:has-text(' of 400 runs')")
        assert all("fedoras" in name for name in rows_of(page))
        page.fill("#search", "")
        page.click("button.chip[data-state=failed]")
        page.wait_for_selector(".count:has-text('80 of 400 runs')")
        page.click("th.of-started button")
        failed = [name for i, name in enumerate(ids) if i % 5 == 3]
        assert rows_of(page)[0] == min(failed)
        page.focus("table.list input >> nth=0")
        page.keyboard.press("End")
        assert page.evaluate("document.activeElement.dataset.tick") == max(failed)
        page.keyboard.press("Space")
        page.wait_for_selector(".selection:has-text('1 selected')")
        page.fill("#search", "there is no such run")
        page.wait_for_selector("text=No run matches")
        page.click("text=show all runs")
        page.wait_for_selector(".count:has-text('400 runs')")
        # An open page asks for what changed: nothing.
        page.wait_for_selector("#link:text-is('live')")
        before = site.board.index.parts_read
        answer = page.evaluate("""async () => {
          const first = await (await fetch("api/runs")).json();
          const next = await (await fetch("api/runs?since=" + first.version)).text();
          return [first.runs.length, first.waiting, next.length];
        }""")
        assert answer[0] == 400
        assert answer[2] < 500
        assert (answer[1], site.board.index.parts_read) == (0, before)


def test_an_ablation_is_brushed_with_the_mouse_and_the_keys(tmp_path: Path, open_board: Callable[..., Opened]) -> None:
    ablation = write_planned(
        tmp_path, ["ablation=comm_budget", "experiment=fedoras_digits"], Fates(waiting=[17]), rounds=2
    )
    number = len(ablation.trials)
    with served(tmp_path) as site:
        page = open_board(site).show(view="ablations")
        page.wait_for_selector(f"text={number} of {number} trials")
        assert page.locator("path.trial").count() == number
        page.wait_for_selector("text=What determines accuracy")
        written = page.evaluate("""async () => {
          const { number, duration } = await import("./base.js");
          const numbers = [number(999600), number(9.997e8, "bytes"), number(3.2e16, "MACs"), number(3)];
          return [...numbers, duration(119.7), duration(9.5)];
        }""")
        assert written == ["1.00M", "1.00 GB", "32.0 PMACs", "3", "2 min 0 s", "9.5 s"]
        assert page.locator(".importances th").first.inner_text() == "budget"
        axis = page.locator("g.axis[data-axis=averaging] .grip")
        box = axis.bounding_box()
        page.mouse.move(box["x"] + 10, box["y"] + 2)
        page.mouse.down()
        page.mouse.move(box["x"] + 10, box["y"] + box["height"] / 3.2, steps=4)
        page.mouse.up()
        shown = [t for t in ablation.trials if t.setting["averaging"] == ablation.axes["averaging"][-1]]
        page.wait_for_selector(f"text={len(shown)} of {number} trials")
        assert page.locator("path.trial:not(.out)").count() == len(shown)
        page.reload()
        page.wait_for_selector(f"text={len(shown)} of {number} trials")
        page.focus("g.axis[data-axis=averaging]")
        page.keyboard.press("Escape")
        page.wait_for_selector(f"text={number} of {number} trials")
        page.focus("g.axis[data-axis=budget]")
        page.keyboard.press("ArrowUp")
        page.wait_for_selector("text=in the brushed ranges")
        page.click("text=select these")
        page.wait_for_selector("path.trial.chosen")


OFTEN = """async (times) => {
  for (let i = 0; i < times; i++) {
    document.dispatchEvent(new Event("visibilitychange"));
    await new Promise((resolve) => setTimeout(resolve, 40));
  }
  return [document.querySelectorAll("*").length, document.querySelectorAll("canvas").length];
}"""
"""Has the page ask many times, and counts its elements."""


@pytest.mark.slow
def test_a_page_that_stays_open_does_not_grow(tmp_path: Path, open_board: Callable[..., Opened]) -> None:
    writers = [add_run(tmp_path, name, state="running", seed=i) for i, name in enumerate(("a1", "b2"))]
    with served(tmp_path) as site:
        for view in ("curves", "clients", "runs"):
            page = open_board(site).show(view=view, runs="a1,b2")
            page.wait_for_selector("#link[data-state=live]")
            page.wait_for_timeout(300)
            before = page.evaluate(OFTEN, 1)
            read = site.board.reader.read
            for message in ("one", "two", "three"):
                StatusFile(writers[0].paths.status).write("running", message=message)
                after = page.evaluate(OFTEN, 10)
            assert after == before, view
            assert site.board.reader.read == read, "its tables are as they were"


def test_curves_clients_and_fronts_say_what_is_under_the_mouse(
    tmp_path: Path, trained: RunPaths, open_board: Callable[..., Opened]
) -> None:
    shutil.copytree(trained.root, tmp_path / "results")
    writer = RunWriter.create(tmp_path / "results", "tiny", "a1")
    writer.update_run(config=json.dumps(json.loads(_config_of(trained))), method="fedoras")
    for macs, metric in ((100, 0.5), (300, 0.9)):
        row = {"tier": "tier1", "architecture": "0-1-2", "on_front": True, "winner": macs == 300}
        writer.add("candidates", stage="search", round=0, macs=macs, metric=metric, feasible=True, **row)
    for client in range(1000):
        end = "failed" if client % 10 == 0 else "ok"
        writer.add("clients", stage="train", round=client % 20, client_id=client, status=end, metric=client / 1000)
    writer.close()
    with served(tmp_path / "results") as site:
        board = open_board(site)
        page = board.show(view="curves", runs=trained.run_id, metrics="loss")
        box = page.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_selector("#tip:has-text('rounds')")
        page = board.show(view="clients", runs="a1")
        page.wait_for_selector(".clients[data-drawn='1000x20']")
        assert "failed 100" in page.locator(".legend").inner_text()
        page.focus(".clients canvas")
        page.keyboard.press("ArrowDown")
        page.wait_for_selector("#cell:has-text('client 0')")
        page = board.show(view="fronts", runs="a1")
        box = page.locator(".u-over").bounding_box()
        for part in range(20):  # the winner is at the top right
            page.mouse.move(box["x"] + box["width"] * (0.9 + part / 200), box["y"] + box["height"] * 0.06)
        page.wait_for_selector("#tip:has-text('winner')")
        page.wait_for_selector("#tip:has-text('conv')")  # its operators by name


def _config_of(paths: RunPaths) -> str:
    return str(views.read_columns(paths, "runs", ("config",))["config"][0].as_py())


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (1300, "dark"), (400, "light")])
def test_every_view_fits_its_window(tmp_path: Path, open_board: Callable[..., Opened], width: int, scheme: str) -> None:
    for name in ("20260101-101010-a-long-name-of-a-run-000001", "b2"):
        add_run(tmp_path, name, method={"train": {"lr": 0.1}})
    with served(tmp_path) as site:
        board = open_board(site, viewport={"width": width, "height": 700}, color_scheme=scheme)
        for view in ("runs", "curves", "clients", "fronts", "differences", "run", "ablations"):
            page = board.show(view=view, runs="b2,20260101-101010-a-long-name-of-a-run-000001")
            page.wait_for_selector("#link[data-state=live]")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(21, 23, 26)" if scheme == "dark" else "rgb(255, 255, 255)"
        )


def test_the_page_says_that_its_board_was_ended_and_asks_for_a_token(
    tmp_path: Path, open_board: Callable[..., Opened]
) -> None:
    with served(tmp_path, token=TOKEN) as site:
        board = open_board(site)
        page = board.show(view="runs")
        page.fill("#token", TOKEN)
        page.click("text=Open")
        page.wait_for_selector("#link[data-state=live]")
    page.wait_for_selector("text=not connected")
    board.complaints.clear()  # the browser's own, of the address that does not answer
