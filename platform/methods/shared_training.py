"""What a method declares about its training, so that runs that differ only in what follows can share it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedTraining:
    """The beginning of a method: its first `stages`.

    `later` names the parts of the method's configuration that they do not depend on.
    """

    later: tuple[str, ...]
    stages: int = 1
