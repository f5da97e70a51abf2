"""What a round takes on N nodes with k actors each, from the constants of one server that `scale` measures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Server:
    """Seconds of the server's own processor.

    Attributes:
        round_s: per round: plan, rows, checkpoint's head.
        client_s: per client: its assignment, report and rows.
        chunk_s: per chunk: Ray's call and its result.
        state_s_per_byte: per byte of the weights: sharing, mean, checkpoint.
        update_s_per_byte: per byte of a chunk's sums: adding it.
    """

    round_s: float
    client_s: float
    chunk_s: float
    state_s_per_byte: float
    update_s_per_byte: float

    def work_s(self, load: "Load") -> float:
        """What the server works for one round."""
        per_byte = self.state_s_per_byte + load.chunks * self.update_s_per_byte
        return self.round_s + load.clients * self.client_s + load.chunks * self.chunk_s + load.weights_bytes * per_byte

    def __str__(self) -> str:
        return (
            f"server: {1e3 * self.round_s:.3g} ms/round, {1e6 * self.client_s:.3g} us/client, "
            f"{1e6 * self.chunk_s:.3g} us/chunk, {1e9 * self.state_s_per_byte:.3g} s/GB of weights, "
            f"{1e9 * self.update_s_per_byte:.3g} s/GB of updates"
        )


@dataclass(frozen=True)
class Load:
    """A round: its clients, the clients per chunk, the bytes of the weights, and the seconds that a client trains."""

    clients: int
    chunk_size: int
    weights_bytes: float
    client_s: float

    @property
    def chunks(self) -> int:
        """Calls of actors in the round."""
        return math.ceil(self.clients / self.chunk_size)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal actors, and the bytes per second of the server's connection to them, in each direction."""

    nodes: int
    actors_per_node: int
    bytes_per_s: float

    @property
    def actors(self) -> int:
        """All actors."""
        return self.nodes * self.actors_per_node


@dataclass(frozen=True)
class Prediction:
    """The seconds of a round's three works, of which the longest decides."""

    clients_s: float
    server_s: float
    network_s: float

    @property
    def round_s(self) -> float:
        """A round, if its works overlap perfectly."""
        return max(self.clients_s, self.server_s, self.network_s)

    @property
    def limit(self) -> str:
        """What decides."""
        return max(("clients", "server", "network"), key=lambda name: float(getattr(self, f"{name}_s")))


def predict(server: Server, load: Load, cluster: Cluster) -> Prediction:
    """A round of the load on the cluster.

    Clients work in waves of one chunk per actor; the weights travel to every node once, a chunk's sums come back once.
    """
    waves = math.ceil(load.chunks / cluster.actors)
    traffic_s = load.weights_bytes * max(cluster.nodes, load.chunks) / cluster.bytes_per_s
    return Prediction(waves * load.chunk_size * load.client_s, server.work_s(load), traffic_s)


def most_actors(server: Server, load: Load) -> float:
    """The number of actors beyond which the server is the limit, for a load of many waves."""
    return load.clients * load.client_s / server.work_s(load)


def server_of(figures: Mapping[str, Rows]) -> Server | None:
    """The constants from the figures of the parts `cohorts`, `supernets` and `actors`; None if one is missing."""
    if not {"cohorts", "supernets", "actors"} <= figures.keys():
        return None
    cohorts, supernets = figures["cohorts"], figures["supernets"]
    per_client_s = _slope(cohorts[0], cohorts[-1], "cohort", "cpu_ms") / 1e3
    round_s = max(0.0, cohorts[0]["cpu_ms"] / 1e3 - cohorts[0]["cohort"] * per_client_s)
    client_s, chunk_s = _clients_and_chunks(figures["actors"])
    state_s, update_s = _per_byte(supernets)
    return Server(round_s, client_s, chunk_s, state_s, update_s)


def _per_byte(supernets: Rows) -> tuple[float, float]:
    """Seconds per byte of the weights and of a client's update: medians over all sizes but the smallest.

    With the smallest, clients and rounds cost more than bytes.
    """
    pairs = [*zip(supernets[::2], supernets[1::2], strict=True)]
    pairs = pairs[1:] or pairs
    update_s = median(_slope(few, more, "clients", "cpu_s") / (4 * few["parameters"]) for few, more in pairs)
    state_s = median(few["cpu_s"] / (4 * few["parameters"]) - few["clients"] * update_s for few, _ in pairs)
    return state_s, update_s


def _slope(first: Mapping[str, Any], last: Mapping[str, Any], x: str, y: str) -> float:
    return float((last[y] - first[y]) / (last[x] - first[x]))


def _clients_and_chunks(actors: Rows) -> tuple[float, float]:
    """Seconds per client and per chunk, from the most actors that clients were handed to singly and in chunks."""
    busy = {row["chunk_size"]: row for row in actors if not row["rest_ms"] and row["kind"] != "ray"}
    (one, alone), (many, together) = sorted(busy.items())
    single_s, shared_s = (1e-6 * row["cpu_us_per_client"] for row in (alone, together))
    chunk_s = (single_s - shared_s) / (1 / one - 1 / many)
    return max(0.0, single_s - chunk_s / one), chunk_s
