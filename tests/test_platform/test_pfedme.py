"""pFedMe: steps in literal numbers, whole rounds beside a slow reference, and the limit in which it is FedAvg."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, batch_indices
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods import local_adaptation, pfedme
from fedloom.platform.methods.local_adaptation import LocalAdaptationConfig
from fedloom.platform.methods.pfedme import MoreauSteps, PFedMeConfig, PFedMeTrainingConfig
from fedloom.platform.methods.silos import SiloTrainingConfig, unpacked
from fedloom.platform.seeding import torch_stream

Make = Callable[..., RunConfig]
TWO_ROUNDS = PFedMeTrainingConfig(rounds=2, batch_size=12, use_validation=False)


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    return partial(silo_config, train_samples=150)


def test_two_batches_in_literal_numbers() -> None:
    theta, w = nn.Parameter(torch.tensor([0.0])), torch.tensor([0.0])
    network = Network(nn.Module(), lambda x: torch.cat([torch.zeros_like(x), theta * x], dim=1), {}, 0.0)
    steps = MoreauSteps(network, {"theta": w}, PFedMeTrainingConfig(pull=2.0, inner_steps=2, outer_lr=0.25))
    watched, step = steps.watched(), steps.of(Optimizer(LocalSGD(1, 1, lr=0.1), {"theta": theta}))

    def batch(x: float, y: int) -> list[float]:
        loss = cast(Any, watched.loss)(Objective(), watched.forward(torch.tensor([[x]])), torch.tensor([y]))
        loss.backward()
        step.step()
        return [theta.item(), w.item()]

    # -2 sigmoid(0) = -1, so that theta = .1; then -2 sigmoid(-.2) + 2 * .1 = -.7003320, and w goes half of the way.
    assert batch(2.0, 1) == pytest.approx([0.17003320, 0.08501660], abs=1e-7)
    # sigmoid(.1700332) + 2 * .0850166 = .7124394, so that theta = .0987893; then sigmoid(.0987893) + 2 * .0137727.
    assert batch(1.0, 0) == pytest.approx([0.04356701, 0.06429180], abs=1e-7)


class Silo:
    """A silo's round by plain torch."""

    def __init__(self, module: nn.Module, train: PFedMeTrainingConfig) -> None:
        self.module, self.train = module, train
        self.optimizer = torch.optim.SGD(module.parameters(), lr=train.lr)
        self.outer = {name: p.detach().clone() for name, p in module.named_parameters()}

    def sees(self, x: Tensor, y: Tensor) -> None:
        """K steps on the envelope's inner problem, and one of the silo's shared model."""
        for _ in range(self.train.inner_steps):
            far = sum(((p - self.outer[name]) ** 2).sum() for name, p in self.module.named_parameters())
            self.optimizer.zero_grad()
            (F.cross_entropy(self.module(x), y) + self.train.pull / 2 * far).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        for name, p in self.module.named_parameters():
            self.outer[name] -= self.train.outer_lr * self.train.pull * (self.outer[name] - p.detach())


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_two_rounds_are_those_of_a_slow_reference(make_config: Make, run_in_memory: Any, beta: float) -> None:
    train = replace(TWO_ROUNDS, pull=3.0, inner_steps=3, outer_lr=0.1, beta=beta)
    world, memory, state = run_in_memory(make_config(PFedMeConfig(train=train)))
    worker, subnet = Worker(world.spec), world.space.build_subnet((0, 0, 0))
    stream = torch_stream(world.config.seed_for("initialisation"), "supernet")
    shared: dict[str, Tensor] = world.space.initial_subnet_weights((0, 0, 0), stream)
    for round_ in range(2):
        silos = []
        for client_id in range(3):
            subnet.load_state_dict(shared)
            silo = Silo(subnet.train(), train)
            x, y = worker.client_data(client_id, "train")
            batches = torch_stream(world.spec.training_seed, "batches", "pfedme", round_, client_id)
            for index in batch_indices(len(y), train.batch_size, 1, batches):
                silo.sees(x[index], y[index])
            silos.append(silo.outer)
            personal = {name: tensor.clone() for name, tensor in subnet.state_dict().items()}
        mean = {name: sum(silo[name] for silo in silos) / 3 for name in silos[0]}
        shared |= {name: (1 - beta) * shared[name] + beta * mean[name] for name in mean}
    for name in mean:
        torch.testing.assert_close(state.weights("supernet")[name], shared[name], rtol=1e-4, atol=1e-5)
        last = unpacked(state.groups["client-2"].tensors).weights[name]
        torch.testing.assert_close(last, personal[name], rtol=1e-4, atol=1e-5)
    rows = memory.table("clients")
    trained = rows[rows.stage == "pfedme"]
    sizes = torch.tensor(trained.samples.tolist())
    assert trained.macs.tolist() == (3 * world.macs_table.cost((0, 0, 0)) * sizes).long().tolist()
    assert set(memory.table("evaluations").model) == {"personal"}


def test_one_inner_step_that_is_followed_all_the_way_is_fedavg_bit_for_bit(make_config: Make, run_stages: Any) -> None:
    plain = SiloTrainingConfig(
        **{name: getattr(TWO_ROUNDS, name) for name in SiloTrainingConfig.__dataclass_fields__}
        | {"momentum": 0.5, "clip_norm": 1.0, "weighting": "fedavg"}
    )
    moreau = replace(
        TWO_ROUNDS, momentum=0.5, clip_norm=1.0, weighting="fedavg", pull=4.0, outer_lr=0.25, inner_steps=1
    )
    config = make_config(LocalAdaptationConfig(train=plain))
    world = build_world(replace(config, executor=replace(config.executor, stack_clients="off")))

    def shared(stages: list[Stage]) -> dict[str, Tensor]:
        return dict(cast(RunState, run_stages(world, stages[:1], RunState())[1]).weights("supernet"))

    # Both under one name, as random streams depend on the stage's.
    same = pfedme.stages(PFedMeConfig("local_adaptation", train=moreau), world)
    fedavg, limit = shared(local_adaptation.stages(world.config.method, world)), shared(same)
    assert [name for name, tensor in fedavg.items() if not torch.equal(tensor, limit[name])] == []
    twice = replace(moreau, inner_steps=2)
    other = shared(pfedme.stages(PFedMeConfig("local_adaptation", train=twice), world))
    assert not torch.equal(fedavg["fixed.classifier.bias"], other["fixed.classifier.bias"])


def test_what_has_its_own_place_in_the_method_is_refused(
    make_config: Make, refused: Callable[[RunConfig], str]
) -> None:
    def said(**changes: Any) -> str:
        return refused(make_config(PFedMeConfig(train=replace(TWO_ROUNDS, **changes))))

    rest = "pfedme has rules of its own for its silos (pull, outer_lr) and its server (beta); use"
    assert said(local_rule="fedprox") == f"method.train.local_rule=fedprox: {rest} sgd"
    assert said(server="fedadam") == f"method.train.server=fedadam: {rest} replace"
    assert said(outer_lr=0.0) == "method.train.outer_lr=0.0: must be greater than 0"
