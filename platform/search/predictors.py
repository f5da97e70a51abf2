"""Predictors of metric and latency (a small MLP on one-hot architectures), and searches that rank by predictions."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import annotated_types
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, blaming, is_import_path
from fedloom.platform.search.base import Interval, Scored, pareto_front, rank
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.constraint import Constraint, inside_interval
from fedloom.platform.search.generations import Evolution, NSGA2Search
from fedloom.platform.seeding import Id, stream, torch_stream
from fedloom.platform.settings import UP_TO_A_MILLION
from fedloom.platform.spaces.genome import Floats, Genome, Ints, as_array
from fedloom.tiers.costs import CostTable

# -- rank correlation of two scorings of the same models --------------------------------------------------------------

Values = Sequence[float] | NDArray[np.float64]


def kendall_tau(a: Values, b: Values) -> tuple[float, float]:
    """Kendall's tau-b of two scorings of the same models, and the p-value of no association.

    Both are NaN if one scoring is constant.
    Raises ValueError unless both have the same number of finite values, at least two.
    """
    from scipy.stats import kendalltau  # importing takes half a second, and only evaluations need it

    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(f"ranking needs two scorings of the same two or more models: got {len(a)} and {len(b)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("ranking needs finite scores: leave failed models out")
    result = kendalltau(x, y)
    return float(result.statistic), float(result.pvalue)


# -- predictors -------------------------------------------------------------------------------------------------------

FEWEST_SAMPLES = 10
HIDDEN = annotated_types.Interval(ge=1, le=65536)
ONE_EACH = "a finite value for each sample"
BATCH = 32
MLP = ComponentSpec("mlp")
LR = 3e-3
WEIGHT_DECAY = 3.0
"""Decoupled weight decay (AdamW): with one feature per 4 samples, small values give tau 0.8, this one 0.99."""


Predict = Callable[[Floats], Floats]
"""Maps features (n, f) to values (n,)."""
Fit = Callable[[Floats, Floats, torch.Generator], Predict]
"""Fits a predictor to features (n, f) and measured values (n,), with a generator for all random numbers."""


@dataclass(frozen=True)
class Fitted:
    """A predictor and its quality on held-out samples.

    `tau` is Kendall's tau-b (NaN if one side is constant), `mae` the mean absolute error in the values' unit;
    `held_out` and `train` count samples.
    """

    predictor: Predict
    tau: float
    mae: float
    held_out: int
    train: int


def fit_predictor(
    features: Floats,
    values: Floats,
    *,
    seed: int,
    ids: tuple[Id, ...] = (),
    fit: ComponentSpec = MLP,
    held_out_share: float = 0.2,
) -> Fitted:
    """Fits a predictor of `values` (n,) from `features` (n, f).

    A random `held_out_share` of the samples is only used to measure its quality; it is not refitted on them.
    All random numbers come from the stream (seed, "predictor", ids).
    Raises ValueError for fewer than ten samples, shapes that do not fit, values that are not finite, or a setting out
    of range; PluginError for a user's predictor that does not return finite values (n,).
    """
    if features.ndim != 2 or values.shape != (len(features),):
        raise ValueError(
            f"a predictor needs features (n, f) and values (n,), given shapes {features.shape} and {values.shape}"
        )
    if len(values) < FEWEST_SAMPLES:
        raise ValueError(f"a predictor needs at least {FEWEST_SAMPLES} samples, given {len(values)}: measure more")
    if not (np.isfinite(features).all() and np.isfinite(values).all()):
        raise ValueError("a predictor needs finite features and values: leave failed models out")
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share is {held_out_share}, it must lie between 0 and 1")
    generator = torch_stream(seed, "predictor", *ids)
    order = torch.randperm(len(values), generator=generator).numpy()
    num_held_out = min(max(2, round(held_out_share * len(values))), len(values) - 2)
    held_out, train = order[:num_held_out], order[num_held_out:]
    predictor = _checked(PREDICTORS.make(fit)(features[train], values[train], generator), fit.name)
    predicted, measured = predictor(features[held_out]), values[held_out]
    tau, _ = kendall_tau(predicted, measured)
    mae = float(np.abs(predicted - measured).mean())
    return Fitted(predictor, tau, mae, len(held_out), len(train))


def refusal(fitted: Fitted, min_tau: float, what: str) -> str:
    """Why a search must not use the predictor of `what` (held-out tau below `min_tau` or undefined), otherwise ""."""
    if fitted.tau >= min_tau:
        return ""
    if math.isnan(fitted.tau):
        return (
            f"Kendall's tau of the predictor of {what} cannot be measured, and {min_tau:g} is required: all of the "
            f"{fitted.held_out} held-out samples are alike; train longer, or measure more samples"
        )
    return (
        f"the predictor of {what} reaches Kendall tau {fitted.tau:.3f} on {fitted.held_out} held-out samples "
        f"(fitted on {fitted.train}), below the required {min_tau:g}: measure more samples or lower min_tau"
    )


def check_predictor(fit: ComponentSpec, genome: Genome) -> None:
    """Fits a user's own predictor to invented values of random architectures; PluginError if it does not work."""
    if is_import_path(fit.name):
        rng = stream(0, "trial")
        features = genome.one_hot(genome.draw(2 * FEWEST_SAMPLES, rng))
        fit_predictor(features, rng.random(len(features)), seed=0, fit=fit)


