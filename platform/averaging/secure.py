"""Secure aggregation over slices, simulated: the server learns sums, never a client's update (Bonawitz et al. 2017).

    client i:  q_i <- its weighted change in fixed point, modulo 2^32
               sends, for every scalar s that it holds,
                   q_i,s + PRG(b_i)_s + sum over j > i that hold s of PRG(s_ij)_s - sum over j < i of PRG(s_ij)_s
    server:    adds what arrives: pairwise masks cancel among the clients that hold the same scalar and have answered;
               t survivors reveal their shares of the b_i of survivors and of the s_ij of clients that dropped out;
               the server removes these masks and reads the sum

If fewer than `least` clients hold a scalar, the server could read a client's value from the "sum"; clients send random
bits for such scalars instead, and these keep their old values. If all but one of a scalar's holders drop out, the
server can read the remaining value, though it does not use it: a limit of masks per slice, which a larger `least`
moves. The server never learns both b_i and all s_ij of the same client, so an update that arrives too late stays
hidden. Fewer than t shares reveal nothing about a secret (Shamir 1979).

Here pairs derive their seeds from the run's seed instead of by Diffie-Hellman, and torch's generator replaces a
cryptographic one: the simulation covers the arithmetic, the messages and their sizes, not the strength of keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.averaging.average import MASKED, TensorSum, Update, WeightedSums
from fedloom.platform.averaging.processors import Message, Processor, ServerContext, Traffic
from fedloom.platform.data.on_device import moved
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.slices import Region, Slice, Weights, difference, part_in, part_of

logger = logging.getLogger(__name__)

PRIME = 2**127 - 1
"""The field of Shamir's shares; secrets are seeds of 63 bits."""
KEY_BYTES, SHARE_BYTES = 32, 16 + 32
"""The sizes of a Curve25519 public key, and of an encrypted share with its nonce and tag."""
LOW, HIGH = -(2**31), 2**31


# -- shares of secrets -------------------------------------------------------------------------------------------------


def secret_shares(secret: int, holders: Sequence[int], needed: int, rng: np.random.Generator) -> dict[int, int]:
    """Shamir's share of a secret for each holder (ids of at least 0); any `needed` of them restore it."""
    words = [secret, *(int.from_bytes(rng.bytes(16), "little") % PRIME for _ in range(needed - 1))]

    def at(x: int) -> int:
        value = 0
        for word in reversed(words):
            value = (value * x + word) % PRIME
        return value

    return {holder: at(holder + 1) for holder in holders}


def restored_secret(shares: Mapping[int, int]) -> int:
    """The secret restored from enough shares (Lagrange's polynomial at 0)."""
    secret = 0
    for holder, share in shares.items():
        above = below = 1
        for other in shares:
            if other != holder:
                above = above * (other + 1) % PRIME
                below = below * (other - holder) % PRIME
        secret = (secret + share * above * pow(below, -1, PRIME)) % PRIME
    return secret


# -- a round -----------------------------------------------------------------------------------------------------------

Held = Mapping[str, Region]
"""The region that a client holds of each shared tensor."""


@dataclass(frozen=True)
class SecureAggregation(Processor):
    """Masks updates so that the server learns only their sums.

    Attributes:
        fraction_bits: the number of fractional bits in fixed point.
        survivors: the minimum share of a cohort that must answer for anything to be revealed.
    """

    fraction_bits: int = 16
    survivors: float = 0.5
    least_contributors = 2

    def begun(self, context: ServerContext) -> SecureRound:
        """The round's processor, which masks the regions that its clients hold."""
        held = {
            client: {piece.source: piece.region_of(context.old[piece.source]) for piece in slices.values()}
            for client, slices in context.held().items()
        }
        needed, names = needed_of(len(held), self.survivors), (context.stage, context.round)
        return SecureRound(context.seed, names, _shared(held), needed, self.fraction_bits, context.min_contributors)


def _shared(held: Mapping[int, Held]) -> dict[int, Held]:
    """What clients hold, as one object for all clients that hold the same, so that it is sent to workers only once."""
    different = list[Held]()
    for regions in held.values():
        if regions not in different:
            different.append(regions)
    return {client: different[different.index(regions)] for client, regions in held.items()}


