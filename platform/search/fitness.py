"""A fitness of elastic subnets that needs no training, and the path of the fittest (DeepFedNAS, arXiv 2601.15127).

    F(subnet) = sum over stages of log(V) * sum of log(w)  -  10 exp(variance of the stages' depths)  +  1000 rho
    rho       = L / geometric mean of w; a subnet with rho above .31 is excluded

V is the number of values in a stage's output, w = inputs * kernel / groups of each of the L convolutions of stem and
stages. The paper's other width multipliers are fixed in our spaces, and so is its penalty on decreasing channels.
Constants: the authors' code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from fedloom.platform.search.base import Interval
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.search.predictors import search_predicted
from fedloom.platform.spaces.base import SearchSpace, once
from fedloom.platform.spaces.capabilities import HasBlocks, with_blocks
from fedloom.platform.spaces.genome import ElasticGenome, Floats, Ints, as_array
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.tcn import CausalConv
from fedloom.tiers.costs import CostTable

UNEVEN, EFFECTIVE, MOST_RHO = 10.0, 1000.0, 0.31
"""The weights of uneven depths and of the effectiveness rho, and the largest rho."""


@dataclass(frozen=True)
class Fitness:
    """The fitness of subnets from their features (`Genome.one_hot`), in which all sums are linear.

    Attributes:
        entropy, log_widths, layers: each feature's contribution to the sums, (features,).
        depths: the number of blocks that each feature adds to each stage, (stages, features).
        stem: the sum of log(w) and the number of the stem's convolutions.
    """

    entropy: Floats
    log_widths: Floats
    layers: Floats
    depths: Floats
    stem: tuple[float, int]

    def __call__(self, features: Floats) -> Floats:
        """Fitnesses (n,) of features (n, f); minus infinity where rho is too large."""
        log_sum, count = self.stem
        # Row by row: in a matrix product a row's last bit may depend on the rows beside it.
        entropy, log_widths, layers = ((features * w).sum(axis=1) for w in (self.entropy, self.log_widths, self.layers))
        layers = layers + count
        rho = layers / np.exp((log_widths + log_sum) / layers)
        uneven = np.exp(np.var(features @ self.depths.T, axis=1))
        values: Floats = entropy - UNEVEN * uneven + EFFECTIVE * rho
        return np.where(rho > MOST_RHO, -np.inf, values)


def _log_widths(module: nn.Module) -> list[float]:
    """log(w) of each convolution: w is the size of one output channel's filter."""
    filters = [m.weight for m in module.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)]
    filters += [m.direction for m in module.modules() if isinstance(m, CausalConv)]
    return [math.log(f[0].numel()) for f in filters]


def fitness_of(space: SearchSpace) -> Fitness:
    """The fitness of a space's subnets; ValueError for a space without blocks."""
    known = with_blocks(space, "DeepFedNAS' fitness")
    return once(space, "fitness", lambda _: _fitness_of(known))


def _fitness_of(space: HasBlocks) -> Fitness:
    stages = space.genome.stages
    columns: list[tuple[float, float, int, int, int]] = []
    for index, stage in enumerate(stages):
        volume = math.log(space.stage_inputs[index + 1].numel())
        columns += [(0.0, 0.0, 0, index, 0)] * (stage.most - stage.fewest + 1)
        for block, width in itertools.product(range(stage.most), range(stage.widths)):
            log_filters = _log_widths(on_meta(partial(space.design.build_block, index, block, width)))
            if not log_filters:
                raise ValueError(f"space {space.name}: DeepFedNAS' fitness needs convolutions, and it has none")
            columns.append((volume * math.fsum(log_filters), math.fsum(log_filters), len(log_filters), index, 1))
    entropy, log_widths, layers, of_stage, blocks = (
        np.array(column, dtype=np.float64) for column in zip(*columns, strict=True)
    )
    depths = np.where(of_stage == np.arange(len(stages))[:, None], blocks, 0.0)
    stem = _log_widths(on_meta(space.design.build_stem))
    return Fitness(entropy, log_widths, layers, depths, (math.fsum(stem), len(stem)))


def path_of_the_fittest(space: SearchSpace, limits: int) -> tuple[Architecture, ...]:
    """The fittest subnet within each of `limits` MACs limits, in equal steps from the smallest subnet to the largest.

    Evolution with a fixed seed, then hill climbing until no change of one depth or width helps: the path depends only
    on the space. Limits that share a subnet shorten it, and fitness rises along it. ValueError if no subnet is found.
    """
    known = with_blocks(space, "DeepFedNAS' path")
    return once(space, f"path of {limits}", lambda _: _path(known, limits))


def _path(space: HasBlocks, limits: int) -> tuple[Architecture, ...]:
    fitness, table, genome = fitness_of(space), space.cost_table("macs"), space.genome

    def score(architectures: Ints) -> Floats:
        return fitness(genome.one_hot(architectures))

    path: dict[Architecture, None] = {}
    for limit in np.linspace(table.smallest, table.largest, limits).tolist():
        within = TableConstraint(table, Interval(-math.inf, limit), genome)
        best = search_predicted(genome, score, within, seed=0, name=f"path {limit:.10g}", keep=1, generations=30)
        # The best subnet of the previous limit is within this limit, too.
        starts = [*(candidate.architecture for candidate in best), *list(path)[-1:]]
        tops = [_climbed(start, genome, score, table, limit) for start in starts]
        if tops:
            path[max(tops, key=lambda a: float(score(as_array([a]))[0]))] = None
    if not path:
        raise ValueError(f"space {space.name}: rho of all subnets is above {MOST_RHO}: their layers are too narrow")
    return tuple(path)


def _climbed(
    start: Architecture, genome: ElasticGenome, score: Callable[[Ints], Floats], table: CostTable, limit: float
) -> Architecture:
    """The subnet reached by hill climbing from `start`: no change of one gene within the limit is fitter."""
    best, fitness = start, float(score(as_array([start]))[0])
    while True:
        near = genome.neighbours(best)
        scores = np.where(table.costs(near) <= limit, score(near), -np.inf)
        row = int(np.argmax(scores))
        if scores[row] <= fitness:
            return best
        best, fitness = tuple(near[row].tolist()), float(scores[row])
