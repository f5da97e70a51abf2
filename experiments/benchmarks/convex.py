"""Federated optimisers on convex problems whose optimum is known: how far from it does each one end?

    python -m fedloom.experiments.benchmarks.convex [--figure FILE]

Client i's loss is a_i / 2 |x - b_i|^2 in each dimension, so that the optimum of the sum is known. Everything else is
the platform's: local rules, SGD, weighted sums and server rules. Two problems:

    drift   clients differ in curvature and minimum, and all make 10 steps: FedAvg and FedProx end where the clients'
            drifts balance; SCAFFOLD and FedDyn end at the optimum
    steps   clients have the same curvature and make 1 to 32 steps: FedAvg ends at the minimum of the clients that make
            many steps; FedNova ends near the optimum, the nearer the smaller the learning rate

Prints one JSON object on its last line: per problem and algorithm the distance from the optimum after the last round,
relative to the distance at the start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import fedloom.platform.methods  # noqa: F401 - registers the built-in rules
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.averaging.server import SERVER_RULES, ServerRound, ServerRule, serve
from fedloom.platform.clients.local_rules import LocalClient, begun, local_rule, place_of
from fedloom.platform.clients.training import PLAIN, LocalSGD, Optimizer
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.spaces.slices import Slice

X = "x"
REPLACE = ComponentSpec("replace")


@dataclass(frozen=True)
class Quadratics:
    """A federation: curvatures a (N, D), minima b (N, D), and the number of local steps of each client."""

    curvatures: Tensor
    minima: Tensor
    steps: tuple[int, ...]
    lr: float

    @property
    def optimum(self) -> Tensor:
        """The minimum (D,) of the sum of all clients' losses."""
        return (self.curvatures * self.minima).sum(dim=0) / self.curvatures.sum(dim=0)


@dataclass(frozen=True)
class Algorithm:
    """A local rule and a server rule."""

    local: ComponentSpec = PLAIN
    server: ComponentSpec = REPLACE


ALGORITHMS: Mapping[str, Algorithm] = {
    "FedAvg": Algorithm(),
    "FedProx": Algorithm(ComponentSpec("fedprox", (("mu", 0.1),))),
    "SCAFFOLD, option 1": Algorithm(ComponentSpec("scaffold", (("option", 1),))),
    "SCAFFOLD, option 2": Algorithm(ComponentSpec("scaffold")),
    "FedDyn": Algorithm(ComponentSpec("feddyn", (("alpha", 0.5),)), ComponentSpec("feddyn")),
    "FedNova": Algorithm(ComponentSpec("fednova"), ComponentSpec("fednova")),
}


@dataclass
class Federation:
    """The state between rounds: shared tensors, the server's, and every client's."""

    problem: Quadratics
    algorithm: Algorithm
    weights: dict[str, Tensor] = field(default_factory=dict)
    server: dict[str, Tensor] = field(default_factory=dict)
    clients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    rounds: int = 0

    def __post_init__(self) -> None:
        start = torch.zeros_like(self.problem.minima[0])
        shared = local_rule(self.algorithm.local).shared
        self.weights = {X: start} | {place_of(slot, X): torch.zeros_like(start) for slot in shared}

    def round(self, cohort: Sequence[int]) -> None:
        """One round of these clients, all weighted alike."""
        sums = WeightedSums()
        for client_id in cohort:
            sums.add(self._trained(client_id))
        rule = local_rule(self.algorithm.local)
        rules: dict[str, tuple[str, ServerRule]] = {
            name: (self.algorithm.local.name, rule.merge) for name in self.weights if name != X
        }
        if self.algorithm.server.name != "replace":
            rules[X] = (self.algorithm.server.name, SERVER_RULES.make(self.algorithm.server))
        about = ServerRound(self.rounds, len(cohort), len(self.problem.steps))
        averaged = sums.finish(self.weights)
        self.weights, self.server = serve(rules, self.weights, averaged, self.server, about)
        self.rounds += 1

    def _trained(self, client_id: int) -> Update:
        problem, rule = self.problem, local_rule(self.algorithm.local)
        a, b, steps = problem.curvatures[client_id], problem.minima[client_id], problem.steps[client_id]
        local, client_state = LocalSGD(1, 1, problem.lr), self.clients.setdefault(client_id, {})
        x = self.weights[X].clone().requires_grad_()
        client = LocalClient(client_id, self.rounds, 1, steps, local, {X: x}, {X: Slice(X)}, self.weights, client_state)
        client.gradients = lambda: {X: a * (self.weights[X] - b)}
        sgd = Optimizer(local, {X: x}, begun(rule, client))
        for _ in range(steps):
            x.grad = a * (x.detach() - b)
            sgd.step()
        with torch.no_grad():
            rule.end(client)
        tensors = {X: x.detach(), **client.instead, **client.sent}
        slices = {X: Slice(X), **client.sent_slices}
        return Update(tensors, slices, dict.fromkeys(tensors, 1.0), factors=client.factors)


