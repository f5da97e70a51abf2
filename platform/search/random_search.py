"""Random search, the baseline of all searchers at equal budget."""

from collections.abc import Sequence

import numpy as np

from fedloom.platform.search.base import Architecture, Interval, Scored, State
from fedloom.platform.search.generations import GenerationSearch, Proposer, at_least
from fedloom.platform.search.sampling import IntervalSampler, sample_new
from fedloom.platform.seeding import stream
from fedloom.tiers.costs import CostTable


class RandomSearch(GenerationSearch):
    """Distinct random architectures of the interval, `batch` at a time; see `Searcher`."""

    name = "random"

    def __init__(
        self,
        options: Sequence[int],
        table: CostTable,
        interval: Interval,
        seed: int,
        *,
        batch: int = 64,
        budget: int = 1000,
    ) -> None:
        super().__init__(options, table, interval, seed, budget=budget)
        self.batch = at_least("batch", batch, 1)

    def _settings(self) -> State:
        return {"batch": self.batch}

    def _start(self) -> Proposer:
        rng = stream(self.seed, "random_search", repr(self.interval.lower), repr(self.interval.upper))
        return _RandomProposer(self._sampler, self.batch, rng)


class _RandomProposer:
    def __init__(self, sampler: IntervalSampler, batch: int, rng: np.random.Generator) -> None:
        self.sampler, self.batch, self.rng = sampler, batch, rng
        self.asked: set[Architecture] = set()

    def propose(self, most: int) -> list[Architecture]:
        new = sample_new(self.sampler, min(self.batch, most), self.asked, self.rng)
        self.asked.update(new)
        return new

    def observe(self, scored: Sequence[Scored]) -> None:
        """Ignores the scores."""
