"""What a trained supernet is kept under: everything that its training depends on, and nothing that comes after it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.runs.supernets import supernet_key
from fedloom.platform.settings import settings_of
from fedloom.tiers.device_files import write_device_table
from fedloom.tiers.devices import generate_device_table

PRESETS = {"fedoras": "fedoras_digits", "superfednas": "superfednas_digits"}

FREE = {
    "checkpoint.every",
    "data.cache",
    "data.download",
    "data.root",
    "dry_run",  # has no key at all
    "executor.actors",
    "executor.kind",
    "experiment",
    "name",
    "ray.address",
    "ray.dashboard",
    "ray.detached",
    "ray.num_cpus",
    "ray.num_gpus",
    "ray.object_store_memory_bytes",
    "ray.wait_s",
    "results",
    "reuse_supernet",
    "seeds.search",
    "tags",
    "tensorboard",
    "tracking.models",
    "tracking.project",
    "tracking.to",
}
"""Keys that may differ between runs that share a supernet, whatever the method."""
LATER = {
    "fedoras": ("method.search.", "method.finetune.", "method.rand_init.", "method.evaluation."),
    "superfednas": ("method.search.", "method.evaluation.", "method.family"),
}
"""Of a method's own keys those of what comes after training."""

OTHERS: dict[str, Any] = {
    "int": 3,
    "float": 0.625,
    "text": "another",
    "true or false": True,
    "dict[text, float]": {"another": 2.0},
    "dict[text, any]": {"another": 2.0},
    "dict[text, text]": {"another": "other"},
    "list[int]": [5],
    "list[float]": [1.5],
    "list[text]": ["smallest", "largest", "d=1,1 e=1.0"],
    "list[any]": [["idle", 1.0, 1.0]],
    "list[one of wandb, trackio, mlflow, aim, tensorboard]": ["tensorboard"],
}
"""A value for every type of the schema."""

Given = tuple[RunConfig, World]


@lru_cache(maxsize=4)
def given(preset: str) -> Given:
    config = compose_config([f"experiment={preset}", "tiers.paths=500"])
    return config, build_world(config)


def changed(config: RunConfig, key: str, kind: str) -> RunConfig:
    """The configuration with another value of one key."""
    changed = deepcopy(config)
    *path, name = key.split(".")
    place: Any = changed
    for part in path:
        place = getattr(place, part)
    old = getattr(place, name)
    new = OTHERS["text" if kind.startswith("one of") else kind.removesuffix(" or null")]
    if new == old:
        new = not old if isinstance(old, bool) else old + old
    setattr(place, name, new)
    return changed


@pytest.mark.parametrize("method", PRESETS)
def test_every_key_changes_the_supernets_or_is_known_not_to(method: str, tmp_path: Path) -> None:
    config, world = given(PRESETS[method])
    assert config.method.name == method
    key = supernet_key(config, world)
    keys = {setting.key: setting.kind for setting in settings_of(config)}
    assert {"seed", "method.train.lr", "method.train.options", "data.alpha", "objective.name"} <= keys.keys()
    for name, kind in keys.items():
        if name in ("tiers.device_table", "method.separately", "method.name"):
            continue  # by content, and no key: below; and another method
        other = supernet_key(changed(config, name, kind), world)
        free = name in FREE or name.startswith(LATER[method])
        if name == "dry_run":
            assert other is None
        elif free:
            assert other == key, f"{name} does not belong to the training"
        else:
            assert other != key, f"{name} changes the training"
            assert other is not None


def test_a_key_is_32_hexadecimal_digits_and_the_same_again() -> None:
    config, world = given("fedoras_digits")
    key = supernet_key(config, world)
    assert key is not None
    assert len(key) == 32
    assert set(key) <= set("0123456789abcdef")
    assert supernet_key(deepcopy(config), build_world(config)) == key


def test_seeds_count_by_what_they_come_to() -> None:
    config, world = given("fedoras_digits")
    key = supernet_key(config, world)
    spelled_out = compose_config(
        ["experiment=fedoras_digits", "tiers.paths=500", f"seed={config.seed + 1}"]
        + [f"seeds.{p}={config.seed}" for p in ("partition", "initialisation", "selection", "training")]
    )
    assert supernet_key(spelled_out, world) == key


