"""Everything that a run's own code consists of counts: in the supernet's key, in the source hash, and on resume."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.federation.world import build_world
from fedloom.platform.plugins import place_in_own, raised_by_own
from fedloom.platform.results.files import check_name
from fedloom.platform.results.paths import run_paths
from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs import source_code
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run
from fedloom.platform.runs.source_code import UnknownSourceError, named_modules, plugin_sources, source_hash, sources_of
from fedloom.platform.runs.supernets import supernet_key

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module beside the user."""
    folder = tmp_path / "beside"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def put(place: str, text: str) -> Path:
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        return file

    yield put
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def names(config: Any) -> list[str]:
    return [*plugin_sources(config).files]


def test_a_module_counts_with_what_it_imports_wherever_that_stands(write: Write) -> None:
    write("own_rule.py", "import own_helper\nimport json, numpy\n\ndef rule(work):\n    from own_inner import x\n")
    write("own_helper.py", "import importlib\nlate = importlib.import_module('own_late')\n")
    write("own_inner.py", "import own_rule  # back again\nx = 1\n")
    write("own_late.py", "")
    write("own_other.py", "")
    config = {"method": {"train": {"weighting": "own_rule:rule", "rounds": 3}}, "names": ["a", "b:c d"]}
    assert names(config) == ["own_helper", "own_inner", "own_late", "own_rule"]
    assert named_modules(config) == ["own_rule"]


def test_packages_count_with_what_their_modules_take_from_each_other(write: Write) -> None:
    write("own_package/__init__.py", "from .base import thing\n")
    write("own_package/base.py", "thing = 1\n")
    write("own_package/deep/__init__.py", "")
    write("own_package/deep/rule.py", "from ..base import thing\nfrom .. import side\n")
    write("own_package/side.py", "")
    write("own_package/unused.py", "")
    expected = [f"own_package{rest}" for rest in ("", ".base", ".deep", ".deep.rule", ".side")]
    assert names(["own_package.deep.rule:f"]) == expected


