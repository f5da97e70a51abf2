"""The searchers: random search, NSGA-II and evolution, in generations, within a budget, resumed by replay."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Protocol

import numpy as np

from fedloom.platform.search.base import Architecture, Interval, Scored, State, rank
from fedloom.platform.search.constraint import Constraint, TableConstraint, add_new
from fedloom.platform.search.sampling import IntervalSampler, sample_new
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import Genome, Ints, PlainGenome, as_array
from fedloom.tiers.costs import CostTable

FORMAT = 1
"""Version of the saved state."""


class Proposer(Protocol):
    """The source of candidates, the part in which searchers differ."""

    def propose(self, most: int) -> list[Architecture]:
        """At most `most` new distinct architectures inside the interval; empty if there are no more."""
        ...

    def observe(self, scored: Sequence[Scored]) -> None:
        """Receives the scores of the last proposal, in its order."""
        ...


class GenerationSearch(ABC):
    """A searcher (see `Searcher`) around a proposer that depends only on the seed.

    `budget` is the number of models to score, failed ones included.
    Raises ValueError if the options are not the cost table's or a setting is out of range.
    """

    name: str

    def __init__(self, options: Sequence[int], table: CostTable, interval: Interval, seed: int, *, budget: int) -> None:
        expected = tuple(len(row) for row in table.options)
        if tuple(options) != expected:
            raise ValueError(f"options {tuple(options)} do not fit the cost table, which has {expected}")
        self.options = expected
        self.table = table
        self.interval = interval
        self.seed = seed
        self.budget = at_least("budget", budget, 1)
        self._sampler = IntervalSampler(table, interval)
        self._clear()

    @abstractmethod
    def _start(self) -> Proposer:
        """A new proposer, identical on every call."""

    @abstractmethod
    def _settings(self) -> State:
        """The searcher's own settings, besides the seed, the space and the budget."""

    def _clear(self) -> None:
        self._proposer: Proposer | None = None
        self._pending: list[Architecture] = []
        self._history: list[Scored] = []
        self._generation = 0
        self._reason = ""

    @property
    def done(self) -> bool:
        return bool(self._reason)

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def history(self) -> list[Scored]:
        return list(self._history)

    def ask(self) -> list[Architecture]:
        if not self.done and not self._pending:
            if self._proposer is None:
                self._proposer = self._start()
            self._pending = self._proposer.propose(self.budget - len(self._history))
            if not self._pending:
                self._reason = "exhausted"
        return list(self._pending)

    def tell(self, architectures: Sequence[Architecture], metrics: Sequence[float], losses: Sequence[float]) -> None:
        if not self._pending or list(architectures) != self._pending:
            raise ValueError("tell: these are not the architectures last asked: tell exactly what ask() returned")
        if not len(metrics) == len(losses) == len(architectures):
            raise ValueError(
                f"tell: {len(architectures)} architectures, {len(metrics)} metrics and {len(losses)} losses: "
                "give one metric and one loss per architecture"
            )
        scored = [self._scored(*told) for told in zip(architectures, metrics, losses, strict=True)]
        assert self._proposer is not None
        self._proposer.observe(scored)
        self._history += scored
        self._pending = []
        self._generation += 1
        if len(self._history) >= self.budget:
            self._reason = "budget"

    def _scored(self, architecture: Architecture, metric: float, loss: float) -> Scored:
        feasible = math.isfinite(metric)
        value = float(metric) if feasible else math.nan
        return Scored(architecture, value, float(loss), self.table.cost(architecture), self._generation, feasible)

    def _identity(self) -> State:
        costs = repr((self.table.measure, self.table.reduce, self.table.fixed, self.table.options))
        return {
            "searcher": self.name,
            "seed": self.seed,
            "options": list(self.options),
            "lower": _encode(self.interval.lower),
            "upper": _encode(self.interval.upper),
            "costs": blake2b(costs.encode(), digest_size=8).hexdigest(),
            "budget": self.budget,
            **self._settings(),
        }

    def state(self) -> State:
        generations = [_generation(list(told)) for _, told in groupby(self._history, key=lambda s: s.generation)]
        return {"format": FORMAT, "identity": self._identity(), "generations": generations, "reason": self._reason}

    def restore(self, state: State) -> None:
        if state["format"] != FORMAT:
            raise ValueError(f"search state has format {state['format']}, this version reads {FORMAT}: start it anew")
        saved, present = state["identity"], self._identity()
        differing = sorted(key for key in saved.keys() | present.keys() if saved.get(key) != present.get(key))
        if differing:
            changes = ", ".join(f"{key} {saved.get(key)} -> {present.get(key)}" for key in differing)
            raise ValueError(f"search state belongs to another search: {changes}; resume with the saved settings")
        self._clear()
        for number, generation in enumerate(state["generations"]):
            self._replay(number, generation)
        # The empty result of the last `ask` of an exhausted search is not saved as a generation, so ask again.
        if state["reason"] and not self.done and self.ask():
            raise ValueError(f"search state says {state['reason']!r}, but the replay goes on: it was changed")

    def _replay(self, number: int, generation: State) -> None:
        recorded = [tuple(architecture) for architecture in generation["architectures"]]
        if self.ask() != recorded:
            raise ValueError(
                f"generation {number} of the search state does not replay from seed {self.seed}: "
                "it was changed, or saved with other versions of fedloom, pymoo or numpy"
            )
        self.tell(recorded, [float(m) for m in generation["metrics"]], [float(x) for x in generation["losses"]])


def at_least(name: str, value: int, smallest: int) -> int:
    """The value, or a ValueError if it is too small."""
    if value < smallest:
        raise ValueError(f"{name} is {value}, it must be at least {smallest}")
    return value


def _generation(told: list[Scored]) -> State:
    return {
        "architectures": [list(s.architecture) for s in told],
        "metrics": [_encode(s.metric) for s in told],
        "losses": [_encode(s.loss) for s in told],
    }


def _encode(value: float) -> float | str:
    # JSON has no NaN and no infinities.
    return float(value) if math.isfinite(value) else str(float(value))


# -- random search, the baseline of all searchers at equal budget -----------------------------------------------------


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


# -- NSGA-II (Deb et al. 2002), with pymoo's ask/tell interface, on integer architectures of one cost interval --------

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


# -- evolution inside a constraint (Cai et al. 2020, Once-for-All; SuperFedNAS, search stage) -------------------------

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
        check_evolution(population, parents, mutation)
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
            before = len(new)
            children = breed(times * count)
            add_new(new, children[self.constraint.inside(children)], self.asked, most)
            if len(new) >= most or len(new) - before < USEFUL * len(children):
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
        check_evolution(population, parents, mutation)
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


def check_evolution(population: int, parents: float, mutation: float) -> None:
    """Raises ValueError naming the setting that is out of range."""
    at_least("population", population, 2)
    if not 0 < parents <= 1:
        raise ValueError(f"parents is {parents}, it must be a share of the population in (0, 1]")
    if not 0 <= mutation <= 1:
        raise ValueError(f"mutation is {mutation}, it must be a probability between 0 and 1")
