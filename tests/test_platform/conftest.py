"""A tiny federation on an elastic space, for the tests of SuperFedNAS."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedloom.platform.config import RunConfig, TiersConfig
from fedloom.platform.methods.elastic_stage import ElasticTrainingConfig
from fedloom.platform.methods.superfednas import SuperFedNASConfig
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.config import SpaceConfig


@pytest.fixture
def elastic_config(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configurations of 8 clients in 2 tiers on a space of 36 subnets, not searched.

    `norm`, `method` (a dict) and `train` (a dict) change parts; other keywords replace fields of RunConfig.
    """

    def make(
        norm: str = "none", method: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **changes: Any
    ) -> RunConfig:
        space = SpaceConfig(
            "resnet_elastic_small",
            input_shape=[1, 8, 8],
            stem_channels=8,
            stage_widths=[8, 16],
            stage_strides=[2, 2],
            depths=[1, 1],
            expansions=[1.0, 2.0],
            norm=norm,
        )
        training = ElasticTrainingConfig(rounds=2, clients_per_round=4, epochs=2, batch_size=16, evaluate_every=2)
        chosen = SuperFedNASConfig(train=replace(training, **(train or {})), search=TargetSearchConfig(samples=0))
        tiers = TiersConfig(count=2, paths=2000, rho_high=0.5)
        return tiny_config(**{"space": space, "tiers": tiers, "method": replace(chosen, **(method or {})), **changes})

    return make
