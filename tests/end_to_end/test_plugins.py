"""Complete plug-ins from files beside the user: by the command line, on Ray with the same bits, and in an ablation."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.overrides import override_text
from fedloom.platform.clients.local_rules import STATE
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState, from_generator
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.federation.recorder import restored_state
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
LINES = {
    "power_of_choice": 25,
    "lion": 20,
    "prox": 12,
    "scaffold": 60,
    "rotated": 30,
    "mixers": 60,
    "head_first": 70,
    "fedper": 75,
    "class_means": 75,
    "hidden_parts": 40,
    "closest_half": 25,
    "free_rider": 18,
}

Changes = Mapping[str, Any]
RESULTS = Path("results")
"""Below the folder that the commands are started from."""
OPTION = "method.train.options."

ALL: Changes = {
    "executor.kind": "serial",
    "executor.chunk_size": 2,
    "tiers.paths": 500,
    "ray.address": "local",
    "ray.num_cpus": 2,
    "ray.object_store_memory_bytes": 200_000_000,
    "method.train.rounds": 3,
    "method.train.epochs": 1,
    "method.train.clients_per_round": 10,
    "method.train.evaluate_every": 0,
    "seed": 1,
}
SMALL: Changes = {"space.name": "mixers:mixers", "space.options.channels": 4, "tiers.count": 1}
WRITERS: Changes = {
    "data.dataset": "rotated:rotated",
    "data.options.writers": 20,
    "data.partition": "natural",
    "data.num_clients": 20,
    "method.train.selection": "power_of_choice:power_of_choice",
    f"{OPTION}candidates": 20,
}
LION: Changes = {"method.train.server": "lion:lion", f"{OPTION}server_lr": 0.01}
HUNDRED: Changes = {"data.num_clients": 100, "method.train.local_rule": "scaffold:Scaffold"}
TWO_STAGES: Changes = {
    "method.search.population": 4,
    "method.search.offspring": 2,
    "method.search.budget": 4,
    "method.finetune.rounds": 1,
    "method.finetune.epochs": 1,
    "method.rand_init.rounds": 0,
}
ELASTIC: Changes = {
    "space.name": "resnet_elastic_small",
    "space.input_shape": [1, 8, 8],
    "space.stage_widths": [8, 16],
    "space.stage_strides": [2, 2],
    "space.depths": [1, 1],
    "space.expansions": [0.5, 1.0, 1.5],
    "method.search.samples": 0,
}

RUNS: Mapping[str, Changes] = {
    "prox": {
        "method": "fedavg",
        **SMALL,
        **WRITERS,
        **LION,
        "method.train.local_rule": "prox:prox",
        "method.train.optimizer": "adagrad:adagrad",
        f"{OPTION}mu": 2.0,
    },
    "head_first": {
        "method": "head_first:METHOD",
        **SMALL,
        **WRITERS,
        "method.train.local_rule": "prox:prox",
        "method.shrink": 0.6,
    },
    "fedper": {"method": "fedper:METHOD", **SMALL, "data.num_clients": 10},
    "class_means": {"method": "class_means:METHOD", **SMALL, "data.num_clients": 10, "data.partition": "shards"},
    "module": {
        "method": "fedavg",
        "space.name": "module",
        "space.build": "hidden_parts:reader",
        "data.dataset": "hidden_parts:hidden",
        "data.num_clients": 20,
    },
    "scaffold": {"method": "fedavg", **SMALL, **HUNDRED, **LION, "method.train.aggregator": "median:median"},
    "fedoras": {"method": "fedoras", **HUNDRED, "tiers.count": 2, "space.name": "mixers:mixers", **TWO_STAGES},
    "superfednas": {
        "method": "superfednas",
        **HUNDRED,
        "tiers.count": 2,
        **ELASTIC,
        "method.train.aggregator": "closest_half:closest_half",
        "attack.share": 0.2,
        "attack.name": "free_rider:FreeRider",
    },
}
"""Runs that use each of the plug-ins, together where that saves time."""
USED = {
    "prox": {"mixers", "rotated", "power_of_choice", "lion", "prox", "adagrad"},
    "head_first": {"mixers", "head_first", "rotated", "power_of_choice", "prox"},
    "fedper": {"mixers", "fedper"},
    "class_means": {"mixers", "class_means"},
    "module": {"hidden_parts"},
    "scaffold": {"mixers", "scaffold", "lion", "median"},
    "fedoras": {"scaffold", "mixers"},
    "superfednas": {"scaffold", "closest_half", "free_rider"},
}
EMPTY = {"fedoras": (), "superfednas": ("candidates",)}
"""Tables that a run writes nothing to; the others' are `candidates`, too."""


