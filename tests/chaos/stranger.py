"""A stranger's results folder: whatever is in it, nothing is followed, resolved, waited for or obeyed.

    PYTHONPATH=tests python -m chaos.stranger --times 1000

Each attempt makes one file of an interrupted or a finished run hostile: another kind of file, a value of another type,
a name that leads out of the folder, nested lists, an interpolation, or noise. Hashes are made anew, as a stranger can,
and the table's copy of the configuration is changed as well. Then every command is called on it, in this process.
"""

import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chaos.attack import arguments, attack
from chaos.fuzz import Hung, hung
from chaos.interrupted import Template, interrupted
from chaos.subjects import SHARED, UNDISTURBED, run_on, undisturbed
from chaos.victims import SERIAL, TINY
from fedloom.experiments import analysis
from fedloom.experiments.cli import main as fedloom
from fedloom.platform.results.files import HASH, hashed_json
from fedloom.platform.results.manifest import Manifest, listed_files
from fedloom.platform.results.paths import list_runs, run_paths
from fedloom.platform.results.tables import TABLES, read_part
from fedloom.platform.results.writer import TableParts

WRONG = ("silent", "tracebacks", "hangs", "many_lines", "steered")
HANG_S = 60
SECRET = "correct-horse-battery-staple"
KINDS = ("pipe", "device", "link", "folder", "nested", "noise", "empty")
VALUES: tuple[Any, ...] = (
    *("x", "", -1, 0.5, 1e400, 10**40, True, None, [], {}, [[]], "\x1b]0;owned\x07", "${oc.env:SECRET}", "evil:build"),
    *("../../../../dev/zero", "/etc/passwd", "../..", "antigravity:fly", {"x": "${oc.env:SECRET}"}, "x" * 100_000),
)
EXPENSIVE = ("num_clients", "paths", "rounds", "population", "offspring", "budget", "epochs", "samples", "count")
"""Keys whose great values are allowed, and take long."""


