"""Compression of messages: top-k with error feedback, QSGD and uniform quantisation; and clipping and noise before it.

top_k (Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory", Alg. 1; here for a round's change instead of a
step's gradient), with the client's memory m, initially 0:

    p <- the change + m
    sends the largest share `share` of p by magnitude, over all parameters together, and its positions
    m <- p - what was sent

qsgd (Alistarh et al. 2017, "QSGD", Sec. 3.1), for every tensor v of the change, with s levels:

    sends |v|_2, and for every scalar its sign and a level: s |v_i| / |v|_2, rounded up or down at random without bias
    the receiver reads |v|_2 sign level / s

uniform: the same with the largest |v_i| in place of |v|_2, and as many levels as fit into `bits` with their signs.

**Bytes.** A value costs 4 bytes. The positions cost one bit per parameter or 4 bytes per value sent, whichever is less.
A level with its sign takes the smallest whole number of bits that tells all signed levels apart, and each tensor takes
4 bytes more for its scale. (QSGD's Elias code is shorter if most levels are 0, but its length depends on the values, so
it is not known before a run.) Buffers such as running statistics, and what local rules send, are not compressed.

**From the server.** With `direction` down or both, quantisers also encode the shared weights, once per round and as
whole tensors. Clients start from slices of the decoded weights; a slice costs its own levels and the scales of its
tensors. The server keeps the exact weights w and adds the mean change to them, so the next round's message makes up for
what rounding lost (error feedback with w as the memory):

    server:  w' <- decoded(encoded(w)), to all clients
             w <- w + mean change from w' where clients cover it

top_k cannot compress in this direction: a client that missed a round lacks the weights to which changes would be added.

**Slices.** The memory is in the coordinates of the shared weights: a client that trains other slices in a later round
adds what it has not yet sent of those slices. Tensors of weight 0, such as an operator that no path of the round has
used (OPA), do not count in the mean: nothing of them is sent, and their memory stays. **Privacy.** The clipping of
`method.train.privacy` comes last and bounds all that arrives, including what comes from the memory; what it cuts off is
not remembered.

For a single tensor, GRACE's top-k with residual memory sends and remembers the same bits in every round; for several,
it selects within each tensor, here over all of them. Its QSGD gives the same levels for the same random draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from fedloom.platform.averaging.privacy import clip_changes
from fedloom.platform.averaging.processors import (
    Message,
    Payload,
    Processor,
    ServerContext,
    Traffic,
    smallest,
    with_fewer,
)
from fedloom.platform.data.on_device import upload
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, SHARE, ZERO_OR_MORE
from fedloom.platform.spaces.slices import FLOAT_BYTES, Weights


@dataclass(frozen=True, kw_only=True)
class Clip(Processor):
    """Scales a client's change, over all parameters, to a norm of at most `max_norm`; for an epsilon, use `privacy`."""

    max_norm: Annotated[float, POSITIVE, "clip: the largest Euclidean norm of a client's change"] = 1.0
    kind = "clip"

    def on_client(self, message: Message) -> Message:
        clip_changes({n: message.update.tensors[n] for n in message.parameters}, message.received, self.max_norm)
        return message


@dataclass(frozen=True, kw_only=True)
class Noise(Processor):
    """Adds Gaussian noise to every parameter's change before it leaves the client; no epsilon is accounted for."""

    noise_std: Annotated[float, ZERO_OR_MORE, "noise: the standard deviation of the noise on every change"] = 0.01
    kind = "noise"

    def on_client(self, message: Message) -> Message:
        generator = message.generator("noise")
        for name, change in message.changes().items():
            noise = upload(torch.randn(change.shape, generator=generator), change.device)
            message.send({name: change + self.noise_std * noise})
        return message


