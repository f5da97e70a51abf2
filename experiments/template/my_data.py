"""A data set of arrays: machines whose state is read from four sensors, each machine with sensors of its own."""

from typing import Annotated

import numpy as np

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.settings import ONE_OR_MORE

SENSORS, STATES = 4, 3


def machines(
    _config: DataConfig,
    *,
    machines: Annotated[int, ONE_OR_MORE, "machines, each of which is a client"] = 12,
    readings: Annotated[int, ONE_OR_MORE, "readings per machine"] = 60,
) -> Arrays:
    """Readings (n, 4) with their states (n,) and machines (n,).

    A state has typical readings; a machine's sensors add an offset. Replace the body with code that reads your data.
    """
    rng = np.random.default_rng(0)
    machine = np.repeat(np.arange(machines), readings)
    state = rng.integers(STATES, size=len(machine))
    typical, offset = rng.normal(size=(STATES, SENSORS)), rng.normal(scale=0.5, size=(machines, SENSORS))
    x = typical[state] + offset[machine] + rng.normal(scale=0.3, size=(len(machine), SENSORS))
    return Arrays((x, state, machine), class_names=["idle", "busy", "broken"])
