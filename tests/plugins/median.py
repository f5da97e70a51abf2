"""An aggregator: the median of what clients send, which a minority cannot move at will (Yin et al. 2018, Alg. 1)."""

from torch import Tensor, quantile

from fedloom.platform.averaging.aggregators import Cell


def median(cell: Cell) -> Tensor:
    """Of every scalar among the clients that hold it, whatever they weigh; of an even number the middle of two."""
    return quantile(cell.values_n, 0.5, dim=0)