@dataclass(frozen=True, kw_only=True)
class TopK(Processor):
    """Sends the largest changes, and adds what it has not sent to the client's change in its next round."""

    share: Annotated[float, SHARE, "top_k: the share of the changes that is sent"] = 0.1
    shortens_updates = True
    kind = "sparsify"

    @torch.no_grad()
    def on_client(self, message: Message) -> Message:
        weights = message.update.weights
        memory = {name: message.memory("top_k", name) for name in message.parameters if weights[name]}
        changes = {
            name: change + memory[name] if name in memory else torch.zeros_like(change)
            for name, change in message.changes().items()
        }
        for name, left_out in smallest(changes, self.share).items():
            if name not in memory:
                continue
            tensor = message.update.tensors[name]
            # Not received + change: with an empty memory, the sent values keep their bits.
            tensor.copy_(torch.where(left_out, message.received[name], tensor + memory[name]))
            memory[name].copy_(changes[name] * left_out)
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        return traffic._replace(up=with_fewer(traffic.up, self.share))


@dataclass(frozen=True)
class Encoded:
    """A tensor as it is sent: whole levels from -s to s, and the value of level s, `scale`."""

    levels: Tensor
    scale: float
    s: int

    def decoded(self) -> Tensor:
        """The values that the levels stand for."""
        return self.levels * (self.scale / self.s)


def encoded(values: Tensor, scale: float, s: int, generator: torch.Generator) -> Encoded:
    """The values in whole levels, rounded at random without bias; 0 stays 0.

    No magnitude may be above `scale`.
    """
    if not scale:
        return Encoded(torch.zeros_like(values), 0.0, s)
    # Drawn in main memory: the same numbers on every device.
    draws = upload(torch.rand(values.shape, generator=generator), values.device)
    levels = (values.abs() / scale * s + draws).floor_().clamp_(max=s)
    return Encoded(levels * values.sign(), scale, s)


def quantised_bytes(scalars: int, tensors: int, s: int) -> int:
    """The size in bytes of `scalars` values in levels from -s to s, with one scale per tensor."""
    bits = (2 * s).bit_length()
    return -(-bits * scalars // 8) + FLOAT_BYTES * tensors


Direction = Literal["up", "down", "both"]
"""What is encoded: clients' changes, the server's weights, or both."""


@dataclass(frozen=True, kw_only=True)
class Quantiser(Processor):
    """Base of processors that send levels; override `s` and `scale_of`."""

    direction: Annotated[Direction, "encodes what clients send (up), what they receive (down), or both"] = "up"
    kind = "quantise"

    @property
    def s(self) -> int:
        """The number of levels above 0."""
        raise NotImplementedError

    def scale_of(self, values: Tensor) -> float:
        """The value of a tensor's highest level."""
        raise NotImplementedError

    def read(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """A tensor as the receiver decodes it."""
        return encoded(values, self.scale_of(values), self.s, generator).decoded()

    @torch.no_grad()
    def on_weights(self, parameters: Weights, context: ServerContext) -> Weights | None:
        if self.direction == "up":
            return None
        generator = torch_stream(context.seed, "quantise", context.stage, context.round)
        return {name: self.read(tensor, generator) for name, tensor in parameters.items()}

    @torch.no_grad()
    def on_client(self, message: Message) -> Message:
        if self.direction != "down":
            generator = message.generator("quantise")
            message.send({name: self.read(change, generator) for name, change in message.changes().items()})
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        down, up = traffic
        return Traffic(
            down if self.direction == "up" else self.in_levels(down),
            up if self.direction == "down" else self.in_levels(up),
        )

    def in_levels(self, payload: Payload) -> Payload:
        """The payload if its scalars are sent as levels."""
        return payload.recoded(quantised_bytes(payload.scalars, payload.tensors, self.s))


@dataclass(frozen=True, kw_only=True)
class Qsgd(Quantiser):
    """QSGD: levels as fractions of the tensor's Euclidean norm."""

    levels: Annotated[int, Interval(ge=1, le=32767), "qsgd: s, the levels above 0; 7 take 4 bits, sign included"] = 7

    @property
    def s(self) -> int:
        return self.levels

    def scale_of(self, values: Tensor) -> float:
        return float(values.double().norm().float())


@dataclass(frozen=True, kw_only=True)
class Uniform(Quantiser):
    """Uniform quantisation with stochastic rounding: levels as fractions of the tensor's largest magnitude."""

    bits: Annotated[Literal[4, 8], "uniform: bits per value, sign included"] = 8

    @property
    def s(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def scale_of(self, values: Tensor) -> float:
        return float(values.abs().max()) if values.numel() else 0.0
