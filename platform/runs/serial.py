"""The executor of runs whose clients train one after the other, in the process of the driver."""

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.world import World


def make_serial(world: World) -> SerialExecutor:
    """Trains the world's clients in this process."""
    return SerialExecutor(Worker(world.spec))
