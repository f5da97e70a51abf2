"""A processor: changes travel as small integers, in steps of the largest one (uniform quantisation)."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Literal

from fedloom.platform.averaging.processors import Message, Processor, Traffic


@dataclass(frozen=True, kw_only=True)
class Quantise(Processor):
    """Rounds every change to one of 2^bits values, and counts the bits and the length of a step."""

    bits: Annotated[Literal[2, 3, 4, 8, 16], "bits of a change"] = 8
    kind = "quantise"

    def on_client(self, message: Message) -> Message:
        changes = message.changes()
        step = max(float(change.abs().max()) for change in changes.values()) / (2 ** (self.bits - 1) - 1) or 1.0
        message.send({name: (change / step).round() * step for name, change in changes.items()})
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        return traffic._replace(up=traffic.up.recoded(ceil(self.bits * traffic.up.scalars / 8) + 4))
