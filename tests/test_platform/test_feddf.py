"""FedDF: the divergence by hand, rounds of two kinds by plain torch, the limit of FedAvg, refusals."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment, TaskError
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.objectives import divergence
from fedloom.platform.clients.training import batch_indices
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods import fedavg
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.feddf import Distill, DistillationConfig, FedDFConfig, _logits
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
SPACE = SpaceConfig("cnn_width", input_shape=[1, 8, 8], stage_widths=[4, 8], widths=[0.5, 1.0], norm="none")
TRAIN = TrainingConfig(rounds=2, clients_per_round=4, batch_size=1000, momentum=0.0, evaluate_every=1)
FEW = DistillationConfig(steps=5, batch_size=16, lr=0.01)


@pytest.fixture
def kinds_config(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in 2 tiers, of two kinds; keywords are of the method."""

    def make(*, space: SpaceConfig = SPACE, **method: Any) -> RunConfig:
        tiers = TiersConfig(count=2, clients=[0, 0, 0, 0, 1, 1, 1, 1], upper_bounds=[4000.0, 12000.0])
        return tiny_config(
            method=FedDFConfig(**{"train": TRAIN, "distillation": FEW, **method}), space=space, tiers=tiers
        )

    return make


def test_the_divergence_by_hand() -> None:
    taught = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])
    # .25 ln(.25 / .5) + .75 ln(.75 / .5) = .13081204, and 0
    assert divergence(torch.zeros(2, 2), taught).item() == pytest.approx(0.13081204 / 2)


