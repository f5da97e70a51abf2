"""FedSup: the sandwich rule with in-place distillation on the whole supernet."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.superfednas import Shrinking, ShrinkingConfig

Make = Callable[..., RunConfig]
SANDWICH = Shrinking(3, sandwich=True, distillation=0.5)


def at() -> Assignment:
    return Assignment("supernet", 0, 3, "tier1", None)  # type: ignore[arg-type]


def test_a_batch_begins_with_the_largest_and_ends_with_the_smallest(elastic_config: Make) -> None:
    world = build_world(elastic_config())
    worker, space = Worker(world.spec), world.space
    drawn = list(islice(SANDWICH._draws(worker, at()), 30))
    assert drawn[::3] == [space.largest] * 10
    assert drawn[2::3] == [space.smallest] * 10
    assert len(set(drawn[1::3])) > 3


def test_one_step_is_the_sum_of_the_passes_gradients(elastic_config: Make) -> None:
    world = build_world(elastic_config())
    worker, space = Worker(world.spec), world.space
    weights = space.initial_weights(torch.Generator().manual_seed(0))
    x, y = worker.client_data(3, "train")
    task = Train(SANDWICH, LocalSGD(epochs=1, batch_size=len(y), lr=0.1))
    outcome, counted = task.run(worker, at(), weights), task.account(worker, at())
    assert outcome.update is not None
    assert outcome.macs == counted.macs
    module = space.build_supernet().train()
    module.load_state_dict(weights)
    order = list(islice(SANDWICH._draws(worker, at()), 3))
    teacher = module(x, order[0])
    loss = torch.nn.functional.cross_entropy(teacher, y)
    for architecture in order[1:]:
        outputs = module(x, architecture)
        taught = torch.softmax(teacher.detach(), 1)
        divergence = (taught * (taught.log() - torch.log_softmax(outputs, 1))).sum(dim=1).mean()
        loss = loss + 0.5 * torch.nn.functional.cross_entropy(outputs, y) + 0.5 * divergence
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        expected = weights[name] - 0.1 * parameter.grad
        torch.testing.assert_close(outcome.update.tensors[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_a_run_of_fedsup(elastic_config: Make, run_in_memory: Any) -> None:
    shrinking = ShrinkingConfig(subnets_per_batch=3, depth_share=0.0, sandwich=True, distillation=1.0)
    config = elastic_config(train={"travels": "supernet", "shrinking": shrinking, "rounds": 3, "epochs": 3})
    _, memory, _ = run_in_memory(config)
    rows = [row for r in memory.records for table, row in r.rows if table == "rounds" and row["stage"] == "supernet"]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("shrinking", "said"),
    [
        (ShrinkingConfig(distillation=0.5), r"shrinking.distillation needs method.train.shrinking.sandwich=true"),
        (ShrinkingConfig(sandwich=True, subnets_per_batch=1), "a sandwich has a largest and a smallest subnet; give 2"),
    ],
)
def test_what_cannot_be_is_refused(elastic_config: Make, shrinking: ShrinkingConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_stages(build_world(elastic_config(train={"travels": "supernet", "shrinking": shrinking})))


def test_a_rule_that_needs_the_gradient_of_one_network_is_refused_where_every_pass_has_another(
    elastic_config: Make,
) -> None:
    train = {"local_rule": "scaffold", "options": {"option": 1}}
    build_stages(build_world(elastic_config(train=train)))  # a subnet per client
    with pytest.raises(ValueError, match=r"needs the gradient of one network, but clients train another one in every"):
        build_stages(build_world(elastic_config(train={"travels": "supernet", **train})))
