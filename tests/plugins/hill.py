"""A searcher: hill climbing. Every generation are mutants of the best model so far."""

from collections.abc import Sequence

from fedloom.platform.search.base import Scored, rank
from fedloom.platform.search.config import SearchProblem
from fedloom.platform.search.generations import GenerationSearch
from fedloom.platform.search.sampling import IntervalSampler, as_architecture, sample_new
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import as_array
from fedloom.platform.spaces.slices import Architecture

MUTANTS = 64
"""Drawn at a time; those outside the interval, or known already, are thrown away."""


class Climber:
    """Where the candidates come from; it depends on the seed and on what was observed, on nothing else."""

    def __init__(self, problem: SearchProblem, sampler: IntervalSampler) -> None:
        self.problem, self.sampler = problem, sampler
        self.rng = stream(problem.seed, "hill", repr(problem.interval))
        self.best: Scored | None = None
        self.asked: set[Architecture] = set()

    def propose(self, most: int) -> list[Architecture]:
        """New architectures inside the interval; random ones at first, and where all neighbours are known."""
        size = min(self.problem.config.offspring, most)
        found = list(self._neighbours())[:size] or sample_new(self.sampler, size, self.asked, self.rng)
        self.asked.update(found)
        return found

    def _neighbours(self) -> dict[Architecture, None]:
        if self.best is None:
            return {}
        parents = as_array([self.best.architecture] * MUTANTS)
        mutants = self.problem.genome.mutate(parents, self.problem.config.mutation, self.rng)
        drawn = map(as_architecture, mutants)
        return dict.fromkeys(m for m in drawn if m not in self.asked and self.sampler.contains(m))

    def observe(self, scored: Sequence[Scored]) -> None:
        """Models that failed are no parents."""
        known = [*scored, *([self.best] if self.best else [])]
        self.best = min((s for s in known if s.feasible), key=rank, default=None)


class HillClimbing(GenerationSearch):
    """Budget, history and checkpoints are `GenerationSearch`'s."""

    name = "hill"

    def _settings(self) -> dict[str, float]:
        return {"offspring": self.problem.config.offspring, "mutation": self.problem.config.mutation}

    def _start(self) -> Climber:
        return Climber(self.problem, self._sampler)