def test_two_rounds_of_two_kinds_are_those_of_plain_torch(kinds_config: Make, run_in_memory: Any) -> None:
    world, memory, _ = run_in_memory(kinds_config())
    worker, space, seed = Worker(world.spec), world.space, world.spec.training_seed
    generator = torch_stream(world.config.seed_for("initialisation"), "feddf")
    models = {kind: space.initial_subnet_weights(kind, generator) for kind in ((0,), (1,))}
    modules = {kind: space.build_subnet(kind) for kind in models}
    unlabelled = worker.central_data("validation").tensors()[0]
    clients = memory.table("clients")
    for round_ in range(2):
        sent: dict[Any, list[tuple[int, dict[str, Tensor]]]] = {kind: [] for kind in models}
        logits = []
        chosen = clients[(clients.stage == "feddf") & (clients["round"] == round_)]
        for client_id in chosen.client_id:
            kind = (int(world.tier_of_client[client_id]),)
            modules[kind].load_state_dict(models[kind])
            x, y = worker.client_data(client_id, "train")
            gradients = torch.autograd.grad(F.cross_entropy(modules[kind](x), y), list(modules[kind].parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(modules[kind].parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
                logits.append(modules[kind](unlabelled))
            sent[kind].append((len(y), {n: t.clone() for n, t in modules[kind].state_dict().items()}))
        probabilities = torch.stack(logits).mean(dim=0).softmax(dim=1)
        stream = torch_stream(seed, "distillation", "feddf", round_)
        batches = list(batch_indices(len(unlabelled), 16, 5, stream))[:5]
        for kind, module in modules.items():
            if sent[kind]:
                total = sum(samples for samples, _ in sent[kind])
                models[kind] = {
                    n: cast(Tensor, sum(s * t[n] for s, t in sent[kind])) / total for n in module.state_dict()
                }
            module.load_state_dict(models[kind])
            adam = torch.optim.Adam(module.parameters(), lr=0.01)
            for step, batch in enumerate(batches):
                adam.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / 4)) / 2
                adam.zero_grad()
                predicted = module(unlabelled[batch]).log_softmax(dim=1)
                target = probabilities[batch]
                (target * (target.log() - predicted)).sum(dim=1).mean().backward()
                adam.step()
            models[kind] = {n: t.clone() for n, t in module.state_dict().items()}
    final = memory.state(1).weights("supernet")
    assert set(final) == {f"{kind[0]}/{name}" for kind, weights in models.items() for name in weights}
    for kind, weights in models.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(final[f"{kind[0]}/{name}"], tensor, rtol=1e-3, atol=1e-5)
    trained = clients[clients.stage == "feddf"]
    sizes = {f"tier{i + 1}": space.cost_table("bytes").cost((i,)) for i in range(2)}
    assert {(row.tier, row.bytes_up) for row in trained.itertuples()} <= {*sizes.items()}
    rows = memory.table("evaluations")
    validated = rows[(rows.split == "validation") & (rows.metric == "accuracy") & (rows.stage == "feddf")]
    assert len(validated) == 2 * 3, "both kinds, before each round and after the last"
    tested = rows[(rows.split == "test") & (rows.metric == "accuracy") & rows.client_id.isna()]
    assert tested.architecture.tolist() == ["0", "1"]


@pytest.mark.parametrize("steps", [0, 3])
def test_without_steps_of_the_server_it_is_fedavg_bit_for_bit(kinds_config: Make, run_stages: Any, steps: int) -> None:
    # A step of this size changes no float32: what is left is the rounding of a mean of single updates.
    distillation = replace(FEW, steps=steps, lr=1e-30)
    train = replace(TRAIN, batch_size=16, momentum=0.9, rounds=3)
    config = kinds_config(architectures=["largest"], train=train, distillation=distillation)
    world = build_world(replace(config, executor=replace(config.executor, stack_clients="off")))
    plain = fedavg.training(FedAvgConfig(architecture="largest", train=train), world, "feddf")
    (average, state) = (run_stages(world, [stage], RunState())[1] for stage in (plain, build_stages(world)[0]))
    expected, ours = average.weights("feddf"), state.weights("supernet")
    assert {name.removeprefix("1/") for name in ours} == set(expected)
    for name, tensor in expected.items():
        if steps:
            torch.testing.assert_close(ours[f"1/{name}"], tensor, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(ours[f"1/{name}"], tensor), name


def test_students_approach_the_ensemble_of_teachers_of_other_kinds(kinds_config: Make) -> None:
    world = build_world(kinds_config())
    worker, space = Worker(world.spec), world.space
    drawn = {kind: space.initial_subnet_weights(kind, torch_stream(2, "test", *kind)) for kind in ((0,), (1,))}
    weights = {f"{kind[0]}/{name}": tensor for kind, own in drawn.items() for name, tensor in own.items()}
    teachers, unlabelled = ((0,), (1,), (1,)), worker.central_data("validation").tensors()[0]
    state, logits = dict[str, Tensor](), []
    for index, kind in enumerate(teachers):
        module, own = space.build_subnet(kind), space.initial_subnet_weights(kind, torch_stream(3, "test", index))
        own = {name: 2 * tensor for name, tensor in own.items()}
        module.load_state_dict(own)
        with torch.no_grad():
            logits.append(module(unlabelled))
        state |= {f"{index}/{name}": tensor for name, tensor in own.items()}
    taught = torch.stack(logits).mean(dim=0)

    def distance(tensors: Mapping[str, Tensor], kind: tuple[int]) -> float:
        module = space.build_subnet(kind)
        module.load_state_dict({n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(f"{kind[0]}/")})
        with torch.no_grad():
            return divergence(module(unlabelled), taught).item()

    task = Distill(((0,), (1,)), teachers, replace(FEW, steps=200))
    update = task.run(worker, Assignment("feddf", 0, None, "server", task, state=state), weights).update
    assert update is not None
    for kind in drawn:
        assert distance(update.tensors, kind) < 0.2 * distance(weights, kind)


def test_a_single_logit_is_not_distilled() -> None:
    with pytest.raises(TaskError, match=r"feddf distils a logit per class, and the network gives \(4, 1\) for a batch"):
        _logits(cast(Network, SimpleNamespace(forward=lambda x: x)), torch.zeros(4, 1))


def test_what_it_cannot_do_is_refused_in_one_line(kinds_config: Make, refused: Callable[[RunConfig], str]) -> None:
    def said(**method: Any) -> str:
        return refused(kinds_config(**method))

    private = replace(TRAIN, privacy=PrivacyConfig(secure=True))
    assert said(train=private) == (
        "method.train.privacy: feddf's server looks at every single network; use method.distillation.steps=0"
    )
    whole = replace(TRAIN, weighting="fedavg_whole")
    assert said(train=whole).startswith("method.train.weighting=fedavg_whole: networks of several kinds have no")
    normalised = replace(TRAIN, local_rule="fednova", server="fednova")
    assert said(train=normalised).startswith("method.train.local_rule=fednova: clients send normalised changes, not")
    late = replace(TRAIN, asynchronous="fedbuff", arrivals=2)
    assert said(train=late).startswith("method.train.asynchronous=fedbuff: late networks are mixed with newer weights")
    assert said(architectures=["0"] * 3) == "method.architectures has 3 values for 2 tiers: give one each, or one"
    assert said(architectures=["1", "1"]).startswith("method.architectures: tier1 may spend 4000 macs, p=1 costs ")
    config = kinds_config()
    nothing = replace(config, data=replace(config.data, validation_share=0.0), method=config.method)
    config.method.train = replace(TRAIN, evaluate_every=0)
    assert refused(nothing) == (
        "method.distillation needs unlabelled inputs, the server's validation data: raise data.validation_share"
    )
    operators = replace(config, space=SpaceConfig("cnn_digits", stage_layers=[4, 4]), tiers=TiersConfig(paths=200))
    assert refused(operators).startswith("method.architectures: cnn_digits has 43046721 architectures, too many")
