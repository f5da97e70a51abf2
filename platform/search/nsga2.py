"""NSGA-II (Deb et al. 2002), with pymoo's ask/tell interface, on integer architectures of one cost interval."""

from collections.abc import Sequence

from fedloom.platform.search.base import Interval, State
from fedloom.platform.search.generations import GenerationSearch, Proposer, at_least
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import Genome, PlainGenome
from fedloom.tiers.costs import CostTable

METRIC, METRIC_AND_COST = OBJECTIVES = ("metric", "metric_and_cost")
"""What NSGA-II ranks models by."""


class NSGA2Search(GenerationSearch):
    """FedorAS' search (stage 2): NSGA-II inside one tier, on the metric or on metric and cost; see `Searcher`.

    The first generation has `population` models, each later one `offspring`, and the last is cut at the budget.
    `mutation` is the probability per gene. `objectives` is the metric alone, with the cost as a constraint (App. L and
    the authors' code), or metric and cost (Sec. 3), which finds worse winners. `genome` draws, mutates and crosses
    (uniformly) architectures whose decisions have several genes; a saved state stores its repr.
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
        objectives: str = METRIC,
    ) -> None:
        super().__init__(options, table, interval, seed, budget=budget)
        if not 0 <= mutation <= 1:
            raise ValueError(f"mutation is {mutation}, it must be a probability between 0 and 1")
        self.population = at_least("population", population, 2)
        self.offspring = at_least("offspring", offspring, 1)
        self.mutation = mutation
        self.ranks_cost = objectives == METRIC_AND_COST
        # None if every decision is one gene, so that earlier saved states stay valid.
        self.genome = None if isinstance(genome, PlainGenome) else genome

    def _settings(self) -> State:
        settings: State = {"population": self.population, "offspring": self.offspring, "mutation": self.mutation}
        # States of before there was a choice have no word of it: both objectives.
        settings |= {} if self.ranks_cost else {"objectives": METRIC}
        return settings if self.genome is None else {**settings, "genome": repr(self.genome)}

    def _start(self) -> Proposer:
        # pymoo loads half of scipy; a run that has yet to train should not wait for it.
        from fedloom.platform.search.nsga2_proposer import NSGA2Proposer

        rng = stream(self.seed, "nsga2", repr(self.interval.lower), repr(self.interval.upper))
        return NSGA2Proposer(self, self._sampler, rng)
