"""Client-level differential privacy of the mean over slices (DP-FedAvg: McMahan et al. 2018; Abadi et al. 2016).

    client k:  Delta_k <- Delta_k min(1, S / |Delta_k|), where Delta_k is its change over all scalars that it holds
    server:    change of scalar s <- (sum_k w_k Delta_k,s + N(0, (z S)^2)) / d_s

**Sensitivity.** Let client k hold the scalars H_k (its slices, the operators of its subspace, everything), and let all
its weights be between 0 and 1. It adds the vector (w_k,s Delta_k,s) for s in H_k, and 0 elsewhere, to the sum over all
scalars. As |(w_k,s Delta_k,s)_s| <= max w |Delta_k| <= S, the sums with and without the client differ by at most S in
the Euclidean norm, however many others hold the same scalars. Noise is therefore added to the sum, with standard
deviation z S in *every* scalar, covered in this round or not: noise on the covered scalars alone would reveal who took
part. The change of a scalar has sensitivity S / d_s and noise z S / d_s, which is larger the fewer clients are expected
to hold the scalar.

**Denominators.** The divisor d_s is the *expected* sum of weights, known from tiers and sampling alone. Dividing by the
round's actual weights, as a plain mean does, would make the change depend on the client in a second way: if no other
client covers a scalar, the client's removal would take away the noise as well. A scalar with d_s below `least` never
changes. If weights are capped (`weight_cap`), d_s counts every holder with weight 1, so smaller weights shorten the
step.

With Poisson sampling, neighbours differ by one client (sensitivity S); with cohorts of a fixed size, neighbours differ
in that one client replaces another (sensitivity 2 S). The accountant receives z or z / 2 accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.averaging.average import Averaged, Coverage, Covered, Update
from fedloom.platform.averaging.processors import Message, Processor, ServerContext
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import SliceMap, Weights, difference, part_of, whole_region, widened

SPENT = "privacy"
"""The key of the JSON value that records the privacy that all stages have spent so far."""


@dataclass(frozen=True)
class DifferentialPrivacy(Processor):
    """Clients clip their changes and limit their weights; the server adds noise and accounts for it.

    Attributes:
        clip, noise: the clipping norm S and the noise multiplier z.
        weight_cap: weights are divided by it and then limited to 1; None if no weight is above 1.
        least_coverage: scalars that fewer clients than this are expected to hold never change.
        delta, accountant: delta and the accountant (`rdp` or `pld`) of epsilon.
        mechanism, population: how a round samples its clients, and from how many.
    """

    clip: float
    noise: float
    weight_cap: float | None
    least_coverage: float
    delta: float
    accountant: str
    mechanism: Mechanism
    population: int

    def on_client(self, message: Message) -> Message:
        clip_changes(message.update.tensors, message.received, self.clip)
        update = replace(message.update, weights=limited(message.update, self.weight_cap or 1.0))
        return replace(message, update=update)

    def on_mean(self, averaged: Averaged, context: ServerContext) -> Averaged:
        """The mean with fixed denominators and noise."""
        noise = torch_stream(context.seed, "noise", context.stage, context.round)
        expected, std = context.expected_weights(), self.noise * self.clip
        return privatised(averaged, context.old, expected, std, self.least_coverage, noise)

    def recorded(self, context: ServerContext) -> dict[str, Any]:
        """The mechanisms of all stages' rounds, this one included."""
        return {SPENT: with_round(context.data.get(SPENT, []), self.mechanism, self.population)}

    def schedules(self, context: ServerContext) -> dict[str, float]:
        """The epsilon of all rounds, this one included, if there is noise."""
        if not self.noise:
            return {}
        return {"epsilon": epsilon(self.recorded(context)[SPENT], self.delta, self.accountant)}


