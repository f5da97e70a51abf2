"""The searchers: random search, NSGA-II and evolution, in generations, within a budget, resumed by replay."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Protocol

import numpy as np

from fedloom.platform.search.base import Architecture, Scored, State, rank
from fedloom.platform.search.config import SearchProblem
from fedloom.platform.search.constraint import Constraint, TableConstraint, add_new
from fedloom.platform.search.sampling import IntervalSampler, sample_new
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import Genome, Ints, PlainGenome, as_array

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

    Raises ValueError if the options are not the cost table's.
    """

    name: str

    def __init__(self, problem: SearchProblem) -> None:
        expected = tuple(len(row) for row in problem.table.options)
        if tuple(problem.options) != expected:
            raise ValueError(f"options {tuple(problem.options)} do not fit the cost table, which has {expected}")
        self.problem = problem
        self.budget = problem.budget
        self._sampler = IntervalSampler(problem.table, problem.interval)
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
        self.reason = ""
        """Why the search ended: "budget" or "exhausted" (no further architecture in the interval); "" before."""

    @property
    def history(self) -> list[Scored]:
        """All scores told so far, in order."""
        return list(self._history)

    def ask(self) -> list[Architecture]:
        """The next generation; empty when the search has ended."""
        if not self.reason and not self._pending:
            if self._proposer is None:
                self._proposer = self._start()
            self._pending = self._proposer.propose(self.budget - len(self._history))
            if not self._pending:
                self.reason = "exhausted"
        return list(self._pending)

    def tell(self, architectures: Sequence[Architecture], metrics: Sequence[float], losses: Sequence[float]) -> None:
        """Reports the scores of the last generation, in its order."""
        if not self._pending or list(architectures) != self._pending:
            raise ValueError("tell: these are not the architectures last asked: tell exactly what ask() returned")
        if not len(metrics) == len(losses) == len(architectures):
            raise ValueError(
                f"tell: {len(architectures)} architectures, {len(metrics)} metrics and {len(losses)} losses: "
                "give one metric and one loss per architecture"
            )
        scored: list[Scored] = []
        for architecture, metric, loss in zip(architectures, metrics, losses, strict=True):
            feasible, cost = math.isfinite(metric), self.problem.table.cost(architecture)
            value = float(metric) if feasible else math.nan
            scored.append(Scored(architecture, value, float(loss), cost, self._generation, feasible))
        assert self._proposer is not None
        self._proposer.observe(scored)
        self._history += scored
        self._pending = []
        self._generation += 1
        if len(self._history) >= self.budget:
            self.reason = "budget"

    def _identity(self) -> State:
        problem, table = self.problem, self.problem.table
        costs = repr((table.measure, table.reduce, table.fixed, table.options))
        return {
            "searcher": self.name,
            "seed": problem.seed,
            "options": list(problem.options),
            "lower": _encode(problem.interval.lower),
            "upper": _encode(problem.interval.upper),
            "costs": blake2b(costs.encode(), digest_size=8).hexdigest(),
            "budget": self.budget,
            **self._settings(),
        }

    def state(self) -> State:
        """The scored generations and the settings, as JSON values."""
        generations = [
            {
                "architectures": [list(s.architecture) for s in scored],
                "metrics": [_encode(s.metric) for s in scored],
                "losses": [_encode(s.loss) for s in scored],
            }
            for scored in (list(group) for _, group in groupby(self._history, key=lambda s: s.generation))
        ]
        return {"format": FORMAT, "identity": self._identity(), "generations": generations, "reason": self.reason}

    def restore(self, state: State) -> None:
        """Restores a saved state by replaying it from the seed."""
        if state["format"] != FORMAT:
            raise ValueError(f"search state has format {state['format']}, this version reads {FORMAT}: start it anew")
        saved, present = state["identity"], self._identity()
        differing = sorted(key for key in saved.keys() | present.keys() if saved.get(key) != present.get(key))
        if differing:
            changes = ", ".join(f"{key} {saved.get(key)} -> {present.get(key)}" for key in differing)
            raise ValueError(f"search state belongs to another search: {changes}; resume with the saved settings")
        self._clear()
        for number, generation in enumerate(state["generations"]):
            recorded = [tuple(architecture) for architecture in generation["architectures"]]
            if self.ask() != recorded:
                raise ValueError(
                    f"generation {number} of the search state does not replay from seed {self.problem.seed}: "
                    "it was changed, or saved with other versions of fedloom, pymoo or numpy"
                )
            self.tell(recorded, [float(m) for m in generation["metrics"]], [float(x) for x in generation["losses"]])
        # The empty result of the last `ask` of an exhausted search is not saved as a generation, so ask again.
        if state["reason"] and not self.reason and self.ask():
            raise ValueError(f"search state ended with {state['reason']!r}, but its replay goes on: it was changed")

    def _stream(self, name: str) -> np.random.Generator:
        """A random stream of the seed and the interval."""
        interval = self.problem.interval
        return stream(self.problem.seed, name, repr(interval.lower), repr(interval.upper))


