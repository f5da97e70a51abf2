"""FedDyn: dynamic regularisation aligns the clients' minima with the global one (Acar et al. 2021, Alg. 1).

Every client keeps g_k, its last gradient; the server keeps h, the mean of all clients' g_k; all are zero at first.

    client k:  theta_k <- argmin of  L_k(theta) - <g_k, theta> + alpha / 2 |theta - theta_server|^2
               g_k <- g_k - alpha (theta_k - theta_server)
    server:    h <- h - alpha / N sum over S of (theta_k - theta_server)
               theta_server <- mean of theta_k - h / alpha

The server keeps -h / alpha, which does not depend on alpha. The argmin is approximated by the client's SGD, as in the
paper's experiments. The paper weights all clients equally: weighting=plain. A part of a supernet uses the same part of
g_k and h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fedloom.platform.averaging.server import ServerTraits
from fedloom.platform.clients.local_rules import LinearCorrection, LocalClient, LocalRule
from fedloom.platform.plugins import declares
from fedloom.platform.settings import POSITIVE

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.averaging.server import ServerStep

GRADIENT, SHIFT = "gradient", "shift"


class FedDyn(LocalRule):
    """The clients' side: the regulariser's gradient - g_k + alpha (theta - theta_server), and the new g_k."""

    server = "feddyn"

    def __init__(self, *, alpha: Annotated[float, POSITIVE, "strength of FedDyn's regularisation"] = 0.01) -> None:
        self.alpha = alpha

    def begin(self, client: LocalClient) -> LinearCorrection:
        """Adds the regulariser's gradient to the gradient of the loss."""
        offsets = {name: -client.kept(GRADIENT, name) for name in client.parameters}
        return LinearCorrection(offsets, self.alpha, client.received)

    def end(self, client: LocalClient) -> None:
        """g_k <- g_k - alpha (theta_k - theta_server)."""
        for name, parameter in client.parameters.items():
            client.kept(GRADIENT, name).sub_(parameter - client.received[name], alpha=self.alpha)


@declares(ServerTraits(local_rule="feddyn", needs_every_contributor=True))
def feddyn(step: ServerStep) -> Tensor:
    """The server's side: the mean plus the sum of all mean changes so far, each times |S| / N."""
    shift = step.state(SHIFT)
    shift.add_(step.change, alpha=step.contributors / step.about.num_clients)
    return step.mean + shift