def limited(update: Update, cap: float) -> dict[str, float]:
    """The weights divided by `cap` and limited to 1; counters weigh 0, as they would reveal a client's sample count."""
    return {
        name: min(weight / cap, 1.0) if update.tensors[name].is_floating_point() else 0.0
        for name, weight in update.weights.items()
    }


@torch.no_grad()
def clip_changes(tensors: Weights, received: Weights, most: float) -> float:
    """Scales the changes of all float tensors, in place, to a joint norm of at most `most`; returns the norm before.

    Changes within the limit keep their bits.
    """
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    squares = [difference(tensors[name], received[name]).double().square().sum() for name in names]
    norm = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    if norm > most:
        for name in names:
            old = received[name]
            # Slightly below the limit, so that rounding does not exceed it.
            tensors[name].copy_(old + difference(tensors[name], old) * (most / norm * (1 - 1e-6)))
    return norm


def expected_weights(rounds: Iterable[Iterable[tuple[SliceMap, float]]], like: Weights) -> dict[str, Tensor]:
    """The mean over rounds of each scalar's summed weights; a round gives (slices, weight) per client."""
    totals = {name: torch.zeros_like(widened(t), device="cpu") for name, t in like.items() if t.is_floating_point()}
    number = 0
    for clients in rounds:
        number += 1
        for slices, weight in clients:
            for piece in slices.values():
                if piece.source in totals:
                    piece.of(totals[piece.source]).add_(weight)
    return {name: total / max(1, number) for name, total in totals.items()}


@torch.no_grad()
def privatised(
    averaged: Averaged,
    old: Weights,
    expected: Mapping[str, Tensor],
    noise_std: float,
    least: float,
    generator: torch.Generator,
) -> Averaged:
    """The mean with fixed denominators and noise in every scalar that is expected to be covered.

    Args:
        averaged: the clients' mean, and the summed weights of its regions.
        old: the weights before the round.
        expected: d_s of every scalar; tensors without it (counters) keep their old values.
        noise_std: the standard deviation z S of the noise on the sums.
        least: scalars with a smaller d_s never change.
        generator: draws the noise; a deployment would use a cryptographic source.
    """
    weights, coverage = dict(old), dict[str, Covered]()
    for name, divisors in expected.items():
        reached = divisors >= least
        if not bool(reached.any()):
            continue
        changed = _with_fixed_denominators(averaged, name, old[name], divisors)
        if noise_std > 0:
            noise = torch.randn(old[name].shape, generator=generator) * noise_std
            changed = changed + (noise / divisors.clamp(min=least)).to(changed)
            if name.endswith("running_var"):
                changed.clamp_(min=1e-3)  # noise may have made a variance negative
        weights[name] = torch.where(reached.to(old[name].device), changed, old[name])
        weight = float(divisors.max())
        coverage[name] = {whole_region(old[name]): Coverage(weight, max(1, round(weight)), weight)}
    return Averaged(weights, coverage)


def _with_fixed_denominators(averaged: Averaged, name: str, old: Tensor, divisors: Tensor) -> Tensor:
    """old + sum of weighted changes / d; where the round's weights sum to d, the mean itself, bit for bit."""
    result = old.clone()
    for region, coverage in averaged.coverage.get(name, {}).items():
        before, mean = part_of(old, region), part_of(averaged.weights[name], region)
        divisor = part_of(divisors, region).to(old.device).clamp(min=1e-12)
        scaled = before + difference(mean, before) * (coverage.weight / divisor)
        part_of(result, region).copy_(torch.where(divisor == coverage.weight, mean, scaled))
    return result


# -- epsilon -----------------------------------------------------------------------------------------------------------


Mechanism = tuple[str, float, float]
"""How clients are sampled (uniform, poisson or all), their share (uniform: their number), and the multiplier z."""
Spent = tuple[tuple[Mechanism, int, int], ...]
"""Mechanisms, each with its population and its number of rounds."""
DISCRETISATION = 1e-4
"""The interval in which the accountant discretises privacy losses; its own default."""


