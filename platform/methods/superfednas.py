"""SuperFedNAS: an elastic supernet trained by a federation, searched for any target without training.

The same code gives its baselines: single-stage (random + overlap), multi-stage (the whole supernet travels,
progressive shrinking on the clients), iFedAvg over a family and FedAvg of one subnet (`separately`).
Papers: SuperFed (MaxNet), SuperFedNAS.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedloom.platform.clients.tasks import parse_architecture
from fedloom.platform.federation.distribution import HEURISTICS, NEED_A_FAMILY
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.methods.elastic_stage import (
    ALONE,
    ElasticStage,
    ElasticTrainingConfig,
    bag_of,
    check_elastic_training,
    elastic_space,
    named_subnet,
)
from fedloom.platform.methods.evaluation_stage import EvaluationConfig, EvaluationJob, EvaluationStage
from fedloom.platform.methods.search_stage import WINNERS
from fedloom.platform.methods.shared_training import SharedTraining
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.methods.target_search import search_stages
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.base import Architecture

SEARCHED = "searched"
"""The model that was found by the search, cut from the supernet as it is."""


@dataclass
class SuperFedNASConfig:
    """Training, search and final evaluation.

    `family` names subnets (`smallest`, `largest`, `d=1,0,2,1 e=.14`) that are evaluated at the end, and that the
    heuristics static and dynamic hand out. With `separately` each of them is trained alone, for as many rounds
    (iFedAvg; FedAvg for a family of one), and nothing is searched.
    """

    name: str = "superfednas"
    family: list[str] = field(default_factory=lambda: ["smallest", "largest"])
    separately: bool = False
    train: ElasticTrainingConfig = field(default_factory=ElasticTrainingConfig)
    search: TargetSearchConfig = field(default_factory=TargetSearchConfig)
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(clients_per_tier=0))


def shared_training(config: SuperFedNASConfig) -> SharedTraining | None:
    """The supernet's training; None where the subnets are trained alone.

    The family belongs to what comes later unless it is handed out; a heuristic of the user's own may do so.
    """
    if config.separately:
        return None
    name = config.train.distribution.heuristic
    hands_out = name in NEED_A_FAMILY or name not in HEURISTICS
    return SharedTraining(later=("search", "evaluation") if hands_out else ("search", "evaluation", "family"))


def parse_family(config: SuperFedNASConfig, world: World) -> tuple[Architecture, ...]:
    """The family's subnets; ValueError naming the field that is outside the space, or a subnet named twice."""
    space = elastic_space(world)
    family: list[Architecture] = []
    for text in config.family:
        architecture = named_subnet(space, text, "method.family")
        if architecture in family:
            raise ValueError(f"method.family: {text!r} is named twice: {space.label(architecture)}")
        family.append(architecture)
    return tuple(family)


def stages(config: SuperFedNASConfig, world: World) -> list[Stage]:
    """The stages in their order."""
    family = parse_family(config, world)
    check_elastic_training(config.train, "method.train", world.num_clients, len(family), separately=config.separately)
    if config.separately:
        return _alone(world, config, family)
    sequence: list[Stage] = [ElasticStage(world, config.train, family), *search_stages(world, config.search)]
    jobs = [EvaluationJob("", SUPERNET, member, SUPERNET, everybody(world), stand_alone=False) for member in family]
    return [*sequence, EvaluationStage(world, config.evaluation, lambda state: [*jobs, *_winners(world, state)])]


def _alone(world: World, config: SuperFedNASConfig, family: tuple[Architecture, ...]) -> list[Stage]:
    """Every member of the family by itself."""
    if not family:
        raise ValueError("method.separately=true trains the members of method.family, which is empty: name some")
    training: list[Stage] = [ElasticStage(world, config.train, alone=member) for member in family]
    jobs = [EvaluationJob("", ALONE, member, bag_of(member), everybody(world), stand_alone=True) for member in family]
    return [*training, EvaluationStage(world, config.evaluation, lambda _: jobs)]


def _winners(world: World, state: RunState) -> list[EvaluationJob]:
    """The winner of every tier (scored on its clients) or target."""
    jobs: list[EvaluationJob] = []
    tiers = {tier.name: index for index, tier in enumerate(world.tiers)}
    for name, text in state.data.get(WINNERS, {}).items():
        own: Sequence[int] | np.ndarray = everybody(world)
        if name in tiers:
            own = np.flatnonzero(world.tier_of_client == tiers[name])
        jobs.append(EvaluationJob(name, SEARCHED, parse_architecture(text), SUPERNET, own, stand_alone=False))
    return jobs


def everybody(world: World) -> Sequence[int]:
    """All clients, without a list of them."""
    return range(world.num_clients)


__all__ = ["SuperFedNASConfig", "stages"]
