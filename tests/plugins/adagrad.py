"""Adagrad (Duchi et al. 2011) as a local optimiser: the larger a scalar's gradients were, the smaller are its steps."""

from typing import Annotated

from fedloom.platform.clients.optimizers import LocalStep, OptimizerTraits
from fedloom.platform.plugins import declares
from fedloom.platform.settings import POSITIVE


@declares(OptimizerTraits(elementwise=True))
def adagrad(step: LocalStep, *, eps: Annotated[float, POSITIVE, "what keeps first steps finite"] = 1e-10) -> None:
    """The sum s of squared gradients grows by g^2;  x <- x - lr g / (sqrt(s) + eps)."""
    for parameter, gradient, squares in zip(step.parameters, step.gradients, step.state("squares"), strict=True):
        squares.addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, squares.sqrt().add_(eps), value=-step.lr)
