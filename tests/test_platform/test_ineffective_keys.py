"""Keys that have no effect beside others are said once, at the start of the run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.experiments.runs.configuration import compose_config, tell_of_attack
from fedloom.platform.averaging.server import ServerStep
from fedloom.platform.clients.optimizers import LocalStep
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.ineffective_keys import keys_without_effect
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.runs.run import make_serial, start_run

CHOICE = ["method.train.selection=power_of_choice"]


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ([], []),
        (["data.alpha=0.1"], []),
        (
            ["data.partition=iid", "data.alpha=0.1"],
            [
                "data.alpha=0.1 has no effect with data.partition=iid: it is for lda, lda_sequential, "
                "dirichlet_classes, quantity"
            ],
        ),
        (
            ["executor.kind=serial", "executor.actors=2"],
            ["executor.actors=2 has no effect with executor.kind=serial: it is for ray"],
        ),
        (["tiers.upper_bounds=[1e9,2e9]", "tiers.count=2"], []),
        (
            ["tiers.upper_bounds=[1e9,2e9]", "tiers.count=7"],
            ["tiers.count=7 has no effect with 2 tiers.upper_bounds: there are as many tiers"],
        ),
        (
            ["tiers.max_step_s=5"],
            ["tiers.max_step_s=5.0 has no effect with tiers.device_table=null: it is for a device table"],
        ),
        (
            ["tiers.device_table=generated", "tiers.max_step_s=5", "devices.dropout=0.5"],
            [
                "devices.dropout=0.5 has no effect with tiers.device_table=generated: it is for runs without a device "
                "table, which has these columns"
            ],
        ),
        (
            ["method.train.step_rounds=3", "method.train.privacy.delta=1e-6"],
            [
                "method.train.step_rounds=3 has no effect with method.train.schedule=fixed: it is for steps",
                "method.train.privacy.delta=1e-06 has no effect with method.train.privacy.noise=0.0: it is for noise "
                "above 0",
            ],
        ),
        (
            ["method.train.optimizer=adam", "method.train.momentum=0.5", "method.train.optimizer_state=kept"],
            ["method.train.momentum=0.5 has no effect with method.train.optimizer=adam: it is for sgd"],
        ),
        (
            ["method.train.momentum=0", "method.train.optimizer_state=kept"],
            [
                "method.train.optimizer_state=kept has no effect with method.train.momentum=0.0: SGD without momentum "
                "has no state"
            ],
        ),
        (
            ["executor.sum_chunks=4", "method.train.asynchronous=fedbuff", "method.train.arrivals=2"],
            [
                "executor.sum_chunks=4 has no effect with method.train.asynchronous=fedbuff: it is for means of whole "
                "rounds"
            ],
        ),
        ([*CHOICE, "method.train.options.candidates=11"], []),
        (
            [*CHOICE, "method.train.options.candidates=10"],
            [
                "method.train.selection=power_of_choice has no effect with method.train.options.candidates=10: a round "
                "has 10 clients, so that there is no choice among the candidates"
            ],
        ),
    ],
)
def test_what_has_no_effect_is_named_with_the_key_that_says_so(given: list[str], lines: list[str]) -> None:
    assert [*keys_without_effect(compose_config(["experiment=fedavg_digits", *given]))] == lines


def towards(step: ServerStep, *, rate: float = 0.5) -> Tensor:
    return step.old + rate * step.change


def steps(step: LocalStep, *, rate: float = 1.0) -> None:
    for parameter, gradient in zip(step.parameters, step.gradients, strict=True):
        parameter.sub_(rate * step.lr * gradient)


def test_an_option_that_several_rules_take_is_named_with_all_of_them() -> None:
    rules = [f"method.train.server={__name__}:towards", f"method.train.optimizer={__name__}:steps"]
    overrides = ["experiment=fedavg_digits", *rules, "method.train.options.rate=0.25"]
    assert [*keys_without_effect(compose_config(overrides))] == [
        f"method.train.options.rate=0.25 is an option of server rule {__name__}:towards and of local optimizer "
        f"{__name__}:steps: each takes it"
    ]
    assert [*keys_without_effect(compose_config([*overrides[:2], overrides[-1]]))] == []


def shrink(x_B: Tensor, generator: torch.Generator, *, size: int = 2) -> Tensor:
    return x_B / size


def test_an_option_that_data_set_and_augmentation_take_is_named_with_both() -> None:
    data = ["data.dataset=folder", "+data.options.path=photos", "+data.options.size=8"]
    overrides = ["experiment=fedavg_digits", *data, f"data.augment={__name__}:shrink"]
    assert [*keys_without_effect(compose_config(overrides))] == [
        f"data.options.size=8 is an option of data set folder and of augmentation {__name__}:shrink: each takes it"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["attack.name=sign_flip", "attack.share=0.0"], []),
        (["attack.name=sign_flip"], ["attack.name=sign_flip has no effect with attack.share=0.0: it is for attackers"]),
        (["attack.name=sign_flip", "attack.share=0.2"], []),
        (["attack.name=alie"], []),  # is among those above
        ([], []),
    ],
)
def test_an_attack_that_is_the_default_is_said_to_have_no_attackers(
    given: list[str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["experiment=fedavg_digits", *given]
    tell_of_attack(compose_config(overrides), overrides)
    assert caplog.messages == said


def test_it_is_said_once_at_the_start_and_is_in_the_log(
    tiny_config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainingConfig(rounds=2, clients_per_round=3, final_lr_share=0.5)
    config = tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train, evaluate=False))
    start_run(config, make_serial)
    line = "method.train.final_lr_share=0.5 has no effect with method.train.schedule=fixed: it is for cosine"
    assert caplog.messages.count(line) == 1
    (log,) = Path(config.results).rglob("server.log")
    assert line in log.read_text()
