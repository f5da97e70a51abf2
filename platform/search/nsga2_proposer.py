"""The models that NSGA-II proposes: pymoo's algorithm with operators on integer architectures.

pymoo's own discrete operators round floats and repair only some of the children; these only use integers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.crossover import Crossover
from pymoo.core.duplicate import DuplicateElimination
from pymoo.core.mutation import Mutation
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.repair import Repair
from pymoo.core.sampling import Sampling
from pymoo.core.termination import NoTermination

from fedloom.platform.search.base import Architecture, Scored
from fedloom.platform.search.config import SearchProblem
from fedloom.platform.search.constraint import TableConstraint, distance
from fedloom.platform.search.sampling import IntervalSampler, as_architecture, sample_new
from fedloom.platform.spaces.genome import Genome, Ints, PlainGenome


class DistinctSampling(Sampling):  # type: ignore[misc]
    """Distinct random architectures by `draw`; fewer than asked only if there are no more."""

    def __init__(self, draw: Callable[[int, np.random.Generator], list[Architecture]]) -> None:
        super().__init__()
        self.draw = draw

    def _do(self, problem: Any, n_samples: int, *_args: Any, random_state: np.random.Generator, **_: Any) -> Ints:
        new = self.draw(n_samples, random_state)
        return np.array(new, dtype=np.int64).reshape(len(new), problem.n_var)


class HalfGeneCrossover(Crossover):  # type: ignore[misc]
    """Two children, each with half of its genes, at random positions, swapped between the parents.

    An odd number of genes is rounded down or up at random.
    """

    def __init__(self) -> None:
        super().__init__(n_parents=2, n_offsprings=2, prob=1.0)

    def _do(self, _problem: Any, X: Ints, *_args: Any, random_state: np.random.Generator, **_: Any) -> Ints:
        _parents, matings, genes = X.shape
        half = (genes + random_state.integers(2, size=(matings, 1))) // 2
        positions = random_state.permuted(np.tile(np.arange(genes), (matings, 1)), axis=1)
        swapped = positions < half
        return np.stack([np.where(swapped, X[1], X[0]), np.where(swapped, X[0], X[1])])


class GenomeCrossover(Crossover):  # type: ignore[misc]
    """Two children per pair, each by the genome's uniform crossover."""

    def __init__(self, genome: Genome) -> None:
        super().__init__(n_parents=2, n_offsprings=2, prob=1.0)
        self.genome = genome

    def _do(self, _problem: Any, X: Ints, *_args: Any, random_state: np.random.Generator, **_: Any) -> Ints:
        a, b = X.astype(np.int64)
        return np.stack([self.genome.cross(a, b, random_state) for _child in range(2)])


class GenomeMutation(Mutation):  # type: ignore[misc]
    """Every gene changes with probability `probability` to another of its choices, uniformly."""

    def __init__(self, genome: Genome, probability: float) -> None:
        super().__init__(prob=1.0)
        self.genome = genome
        self.probability = probability

    def _do(self, _problem: Any, X: Ints, *_args: Any, random_state: np.random.Generator, **_: Any) -> Ints:
        return self.genome.mutate(X.astype(np.int64), self.probability, random_state)


class IntervalRepair(Repair):  # type: ignore[misc]
    """Moves every child into the interval by random single-gene changes, or replaces it by a random draw.

    A change must bring the cost strictly closer, so repairing terminates; changes that land inside are preferred, which
    preserves most of the parents' genes.
    """

    def __init__(self, sampler: IntervalSampler) -> None:
        super().__init__()
        self.sampler = sampler

    def _do(self, _problem: Any, X: Ints, *, random_state: np.random.Generator, **_: Any) -> Ints:
        repaired = [self.repair_one(as_architecture(row), random_state) for row in X]
        return np.array(repaired, dtype=np.int64).reshape(X.shape)

    def repair_one(self, architecture: Architecture, rng: np.random.Generator) -> Architecture:
        """The architecture itself if it is inside the interval, otherwise a repaired one."""
        if self.sampler.contains(architecture):
            return architecture
        supported = np.array(architecture, dtype=np.int64)
        for gene, choices in enumerate(self.sampler.supported):
            if supported[gene] not in choices:
                supported[gene] = rng.choice(choices)
        row: Ints | None = supported
        while row is not None:
            candidate = as_architecture(row)
            if self.sampler.contains(candidate):
                return candidate
            row = self._closer(row, rng)
        drawn = self.sampler.sample(rng)
        assert drawn is not None, "children exist only where the interval holds architectures"
        return drawn

    def _closer(self, row: Ints, rng: np.random.Generator) -> Ints | None:
        """A random single-gene change towards the interval; None if no change gets closer."""
        neighbours = np.repeat(row[None], sum(len(c) for c in self.sampler.supported), axis=0)
        start = 0
        for gene, choices in enumerate(self.sampler.supported):
            neighbours[start : start + len(choices), gene] = choices
            start += len(choices)
        distances = distance(self.sampler.table.costs(neighbours), self.sampler.interval)
        closer = np.flatnonzero(distances < distance(self.sampler.table.costs(row[None]), self.sampler.interval))
        inside = np.flatnonzero(distances == 0)
        if len(closer) == 0:
            return None
        moved: Ints = neighbours[rng.choice(inside if len(inside) else closer)]
        return moved