def overrides(changes: Changes) -> list[str]:
    return [f"{key}={override_text(value)}" for key, value in changes.items()]


def call(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The command line's exit code and JSON."""
    out = io.StringIO()
    with pytest.raises(SystemExit) as ending, redirect_stdout(out):
        main(arguments)
    return int(str(ending.value.code)), json.loads(out.getvalue().splitlines()[-1])


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the command is started from, with the plug-ins' files in it."""
    folder = tmp_path_factory.mktemp("beside")
    for file in PLUGINS.glob("*.py"):
        shutil.copy(file, folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", [*sys.path])
        patched.setenv(LOOPBACK_SWITCH, "0")
        yield folder
    for name in LINES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(beside: Path) -> Callable[[Changes], str]:
    """Runs `fedloom run` by the serial executor and gives the run's id; once for the same changes."""
    done: dict[str, str] = {}

    def once(changes: Changes) -> str:
        name = json.dumps(changes)
        if name not in done:
            code, said = call("run", "--json", *overrides({**ALL, **changes}))
            assert (code, said["status"]) == (0, "done"), said
            done[name] = str(said["run_id"])
        return done[name]

    return once


Run = Callable[[Changes], str]


def table(name: str, run_id: str) -> pd.DataFrame:
    return read_table(RESULTS, name, run_id=run_id)


def world_of(run: Run, name: str) -> World:
    run(RUNS[name])  # the command line looks for modules beside the user from then on
    return build_world(compose_config(overrides({**ALL, **RUNS[name]})))


def weights_of(run_id: str, group: str) -> Mapping[str, torch.Tensor]:
    return load_checkpoint(find_run(RESULTS, run_id).checkpoint).groups[group].tensors


# -- what they do ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINES)
def test_a_plug_in_takes_few_lines(name: str) -> None:
    assert len((PLUGINS / f"{name}.py").read_text().splitlines()) <= LINES[name]


@pytest.mark.parametrize("name", RUNS)
def test_every_plug_in_runs_from_a_file_beside_the_user(run: Run, name: str) -> None:
    run_id = run(RUNS[name])
    copies = {file.stem for file in (find_run(RESULTS, run_id).artifacts / "plugins").iterdir()}
    assert copies == USED[name], "their sources are kept with the run"
    assert set(table("clients", run_id)["status"]) == {"ok"}


def test_natural_clients_are_the_writers_and_the_space_has_its_name(run: Run) -> None:
    data = world_of(run, "prox").data
    assert data.dataset.client_names == tuple(f"writer {i:02d}" for i in range(20))
    assert data.sizes("train").sum() + data.sizes("validation").sum() == 1797 - 20 * 17
    tested = table("evaluations", run(RUNS["prox"])).query("client_id.notna() and metric == 'accuracy'")
    assert sorted(tested["client_id"]) == [*range(20)]
    assert set(tested["samples"]) == {17}
    assert table("runs", run(RUNS["prox"]))["dataset"].tolist() == ["rotated:rotated"]
    assert table("runs", run(RUNS["fedoras"]))["space"].tolist() == ["mixers:mixers"]
    assert len(weights_of(run(RUNS["prox"]), "fedavg")["fixed.patches.weight"]) == 4, "space.options.channels"
    assert set(table("candidates", run(RUNS["fedoras"]))["architecture"].str.count("-")) == {2}, "three layers"


def test_power_of_choice_takes_those_who_never_took_part_then_the_largest_losses(run: Run) -> None:
    clients = table("clients", run(RUNS["prox"])).query("stage == 'fedavg'")
    assert set(clients["selection_reason"]) == {"power_of_choice:power_of_choice"}
    chosen = {r: set(rows["client_id"]) for r, rows in clients.groupby("round")}
    assert chosen[0] | chosen[1] == set(range(20)), "all 20 are drawn to choose from"
    known = clients.query("round < 2").sort_values("loss", ascending=False)
    assert chosen[2] == set(known["client_id"][:10])


def test_every_scalar_goes_by_lions_server_lr(run: Run) -> None:
    world = world_of(run, "prox")
    first, last = weights_of_fresh(world, "fedavg"), weights_of(run(RUNS["prox"]), "fedavg")
    for name in world.space.parameter_names & set(last):
        steps = (last[name] - first[name]) / 0.01
        assert torch.allclose(steps, steps.round(), atol=1e-3), name
        assert steps.abs().max() == pytest.approx(3, abs=1e-3), "in one direction in each of three rounds"


def weights_of_fresh(world: World, stage: str) -> Mapping[str, torch.Tensor]:
    architecture = world.space.largest if stage != "fedavg" else tuple(0 for _ in world.space.options)
    weights = from_generator(world, lambda g: world.space.initial_subnet_weights(architecture, g), stage)(RunState())
    assert weights is not None
    return weights


def test_the_methods_stages_are_in_the_tables_and_the_first_leaves_the_body_as_it_is(run: Run) -> None:
    run_id = run(RUNS["head_first"])
    rounds = table("rounds", run_id)
    assert rounds.groupby("stage", sort=False).size().to_dict() == {"head": 2, "whole": 3, "evaluation": 1}
    rates = rounds.groupby("stage")["lr"].first()
    assert rates["whole"] == pytest.approx(0.6 * rates["head"]), "times method.shrink"
    world = world_of(run, "head_first")
    first, head, whole = weights_of_fresh(world, "head"), *(weights_of(run_id, group) for group in ("head", "whole"))
    trained = [n for n in head if n in world.space.parameter_names and not torch.allclose(head[n], first[n], atol=1e-6)]
    assert sorted(trained) == ["fixed.classifier.bias", "fixed.classifier.weight"]
    assert all(not torch.equal(whole[n], head[n]) for n in whole if n in world.space.parameter_names)
    assert set(table("evaluations", run_id)["model"]) == {"whole"}


def test_silos_keep_their_last_layer_to_themselves(run: Run) -> None:
    run_id, world = run(RUNS["fedper"]), world_of(run, "fedper")
    fresh, checkpoint = weights_of_fresh(world, "supernet"), load_checkpoint(find_run(RESULTS, run_id).checkpoint)
    state = restored_state(checkpoint.data, checkpoint.groups)
    shared, networks = state.weights("supernet"), [state.client_state(client_id) for client_id in range(10)]
    assert shared is not None
    unchanged = {name for name in world.space.parameter_names & set(fresh) if torch.equal(shared[name], fresh[name])}
    assert unchanged == {"fixed.classifier.bias", "fixed.classifier.weight"}, "the server never learns them"
    own = torch.stack([network["weights/fixed.classifier.bias"] for network in networks if network is not None])
    assert own.shape == (10, 10)
    assert own.unique(dim=0).shape == (10, 10), "each silo has its own"
    sent = sum(t.numel() * t.element_size() for n, t in shared.items() if "classifier" not in n)
    clients = table("clients", run_id).query("stage != 'evaluation'")
    assert set(clients["bytes_up"]) == set(clients["bytes_down"]) == {sent}
    assert set(table("evaluations", run_id)["model"]) == {"personal"}


def test_what_clients_send_need_not_be_weights(run: Run) -> None:
    run_id, worker = run(RUNS["class_means"]), Worker(world_of(run, "class_means").spec)
    data, means = [worker.client_data(c, "train") for c in range(10)], weights_of(run_id, "supernet")
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    assert sorted(means) == [f"mean/{label}" for label in range(10)]
    for label in range(10):
        torch.testing.assert_close(means[f"mean/{label}"], x[y == label].flatten(1).mean(dim=0), atol=1e-5, rtol=1e-5)
    clients = table("clients", run_id).query("stage != 'evaluation'")
    classes = {client_id: len(y.unique()) for client_id, (_, y) in enumerate(data)}
    assert (clients["bytes_up"] == clients["client_id"].map(classes) * 64 * 4).all(), "of the classes that it has"
    assert max(classes.values()) < 10
    assert table("evaluations", run_id).query("metric == 'accuracy'")["value"].mean() > 0.8


def test_a_dry_run_counts_the_stage_that_begins_with_fresh_weights(run: Run) -> None:
    assert set(table("rounds", run({**RUNS["head_first"], "dry_run": True}))["stage"]) == {"head"}


def test_an_option_reaches_the_local_rule(run: Run) -> None:
    changed = {**RUNS["prox"], f"{OPTION}mu": 0.0}
    before, after = (weights_of(run(changes), "fedavg") for changes in (RUNS["prox"], changed))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[n], after[n]) for n in before)


