"""SCAFFOLD: control variates correct the drift of clients with different data (Karimireddy et al. 2020, Alg. 1).

The server keeps c, every client its c_i; all are zero at first, and c is always the mean of all clients' c_i.

    client i:  y <- x;  in every step  y <- y - eta (g_i(y) - c_i + c)
               c_i+ <- (I) the gradient of its data at x,  or  (II) c_i - c + (x - y) / (K eta)
               sends y and c_i+ - c_i
    server:    x <- mean of y;  c <- c + |S| / N times the mean of c_i+ - c_i

A client that trains a part of a supernet corrects, keeps and sends that part alone, and K is the number of steps that
reached a tensor. The paper weights all clients equally: weighting=plain.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from fedloom.platform.clients.local_rules import LinearCorrection, LocalClient, LocalRule, not_plain
from fedloom.platform.clients.training import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.averaging.server import ServerStep
    from fedloom.platform.clients.training import LocalSGD

CONTROL, OWN = "control", "own"


class Scaffold(LocalRule):
    """The correction c - c_i of every gradient, and both options for the new c_i."""

    shared = (CONTROL,)

    def __init__(
        self,
        *,
        option: Annotated[
            int, Interval(ge=1, le=2), "SCAFFOLD's c_i: 1, the gradient at x (one more pass); 2, the mean step"
        ] = 2,
    ) -> None:
        self.option = option
        self.extra_passes = 1 if option == 1 else 0

    def refuses(self, local: LocalSGD) -> str | None:
        """For option 2, refuses settings where x - y is not the sum of gradients, such as momentum or clipping."""
        if self.option == 1:
            return None
        why = "option 2 takes x - y for the sum of the gradients"
        if local.clip_norm:
            return f"clip_norm={local.clip_norm:g}: {why}; use clip_norm=0"
        if local.optimizer == PLAIN and local.momentum:
            return f"momentum={local.momentum:g}: {why}; use momentum=0"
        return not_plain(local, why)

    def begin(self, client: LocalClient) -> LinearCorrection:
        """Every gradient is corrected by c - c_i."""
        gradient_at_x = client.gradients() if self.option == 1 else {}
        drift = {name: client.shared(CONTROL, name) - client.kept(OWN, name) for name in client.parameters}
        client.notes = (gradient_at_x, steps := Counter[str]())
        return LinearCorrection(drift, steps=(steps,))

    def end(self, client: LocalClient) -> None:
        """Keeps c_i+ and sends c_i+ - c_i; a tensor that no step has reached or moved keeps its c_i."""
        gradient_at_x, steps = client.notes
        for name, parameter in client.parameters.items():
            # Where a cosine ends at a rate of 0, option II would divide 0 by 0.
            if not steps[name] or (self.option != 1 and not client.local.lr):
                continue
            control = client.kept(OWN, name)
            if self.option == 1:
                change = gradient_at_x[name] - control
            else:
                mean_step = (client.received[name] - parameter) / (steps[name] * client.local.lr)
                change = mean_step - client.shared(CONTROL, name)
            client.send(CONTROL, name, change, weight=1.0)
            control.add_(change)

    def merge(self, step: ServerStep) -> Tensor:
        """c <- c + |S| / N times the mean change over the clients that hold the region."""
        return step.old + step.contributors / step.about.num_clients * step.mean