def drifting() -> Quadratics:
    """Ten clients with different curvatures and minima, each making ten steps."""
    g = torch.Generator().manual_seed(0)
    curvatures = 0.2 + 1.8 * torch.rand((10, 5), generator=g, dtype=torch.float64)
    minima = torch.randn((10, 5), generator=g, dtype=torch.float64) + 2 * (curvatures - 1)
    return Quadratics(curvatures, minima, (10,) * 10, 0.1)


def unequal(lr: float) -> Quadratics:
    """Six clients with the same curvature and 1 to 32 steps; the more steps, the further out the client's minimum."""
    minima = torch.arange(6, dtype=torch.float64).unsqueeze(1) * torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    return Quadratics(torch.ones_like(minima), minima, tuple(2**i for i in range(6)), lr)


def distances(problem: Quadratics, algorithm: Algorithm, rounds: int, cohort: int | None = None) -> list[float]:
    """The distance from the optimum after each round, relative to that at the start; `cohort` random clients or all."""
    federation, clients = Federation(problem, algorithm), len(problem.steps)
    start = (federation.weights[X] - problem.optimum).norm()
    generator, relative = torch.Generator().manual_seed(1), []
    for _ in range(rounds):
        ids = range(clients) if cohort is None else torch.randperm(clients, generator=generator)[:cohort].tolist()
        federation.round(sorted(ids))
        relative.append(float((federation.weights[X] - problem.optimum).norm() / start))
    return relative


def curves() -> dict[str, dict[str, list[float]]]:
    """The distances by problem and algorithm."""
    drift, few = drifting(), ("FedAvg", "SCAFFOLD, option 2", "FedDyn")
    equal = {name: algorithm for name, algorithm in ALGORITHMS.items() if name != "FedNova"}  # it is FedAvg here
    by_problem = {
        "drift, all clients": {name: distances(drift, a, 100) for name, a in equal.items()},
        "drift, 3 of 10 clients": {name: distances(drift, ALGORITHMS[name], 400, 3) for name in few},
    }
    for lr in (0.03, 0.003):
        two = {name: ALGORITHMS[name] for name in ("FedAvg", "FedNova")}
        rounds = int(6 / lr)
        by_problem[f"steps, lr {lr:g}"] = {name: distances(unequal(lr), a, rounds) for name, a in two.items()}
    return by_problem


def draw(by_problem: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    """Writes a figure of all curves, one panel per problem."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(by_problem), figsize=(4.2 * len(by_problem), 3.6), sharey=True, layout="constrained"
    )
    for axis, (title, by_name) in zip(axes, by_problem.items(), strict=True):
        for name, values in by_name.items():
            style = {"linestyle": "--"} if name == "FedProx" else {}
            axis.plot(range(1, len(values) + 1), values, label=name, **style)
        axis.set(title=title, xlabel="round", yscale="log", ylim=(1e-8, 3))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="best")
    axes[0].set_ylabel("distance from the optimum, start = 1")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    """Prints the last distances; with --figure also draws all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where the curves are drawn (PNG)")
    arguments = parser.parse_args()
    by_problem = curves()
    if arguments.figure is not None:
        draw(by_problem, arguments.figure)
    print(json.dumps({title: {n: float(f"{v[-1]:.3g}") for n, v in by.items()} for title, by in by_problem.items()}))


if __name__ == "__main__":
    main()
