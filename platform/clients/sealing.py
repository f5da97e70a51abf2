"""What a client does to its update for privacy: limited weights, and masks of secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedloom.platform.averaging.secure import SecureRound
from fedloom.platform.clients.assignments import ClientResult, TaskError
from fedloom.platform.spaces.base import once
from fedloom.platform.spaces.slices import Weights, extract

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.networks import Countable, Network
    from fedloom.platform.spaces.base import SearchSpace


def limited(update: Update, cap: float) -> dict[str, float]:
    """The weights divided by `cap` and limited to 1; counters, which would tell a client's samples, weigh 0."""
    return {
        name: min(weight / cap, 1.0) if update.tensors[name].is_floating_point() else 0.0
        for name, weight in update.weights.items()
    }


@dataclass(frozen=True)
class SecurePlan:
    """Secure aggregation of a round, as every client is told: who trains what, and `SecureRound`'s parameters."""

    networks: tuple[tuple[int, Countable], ...]
    seed: int
    place: tuple[str | int, ...]
    needed: int
    fraction_bits: int
    least: int

    def on(self, space: SearchSpace, weights: Weights) -> SecureRound:
        """The round, with the regions of these weights that the networks hold; found once per process and round."""
        known = once(space, "secure round", lambda _: dict[SecurePlan, SecureRound]())
        if self not in known:
            known.clear()
            whole = {name: tuple((0, n) for n in tensor.shape) for name, tensor in weights.items()}
            held = {
                client: {p.source: whole[p.source] if p.region is None else p.region for p in parts.values()}
                for client, parts in ((client, network.held(space)) for client, network in self.networks)
            }
            known[self] = SecureRound(self.seed, self.place, held, self.needed, self.fraction_bits, self.least)
        return known[self]


def sealed(
    secure: SecureRound, client_id: int, outcome: ClientResult, network: Network, weights: Weights
) -> ClientResult:
    """The outcome with its update behind masks, and the protocol's messages in its bytes; TaskError if it overflows."""
    assert outcome.update is not None, "it has trained"
    down, up = secure.message_bytes
    try:
        update = secure.masked(client_id, outcome.update, extract(weights, network.slices))
    except OverflowError as error:
        raise TaskError(str(error)) from error
    return replace(outcome, update=update, bytes_down=outcome.bytes_down + down, bytes_up=outcome.bytes_up + up)
