"""NSGA-II (Deb et al. 2002), with pymoo's ask/tell interface, on integer architectures of one cost interval."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.termination import NoTermination

from fedloom.platform.search.base import Architecture, Interval, Scored, State
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.search.generations import GenerationSearch, Proposer, at_least
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
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import Genome, PlainGenome
from fedloom.tiers.costs import CostTable


class NSGA2Search(GenerationSearch):
    """FedorAS' search (stage 2): NSGA-II on metric and cost inside one tier; see `Searcher`.

    The first generation has `population` models, each later one `offspring`, and the last is cut at the budget.
    `mutation` is the probability per gene. `genome` draws, mutates and crosses (uniformly) architectures whose
    decisions have several genes; a saved state stores its repr.
    """

    name = "nsga2"

    def __init__(
        self,
        options: Sequence[int],
        table: CostTable,
        interval: Interval,
        seed: int,
        *,
        population: int = 128,
        offspring: int = 64,
        mutation: float = 0.1,
        budget: int = 1000,
        genome: Genome | None = None,
    ) -> None:
        super().__init__(options, table, interval, seed, budget=budget)
        if not 0 <= mutation <= 1:
            raise ValueError(f"mutation is {mutation}, it must be a probability between 0 and 1")
        self.population = at_least("population", population, 2)
        self.offspring = at_least("offspring", offspring, 1)
        self.mutation = mutation
        # None if every decision is one gene, so that earlier saved states stay valid.
        self.genome = None if isinstance(genome, PlainGenome) else genome

    def _settings(self) -> State:
        settings: State = {"population": self.population, "offspring": self.offspring, "mutation": self.mutation}
        return settings if self.genome is None else {**settings, "genome": repr(self.genome)}

    def _start(self) -> Proposer:
        rng = stream(self.seed, "nsga2", repr(self.interval.lower), repr(self.interval.upper))
        return _NSGA2Proposer(self, self._sampler, rng)


def _variation(search: NSGA2Search, sampler: IntervalSampler) -> dict[str, Any]:
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


class _NSGA2Proposer:
    """pymoo's NSGA2 with our operators; all its randomness comes from `rng`."""

    def __init__(self, search: NSGA2Search, sampler: IntervalSampler, rng: np.random.Generator) -> None:
        self.sampler = sampler
        self.rng = rng
        self.asked: set[Architecture] = set()
        self.individuals = Population.empty()
        self.exhausted = False
        self.algorithm = self._algorithm(search)

    def _algorithm(self, search: NSGA2Search) -> NSGA2:
        algorithm = NSGA2(
            pop_size=search.population,
            n_offsprings=search.offspring,
            **_variation(search, self.sampler),
            repair=IntervalRepair(self.sampler),
            eliminate_duplicates=NewOnly(self.asked),
            output=None,
        )
        last = np.array(search.options) - 1
        problem = Problem(len(last), n_obj=2, n_ieq_constr=1, xl=np.zeros_like(last), xu=last, vtype=int)
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
        """Tells pymoo (-metric, cost); failed models violate the constraint, so feasible ones always survive first."""
        objectives = np.array([(-s.metric if s.feasible else np.inf, s.cost) for s in scored])
        violation = np.array([[-1.0 if s.feasible else 1.0] for s in scored])
        self.individuals.set("F", objectives, "G", violation)
        self.algorithm.tell(infills=self.individuals)