@pytest.mark.parametrize("heuristic", ["static", "dynamic"])
def test_a_family_counts_where_it_is_handed_out(heuristic: str) -> None:
    config, world = given("superfednas_digits")
    config = deepcopy(config)
    config.method.train.distribution.heuristic = heuristic
    other = changed(config, "method.family", "list[text]")
    assert supernet_key(other, world) != supernet_key(config, world)


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=spider_digits"],
        ["method=fedavg"],
        ["experiment=superfednas_digits", "method.separately=true"],
        ["experiment=fedoras_digits", "dry_run=true"],
    ],
)
def test_methods_without_a_shared_supernet_have_no_key(overrides: list[str]) -> None:
    assert supernet_key(compose_config(overrides), given("fedoras_digits")[1]) is None


def test_what_the_world_was_found_to_be_counts() -> None:
    config, world = given("fedoras_digits")
    key = supernet_key(config, world)

    def data(dataset_hash: str, partition_hash: str) -> FederatedData:
        stand_in = SimpleNamespace(dataset=SimpleNamespace(hash=dataset_hash), partition_hash=partition_hash)
        return cast(FederatedData, stand_in)

    own = (world.data.dataset.hash, world.data.partition_hash)
    assert supernet_key(config, replace(world, data=data(*own))) == key
    moved = world.tier_of_client.copy()
    moved[0] = (moved[0] + 1) % len(world.tiers)
    others = [
        replace(world, data=data("another", own[1])),
        replace(world, data=data(own[0], "another")),
        replace(world, tier_of_client=moved),
        replace(world, tiers=(replace(world.tiers[0], upper=world.tiers[0].upper * 1.01), *world.tiers[1:])),
        replace(world, cost_table=replace(world.cost_table, fixed=world.cost_table.fixed + 1)),
    ]
    keys = [supernet_key(config, other) for other in others]
    assert len({key, *keys}) == 1 + len(others)


def test_a_device_table_counts_by_its_content(tmp_path: Path) -> None:
    config, world = given("fedoras_digits")

    def key_with(name: str, seed: int) -> str | None:
        file = tmp_path / name
        write_device_table(file, generate_device_table(40, np.random.default_rng(seed)))
        return supernet_key(replace(config, tiers=replace(config.tiers, device_table=str(file))), world)

    keys = [key_with("a.csv", 1), key_with("b.csv", 1), key_with("c.csv", 2)]
    assert keys[0] == keys[1]
    assert len({supernet_key(config, world), *keys}) == 3


def test_gpus_and_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config, world = given("fedoras_digits")
    key = supernet_key(config, world)
    on_gpus = replace(world, tiers=tuple(replace(t, num_gpus=0.5) for t in world.tiers))
    ray = replace(config, executor=replace(config.executor, kind="ray"))
    serial = replace(config, executor=replace(config.executor, kind="serial"))
    assert supernet_key(ray, on_gpus) == supernet_key(serial, on_gpus) != key
    assert supernet_key(ray, world) == supernet_key(serial, world) == key
    with monkeypatch.context() as patched:
        patched.setattr("fedloom.platform.runs.supernets.source_hash", lambda: "another")
        assert supernet_key(config, world) != key
    monkeypatch.setattr("torch.__version__", "0.0")
    assert supernet_key(config, world) != key


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> None:
        (tmp_path / "handed_out_by_me.py").write_text(text)

    return write


def test_code_of_the_users_own_counts_by_its_file(own_module: Callable[[str], None]) -> None:
    config, world = given("superfednas_digits")
    config = deepcopy(config)
    config.method.train.distribution.heuristic = "handed_out_by_me:everything"
    keys = []
    for text in ("everything = None\n", "everything = None\n", "everything = print\n"):
        own_module(text)
        keys.append(supernet_key(config, world))
    assert keys[0] == keys[1] != keys[2]
    assert None not in keys
    family = changed(config, "method.family", "list[text]")
    assert supernet_key(family, world) != keys[2], "such a heuristic may hand out the family"
    config.method.train.distribution.heuristic = "sys:exit"  # no file
    assert supernet_key(config, world) is None
    config.method.train.distribution.heuristic = "no_module_at_all:of_this_name"  # a text like any other
    assert supernet_key(config, world) is not None
