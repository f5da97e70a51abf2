"""The models that NSGA-II proposes: pymoo's algorithm with our operators."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.termination import NoTermination

from fedloom.platform.search.base import Architecture, Interval, Scored
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.search.operators import (
    ConstraintSampling,
    GenomeCrossover,
    GenomeMutation,
    HalfGeneCrossover,
    IntervalRepair,
    NewOnly,
    OptionMutation,
    TierSampling,
)
from fedloom.platform.search.sampling import IntervalSampler, as_architecture, sample_new
from fedloom.platform.spaces.genome import Genome
from fedloom.tiers.costs import CostTable


class Breeding(Protocol):
    """What NSGA-II is given: the options per decision, costs and their interval, and its own settings."""

    options: tuple[int, ...]
    table: CostTable
    interval: Interval
    population: int
    offspring: int
    mutation: float
    genome: Genome | None
    ranks_cost: bool


def _variation(search: Breeding, sampler: IntervalSampler) -> dict[str, Any]:
    """The operators that draw, cross and mutate."""
    if search.genome is None:
        return {
            "sampling": TierSampling(sampler),
            "crossover": HalfGeneCrossover(),
            "mutation": OptionMutation(search.mutation),
        }
    return {
        "sampling": ConstraintSampling(TableConstraint(search.table, search.interval, search.genome)),
        "crossover": GenomeCrossover(search.genome),
        "mutation": GenomeMutation(search.genome, search.mutation),
    }


class NSGA2Proposer:
    """pymoo's NSGA2 with our operators; all its randomness comes from `rng`."""

    def __init__(self, search: Breeding, sampler: IntervalSampler, rng: np.random.Generator) -> None:
        self.sampler = sampler
        self.rng = rng
        self.asked: set[Architecture] = set()
        self.individuals = Population.empty()
        self.exhausted = False
        self.ranks_cost = search.ranks_cost
        self.algorithm = self._algorithm(search)

    def _algorithm(self, search: Breeding) -> NSGA2:
        algorithm = NSGA2(
            pop_size=search.population,
            n_offsprings=search.offspring,
            **_variation(search, self.sampler),
            repair=IntervalRepair(self.sampler),
            eliminate_duplicates=NewOnly(self.asked),
            output=None,
        )
        last = np.array(search.options) - 1
        ends = {"xl": np.zeros_like(last), "xu": last, "vtype": int}
        problem = Problem(len(last), n_obj=1 + self.ranks_cost, n_ieq_constr=1, **ends)
        # pymoo calls default_rng on the seed, which returns a given generator unchanged.
        return algorithm.setup(problem, termination=NoTermination(), seed=self.rng)

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
        """Tells pymoo -metric, and the cost if it ranks; failed models violate the constraint: sound ones survive."""
        objectives = np.array([(-s.metric if s.feasible else np.inf, s.cost)[: 1 + self.ranks_cost] for s in scored])
        violation = np.array([[-1.0 if s.feasible else 1.0] for s in scored])
        self.individuals.set("F", objectives, "G", violation)
        self.algorithm.tell(infills=self.individuals)
