"""The interface of labelled data sources that preparation reads."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray
from fedloom.platform.data.label_sets import LabelSet


class Source(ABC):
    """A data set with one label per input, as published, in the parts "train" and "test", and maybe "validation"."""

    kind: str = "image"
    """`image` for pixels (C, H, W) as bytes, `features` for floats of any shape."""
    client_names: Sequence[str] = ()
    """The names of the data set's natural clients, in order; empty if there are none."""
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None
    """Mean and standard deviation per channel of the inputs divided by `scale`; None for those of the training part."""

    has_validation: bool = False
    """Whether there is a third part, "validation", of which no client has a sample."""

    scale: float
    """The input value that is mapped to 1.0."""

    @property
    def label_sets(self) -> Mapping[str, LabelSet]:
        """Coarser classes with which the data set is published, by name."""
        return {}

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The names of the classes in the order of their labels."""

    @abstractmethod
    def identity(self) -> Fields:
        """The fields that determine the content, without local paths."""

    @abstractmethod
    def labels(self, part: str) -> IntArray:
        """Labels (n,) of all samples of the part."""

    @abstractmethod
    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        """Inputs (len(rows), ...) of the given samples of the part."""

    def clients(self, part: str) -> IntArray | None:
        """Each sample's index into `client_names` (n,); None if the clients are unknown."""
        del part
        return None
