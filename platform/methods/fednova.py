"""FedNova: clients that make more steps do not pull the model towards their own minimum (Wang et al. 2020, Eq. 6, 7).

    client i:  makes tau_i steps; its change Delta_i is a_i times a mean gradient step,
               a_i = tau_i, or with momentum rho  a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)
               sends x + Delta_i / a_i
    server:    x <- x + (sum_i p_i a_i) (sum_i p_i Delta_i / a_i),  where p_i is the client's share in the mean

For parts of a supernet, p_i is the share among the clients that hold a scalar, and tau_i the number of steps that
reached it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedloom.platform.averaging.server import ServerTraits
from fedloom.platform.clients.local_rules import LinearCorrection, LocalClient, LocalRule, not_plain
from fedloom.platform.plugins import declares

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.averaging.server import ServerStep
    from fedloom.platform.clients.training import LocalSGD


def total_weight(steps: int, momentum: float) -> float:
    """|a_i|_1: the weights of a client's gradients in its change, summed over its steps (Wang et al. 2020, App. A)."""
    if not momentum:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class FedNova(LocalRule):
    """The clients' side: the normalised change, and a_i as the factor that belongs to it."""

    server = "fednova"
    needs_whole_change = False  # no state is kept, and the normalised changes can also be averaged if sent in part

    def refuses(self, local: LocalSGD) -> str | None:
        """Refuses all but SGD with one learning rate and momentum that starts at zero, for which a_i is derived."""
        if local.keeps_state and local.momentum:
            return "optimizer_state=kept: a_i assumes that momentum starts at zero; use optimizer_state=fresh"
        return not_plain(local, "a_i counts steps of SGD")

    def begin(self, client: LocalClient) -> LinearCorrection:
        """Gradients are not changed, only counted."""
        client.notes = steps = Counter[str]()
        return LinearCorrection(steps=(steps,))

    def end(self, client: LocalClient) -> None:
        """Sends x + Delta_i / a_i instead of the trained values; parameters that no step reached have not changed."""
        for name, parameter in client.parameters.items():
            total = total_weight(client.notes[name], client.local.momentum)
            client.factors[name] = total
            if total:
                received = client.received[name]
                client.instead[name] = received + (parameter.detach() - received) / total


@declares(ServerTraits(local_rule="fednova"))
def fednova(step: ServerStep) -> Tensor:
    """The server's side: the mean normalised change times the mean of the a_i."""
    return step.old + step.factor * step.change
