"""What the pages say is so: links lead somewhere, commands parse and compose, and the code they show is tested code.

`python tests/test_readmes.py` writes the files of tests/plugins, and their numbers of lines, into the pages that show
them.
"""

import ast
import importlib.util
import re
import shlex
import shutil
import sys
import wave
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments.ablation.config import AblationConfig, SchedulerConfig, SearchConfig
from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.arguments import COMMANDS, build_parser, parse
from fedloom.experiments.catalogue import known_code, known_keys
from fedloom.experiments.cli import HANDLERS
from fedloom.experiments.runs.configuration import change_stored, compose_config
from fedloom.experiments.runs.presets import ablations
from fedloom.platform.data.registry import DATASETS
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import METHODS, find_method
from fedloom.platform.runs.run import planned_stages
from fedloom.platform.settings import settings_of
from fedloom.platform.spaces.registry import SPACES
from tools.pages import ALL_BLOCKS, DOCS, PLUGINS, READMES, ROOT, SHOWN, with_files

PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
MOST_LINES = 170
ALIASES = {"describe": ("space=", "space.name="), "prepare": ("dataset=", "data.dataset=")}
"""What two of the commands understand beside configuration keys."""
KEYS = (
    "data",
    "space",
    "tiers",
    "devices",
    "objective",
    "method",
    "stop",
    "executor",
    "ray",
    "checkpoint",
    "seeds",
    "ablation",
)


def commands() -> Iterator[tuple[str, list[str]]]:
    """The command lines of all consoles as words, with their places, without variables before them and comments."""
    for block in ALL_BLOCKS:
        if block.language != "console":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield block.place, words