# -- what SCAFFOLD's clients keep --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage"), [("scaffold", "fedavg"), ("fedoras", "supernet"), ("superfednas", "supernet")]
)
def test_clients_that_took_part_keep_their_variate_and_nobody_else(
    run: Run, assert_same_run: Callable[..., None], name: str, stage: str
) -> None:
    config, seen = compose_config(overrides({**ALL, **RUNS[name]})), list[str]()
    stops = Watcher(started=lambda run_id, _: seen.append(run_id), should_stop=lambda: True)
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, stops)
    with pytest.raises(InterruptedRunError):
        resume_run(config, seen[0], make_serial, stops)
    checkpoint = load_checkpoint(find_run(RESULTS, seen[0]).checkpoint)
    state = restored_state(checkpoint.data, checkpoint.groups)
    shared = state.weights(stage)
    took_part = table("clients", seen[0]).groupby("client_id")["architecture"].last()
    assert 10 < len(took_part) <= 20
    for client_id in range(100):
        kept = state.client_state(client_id)
        assert (kept is not None) == (client_id in took_part.index)
        for place, variate in (kept or {}).items():
            assert place.startswith(f"{STATE}own/")
            assert variate.shape == shared[place.removeprefix(f"{STATE}own/")].shape
    some = [bool(kept.any()) for c in took_part.index for kept in (state.client_state(c) or {}).values()]
    assert np.mean(some) > 0.5, "variates are not zero"
    assert any(name.startswith("control/") and bool(tensor.any()) for name, tensor in shared.items())
    resume_run(config, seen[0], make_serial)
    assert_same_run((RESULTS, run(RUNS[name])), (RESULTS, seen[0]), empty=EMPTY.get(name, ("candidates",)))
    last = load_checkpoint(find_run(RESULTS, seen[0]).checkpoint)
    assert restored_state(last.data, last.groups).client_state(int(took_part.index[0])) is None, "of this stage alone"