def test_packages_of_another_environment_on_the_path_are_installed_ones(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all of torch was read, file by file, where PYTHONPATH led to another environment's packages."""
    elsewhere = tmp_path / "other" / "site-packages"
    elsewhere.mkdir(parents=True)
    (elsewhere / "own_library.py").write_text("import own_rule\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    write("own_rule.py", "import own_library\n")
    assert names({"x": "own_rule:f"}) == ["own_rule"]


def test_neither_pythons_nor_fedlooms_nor_installed_modules_count_beside_it(write: Write) -> None:
    write("own_rule.py", "import sys, re, torch, pandas.io\nfrom fedloom.platform import plugins\nimport not_there\n")
    assert names({"x": "own_rule:f"}) == ["own_rule"]
    assert names({"x": "fedloom.platform.averaging.weighting:opa", "y": "no_such_module:f", "z": "plain"}) == []
    assert names({"x": "omegaconf:OmegaConf"}) == ["omegaconf"], "a named one counts: nobody knows its version"
    with pytest.raises(UnknownSourceError):
        plugin_sources({"x": "sys:exit"})


def test_packages_of_an_environment_below_this_one_are_installed_ones_too(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pth file or PYTHONPATH may add them: to follow their imports would take a minute for torch alone."""
    write("own_rule.py", "import own_library.part\n")
    write("lib/site-packages/own_library/__init__.py", "import own_elsewhere\n")
    write("lib/site-packages/own_library/part.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "beside" / "lib" / "site-packages"))
    assert names({"x": "own_rule:f"}) == ["own_rule"]
    assert names({"x": "own_library:f"}) == ["own_library"], "one that is named counts"


def test_the_hash_follows_contents_and_names(write: Write) -> None:
    file = write("own_rule.py", "import own_helper\n")
    write("own_helper.py", "CONSTANT = .5\n")
    first = plugin_sources(["own_rule:f"]).hash
    assert plugin_sources(["own_rule:f", "own_rule:g"]).hash == first
    write("own_helper.py", "CONSTANT = 3\n")
    second = plugin_sources(["own_rule:f"]).hash
    file.write_text("import own_helper  # and no more\n")
    assert len({first, second, plugin_sources(["own_rule:f"]).hash, sources_of([]).hash}) == 4
    assert source_hash() == source_hash(sources_of([])) != source_hash(plugin_sources(["own_rule:f"]))


def test_copies_tell_what_has_changed(write: Write, tmp_path: Path) -> None:
    write("own_rule.py", "import own_package.helper\n")
    write("own_package/__init__.py", "")
    helper = write("own_package/helper.py", "x = 1\n")
    sources, copies = plugin_sources(["own_rule:f"]), tmp_path / "copies"
    sources.copy_to(copies)
    assert (copies / "own_package" / "helper.py").read_text() == "x = 1\n"
    assert (copies / "own_package" / "__init__.py").exists()
    assert plugin_sources(["own_rule:f"]).changed_since(copies) == []
    helper.write_text("x = 2\n")
    assert plugin_sources(["own_rule:f"]).changed_since(copies) == ["own_package.helper"]
    write("own_rule.py", "import own_new\n")
    write("own_new.py", "")
    changed = plugin_sources(["own_rule:f"]).changed_since(copies)
    assert changed == ["own_new", "own_package/__init__.py", "own_package/helper.py", "own_rule"]


def test_a_helpers_constant_is_part_of_the_supernets_key(write: Write, tiny_config: Callable[..., RunConfig]) -> None:
    write("own_rule.py", "from own_helper import CONSTANT\n\ndef rule(work):\n    return {}\n")
    write("own_helper.py", "CONSTANT = .5\n")
    config = tiny_config(reuse_supernet=True)
    world = build_world(config)
    config.method.train.weighting = "own_rule:rule"
    before = supernet_key(config, world)
    assert supernet_key(config, world) == before
    write("own_helper.py", "CONSTANT = 3\n")
    assert supernet_key(config, world) != before


# -- runs --------------------------------------------------------------------------------------------------------------

RULE = """from own_powers import POWER

def rule(work):
    return {name: seen ** POWER for name, seen in work.seen_by_tensor.items()}
"""


@pytest.fixture
def interrupted(write: Write, tiny_config: Callable[..., RunConfig]) -> tuple[RunConfig, str]:
    """A run with a rule of its own that was interrupted after its first round."""
    write("own_weighting.py", RULE)
    write("own_powers.py", "POWER = 1\n")
    config = tiny_config()
    config.method.train.weighting = "own_weighting:rule"
    run_ids: list[str] = []
    stops = Watcher(started=lambda run_id, _: run_ids.append(run_id), should_stop=lambda: True)
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, stops)
    return config, run_ids[0]


def recorded(config: RunConfig, run_id: str) -> str:
    return str(read_table(Path(config.results), "runs", run_id=run_id)["source_hash"].iloc[-1])


def test_a_run_keeps_a_copy_and_its_hash_says_with_what_it_ran(interrupted: tuple[RunConfig, str]) -> None:
    config, run_id = interrupted
    folder = run_paths(Path(config.results), config.experiment, run_id).artifacts / "plugins"
    assert {f.name for f in folder.iterdir()} == {"own_weighting.py", "own_powers.py"}
    assert recorded(config, run_id) == source_hash(plugin_sources(asdict(config))) != source_hash()


def test_changed_code_is_refused_on_resume_unless_it_is_meant(interrupted: tuple[RunConfig, str], write: Write) -> None:
    config, run_id = interrupted
    artifacts = run_paths(Path(config.results), config.experiment, run_id).artifacts
    before = (artifacts / "status.json").read_text()
    file = write("own_powers.py", "POWER = 2\n")
    with pytest.raises(ValueError, match=r"code of run .* has changed .*: own_powers; its copy is in .*/plugins: rest"):
        resume_run(config, run_id, make_serial)
    assert (artifacts / "status.json").read_text() == before
    file.write_text("POWER = 1\n")
    stops = Watcher(should_stop=lambda: True)
    with pytest.raises(InterruptedRunError):
        resume_run(config, run_id, make_serial, stops)
    assert recorded(config, run_id) == source_hash(plugin_sources(asdict(config)))
    file.write_text("POWER = 2\n")
    with pytest.raises(InterruptedRunError):
        resume_run(config, run_id, make_serial, stops, changed_plugins=True)
    assert (artifacts / "plugins-2" / "own_powers.py").read_text() == "POWER = 2\n"
    assert (artifacts / "plugins" / "own_powers.py").read_text() == "POWER = 1\n"
    assert recorded(config, run_id) == source_hash(plugin_sources(asdict(config)))
    resume_run(config, run_id, make_serial)  # what it was last at work with counts
    assert json.loads((artifacts / "status.json").read_text())["state"] == "done"


@pytest.mark.parametrize(("place", "name"), [(RunWriter, "update_run"), (source_code, "write_atomically")])
def test_changed_code_is_asked_about_again_if_the_run_was_killed_before_it_was_recorded(
    interrupted: tuple[RunConfig, str], write: Write, monkeypatch: pytest.MonkeyPatch, place: object, name: str
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit  # unlike other exceptions, it leaves the run's files as a kill does

    config, run_id = interrupted
    write("own_powers.py", "POWER = 2\n")
    with monkeypatch.context() as patched:
        patched.setattr(place, name, killed)
        with pytest.raises(SystemExit):
            resume_run(config, run_id, make_serial, changed_plugins=True)
    with pytest.raises(ValueError, match=r"code of run .* has changed .*: own_powers; its copy is in .*/plugins: rest"):
        resume_run(config, run_id, make_serial)


def test_it_is_said_whose_supernet_a_run_begins_with(tiny_config: Callable[..., RunConfig]) -> None:
    told: list[tuple[str, str]] = []
    watcher = Watcher(started=lambda run_id, taken: told.append((run_id, taken)))
    config = tiny_config(reuse_supernet=True)
    for seed in (None, 7):
        start_run(replace(config, seeds=replace(config.seeds, search=seed)), make_serial, watcher)
    assert [taken for _, taken in told] == ["", told[0][0]]


def test_the_users_own_line_is_named_though_fedloom_raised_what_it_was_misused_for() -> None:
    """This file is a user's own; a row names the line only where the user's code raised, as fedloom says what to do."""
    with pytest.raises(ValueError, match="run") as refused:
        check_name("run", "../outside")
    assert place_in_own(refused.value).endswith(" of test_plugin_sources.py)")
    assert not raised_by_own(refused.value)
    for fails in (lambda: 1 / 0, lambda: torch.zeros(2) @ torch.zeros(3)):  # by itself, and by a package that it calls
        with pytest.raises((ZeroDivisionError, RuntimeError)) as own:
            fails()
        assert place_in_own(own.value).endswith(" of test_plugin_sources.py)")
        assert raised_by_own(own.value)