class NewOnly(DuplicateElimination):  # type: ignore[misc]
    """Drops architectures asked before, and duplicates among the children."""

    def __init__(self, asked: set[Architecture]) -> None:
        super().__init__()
        self.asked = asked

    def do(self, pop: Population, *others: Population, **_: Any) -> Population:
        """Returns the new individuals."""
        taken = {as_architecture(individual.X) for other in others for individual in other}
        new = []
        for index, individual in enumerate(pop):
            architecture = as_architecture(individual.X)
            if architecture not in taken and architecture not in self.asked:
                taken.add(architecture)
                new.append(index)
        return pop[new]


class NSGA2Proposer:
    """pymoo's NSGA2 with our operators; all its randomness comes from `rng`."""

    def __init__(self, problem: SearchProblem, sampler: IntervalSampler, rng: np.random.Generator) -> None:
        self.sampler, self.rng = sampler, rng
        self.asked: set[Architecture] = set()
        self.individuals = Population.empty()
        self.exhausted = False
        config, genome = problem.config, problem.genome
        self.ranks_cost = config.objectives == "metric_and_cost"
        if isinstance(genome, PlainGenome):
            sampling = DistinctSampling(lambda count, rng: sample_new(sampler, count, (), rng))
            crossover = HalfGeneCrossover()
        else:
            constraint = TableConstraint(problem.table, problem.interval, genome)
            sampling = DistinctSampling(lambda count, rng: constraint.sample(count, (), rng))
            crossover = GenomeCrossover(genome)
        algorithm = NSGA2(
            pop_size=config.population,
            n_offsprings=config.offspring,
            sampling=sampling,
            crossover=crossover,
            mutation=GenomeMutation(genome, config.mutation),
            repair=IntervalRepair(sampler),
            eliminate_duplicates=NewOnly(self.asked),
            output=None,
        )
        last = np.array(problem.options) - 1
        ends = {"xl": np.zeros_like(last), "xu": last, "vtype": int}
        space = Problem(len(last), n_obj=1 + self.ranks_cost, n_ieq_constr=1, **ends)
        # pymoo calls default_rng on the seed, which returns a given generator unchanged.
        self.algorithm = algorithm.setup(space, termination=NoTermination(), seed=rng)

    def propose(self, most: int) -> list[Architecture]:
        """The first population or the children of the current one, at most `most`."""
        if self.exhausted:
            return []
        first = not self.algorithm.is_initialized
        wanted = self.algorithm.pop_size if first else self.algorithm.n_offsprings
        bred = self.algorithm.ask()
        # pymoo terminates when mating finds nothing new; first sample the remaining architectures.
        self.algorithm.termination.force_termination = False
        new = [] if bred is None else [as_architecture(individual.X) for individual in bred][:most]
        missing = min(wanted, most) - len(new)
        if missing > 0:
            rest = sample_new(self.sampler, missing, self.asked.union(new), self.rng)
            self.exhausted = len(rest) < missing
            new += rest
        self.asked.update(new)
        self.individuals = Population.new("X", np.array(new, dtype=np.int64))
        return new

    def observe(self, scored: Sequence[Scored]) -> None:
        """Passes -metric, and the cost if it is ranked, to pymoo; failed models violate its constraint and die out."""
        objectives = np.array([(-s.metric if s.feasible else np.inf, s.cost)[: 1 + self.ranks_cost] for s in scored])
        violation = np.array([[-1.0 if s.feasible else 1.0] for s in scored])
        self.individuals.set("F", objectives, "G", violation)
        self.algorithm.tell(infills=self.individuals)
