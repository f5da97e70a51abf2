"""A processor: changes travel as small integers, in steps of the largest one (uniform quantisation)."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated

import torch
from annotated_types import Interval

from fedloom.platform.averaging.processors import Message, Processor, Traffic


@dataclass(frozen=True, kw_only=True)
class Quantise(Processor):
    """Rounds every change to one of 2^bits values, and counts the bits and the length of a step."""

    bits: Annotated[int, Interval(ge=2, le=16), "bits of a change"] = 8

    @torch.no_grad()
    def on_client(self, message: Message) -> Message:
        tensors = {name: message.update.tensors[name] for name in message.parameters}
        changes = {name: tensor - message.received[name] for name, tensor in tensors.items()}
        step = max(float(change.abs().max()) for change in changes.values()) / (2 ** (self.bits - 1) - 1) or 1.0
        for name, change in changes.items():
            tensors[name].copy_(message.received[name] + (change / step).round() * step)
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        saved_bytes = 4 * traffic.changes - ceil(self.bits * traffic.changes / 8) - 4
        return traffic._replace(up_bytes=traffic.up_bytes - saved_bytes)
