"""An objective: clients minimise cross entropy with smoothed labels (Szegedy et al. 2016); it is measured as ever."""

from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.objectives import IGNORED, Objective
from fedloom.platform.settings import BELOW_ONE


class Smoothed(Objective):
    """The loss of training alone changes: scores on validation and test data stay comparable."""

    def __init__(self, *, smoothing: Annotated[float, BELOW_ONE, "share of the label for all classes"] = 0.1) -> None:
        self.smoothing = smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs, targets = self.targets(outputs, targets)
        return F.cross_entropy(outputs, targets, ignore_index=IGNORED, label_smoothing=self.smoothing)
