"""What preparation asks of a place that data come from: inputs with labels, or text as tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray


class Source(ABC):
    """Inputs with one label each, as published; parts are "train" and "test"."""

    kind: str = "image"
    """`image` for bytes (C, H, W) of pixels, `features` for floats of any shape."""
    client_names: Sequence[str] = ()
    """The clients that the data set is published with, in order; empty if there are none."""
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None
    """Mean and standard deviation per channel of the inputs divided by `scale`; None: those of the training part."""

    scale: float
    """The input value that stands for 1.0."""

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The classes in the order of their labels."""

    @abstractmethod
    def identity(self) -> Fields:
        """What determines the content, without paths of this machine."""

    @abstractmethod
    def labels(self, part: str) -> IntArray:
        """Labels (n,) of all samples of the part."""

    @abstractmethod
    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        """Inputs (len(rows), ...) of the given samples of the part."""

    def clients(self, part: str) -> IntArray | None:
        """For each sample of the part the place of its client in `client_names` (n,); None if it is not known."""
        del part
        return None