@dataclass(frozen=True)
class SecureRound(Processor):
    """What all clients of a round agree on before it starts.

    Attributes:
        seed, names: the run's seed, and the stage and round, from which all secrets derive.
        held: what each client of the cohort holds.
        needed: t, the minimum number of survivors for anything to be revealed.
        fraction_bits: the number of fractional bits in fixed point.
        least: the minimum number of holders for a scalar to be summed.
    """

    seed: int
    names: tuple[str | int, ...]
    held: Mapping[int, Held]
    needed: int
    fraction_bits: int = 16
    least: int = 2

    def pair_seed(self, client: int, other: int) -> int:
        """The seed s_ij of the pair's masks, the same for both clients."""
        return self._secret("pair", min(client, other), max(client, other))

    def _secret(self, *what: str | int) -> int:
        return int(stream(self.seed, "secure", *self.names, *what).integers(2**63))

    # -- the client ------------------------------------------------------------------------------------------------

    def on_client(self, message: Message) -> Message:
        """The message with its update masked, and the bytes of the protocol's own messages in its traffic."""
        update = self.masked(message.client_id, message.update, message.received)
        return replace(message, update=update, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        (down, up), (more_down, more_up) = traffic, self.message_bytes
        return Traffic(
            down._replace(size_bytes=down.size_bytes + more_down), up._replace(size_bytes=up.size_bytes + more_up)
        )

    def masked(self, client: int, update: Update, received: Weights) -> Update:
        """The update as it is sent: its weighted changes in fixed point plus masks, as int32 modulo 2^32.

        Raises OverflowError if a sum of all clients' changes of this size would not fit.
        """
        tensors, slices = dict[str, Tensor](), dict[str, Slice]()
        private = _generator(self._secret("withheld", client))
        before = moved(received, torch.device("cpu"))
        for name, tensor in moved(update.tensors, torch.device("cpu")).items():
            piece, weight = update.slices[name], update.weights[name]
            if not tensor.is_floating_point():
                continue
            region = piece.region_of(tensor)
            fixed = self._fixed(difference(tensor.detach(), before[name]).double() * weight, name)
            fixed += _noise(fixed.shape, _generator(self._at(self._secret("own", client), piece.source)))
            holders = torch.ones(fixed.shape, dtype=MASKED)
            for other, sign, common in self._pairs(client, piece.source, region):
                mask = _noise(_shape(common), _generator(self._at(self.pair_seed(client, other), piece.source)))
                part_in(fixed, region, common).add_(mask, alpha=sign)
                part_in(holders, region, common).add_(1)
            withheld = holders < self.least
            tensors[name] = torch.where(withheld, _noise(fixed.shape, private), fixed)
            slices[name] = Slice(piece.source, region)
        return Update(tensors, slices, {name: update.weights[name] for name in tensors}, masked=True)

    def _fixed(self, change: Tensor, name: str) -> Tensor:
        scaled = (change * 2**self.fraction_bits).round()
        most = float(scaled.abs().max()) if scaled.numel() else 0.0
        if not most * len(self.held) < HIGH:
            raise OverflowError(
                f"secure aggregation: the change of {name} in fixed point ({most:g}) times {len(self.held)} clients "
                "does not fit 32 bits: clip, use weighting=plain, or fewer privacy.fraction_bits"
            )
        fixed: Tensor = scaled.to(torch.int64).to(MASKED)
        return fixed

    def _pairs(self, client: int, source: str, region: Region) -> Iterable[tuple[int, int, Region]]:
        """The other clients that hold a part of a region, each with the sign of the shared mask and with that part."""
        for other, held in sorted(self.held.items()):
            common = _common(region, held[source]) if other != client and source in held else None
            if common is not None:
                yield other, (1 if client < other else -1), common

    @staticmethod
    def _at(seed: int, source: str) -> int:
        return int(stream(seed, source).integers(2**63))

    # -- the server ------------------------------------------------------------------------------------------------

    def on_sums(self, sums: WeightedSums, context: ServerContext) -> WeightedSums:
        """The sums without masks; empty if too few clients have answered for anything to be revealed."""
        if not context.answered:
            return sums
        unmasked = self.unmasked(sums, context.answered, context.old)
        if unmasked is None:
            logger.warning(
                "%s, round %d: %d of %d clients answered, %d are needed to reveal their sum: nothing is learned",
                *(context.stage, context.round + 1, len(context.answered), len(self.held), self.needed),
            )
        return WeightedSums() if unmasked is None else unmasked

    def unmasked(self, sums: WeightedSums, survivors: Sequence[int], old: Weights) -> WeightedSums | None:
        """The sums of weighted values, as `WeightedSums.finish` takes them; None if too few have survived."""
        if len(survivors) < self.needed:
            return None
        helpers = sorted(survivors)[: self.needed]
        unmasked = WeightedSums(updates=sums.updates)
        totals = {name: part.total.clone() for name, part in sums.tensors.items() if part.total.dtype == MASKED}
        for client in survivors:
            seed = self._revealed("own", client, helpers)
            for source, region in self.held[client].items():
                if source in totals:
                    mask = _noise(_shape(region), _generator(self._at(seed, source)))
                    part_in(totals[source], sums.tensors[source].box, region).sub_(mask)
        for gone in sorted(set(self.held) - set(survivors)):
            for client in survivors:
                self._remove_pair(totals, sums, client, gone, helpers)
        for name, own_sum in sums.tensors.items():
            if name in totals:
                unmasked.tensors[name] = self._decoded(own_sum, totals[name], old[name])
        return unmasked

    def _remove_pair(
        self, totals: Mapping[str, Tensor], sums: WeightedSums, client: int, gone: int, helpers: Sequence[int]
    ) -> None:
        shared = [source for source in self.held[client] if source in self.held[gone] and source in totals]
        if not shared:
            return
        seed, sign = self._revealed("pair", min(client, gone), helpers, max(client, gone)), 1 if client < gone else -1
        for source in shared:
            common = _common(self.held[client][source], self.held[gone][source])
            if common is not None:
                mask = _noise(_shape(common), _generator(self._at(seed, source)))
                part_in(totals[source], sums.tensors[source].box, common).sub_(mask, alpha=sign)

    def _revealed(self, kind: str, client: int, helpers: Sequence[int], *other: int) -> int:
        """A secret, restored from the helpers' shares."""
        secret = self._secret(kind, client, *other)
        rng = stream(self.seed, "shares", *self.names, kind, client, *other)
        shares = secret_shares(secret, sorted(self.held), self.needed, rng)
        return restored_secret({helper: shares[helper] for helper in helpers})

    def _decoded(self, masked: TensorSum, total: Tensor, old: Tensor) -> TensorSum:
        """Converts a sum of weighted changes to one of weighted values, from which the mean is computed."""
        values = total.double() / 2**self.fraction_bits
        for region, coverage in masked.cells():
            part_in(values, masked.box, region).add_(part_of(old.cpu(), region).double(), alpha=coverage.weight)
        return TensorSum(masked.box, values.float(), masked.coverage)

    # -- messages --------------------------------------------------------------------------------------------------

    @cached_property
    def message_bytes(self) -> tuple[int, int]:
        """The bytes that a client receives and sends besides the update: keys, shares of secrets, revealed shares."""
        others = len(self.held) - 1
        down = others * (2 * KEY_BYTES + 2 * SHARE_BYTES)
        up = 2 * KEY_BYTES + others * 2 * SHARE_BYTES + (others + 1) * 16
        return down, up


def needed_of(clients: int, share: float) -> int:
    """The number t of survivors that a cohort needs: at least two, and more than half."""
    return min(clients, max(2, clients // 2 + 1, math.ceil(share * clients)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Uniform numbers modulo 2^32."""
    return torch.empty(tuple(shape), dtype=MASKED).random_(LOW, HIGH, generator=generator)


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _common(one: Region, other: Region) -> Region | None:
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None
