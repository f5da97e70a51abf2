"""Evolutionary search inside a constraint (Cai et al. 2020, Once-for-All; SuperFedNAS, search stage)."""

from collections.abc import Callable, Sequence

import numpy as np

from fedloom.platform.search.base import Architecture, Interval, Scored, State, rank
from fedloom.platform.search.constraint import Constraint, TableConstraint, add_new
from fedloom.platform.search.generations import GenerationSearch, Proposer, at_least
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import Genome, Ints, PlainGenome, as_array
from fedloom.tiers.costs import CostTable

BREEDING = (2, 4, 8)
"""Children created per wanted child, by attempt; only those inside the constraint are kept."""
USEFUL = 0.02
"""Breeding stops early if a smaller share of the children is new and inside."""


class Evolution:
    """Proposes generations of `population` architectures; see `generations.Proposer`.

    The parents are the best `parents` x `population` of all observed models. Half of the children are mutants, whose
    genes change with probability `mutation`; half are uniform crossovers of two parents. All lie inside the constraint
    and none was proposed before; missing children are sampled at random.
    Raises ValueError if a setting is out of range.
    """

    def __init__(
        self,
        genome: Genome,
        constraint: Constraint,
        rng: np.random.Generator,
        *,
        population: int = 100,
        parents: float = 0.25,
        mutation: float = 0.1,
    ) -> None:
        check_settings(population, parents, mutation)
        self.genome = genome
        self.constraint = constraint
        self.rng = rng
        self.population = population
        self.num_parents = max(1, round(parents * population))
        self.mutation = mutation
        self.asked: set[Architecture] = set()
        self.parents: list[Scored] = []

    def propose(self, most: int) -> list[Architecture]:
        """At most `most` new distinct architectures inside the constraint; empty if no more are found."""
        wanted = min(self.population, most)
        new: dict[Architecture, None] = {}
        if self.parents:
            rows = as_array([s.architecture for s in self.parents])
            self._breed(new, wanted // 2, lambda count: self._mutants(rows, count))
            self._breed(new, wanted - wanted // 2, lambda count: self._crossed(rows, count))
        if len(new) < wanted:
            rest = self.constraint.sample(wanted - len(new), self.asked.union(new), self.rng)
            new.update(dict.fromkeys(rest))
        self.asked.update(new)
        return list(new)

    def observe(self, scored: Sequence[Scored]) -> None:
        """Keeps the best feasible models as parents."""
        alive = [*self.parents, *(s for s in scored if s.feasible)]
        self.parents = sorted(alive, key=rank)[: self.num_parents]

    def _breed(self, new: dict[Architecture, None], count: int, breed: Callable[[int], Ints]) -> None:
        most = len(new) + count
        for times in BREEDING:
            found = len(new)
            children = breed(times * count)
            add_new(new, children[self.constraint.inside(children)], self.asked, most)
            if len(new) >= most or len(new) - found < USEFUL * len(children):
                return

    def _mutants(self, parents: Ints, count: int) -> Ints:
        chosen = self.rng.integers(len(parents), size=count)
        return self.genome.mutate(parents[chosen], self.mutation, self.rng)

    def _crossed(self, parents: Ints, count: int) -> Ints:
        mothers = self.rng.integers(len(parents), size=count)
        # Two different parents if there are two, because crossing an architecture with itself gives the same one.
        fathers = (mothers + self.rng.integers(1, max(len(parents), 2), size=count)) % len(parents)
        return self.genome.cross(parents[mothers], parents[fathers], self.rng)


class EvolutionSearch(GenerationSearch):
    """Evolution with measured scores (SuperFedNAS without predictors); see `Searcher` and `Evolution`.

    `genome` mutates and crosses architectures, by default with one gene per decision; a saved state stores its repr.
    """

    name = "evolution"

    def __init__(
        self,
        options: Sequence[int],
        table: CostTable,
        interval: Interval,
        seed: int,
        *,
        population: int = 100,
        parents: float = 0.25,
        mutation: float = 0.1,
        budget: int = 1000,
        genome: Genome | None = None,
    ) -> None:
        super().__init__(options, table, interval, seed, budget=budget)
        check_settings(population, parents, mutation)
        self.population, self.parents, self.mutation = population, parents, mutation
        self.genome: Genome = genome or PlainGenome(self.options)

    def _settings(self) -> State:
        return {
            "population": self.population,
            "parents": self.parents,
            "mutation": self.mutation,
            "genome": repr(self.genome),
        }

    def _start(self) -> Proposer:
        return Evolution(
            self.genome,
            TableConstraint(self.table, self.interval, self.genome),
            stream(self.seed, "evolution", repr(self.interval.lower), repr(self.interval.upper)),
            population=self.population,
            parents=self.parents,
            mutation=self.mutation,
        )


def check_settings(population: int, parents: float, mutation: float) -> None:
    """Raises ValueError naming the setting that is out of range."""
    at_least("population", population, 2)
    if not 0 < parents <= 1:
        raise ValueError(f"parents is {parents}, it must be a share of the population in (0, 1]")
    if not 0 <= mutation <= 1:
        raise ValueError(f"mutation is {mutation}, it must be a probability between 0 and 1")
