"""A distribution heuristic: everybody who can train the largest subnet gets it, the others a random one."""

from fedloom.platform.methods.distribution import Distribution
from fedloom.platform.spaces.slices import Architecture


def largest_first(distribution: Distribution) -> list[Architecture]:
    """One subnet per client, in the order of `distribution.client_ids`."""
    largest, places = distribution.space.largest, range(len(distribution.client_ids))
    return [largest if distribution.affords(place, largest) else distribution.draw(place) for place in places]
