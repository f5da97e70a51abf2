"""Power of choice (Cho et al. 2022, cpow-d): of some random clients those take part whose last loss is the largest."""

from math import inf
from typing import Annotated

from fedloom.platform.federation.selection import Choice
from fedloom.platform.settings import ONE_OR_MORE


def power_of_choice(
    choice: Choice, *, candidates: Annotated[int, ONE_OR_MORE, "clients that are drawn to choose from"] = 6
) -> list[int]:
    """Those that never took part come first."""

    def loss(client_id: int) -> float:
        known = choice.record(client_id).loss
        return inf if known is None else known

    drawn = choice.draw(max(candidates, choice.size))
    return sorted(drawn, key=loss, reverse=True)[: choice.size]
