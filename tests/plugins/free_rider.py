"""An attack: clients that take the model and train for nobody but themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.platform.averaging.attacks import Attack


@dataclass(frozen=True, kw_only=True)
class FreeRider(Attack):
    """Sends back what it has received, and noise that looks like work."""

    noise: float = 0.001

    def change(self, change: Tensor, generator: torch.Generator) -> Tensor:
        return self.noise * torch.randn(change.shape, generator=generator).to(change)