LINES = [*commands()]
FEDLOOM = [
    pytest.param(words[1:], id=f"{place} {' '.join(words[1:])}") for place, words in LINES if words[0] == "fedloom"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it, with the examples' code and the files that the READMEs show by name."""
    tmp_path = tmp_path_factory.mktemp("reader")
    for block in ALL_BLOCKS:
        named = re.match(r"# (\w+\.(?:yaml|py))\n", block.text)
        if named:
            (tmp_path / named[1]).write_text(block.text)
    shutil.copytree(ROOT / "experiments" / "template", tmp_path, dirs_exist_ok=True)
    signs = "".join(map(chr, range(33, 127))) * 20
    pd.DataFrame({"text": [signs] * 20, "user": range(20)}).to_parquet(tmp_path / "mine.parquet")
    for speaker in "abcdefghijkl":
        (tmp_path / "mine" / speaker).mkdir(parents=True)
        for word in range(8):
            with wave.open(str(tmp_path / "mine" / speaker / f"word{word}_0.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(bytes(200 + 40 * word))
    return tmp_path


@pytest.fixture
def beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is started from that folder."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("FEDLOOM_CACHE", str(folder / "cache"))


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def headings(readme: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```$", "", readme.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", without_code, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "readme", [*READMES, *(ROOT / page for page in PAGES)], ids=lambda readme: str(readme.relative_to(ROOT))
)
def test_links_lead_somewhere(readme: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", readme.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (readme.parent / path).resolve() if path else readme
        assert found.exists(), f"{readme}: {target}"
        assert not anchor or anchor in headings(found), f"{readme}: {target}"


# -- code -------------------------------------------------------------------------------------------------------------


def test_shown_code_is_the_code_that_is_tested() -> None:
    texts = {readme: readme.read_text() for readme in READMES}
    stale = [str(readme.relative_to(ROOT)) for readme, text in texts.items() if with_files(text) != text]
    assert not stale, f"{', '.join(stale)}: run `python tests/test_readmes.py`"
    shown = {match[2] for text in texts.values() for match in SHOWN.finditer(text)}
    assert shown == {file.name for file in PLUGINS.glob("*.py")}


def test_python_is_python() -> None:
    found = [block for block in ALL_BLOCKS if block.language == "python"]
    assert found
    for block in found:
        tree = ast.parse(block.text, block.place)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom."):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    inside = (
                        importlib.util.find_spec(f"{node.module}.{alias.name}") if hasattr(module, "__path__") else None
                    )
                    assert hasattr(module, alias.name) or inside, f"{block.place}: {node.module} has no {alias.name}"


# -- commands ---------------------------------------------------------------------------------------------------------


def composed(overrides: Sequence[str]) -> RunConfig:
    """The configuration; every option among the overrides is one that the chosen code has."""
    keys = {setting.key for setting in known_keys(overrides)}
    for override in overrides:
        key = override.partition("=")[0]
        free = any(f".{name}." in key for name in ("cost_weights", "label_sets"))
        assert key in keys or key in ("experiment", "method") or free, f"{override}: no such key"
    return compose_config(overrides)


def without(overrides: Sequence[str], *prefixes: str) -> list[str]:
    return [override for override in overrides if not override.startswith(prefixes)]


@pytest.mark.parametrize("words", FEDLOOM)
def test_commands_parse_and_configurations_compose(words: list[str], beside: None) -> None:
    args = parse(build_parser(HANDLERS), words)
    command, overrides = words[0], list(getattr(args, "overrides", ()))
    long, short = ALIASES.get(command, ("", ""))
    overrides = [o.replace(long, short, 1) if long and o.startswith(long) else o for o in overrides]
    if command in ("run", "describe", "calibrate", "prepare"):
        composed(overrides)
    elif command == "resume":
        change_stored(compose_config([]), overrides)
    elif command == "submit" and not any(o.startswith("ablation=") for o in overrides):
        composed(overrides)
    elif command in ("ablate", "submit") and overrides:
        assert plan_ablation(overrides).trials
    elif command == "keys":
        assert known_keys(args.given)
    elif command == "plugins":
        assert known_code(args.words)


def test_commands_that_need_more_than_this_machine_are_marked() -> None:
    """A line above the block says so; they are parsed and composed like all others, and tested elsewhere."""
    for block in ALL_BLOCKS:
        if block.language == "console" and block.place.startswith("docs/"):
            cluster = re.search(r"^(ray (start|job)|fedloom submit)|--address", block.text, re.M)
            needs = "a cluster" if cluster else "object storage" if "s3://" in block.text else ""
            assert block.needs == needs, block.place


def brings_code(words: Sequence[str]) -> bool:
    named = any(re.fullmatch(r"[\w.]+=\w+:[A-Za-z_]\w*", word) and "=torchvision:" not in word for word in words)
    return words[0] == "run" and (named or "experiment=./mine.yaml" in words)


@pytest.mark.parametrize("words", [line for line in FEDLOOM if brings_code(line.values[0])])
def test_code_of_ones_own_is_accepted(words: list[str], beside: None) -> None:
    """All that is tried before a run begins: rules, spaces, data, augmentations, objectives, budgets, methods."""
    assert planned_stages(build_world(composed(words[1:])))


def test_other_commands_are_there() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    for place, words in LINES:
        if words[0] == "make":
            assert words[1] in targets, place
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), place
        assert words[0] in ("make", "fedloom", "python", "source", "export", "ray", "docker"), place


# -- what is listed ---------------------------------------------------------------------------------------------------


def test_everything_built_in_is_listed() -> None:
    """The site's own tables (presets, keys, columns) are made from the code, see docs/hooks.py."""
    for names, page in (
        (SPACES.known, "reference/spaces.md"),
        (DATASETS.known, "how-to/data.md"),
        (ablations(), "how-to/ablations.md"),
        ([f"fedloom {name}" for name in COMMANDS], "reference/commands.md"),
    ):
        text = (DOCS / page).read_text()
        assert [name for name in names if f"`{name}`" not in text] == [], page
    assert all(f"| `{name}` |" in READMES[0].read_text() for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page(name: str) -> None:
    page = (DOCS / "methods" / f"{name}.md").read_text()
    assert f"<!-- fill: method {name} -->" in page
    assert f"<!-- fill: settings {name} -->" in page
    assert "```console" in page


def test_every_place_for_code_has_a_page_with_its_key() -> None:
    index = (DOCS / "extend" / "index.md").read_text()
    for place in known_code([]):
        page = f"{place.kind.replace(' ', '-')}.md"
        assert (DOCS / "extend" / page).exists(), place.kind
        first = place.keys[0].replace("method.finetune.", "method.train.")
        assert re.search(rf"^\| \[{place.kind}\]\({page}\).*`{re.escape(first)}`", index, re.M), place.kind


def all_keys() -> set[str]:
    configs: list[tuple[Any, str]] = [(RunConfig(), ""), *((m.config(), "method.") for m in METHODS.values())]
    configs.append((find_method("head_first:METHOD").config(), "method."))
    keys = {setting.key for config, prefix in configs for setting in settings_of(config, prefix)}
    keys |= {f"ablation.{f.name}" for f in fields(AblationConfig)}
    nested = {"search": SearchConfig, "scheduler": SchedulerConfig}
    keys |= {f"ablation.{part}.{f.name}" for part, config in nested.items() for f in fields(config)}
    return keys | {key.rpartition(".")[0] for key in keys}


def named_keys(text: str) -> Iterator[str]:
    """The keys between backticks; in `ray.num_cpus`, `.num_gpus` the second is short for its neighbour."""
    for first, more in re.findall(r"`([^`\s]+)`((?:, `\.[a-z_0-9]+`)*)", text):
        key = re.sub(r"(=.*|\.\*)$", "", first)
        if re.fullmatch(rf"({'|'.join(KEYS)})(\.[a-z_0-9]+)+", key) and not key.endswith(".py"):
            yield key
            yield from (key.rpartition(".")[0] + short for short in re.findall(r"`(\.\w+)`", more))


def test_keys_that_are_named_are_there(beside: None) -> None:
    known = all_keys()
    for readme in READMES:
        text = re.sub(r"^```.*?^```$", "", readme.read_text(), flags=re.S | re.M)
        named = set(named_keys(text))
        assert {key for key in named if key not in known and ".options." not in key} == set(), readme


def test_the_tests_that_hold_promises_exist() -> None:
    promised = set(re.findall(r"`(test_\w+)`", (DOCS / "concepts" / "promises.md").read_text()))
    defined = {
        name for p in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", p.read_text())
    }
    assert len(promised) > 15
    assert promised <= defined


if __name__ == "__main__":
    for page in READMES:
        page.write_text(with_files(page.read_text()))
    sys.stdout.write(f"wrote the files of {PLUGINS.relative_to(ROOT)} into the pages\n")