def _checked(predict: Predict, name: str) -> Predict:
    """The predictor; a user's own is wrapped, so that its predictions are checked."""
    if not is_import_path(name):
        return predict
    if not callable(predict):
        raise PluginError(f"predictor {name!r} gives {predict!r:.60}: give a function of features that predicts values")

    def checked(features: Floats) -> Floats:
        with blaming("predictor", name):
            predicted = np.asarray(predict(features), dtype=np.float64)
        if predicted.shape != (len(features),):
            raise PluginError(
                f"predictor {name!r} gives {predicted.shape} for {len(features)} samples: give {ONE_EACH}"
            )
        if not np.isfinite(predicted).all():
            raise PluginError(f"predictor {name!r} gives values that are not finite: give {ONE_EACH}")
        return predicted

    return checked


def mlp(
    features: Floats,
    values: Floats,
    generator: torch.Generator,
    *,
    hidden: Annotated[int, HIDDEN, "units per hidden layer"] = 128,
    epochs: Annotated[int, UP_TO_A_MILLION, "passes over the samples"] = 100,
) -> Predict:
    """An MLP on one-hot architectures, trained by AdamW on the squared error (Cai et al. 2020, OFA).

    Two hidden ReLU layers, standardised targets, float32 on the CPU; outputs do not depend on torch's threads.
    """
    mean, scale = float(values.mean()), float(values.std()) or 1.0
    x = torch.as_tensor(features, dtype=torch.float32)
    y = torch.as_tensor((values - mean) / scale, dtype=torch.float32)
    layers: list[tuple[Tensor, Tensor]] = []
    for inputs, outputs in itertools.pairwise((x.shape[1], hidden, hidden, 1)):  # weights as in He et al. 2015
        weight = torch.randn(outputs, inputs, generator=generator) * math.sqrt(2 / inputs)
        layers.append((weight.requires_grad_(), torch.zeros(outputs, requires_grad=True)))

    def forward(x: Tensor) -> Tensor:
        for weight, bias in layers[:-1]:
            x = torch.relu(F.linear(x, weight, bias))
        return F.linear(x, *layers[-1])[:, 0]

    optimizer = torch.optim.AdamW([t for layer in layers for t in layer], lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    # Held-out samples must not be used for early stopping; instead the learning rate decays to zero.
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    with _one_thread(), torch.enable_grad():
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(y), generator=generator), BATCH):
                optimizer.zero_grad()
                F.mse_loss(forward(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            decay.step()

    def predict(features: Floats) -> Floats:
        with _one_thread(), torch.no_grad():
            standard = forward(torch.as_tensor(features, dtype=torch.float32))
        predicted: Floats = standard.numpy().astype(np.float64) * scale + mean
        return predicted

    return predict


def unpredicted(features: Floats, values: Floats, generator: torch.Generator) -> Predict:
    """No predictor: every candidate of the search is measured."""
    del features, values, generator
    raise ValueError("predictor none predicts nothing")


def untrained(features: Floats, values: Floats, generator: torch.Generator) -> Predict:
    """No predictor: the search ranks by a fitness of the architecture alone (see `fedloom.platform.search.fitness`)."""
    del features, values, generator
    raise ValueError("predictor fitness is not fitted")


PREDICTORS: Registry[Fit] = Registry(
    "predictor", {"mlp": mlp, "none": unpredicted, "fitness": untrained}, ("features", "values", "generator")
)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Uses one torch thread in the block: small matrices are not faster with more, and results may depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- search with a cheap score, such as a predictor's, without measurements -------------------------------------------

Score = Callable[[Ints], Floats]
"""Returns predicted metrics (n,), larger is better, of architectures (n, decisions)."""


def search_predicted(
    genome: Genome,
    score: Score,
    constraint: Constraint,
    *,
    seed: int,
    name: str,
    population: int = 100,
    generations: int = 50,
    parents: float = 0.25,
    mutation: float = 0.1,
    keep: int = 10,
) -> list[Scored]:
    """The best `keep` distinct architectures inside the constraint, best first (SuperFedNAS, search stage).

    Their metrics are predictions, to be verified by measurement. Fewer are returned only if no more are found inside
    with a finite score. The random stream is (seed, "predicted_search", name).
    Raises ValueError if no architecture is found inside the constraint.
    """
    rng = stream(seed, "predicted_search", name)
    evolution = Evolution(genome, constraint, rng, population=population, parents=parents, mutation=mutation)
    best: list[Scored] = []
    for generation in range(generations):
        proposed = evolution.propose(population)
        if not proposed:
            break
        rows, interval = as_array(proposed), constraint.interval
        metrics, costs = score(rows), constraint.costs(rows)
        # A predicted cost at the bound may round differently between batches; the reported cost decides.
        feasible = np.isfinite(metrics) & inside_interval(costs, interval)
        scores = zip(proposed, metrics.tolist(), costs.tolist(), feasible.tolist(), strict=True)
        scored = [Scored(a, metric, math.nan, cost, generation, ok) for a, metric, cost, ok in scores]
        evolution.observe(scored)
        best = sorted([*best, *(s for s in scored if s.feasible)], key=rank)[:keep]
    if not evolution.asked:
        interval = constraint.interval
        raise ValueError(
            f"{name}: no architecture found with a cost in ({interval.lower:g}, {interval.upper:g}]; the nearest "
            f"reachable cost found is {constraint.nearest(rng):g}: choose another target or widen the interval"
        )
    return best


def predicted_front(
    genome: Genome,
    score: Score,
    table: CostTable,
    *,
    seed: int,
    name: str,
    population: int = 100,
    generations: int = 50,
    mutation: float = 0.1,
) -> list[Scored]:
    """The Pareto front of predicted metric and cost, sorted by cost (NSGA-II).

    The seed of the search comes from the random stream (seed, "predicted_front", name).
    """
    everything = Interval(-math.inf, math.inf)
    config = SearchConfig(population=population, offspring=population, mutation=mutation, objectives="metric_and_cost")
    options, root = tuple(len(row) for row in table.options), int(stream(seed, "predicted_front", name).integers(2**62))
    search = NSGA2Search(SearchProblem(options, genome, table, everything, root, population * generations, config))
    while candidates := search.ask():
        metrics = score(as_array(candidates)).tolist()
        search.tell(candidates, metrics, [math.nan] * len(candidates))
    return pareto_front(search.history)
