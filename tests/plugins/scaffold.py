"""SCAFFOLD (Karimireddy et al. 2020, Alg. 1, option II): client and server control variates, on any cohort and slices.

A client that holds a part of the supernet corrects, keeps and sends that part of its control variate alone.
"""

from torch import Tensor

from fedloom.platform.averaging.server import ServerStep
from fedloom.platform.clients.local_rules import LocalClient, LocalRule
from fedloom.platform.clients.training import Correction


class Scaffold(LocalRule):
    """The server shares c; every client keeps its c_i."""

    shared = ("control",)

    def begin(self, client: LocalClient) -> Correction:
        """Every gradient is corrected by c - c_i."""
        drift = {name: client.shared("control", name) - client.kept("own", name) for name in client.parameters}

        def correct(name: str, _parameter: Tensor, gradient: Tensor) -> None:
            gradient.add_(drift[name])

        return correct

    def end(self, client: LocalClient) -> None:
        """c_i+ = c_i - c + (x - y_i) / (K eta); what is sent is c_i+ - c_i, which every client counts alike."""
        scale = 1 / (client.steps * client.local.lr)
        for name, parameter in client.parameters.items():
            own = client.kept("own", name)
            change = scale * (client.received[name] - parameter) - client.shared("control", name)
            client.send("control", name, change, weight=1.0)
            own.add_(change)

    def merge(self, step: ServerStep) -> Tensor:
        """c <- c + |S| / N times the mean change, of those that hold the region."""
        return step.old + step.contributors / step.about.num_clients * step.mean
