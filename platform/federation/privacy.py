"""Differential privacy and secure aggregation of a training stage: what they refuse, and their processors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedloom.platform.averaging.accounting import Mechanism, accounting
from fedloom.platform.averaging.privacy import SPENT, DifferentialPrivacy
from fedloom.platform.averaging.secure import SecureAggregation
from fedloom.platform.averaging.weighting import weighting_traits
from fedloom.platform.clients.local_rules import local_rule
from fedloom.platform.clients.objectives import OBJECTIVES, MaskedClasses
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.training_config import expected_size

if TYPE_CHECKING:
    import numpy as np

    from fedloom.platform.averaging.processors import Processor
    from fedloom.platform.federation.training_config import Rules, TrainingConfig
    from fedloom.platform.federation.world import World

logger = logging.getLogger(__name__)

LEAST_NOISE = 0.1
"""Of accountant pld: below it an interval of 1e-4 takes more than a gigabyte of memory, for an epsilon above 100."""


def check_privacy(config: TrainingConfig, rules: Rules) -> None:
    """Raises ValueError for rules with which a client's influence has no bound, or is not accounted for."""
    privacy, key = config.privacy, rules.key
    if privacy.secure:
        _check_secure(config, rules, key)
        if privacy.clip is not None:
            raise ValueError(
                f"{key}.privacy.secure=true leaves out what one client alone has trained, so that more than its own "
                f"change depends on a client: use it without {key}.privacy.clip"
            )
    if privacy.clip is None:
        if privacy.noise:
            raise ValueError(f"{key}.privacy.noise={privacy.noise:g} needs {key}.privacy.clip, its unit: give both")
        return
    weighting = weighting_traits(rules.weighting.name)
    if not weighting.at_most_one and (privacy.weight_cap is None or weighting.weighs_unheld):
        raise ValueError(
            f"{key}.weighting={rules.weighting.name}: a client's weight, and so its influence, has no bound; use "
            f"{key}.weighting=plain" + ("" if weighting.weighs_unheld else f" or {key}.privacy.weight_cap")
        )
    if not local_rule(rules.local).sends_only_change:
        raise ValueError(
            f"{key}.local_rule={rules.local.name}: what it sends beside the change is neither clipped nor accounted "
            "for; use sgd or fedprox"
        )
    sampling = selection_traits(rules.selection.name).sampling
    if sampling is None:
        raise ValueError(
            f"{key}.selection={rules.selection.name}: no client's probability is known; use uniform, poisson, all"
        )
    if privacy.accountant == "pld" and sampling == "uniform":
        raise ValueError(f"{key}.privacy.accountant=pld knows selection=poisson and all, not uniform: use rdp")
    # With everybody in every round, all rounds together are one round of less noise.
    together = privacy.noise / math.sqrt(config.rounds or 1) if sampling == "all" else privacy.noise
    if privacy.accountant == "pld" and 0 < together < LEAST_NOISE:
        raise ValueError(
            f"{key}.privacy.noise={privacy.noise:g}: for accountant pld it must be at least "
            f"{LEAST_NOISE * privacy.noise / together:.3g} here, as distributions of losses with less noise do not fit "
            "into memory; raise it, or use rdp"
        )
    if config.min_contributors > 1:
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: to look at who covers a scalar would tell who took "
            f"part; use 1 ({key}.privacy.least_coverage leaves out what few are expected to hold)"
        )
    accounting()


def _check_secure(config: TrainingConfig, rules: Rules, key: str) -> None:
    if (
        not local_rule(rules.local).sends_only_change
        or weighting_traits(rules.weighting.name).weighs_unheld
        or selection_traits(rules.selection.name).shortens_updates
    ):
        raise ValueError(
            f"{key}.privacy.secure=true hides the changes of parameters alone: use {key}.local_rule=sgd or fedprox, "
            "another weighting than fedavg_whole, another selection than pyramidfl"
        )
    if config.clients_per_round == 1:
        raise ValueError(f"{key}.privacy.secure=true: the sum of one client is its update; raise clients_per_round")


def privacy_processors(
    world: World, config: TrainingConfig, rules: Rules, stage: str, eligible: np.ndarray
) -> list[Processor]:
    """The processors of a stage's `privacy`.

    Raises ValueError for what has no privacy; so do devices that are away, as nobody's probability is known.
    """
    check_privacy(config, rules)
    objective = OBJECTIVES.make(world.spec.objective)
    if isinstance(objective, MaskedClasses) and objective.in_mean:
        raise ValueError(
            f"{rules.key}.privacy: which rows of a classifier count tells which classes a client has: set "
            "objective.options.in_mean=false"
        )
    privacy = config.privacy
    if privacy.clip is None:
        return [SecureAggregation(privacy.fraction_bits, privacy.survivors)]
    if world.devices is not None or any(profile.availability < 1 for profile in world.profiles):
        raise ValueError(f"{stage}, privacy: with devices that may be away no client's probability is known")
    return [
        DifferentialPrivacy(
            clip=privacy.clip,
            noise=privacy.noise,
            weight_cap=privacy.weight_cap,
            least_coverage=privacy.least_coverage,
            delta=privacy.delta,
            accountant=privacy.accountant,
            mechanism=_mechanism(config, len(eligible)),
            population=len(eligible),
        )
    ]


def _mechanism(config: TrainingConfig, eligible: int) -> Mechanism:
    """How a round of the stage samples its clients."""
    sampling, size = selection_traits(config.selection).sampling, expected_size(config, eligible)
    assert sampling is not None, "checked"
    whole = config.clients_per_round is None or size >= eligible
    share = size if sampling == "uniform" else size / max(1, eligible)
    return "all" if whole else sampling, share, config.privacy.noise


def warn_unprotected(config: TrainingConfig, data: Mapping[str, Any], stage: str) -> None:
    """Warns of a stage without differential privacy that trains on after those with it, given the run's JSON values."""
    if SPENT in data and config.privacy.clip is None and config.rounds:
        logger.warning("%s trains without differential privacy after stages with it: its model has none", stage)