def check_population(population: int) -> None:
    """Raises ValueError for a population of fewer than two models; searchers without one do not check the setting."""
    if population < 2:
        raise ValueError(f"population is {population}, it must be at least 2")


def _encode(value: float) -> float | str:
    # JSON has no NaN and no infinities.
    return float(value) if math.isfinite(value) else str(float(value))


# -- random search, the baseline of all searchers at equal budget -----------------------------------------------------


class RandomSearch(GenerationSearch):
    """Uniform draws inside the interval, the baseline at equal budget: distinct, `offspring` at a time."""

    name = "random"

    def _settings(self) -> State:
        return {"batch": self.problem.config.offspring}

    def _start(self) -> Proposer:
        return _RandomProposer(self._sampler, self.problem.config.offspring, self._stream("random_search"))


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


class NSGA2Search(GenerationSearch):
    """NSGA-II (FedorAS, stage 2) inside one tier, on the metric or on metric and cost.

    The first generation has `population` models, each later one `offspring`, and the last is cut at the budget.
    `mutation` is the probability per gene. `objectives` is the metric alone, with the cost as a constraint (App. L and
    the authors' code), or metric and cost (Sec. 3), which finds worse winners. The problem's genome draws, mutates and
    crosses (uniformly) architectures whose decisions have several genes; a saved state stores its repr.
    """

    name = "nsga2"

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        check_population(problem.config.population)

    def _settings(self) -> State:
        config, genome = self.problem.config, self.problem.genome
        settings: State = {
            "population": config.population,
            "offspring": config.offspring,
            "mutation": config.mutation,
        }
        # States saved before there was a choice do not contain the setting: they used both objectives.
        settings |= {} if config.objectives == "metric_and_cost" else {"objectives": "metric"}
        # States saved before there were genomes contain none either.
        return settings if isinstance(genome, PlainGenome) else {**settings, "genome": repr(genome)}

    def _start(self) -> Proposer:
        # pymoo loads half of scipy; a run that has yet to train should not wait for it.
        from fedloom.platform.search.nsga2_proposer import NSGA2Proposer

        return NSGA2Proposer(self.problem, self._sampler, self._stream("nsga2"))


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
            rows, rng = as_array([s.architecture for s in self.parents]), self.rng

            def mutants(count: int) -> Ints:
                return self.genome.mutate(rows[rng.integers(len(rows), size=count)], self.mutation, rng)

            def crossed(count: int) -> Ints:
                mothers = rng.integers(len(rows), size=count)
                # Two different parents if there are two, because crossing an architecture with itself changes nothing.
                fathers = (mothers + rng.integers(1, max(len(rows), 2), size=count)) % len(rows)
                return self.genome.cross(rows[mothers], rows[fathers], rng)

            self._breed(new, wanted // 2, mutants)
            self._breed(new, wanted - wanted // 2, crossed)
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


class EvolutionSearch(GenerationSearch):
    """Evolution by mutation and crossover of the best (OFA, SuperFedNAS), with measured scores; see `Evolution`.

    The problem's genome mutates and crosses architectures; a saved state stores its repr.
    """

    name = "evolution"

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        check_population(problem.config.population)

    def _settings(self) -> State:
        config = self.problem.config
        return {
            "population": config.population,
            "parents": config.parents,
            "mutation": config.mutation,
            "genome": repr(self.problem.genome),
        }

    def _start(self) -> Proposer:
        problem, config = self.problem, self.problem.config
        return Evolution(
            problem.genome,
            TableConstraint(problem.table, problem.interval, problem.genome),
            self._stream("evolution"),
            population=config.population,
            parents=config.parents,
            mutation=config.mutation,
        )
