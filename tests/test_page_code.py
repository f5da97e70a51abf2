"""The Python that pages show runs, page by page, in a folder with small runs and ablations of the kinds they name."""

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.export.export import export
from fedloom.experiments.export.selection import Wanted
from fedloom.experiments.runs.configuration import config_from_dict
from fedloom.experiments.store.ablations import write_ablation
from fedloom.platform.runs.run import RunIdentity, make_serial, start_run
from tools.pages import ALL_BLOCKS, PLUGINS, READMES, ROOT, Block, blocks

TINY = {
    "data.num_clients": 12,
    "method.train.rounds": 2,
    "method.train.clients_per_round": 4,
    "method.train.epochs": 1,
    "method.train.evaluate_every": 1,
    "executor.kind": "serial",
    "space.stem_channels": 8,
}
SMALL = {**TINY, "data.train_samples": 320, "data.test_samples": 80}
FEDORAS = {
    "tiers.paths": 2000,
    "method.search.population": 4,
    "method.search.offspring": 2,
    "method.search.budget": 6,
    "method.finetune.rounds": 1,
    "method.rand_init.rounds": 1,
    "method.finetune.clients_per_round": 2,
    "method.rand_init.clients_per_round": 2,
    **SMALL,
}
PERSONAL = """
title: Layers that stay
axes:
  method:
    settings: {alone: {method.personal: ["*"]}, FedPer: {method.personal: [classifier]}}
  skew: {key: data.shards_per_client, values: [2, 4]}
seeds: [1]
"""


def shown_to_run(page: Path) -> list[Block]:
    """The blocks of a page in Python, without the files of tests/plugins, which have tests of their own."""
    files = {file.read_text() for file in PLUGINS.glob("*.py")}
    return [b for b in blocks(page) if b.language == "python" and b.text not in files]


PAGES = [page for page in READMES if shown_to_run(page)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A reader's folder, which is the working directory, and what stands there for ids in the pages."""
    folder = tmp_path_factory.mktemp("reader")
    copytree(PLUGINS, folder, dirs_exist_ok=True)
    for block in ALL_BLOCKS:
        if named := re.match(r"# (\w+\.(?:yaml|py))\n", block.text):
            (folder / named[1]).write_text(block.text)
    (folder / "personal.yaml").write_text(PERSONAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr("fedloom.experiments.report.pages.drawn", lambda _: [])  # the pictures have their own tests
        fl.run("fedavg_digits", quiet=True, name="mean", **SMALL)
        fl.run("fedavg_digits", quiet=True, **SMALL, **{"data.alpha": 0.1})
        fl.run("fedavg_digits", quiet=True, name="adam", **SMALL, **{"method.train.server": "fedadam"})
        run = fl.run("fedoras_digits", quiet=True, name="opa", **FEDORAS)
        fl.run("fedoras_digits", quiet=True, **FEDORAS, **{"method.train.weighting": "fedavg"})
        export(Path("results"), run.id, Wanted(tier="tier1"), Path(f"results/exports/{run.id}"), ["pt2"])
        sweep = swept("shrink.yaml", "experiment=./mine.yaml", {**SMALL, "method.head_rounds": 1, "tiers.paths": 500})
        yield {"RUN": run.id, "sweep": sweep, "personal": swept("personal.yaml", "experiment=fedper_digits", SMALL)}


def swept(file: str, preset: str, tiny: dict[str, Any]) -> str:
    """The id of an ablation whose trials have run in this process."""
    values = [f"{key}={value}" for key, value in tiny.items() if key not in ("method.train.evaluate_every",)]
    ablation = plan_ablation([f"ablation={file}", preset, *values])
    write_ablation(Path("results"), ablation)
    for trial in ablation.trials:
        identity = RunIdentity(trial.run_id, ablation.ablation_id, trial.index, {**trial.setting})
        start_run(config_from_dict(trial.config), make_serial, identity=identity)
    return ablation.ablation_id


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, reader: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """One block after the other, as in a notebook."""
    names: dict[str, Any] = {"__name__": "page", "images": torch.zeros(2, 1, 8, 8)}
    ablation = reader["personal" if page.stem == "personal_layers" else "sweep"]
    for block in shown_to_run(page):
        code = re.sub(r'"20\d{6}-"', f'"{ablation}"', block.text).replace("RUN", reader["RUN"])
        exec(compile(code, block.place, "exec"), names)
        outputs = re.findall(r"^print\(.*\)  # (tensor.*|\(\(.*)$", block.text, re.M)
        printed = capsys.readouterr().out
        assert [line for line in outputs if line not in printed] == [], printed


def test_the_first_page_shows_python_in_twelve_lines(reader: dict[str, str]) -> None:
    (block,) = (b for b in blocks(READMES[0]) if "import fedloom as fl" in b.text)
    assert len(block.text.splitlines()) <= 12