def hostile(root: Path, run_id: str, rng: random.Random, outside: Path) -> str:
    """Makes one file of a run hostile, and says how."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    path = rng.choice(files)
    if path.suffix in (".json", ".jsonl", ".owner", "") and rng.random() < 0.7 and (how := _changed(path, rng)):
        _hash_anew(root, run_id, path)
        return f"{path.relative_to(root)}: {how}"
    if path.suffix == ".parquet" and rng.random() < 0.7 and (how := _changed_cell(path, rng)):
        _hash_anew(root, run_id, path)
        return f"{path.relative_to(root)}: {how}"
    how = rng.choice(KINDS)
    if how == "nested":
        path.write_text("[" * 200_000)
    elif how == "noise":
        path.write_bytes(rng.randbytes(1000))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}.get(
            how, lambda p: p.symlink_to(outside)
        )(path)
    return f"{path.relative_to(root)}: {how}"


def _changed(path: Path, rng: random.Random) -> str:
    """Puts another value somewhere in a JSON file; how, or nothing if it is no JSON object."""
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return ""
    places = [place for place in _places(values) if not any(word in str(place[1]) for word in EXPENSIVE)]
    if not places:
        return ""
    inside, name = rng.choice(places)
    inside[name] = rng.choice(VALUES)
    hashed = isinstance(values, dict) and values.pop(HASH, None) is not None
    path.write_bytes(hashed_json(values) if hashed else json.dumps(values).encode())
    return f"{name}={inside[name]!r:.40}"


def _changed_cell(path: Path, rng: random.Random) -> str:
    """Puts another text into a row of a table; how, or nothing if there is no text."""
    table = read_part(path)
    texts = [name for name in table.column_names if table.schema.field(name).type == "string"]
    rows = table.to_pylist()
    if not rows or not texts:
        return ""
    row, name = rng.randrange(len(rows)), rng.choice(texts)
    value = rng.choice([*map(str, VALUES), *map(json.dumps, VALUES), "[" * 200_000])
    rows[row][name] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return f"{name}={value!r:.40} in row {row}"


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    for name in values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ():
        yield values, name
        yield from _places(values[name])


def _hash_anew(root: Path, run_id: str, path: Path) -> None:
    """What tells of the changed file tells of its new content, as whoever hands results on can make it."""
    (paths,) = [run for run in list_runs(root) if run.run_id == run_id]
    if path == paths.artifacts / "manifest.json" or not (paths.artifacts / "manifest.json").exists():
        return
    manifest = Manifest(paths, {})
    if path == paths.config:
        (part,) = paths.table("runs").glob("*.parquet")
        (row,) = read_part(part).to_pylist()
        config = json.dumps(json.loads(path.read_bytes()))
        TableParts(paths.table("runs"), TABLES["runs"], 1, manifest).replace([{**row, "config": config}])
        state = paths.checkpoint / "state.json"
        if state.exists():
            values = json.loads(state.read_bytes())
            del values[HASH]
            values["data"]["config"] = json.loads(config)
            state.write_bytes(hashed_json(values))
    manifest.add(listed_files(run_paths(root, paths.experiment, run_id)))


def commands(root: Path, run_id: str) -> list[list[str]]:
    """The commands that read results."""
    at = ["--results", str(root)]
    named = [[name, run_id, *at] for name in ("verify", "report", "export", "search", "resume")]
    named[3] += ["--macs", "1e5"]
    named.append(["attach", run_id, *at, "--address", "local"])
    return [["status", *at], ["status", "--json", *at], *named]


def said(words: list[str]) -> tuple[str, str, str]:
    """How a command ended (done, refused, hangs, tracebacks), and what it printed on either output."""
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    kind = "done"
    try:
        with redirect_stdout(out), redirect_stderr(err):
            _called(words)
    except SystemExit as end:
        kind = "refused" if end.code else "done"
    except Hung:
        kind = "hangs"
    except Exception as error:  # noqa: BLE001 - what a user would see as a traceback
        kind = "tracebacks"
        err.write(f"{type(error).__name__}: {error!s:.300}")
    finally:
        signal.alarm(0)
    return kind, out.getvalue(), err.getvalue()


def _called(words: list[str]) -> None:
    if words[0] != "load":
        fedloom(words)
        return
    try:
        analysis.load(words[1])
    except ValueError as error:
        raise SystemExit(2) from error


@contextmanager
def watched() -> Iterator[list[str]]:
    """Notes connections to other machines, in whatever thread; none is made."""
    noted: list[str] = []
    connect = socket.socket.connect

    def noting(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            noted.append(str(address))
            raise ConnectionRefusedError
        connect(self, address)

    socket.socket.connect = noting  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        socket.socket.connect = connect  # type: ignore[method-assign]


def main() -> None:
    """Makes as many folders hostile as asked."""
    args = arguments(__doc__)
    undisturbed(run_on(SERIAL), args.folder / SHARED)
    done = args.folder / SHARED / UNDISTURBED / "results"
    templates = [interrupted(args.folder / SHARED, [*TINY, *SERIAL]), Template(done, list_runs(done)[0].run_id)]
    os.environ["SECRET"] = SECRET

    def blow(_number: int, rng: random.Random) -> Counter[str]:
        with tempfile.TemporaryDirectory() as place, watched() as connected:
            root, template, outside = Path(place, "results"), rng.choice(templates), Path(place, "outside")
            shutil.copytree(template.root, root)
            outside.write_text("untouched")
            how = hostile(root, template.run_id, rng, outside)
            words = [*commands(root, template.run_id), ["load", str(root)]]
            ends = {" ".join(each[:2]): said(each) for each in words}
            read = outside.read_text() == "untouched" and "antigravity" not in sys.modules and not connected
            kept = not any(_holds(path) for path in root.rglob("*"))
        return _counted(how, ends, is_right=read and kept)

    attack("stranger", blow, args, WRONG)


def _holds(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()


def _counted(how: str, ends: Mapping[str, tuple[str, str, str]], *, is_right: bool) -> Counter[str]:
    kinds = Counter(kind for kind, _, _ in ends.values())
    counts = Counter(
        {
            "silent": int(not is_right),
            "tracebacks": kinds["tracebacks"],
            "hangs": kinds["hangs"],
            "many_lines": sum(kind == "refused" and err.count("\n") > 3 for kind, _, err in ends.values()),
            "steered": sum("\x1b" in out + err for _, out, err in ends.values()),
            "refused": kinds["refused"],
            "done": kinds["done"],
        }
    )
    if any(counts[what] for what in WRONG):
        wrong = {name: end for name, end in ends.items() if end[0] in WRONG or "\x1b" in end[1] + end[2]}
        sys.stderr.write(f"{how}: {wrong or ends!s:.1000}\n")
    return counts


if __name__ == "__main__":
    main()