# -- on Ray ------------------------------------------------------------------------------------------------------------

ON_RAY = {"head_first": 1, "scaffold": 2, "module": 1}
"""Client actors; the runs use every kind of plug-in that a client meets."""


@pytest.fixture(scope="module")
def on_actors(beside: Path, own_ray: Callable[[], AbstractContextManager[None]]) -> dict[str, str]:
    """The runs by client actors, on one cluster."""
    from fedloom.actors.client import accept_shared_memory
    from fedloom.actors.server import make_pool  # the tests above do without Ray

    accept_shared_memory()
    sys.path.append(str(beside))  # as the command line does
    configs = {
        name: compose_config(overrides({**ALL, **RUNS[name], "executor.kind": "ray", "executor.actors": actors}))
        for name, actors in ON_RAY.items()
    }
    with own_ray():
        return {name: start_run(config, make_pool) for name, config in configs.items()}


@pytest.mark.ray
@pytest.mark.parametrize("name", ON_RAY)
def test_actors_give_the_bits_of_the_serial_executor(
    run: Run, on_actors: dict[str, str], assert_same_run: Callable[..., None], name: str
) -> None:
    assert_same_run((RESULTS, run(RUNS[name])), (RESULTS, on_actors[name]), empty=EMPTY.get(name, ("candidates",)))


# -- in an ablation ----------------------------------------------------------------------------------------------------


def settings() -> dict[str, dict[str, Any]]:
    """Each of the runs, and two with another value of a plug-in's own option."""
    found = {name: dict(changes) for name, changes in RUNS.items()}
    found["weak prox"] = {**RUNS["prox"], f"{OPTION}mu": 0.01}
    found["gentle head_first"] = {**RUNS["head_first"], "method.shrink": 0.1}
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("no_ray_cluster")
def test_an_ablation_varies_plug_ins_and_their_options(
    run: Run,
    beside: Path,
    rows_of: Callable[[Path, str], dict[str, pd.DataFrame]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LOOPBACK_SWITCH, "0")  # as the command line does; clusters of later tests are not on loopback
    axes = {"what": {"settings": settings()}}
    (beside / "mine.yaml").write_text(yaml.safe_dump({"axes": axes, "seeds": [1]}, sort_keys=False))
    common = overrides({key: value for key, value in ALL.items() if key != "seed"})
    code, said = call("ablate", "--json", "ablation=./mine.yaml", "results=ablated", *common)
    assert (code, said["counts"]) == (0, {"done": len(settings())}), said
    trials = {trial["setting"]["what"]: trial["run_id"] for trial in said["trials"]}
    assert list(trials) == list(settings())
    for name in RUNS:
        alone, trial = rows_of(RESULTS, run(RUNS[name])), rows_of(Path("ablated"), trials[name])
        for each in set(alone) - {"runs"}:
            pd.testing.assert_frame_equal(trial[each], alone[each], check_exact=True, obj=f"{name}: {each}")
    losses = {
        name: read_table(Path("ablated"), "rounds", run_id=trial)["loss"].tolist() for name, trial in trials.items()
    }
    for one, other in (("prox", "weak prox"), ("head_first", "gentle head_first")):
        assert losses[one] != losses[other]
