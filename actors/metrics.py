"""Reports a run to Ray's metrics once per round, for Prometheus and the dashboard of a cluster."""

from ray.util.metrics import Gauge

from fedloom.actors.pool import ActorPool
from fedloom.platform.federation.loop import RoundProgress

RUN_ID = "run_id"
GAUGES = {
    "fedloom_clients_per_s": "clients that a run's last round has finished, per second of the round",
    "fedloom_clients_waiting": "clients of the round in progress that no actor has begun",
    "fedloom_actors_up": "client actors that can be given work, or are at work",
    "fedloom_actors_starting": "client actors that have not answered yet",
    "fedloom_bytes_down": "bytes that the clients of the last round have received, as simulated",
    "fedloom_bytes_up": "bytes that the clients of the last round have sent, as simulated",
}
"""All have the tag `run_id`."""


class RunMetrics:
    """The gauges of one run; for use in a Ray process."""

    def __init__(self, run_id: str) -> None:
        self._gauges = {name: Gauge(name, meaning, (RUN_ID,)) for name, meaning in GAUGES.items()}
        self._tags = {RUN_ID: run_id}

    def tell(self, progress: RoundProgress, pool: ActorPool) -> None:
        """Sets the gauges after a round, while the pool may be at work on the next one."""
        values = (
            progress.clients_ok / progress.wall_s if progress.wall_s else 0.0,
            pool.clients_waiting(),
            *pool.actors.up_and_starting(),
            progress.bytes_down,
            progress.bytes_up,
        )
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(value, self._tags)
