"""What all tests share: a cache of their own, one thread, and a federation so small that a whole run takes a second."""

import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedoras import FedorASConfig, SupernetConfig
from fedloom.platform.methods.tier_search import TierSearchConfig
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.registry import SPACES, build_space
from fedloom.platform.spaces.space_config import SpaceConfig

settings.register_profile("fedloom", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("fedloom")

gc.disable()  # until all tests are collected: a fifth of the collection's time


def pytest_collection_finish() -> None:
    """What has been imported and collected stays, and is too much to be searched for garbage during the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


TINY_OPERATORS = ["conv(1)", "ds(3,.5)", "mb(1,2)", "identity"]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared data goes into a folder of this session, never into the home folder."""
    before = os.environ.get("FEDLOOM_CACHE")
    cache = tmp_path_factory.mktemp("fedloom-cache")
    os.environ["FEDLOOM_CACHE"] = str(cache)
    yield cache
    if before is None:
        del os.environ["FEDLOOM_CACHE"]
    else:
        os.environ["FEDLOOM_CACHE"] = before


@pytest.fixture(autouse=True)
def own_search_path() -> Iterator[None]:
    """A command adds the working directory to the path: another test's files must not be found there later."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell has what it starts in the background ignore SIGINT, and its children, which tests interrupt, as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors: more threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Syncing guards against power failures only, and is slow on a busy disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def tiny_method() -> FedorASConfig:
    """All stages of FedorAS, a few steps each."""
    return FedorASConfig(
        train=SupernetConfig(
            rounds=2, clients_per_round=4, epochs=1, batch_size=16, evaluate_every=2, evaluate_paths=2
        ),
        search=TierSearchConfig(population=4, offspring=2, budget=6, clients_per_round=2, scoring_rounds=2),
        finetune=TrainingConfig(rounds=1, clients_per_round=2, batch_size=16, lr=0.01, schedule="cosine"),
        rand_init=TrainingConfig(rounds=1, clients_per_round=2, batch_size=16),
    )


def tiny_run(folder: Path, /, **changes: Any) -> RunConfig:
    """A run of 8 clients in 2 tiers on a part of the digits; keywords replace fields of RunConfig."""
    config = RunConfig(
        experiment="tiny",
        results=str(folder),
        data=DataConfig(num_clients=8, train_samples=320, test_samples=80),
        space=SpaceConfig("cnn_digits", stem_channels=4, stage_layers=[1, 2], operators=list(TINY_OPERATORS)),
        tiers=TiersConfig(count=2, paths=2000, rho_high=0.5),  # about as many models in each
        method=tiny_method(),
    )
    return replace(config, **changes)


@pytest.fixture(scope="session")
def tiny_config_in() -> Callable[..., RunConfig]:
    """Makes configurations whose results lie in a folder: for runs that several tests look at."""
    return tiny_run


@pytest.fixture(scope="session", autouse=True)
def remembered_spaces() -> Iterator[None]:
    """Worlds are built on the spaces that are there: to count the costs of operators takes longer than tiny rounds."""
    built: dict[tuple[str, object], SearchSpace] = {}

    def remembered(config: SpaceConfig) -> SearchSpace:
        key = (repr(config), SPACES.find(config.name))  # a user's module may be loaded anew
        if key not in built:
            built[key] = build_space(config)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.platform.federation.world.build_space", remembered)
        yield


@pytest.fixture
def tiny_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes configurations of 8 clients in 2 tiers on a part of the digits; keywords replace fields of RunConfig."""
    return partial(tiny_run, tmp_path / "results")


def start_ray() -> None:
    """Ray with two free CPUs: one cluster for the session, begun by the first who needs it and left to the next."""
    import ray  # the tests below platform/ and tiers/ do without it

    from fedloom.actors.cluster import PRELOADED

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            object_store_memory=300_000_000,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            # Ray's workers would else give way to everything else that this machine does.
            _system_config={"preload_python_modules": PRELOADED, "worker_niceness": 0},
        )
    end = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < end, "somebody's actors hold the cluster's CPUs"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    """The session's cluster."""
    start_ray()


@contextmanager
def _own_ray() -> Iterator[None]:
    end_of_ray()
    start_ray()
    try:
        yield
    finally:
        end_of_ray()


@pytest.fixture(scope="session")
def own_ray() -> Callable[[], AbstractContextManager[None]]:
    """A cluster for a block, whose actors find modules where the test has just put them."""
    return _own_ray


@pytest.fixture(scope="module")
def no_ray_cluster() -> None:
    """No cluster of the session: for those that start one of their own."""
    end_of_ray()


def end_of_ray() -> None:
    """Ends the session's cluster, if there is one."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def pytest_sessionfinish() -> None:
    """Nothing of Ray stays behind."""
    end_of_ray()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says what was skipped, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped {sum(reasons.values())}: {why}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those who share the cluster come before those who end it to start their own; else the order stays."""

    def begins_its_own(item: pytest.Item) -> bool:
        return item.get_closest_marker("ray") is not None and "ray_cluster" not in getattr(item, "fixturenames", ())

    items.sort(key=begins_its_own)
