"""A silo's own model in SPIDER: alone to the bit without a pull, else moved by its gradient and by nothing else."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.trainer import client_samples, train_network
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.silo_search import Perturbation, with_row
from fedloom.platform.methods.silos import Personal, resumed, unpacked
from fedloom.platform.methods.spider import SpiderConfig, SpiderTrainingConfig, TrainSpider
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Weights
from fedloom.platform.spaces.space_config import SpaceConfig
from tests.test_platform.test_spaces_operator_choice import tensors_of

SHARED = "supernet"
Make = Callable[..., RunConfig]

LOCAL = LocalSGD(epochs=1, batch_size=16, lr=0.05, momentum=0.9, clip_norm=5.0)
RULES = rules_of(SpiderTrainingConfig(), "method.train")
ROUNDS = 3


@pytest.fixture
def world(silo_config: Make) -> World:
    """Three silos with cells of one node."""
    return build_world(silo_config(SpiderConfig(), space=SpaceConfig("darts_s2_small", channels=4, nodes=1)))


def worker_of(world: World) -> Worker:
    """A fresh worker, but for the space, which does not change: to count its operators' costs takes a while."""
    worker = Worker(world.spec)
    worker.space = world.space
    return worker


def darts(world: World) -> DartsSpace:
    assert isinstance(world.space, DartsSpace)
    return world.space


def same_bits(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def received(
    first: Weights, change: Callable[[Tensor, int], Tensor] = lambda t, _: t, rounds: int = ROUNDS
) -> Iterator[Weights]:
    """The same weights in round 0, then whatever `change` makes of them."""
    for round_ in range(rounds):
        yield {
            name: change(tensor, round_) if round_ and tensor.is_floating_point() else tensor
            for name, tensor in first.items()
        }


def states_of(world: World, stream: Iterator[Weights], pull: float) -> tuple[list[Weights], list[Weights]]:
    """Silo 1's states and what it sends after every round; from round 1 on every round searches."""
    worker, states, sent = worker_of(world), [], []
    state: Weights | None = None
    for round_, weights in enumerate(stream):
        task = TrainSpider(LOCAL, pull, Perturbation(turns=round_), RULES)
        outcome = task.run(worker, Assignment("spider", round_, 1, "tier1", task, state=state), weights)
        assert outcome.state is not None
        assert outcome.update is not None
        state = outcome.state  # the next task changes it in place: what is compared later is a copy
        states.append({name: tensor.clone() for name, tensor in state.items()})
        sent.append(outcome.update.tensors)
    return states, sent


def states_alone(world: World, first: Weights) -> list[Weights]:
    """The same silo where there is no shared model at all."""
    worker, states = worker_of(world), []
    silo = Personal(dict(first), {}, darts(world).largest_subspace)
    for round_ in range(ROUNDS):
        task = Perturbation(turns=round_)
        assignment = Assignment("spider", round_, 1, "tier1", TrainSpider(LOCAL, 0.0, task, RULES))
        silo, _macs = task.before(worker, assignment, silo)
        joined = all(len(row) == 1 for row in silo.remaining)
        own = train_network(
            worker,
            assignment,
            MixedNetwork(silo.remaining).on(worker),
            silo.weights,
            client_samples(worker, assignment, use_validation=joined),
            LOCAL,
            resumed(silo.momentum),
        ).copied()
        silo = Personal(own.tensors, own.momentum, silo.remaining)
        states.append({name: tensor.clone() for name, tensor in silo.packed().items()})
    return states


def test_without_a_pull_a_silo_is_alone_for_as_long_as_it_searches_and_after(world: World) -> None:
    first = darts(world).initial_weights(torch_stream(1, SHARED))

    def other_weights(tensor: Tensor, round_: int) -> Tensor:
        return tensor * (1 + 0.3 * round_) + 0.1

    same, sent = states_of(world, received(first), 0.0)
    other, sent_other = states_of(world, received(first, other_weights), 0.0)
    alone = states_alone(world, first)
    left = [sum(len(row) > 1 for row in unpacked(state).remaining) for state in same]
    assert left == [4, 2, 0], "an edge of each cell is decided in every round but the first"
    for round_ in range(ROUNDS):
        assert same_bits(same[round_], other[round_]), round_
        assert same_bits(same[round_], alone[round_]), round_
        assert same_bits(sent[round_], sent_other[round_]) == (round_ == 0), "what it receives is another model"
    assert any(name.startswith("momentum/") for name in same[-1])

    pulled, _ = states_of(world, received(first, rounds=2), 0.5)
    pulled_elsewhere, _ = states_of(world, received(first, other_weights, rounds=2), 0.5)
    assert same_bits(pulled[0], pulled_elsewhere[0])
    assert not same_bits(pulled[1], pulled_elsewhere[1])


def test_the_pull_moves_what_the_silo_keeps_by_its_gradient_and_nothing_else(world: World) -> None:
    space, one_batch = darts(world), LocalSGD(epochs=1, batch_size=1000, lr=0.05)
    weights = space.initial_weights(torch_stream(1, SHARED))
    parameters = {name for name, _ in space.build_supernet().named_parameters()}
    kept = with_row(with_row(space.largest_subspace, 0, (0,)), 3, (1,))
    held = set(space.subspace_slices(kept))
    dropped = set(space.subspace_slices(space.largest_subspace)) - held
    assert dropped == {*tensors_of(space, (0, 1)), *tensors_of(space, (3, 0))}
    assert dropped & parameters, "an operator with parameters is among them"

    # v - w is 0.5 in half of the tensors, and -0.25 in the others.
    distance = {name: 0.5 if i % 2 else -0.25 for i, name in enumerate(sorted(held & parameters))}
    own = {name: weights[name] + distance[name] if name in distance else weights[name] for name in held}
    state = Personal(own, {}, kept).packed()

    def after(pull: float, received: Weights) -> tuple[Personal, Weights]:
        task = TrainSpider(one_batch, pull, Perturbation(turns=0), RULES)
        outcome = task.run(worker_of(world), Assignment("spider", 0, 0, "tier1", task, state=state), received)
        assert outcome.steps == 2, "a step of either model"
        assert outcome.state is not None
        assert outcome.update is not None
        return unpacked(outcome.state), outcome.update.tensors

    (free, sent), (pulled, sent_too) = after(0.0, weights), after(0.2, weights)
    assert set(free.weights) == set(pulled.weights) == held
    for name in held:
        # -lr * lambda * (v - w): -0.05 * 0.2 * 0.5, and -0.05 * 0.2 * -0.25
        moved = {0.5: -0.005, -0.25: 0.0025}[distance[name]] if name in distance else 0.0
        difference = pulled.weights[name].double() - free.weights[name].double()
        assert torch.allclose(difference, torch.full_like(difference, moved), rtol=0, atol=2e-6), name
        if name not in distance:
            assert torch.equal(pulled.weights[name], free.weights[name]), name
    assert same_bits(sent, sent_too), "the shared model feels no pull"

    elsewhere = {
        name: tensor + 7 if name in dropped and name in parameters else tensor for name, tensor in weights.items()
    }
    again, sent_elsewhere = after(0.2, elsewhere)
    assert same_bits(again.weights, pulled.weights), "towards operators that are gone there is no pull"
    assert not same_bits(sent, sent_elsewhere)
