"""The configuration of an architecture search by silos, which rounds it takes, and its checks."""

import logging
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from fedloom.platform.federation.world import World
from fedloom.platform.methods.mac_target import MacTarget
from fedloom.platform.methods.masking import BATCH, RUNNING
from fedloom.platform.methods.perturbation import search_steps
from fedloom.platform.methods.silos import check_validation
from fedloom.platform.settings import ONE_OR_MORE, POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import HasCells, with_cells

logger = logging.getLogger(__name__)


@dataclass
class ArchitectureSearchConfig:
    """When and how architectures are searched.

    `perturbation`: in every round t >= `start` (t_s) that is a multiple of `every` (tau), one edge of the normal and
    one of the reduction cell keeps only the operator that is most important on validation data. Rounds count from 0, as
    in Alg. 1 and in the tables: with 30 and 20 these are the rounds 40, 60, 80, and so on (SPIDER, Alg. 2, line 3).
    `milenas`: for `rounds` rounds, SGD with learning rate `lr` on architecture parameters, with the gradient on
    training data plus `validation_weight` times that on validation data; then every edge keeps the largest operator.
    """

    kind: Annotated[Literal["perturbation", "milenas"], "how architectures are searched"] = "perturbation"
    start: Annotated[int, ZERO_OR_MORE, "perturbation: no edge is decided in earlier rounds"] = 30
    every: Annotated[int, ONE_OR_MORE, "perturbation: decisions are made in rounds that are multiples of this"] = 20
    prune_edges: Annotated[bool, "perturbation: finally, every node keeps its two most important edges"] = False
    # The paper does not say which; its prose asks for the operator's effect alone, and its code uses the batch's.
    statistics: Annotated[
        Literal["batch", "running"],
        "perturbation: of batch norms in masked networks, those of the batch or the stored ones",
    ] = "batch"
    max_macs: Annotated[float | None, POSITIVE, "the most MACs of the architecture found; null: no limit"] = None
    rounds: Annotated[int, ONE_OR_MORE, "milenas: rounds of search"] = 400
    lr: Annotated[float, POSITIVE, "milenas: learning rate of the architecture parameters"] = 0.01
    validation_weight: Annotated[float, ZERO_OR_MORE, "milenas: weight of the gradients on validation data"] = 1.0


PARAMETER_FREE = ("none", "noise", "skip_connect", "max_pool_3x3", "avg_pool_3x3")


def searched_space(
    world: World, config: ArchitectureSearchConfig, rounds: int, who: str, *, share: float = 1.0
) -> HasCells:
    """The space; raises ValueError for an invalid search, and warns about edges that will not be searched.

    `share` is how many of the rounds whoever searches takes part in, on average.
    """
    space = with_cells(world.space, who)
    names = {name for names in space.operator_names for name in names}
    if config.prune_edges and config.kind == "milenas":
        raise ValueError("method.search.prune_edges: edges are pruned by perturbation, not by milenas; leave it out")
    if config.prune_edges and not names & set(PARAMETER_FREE):
        raise ValueError(
            f"method.search.prune_edges needs an operator without parameters ({', '.join(PARAMETER_FREE)}), and the "
            f"space has {', '.join(sorted(names))}: add one to space.operators, or leave it out"
        )
    check_validation(world, "search")
    if config.kind == "perturbation" and config.statistics == BATCH and world.data.sizes("validation").min() < 2:
        raise ValueError(
            f"method.search.statistics={BATCH}: a silo has a single validation sample, which has no variance; raise "
            f"data.validation_share, or set {RUNNING}"
        )
    _warn_of_unsearched(space, config, rounds, share)
    return space


def check_target(space: HasCells, config: ArchitectureSearchConfig, base_cells: int = 0) -> None:
    """Raises ValueError if no architecture is within the target, given cells that keep all operators."""
    if config.max_macs is None:
        return
    least = MacTarget.of(space, config.max_macs, base_cells).least(space.largest_subspace)
    if least > config.max_macs:
        base = f", with {base_cells} cells as a base that keeps all operators" if base_cells else ""
        raise ValueError(
            f"method.search.max_macs={config.max_macs:g}: the smallest architecture of {space.name} has {least:g}"
            f"{base}; raise it, or lower space.channels or space.cells"
        )


def only_by(kind: str, search: ArchitectureSearchConfig, name: str) -> None:
    """Raises ValueError if the kind of search is not the method's."""
    if search.kind != kind:
        raise ValueError(f"method.search.kind={search.kind}: {name} searches by {kind}")


def _warn_of_unsearched(space: HasCells, config: ArchitectureSearchConfig, rounds: int, share: float) -> None:
    left, made = unsearched_edges(space, config, rounds, share), steps_made(config, rounds, share)
    if left and config.max_macs is not None:
        raise ValueError(
            f"method.search.max_macs: {left} of {len(space.options)} edges keep all operators until the last round, "
            "whatever MACs they have; search earlier or more often, or train for more rounds"
        )
    if left and config.kind == "milenas":
        logger.warning(
            "none of the %d edges will be decided before the last round: lower method.search.rounds (%d), or train for "
            "more than %d rounds",
            left,
            config.rounds,
            config.rounds + 1,
        )
    elif left:
        logger.warning(
            "%d of %d edges will not be searched before the last round: lower method.search.start or "
            "method.search.every, or train for more rounds",
            left,
            len(space.options),
        )
    elif config.prune_edges and search_steps(space, prune_edges=True) > made:
        logger.warning(
            "not all edges will be pruned before the last round: that takes %d search rounds, there are %d",
            search_steps(space, prune_edges=True),
            made,
        )


def turns(config: ArchitectureSearchConfig, rounds: int) -> int:
    """The number of search steps that are due in the first `rounds` rounds, rounds that are multiples of `every`."""
    return len(range(_first(config), rounds, config.every))


def _first(config: ArchitectureSearchConfig) -> int:
    return math.ceil(config.start / config.every) * config.every


def steps_made(config: ArchitectureSearchConfig, rounds: int, share: float) -> int:
    """The search steps before the last round of whoever takes part in this share of the rounds, on average.

    A missed step is made up for in a later round, one in each.
    """
    return min(turns(config, rounds - 1), math.floor(share * len(range(_first(config), rounds - 1))))


def unsearched_edges(space: HasCells, config: ArchitectureSearchConfig, rounds: int, share: float = 1.0) -> int:
    """The number of edges undecided before the last round, in which the cosine schedule's learning rate is zero."""
    if config.kind == "milenas":
        return 0 if rounds > config.rounds + 1 else sum(options > 1 for options in space.options)
    choices = [sum(space.options[d] > 1 for d in space.decisions(t)) for t in ("normal", "reduction")]
    return sum(max(0, count - steps_made(config, rounds, share)) for count in choices)