def accounting() -> Any:
    """Google's dp_accounting library; if it is missing, raises ValueError with the install command."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ValueError(
            "differential privacy needs Google's accountant: pip install 'fedloom[privacy]' (dp-accounting)"
        ) from error
    return dp_accounting


def with_round(spent: list[list[Any]], mechanism: Mechanism, population: int) -> list[list[Any]]:
    """The entries [mechanism, population, rounds] of the privacy spent, after one more round."""
    entries = [[*entry] for entry in spent]
    if {"uniform", "poisson"} <= {mechanism[0], *(entry[0][0] for entry in entries)}:
        raise ValueError(
            "privacy: stages that sample by uniform and by poisson have no common epsilon: use one of them"
        )
    for entry in entries:
        if entry[0] == list(mechanism) and entry[1] == population:
            entry[2] += 1
            return entries
    return [*entries, [list(mechanism), population, 1]]


def epsilon(spent: list[list[Any]], delta: float, accountant: str) -> float:
    """The epsilon of all rounds so far at this delta; infinite without noise."""
    return _epsilon(tuple((tuple(m), population, rounds) for m, population, rounds in spent), delta, accountant)


@lru_cache(maxsize=4096)
def _epsilon(spent: Spent, delta: float, accountant: str) -> float:
    if any(noise == 0 for (_, _, noise), _, _ in spent):
        return math.inf
    fixed = any(sampling == "uniform" for (sampling, _, _), _, _ in spent)
    if accountant != "pld":
        return _by_divergences(spent, delta, fixed)
    if fixed:
        raise ValueError("privacy.accountant=pld knows stages of selection=poisson and all, not uniform: use rdp")
    return float(_losses(spent).get_epsilon_for_delta(delta))


def _by_divergences(spent: Spent, delta: float, fixed: bool) -> float:
    library = accounting()
    orders = library.rdp.RdpAccountant().orders
    total = np.zeros_like(orders)
    for mechanism_, population, rounds in spent:
        total += rounds * _divergences(mechanism_, population, fixed)
    return float(library.rdp.compute_epsilon(orders, total, delta)[0])


@lru_cache(maxsize=256)
def _divergences(mechanism_: Mechanism, population: int, fixed: bool) -> np.ndarray:
    """The Rényi divergences of one round, at the accountant's orders."""
    library, (sampling, share, noise) = accounting(), mechanism_
    relation = library.NeighboringRelation.REPLACE_ONE if fixed else library.NeighboringRelation.ADD_OR_REMOVE_ONE
    # If one client replaces another, the sum changes by up to 2 S.
    gauss = library.GaussianDpEvent(noise / 2 if fixed else noise)
    if sampling == "uniform":
        event = library.SampledWithoutReplacementDpEvent(population, int(share), gauss)
    else:
        event = gauss if sampling == "all" else library.PoissonSampledDpEvent(share, gauss)
    divergences: np.ndarray = library.rdp.RdpAccountant(neighboring_relation=relation).compose(event).rdp
    return divergences


@lru_cache(maxsize=8)
def _losses(spent: Spent) -> Any:
    """The privacy loss distribution of all these rounds; that of all entries but the last is cached."""
    if not spent:
        return accounting().pld.privacy_loss_distribution.identity(value_discretization_interval=DISCRETISATION)
    (sampling, share, noise), _, rounds = spent[-1]
    if sampling == "all":
        # Rounds with all clients compose to one Gaussian mechanism with less noise: each needs a new distribution.
        last = _round_losses(1.0, noise / math.sqrt(rounds))
    else:
        last = _round_losses(share, noise).self_compose(rounds)
    return _losses(spent[:-1]).compose(last)


@lru_cache(maxsize=8)
def _round_losses(share: float, noise: float) -> Any:
    return accounting().pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise, sampling_prob=share, value_discretization_interval=DISCRETISATION
    )
