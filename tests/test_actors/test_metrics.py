"""A run's figures reach Ray's metrics once per round, and its actors have names that people can read."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import ray

from fedloom.actors import metrics
from fedloom.actors.metrics import GAUGES
from fedloom.actors.pool import ActorPool
from fedloom.actors.server import metered
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.federation.world import World
from fedloom.platform.runs.run import Watcher, run_to_end

pytestmark = pytest.mark.ray


def test_a_run_tells_rays_metrics_after_every_round_and_names_its_actors(
    tiny_config: Callable[..., RunConfig], ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, list[float]] = defaultdict(list)

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tags == {"run_id": "one"}
            told[self.name].append(value)

    monkeypatch.setattr(metrics, "Gauge", Gauge)
    rounds, names = list[RoundProgress](), list[str]()
    make, watch = metered("one", rounds.append)

    def named(world: World) -> Any:
        pool = make(world)
        assert isinstance(pool, ActorPool)
        actors = [member.actor for member in pool.actors.members]
        names.extend(ray.get([actor.__ray_call__.remote(repr) for actor in actors]))
        return pool

    assert run_to_end(tiny_config(), named, Watcher(round=watch)).kind == "done"
    assert names == ["client:clients:1 one", "client:clients:2 one"]
    assert told.keys() == GAUGES.keys()
    assert {len(values) for values in told.values()} == {len(rounds)}
    assert told["fedloom_bytes_down"] == [progress.bytes_down for progress in rounds]
    assert told["fedloom_clients_per_s"] == [progress.clients_ok / progress.wall_s for progress in rounds]
    assert set(told["fedloom_actors_up"]) == {2}
    assert set(told["fedloom_actors_starting"]) == {0}
    assert min(told["fedloom_clients_waiting"]) >= 0
