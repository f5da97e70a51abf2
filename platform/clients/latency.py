"""The inference latency of subnets on this host."""

from dataclasses import dataclass

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import loaded_subnet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.spaces.slices import Architecture, Weights, architecture_id
from fedloom.tiers.devices import EVALUATION_FACTOR
from fedloom.tiers.measure import latency_s_of


@dataclass(frozen=True)
class MeasureLatency:
    """Measures subnets on this host with a batch of one sample: median latency and interquartile range, in seconds."""

    architectures: tuple[Architecture, ...]
    repeats: int = 20

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Returns two measurements per architecture, `latency_s` and `latency_spread_s`."""
        del assignment
        x, _ = worker.central_data("validation")
        measurements: list[Measurement] = []
        for architecture in self.architectures:
            latency = latency_s_of(loaded_subnet(worker, Subnet(architecture), weights), x[:1], repeats=self.repeats)
            figures = {"latency_s": latency.median_s, "latency_spread_s": latency.spread_s}
            name = architecture_id(architecture)
            measurements += [
                Measurement("supernet", name, "validation", k, v, latency.repeats) for k, v in figures.items()
            ]
        return ClientResult(measurements=tuple(measurements), clock_factor=EVALUATION_FACTOR)
