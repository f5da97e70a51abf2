"""Local rules: FedProx by hand, parts of the shared weights, and what rules share, send and keep with the clients."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.averaging.server import ServerStep
from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.local_rules import (
    LOCAL_RULES,
    LinearCorrection,
    LocalClient,
    LocalRule,
    local_rule,
    place_of,
    pull_towards,
)
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import Correction, LocalSGD, Optimizer
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import DevicesConfig, RunConfig
from fedloom.platform.federation.training_config import TrainingConfig, rules_of
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.slices import Slice, Weights, extract

Make = Callable[..., RunConfig]
W = "layer.weight"


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_local")
    monkeypatch.setitem(sys.modules, "own_local", module)
    return module


def fedprox(mu: float) -> ComponentSpec:
    return ComponentSpec("fedprox", (("mu", mu),))


def client_with(weights: Weights, piece: Slice, local: LocalSGD, state: dict[str, Tensor] | None = None) -> LocalClient:
    """A client that trains one parameter, a part of the shared tensor of the same name."""
    parameter = piece.of(weights[piece.source]).clone().requires_grad_()
    return LocalClient(3, 0, 10, 2, local, {W: parameter}, {W: piece}, weights, {} if state is None else state)


# -- FedProx by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mu", "expected"),
    [
        # w begins at (1, -1), the loss has the gradient (2, 4) everywhere, the learning rate is 0.1.
        # Step 1, nothing pulls yet:  w = (1, -1) - 0.1 (2, 4) = (0.8, -1.4)
        # Step 2:  mu (w - w_global) = mu (-0.2, -0.4)
        (0.0, [0.6, -1.8]),
        (0.5, [0.8 - 0.1 * (2 - 0.1), -1.4 - 0.1 * (4 - 0.2)]),  # (0.61, -1.78)
        (10.0, [0.8 - 0.1 * (2 - 2.0), -1.4 - 0.1 * (4 - 4.0)]),  # the pull holds it: (0.8, -1.4)
    ],
)
def test_two_steps_of_fedprox_by_hand(mu: float, expected: list[float]) -> None:
    local = LocalSGD(epochs=1, batch_size=5, lr=0.1)
    client = client_with({W: torch.tensor([1.0, -1.0])}, Slice(W), local)
    sgd = Optimizer(local, client.parameters, local_rule(fedprox(mu)).begin(client))
    for _ in range(2):
        (client.parameters[W] * torch.tensor([2.0, 4.0])).sum().backward()
        sgd.step()
    assert client.parameters[W].tolist() == pytest.approx(expected, abs=1e-6)
    assert client.received[W].tolist() == [1.0, -1.0], "the anchor stays"


def test_fedprox_without_a_pull_and_plain_sgd_correct_nothing() -> None:
    client = client_with({W: torch.ones(2)}, Slice(W), LocalSGD(1, 1, 0.1))
    assert local_rule(ComponentSpec("sgd")).begin(client) is None
    assert local_rule(fedprox(0.0)).begin(client) is None


def test_a_clients_training_with_fedprox_is_that_written_by_hand(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    worker, subnet = Worker(world.spec), Subnet((0, 2, 3), stand_alone=True)
    weights = world.space.initial_subnet_weights((0, 2, 3), torch_stream(1, "test"))
    x, y = worker.client_data(3, "train")
    # One batch of all samples per epoch: two steps, whatever the order.
    local = LocalSGD(epochs=2, batch_size=len(y), lr=0.1, rule=fedprox(0.5))
    task = Train(subnet, local)
    outcome = task.run(worker, Assignment("train", 0, 3, "tier1", task), weights)
    assert outcome.update is not None
    assert outcome.steps == 2

    module = world.space.build_subnet((0, 2, 3))
    module.load_state_dict(weights)
    parameters = dict(module.train().named_parameters())
    for _ in range(2):
        gradients = torch.autograd.grad(F.cross_entropy(module(x), y), list(parameters.values()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                parameter -= 0.1 * (gradient + 0.5 * (parameter - weights[name]))
    for name, parameter in parameters.items():
        torch.testing.assert_close(outcome.update.tensors[name], parameter, rtol=1e-4, atol=1e-5, msg=name)
    assert outcome.state is None, "FedProx keeps nothing"
    assert set(outcome.update.tensors) == set(weights), "and sends nothing but the model"


# -- parts of the shared weights --------------------------------------------------------------------------------------


def test_a_rule_sees_and_keeps_the_clients_part_of_the_shared_tensors() -> None:
    weights = {W: torch.arange(6.0).reshape(3, 2), place_of("control", W): torch.arange(6.0).reshape(3, 2) * 10}
    piece = Slice(W, ((0, 2), (0, 1)))
    state: dict[str, Tensor] = {}
    client = client_with(weights, piece, LocalSGD(1, 1, 0.1), state)
    assert client.received[W].tolist() == [[0.0], [2.0]]
    assert client.shared("control", W).tolist() == [[0.0], [20.0]]
    kept = client.kept("own", W)
    assert kept.tolist() == [[0.0], [0.0]]
    kept.add_(1.0)
    # What is kept has the shared tensor's shape: another part of it in another round finds what belongs to it.
    assert state[place_of("own", W)].tolist() == [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    whole = client_with(weights, Slice(W, ((1, 3), (0, 2))), LocalSGD(1, 1, 0.1), state)
    assert whole.kept("own", W).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    client.send("control", W, torch.tensor([[5.0], [6.0]]))
    assert client.sent_slices == {"control/layer.weight": Slice("control/layer.weight", ((0, 2), (0, 1)))}
    assert client.sent["control/layer.weight"].tolist() == [[5.0], [6.0]]
    assert client.sent_weights == {"control/layer.weight": None}


def test_an_elastic_subnets_rule_works_in_its_slices(elastic_config: Make, own_module: ModuleType) -> None:
    seen: dict[str, Tensor] = {}

    class Watch(LocalRule):
        shared = ("control",)

        def begin(self, client: LocalClient) -> Correction | None:
            seen.update({name: tensor.clone() for name, tensor in client.received.items()})
            return None

        def end(self, client: LocalClient) -> None:
            for name, parameter in client.parameters.items():
                client.kept("moved", name).add_(parameter - client.received[name])
                client.send("control", name, client.shared("control", name) + 1.0)

    own_module.Watch = Watch  # type: ignore[attr-defined]
    world = build_world(elastic_config())
    assert isinstance(world.space, ElasticSpace)
    weights = world.space.initial_weights(torch_stream(1, "test"))
    shared = {place_of("control", name): torch.full_like(weights[name], 2.0) for name in world.space.parameter_names}
    smallest = world.space.smallest
    task = Train(Subnet(smallest), LocalSGD(epochs=1, batch_size=16, lr=0.1, rule=ComponentSpec("own_local:Watch")))
    outcome = task.run(Worker(world.spec), Assignment("train", 0, 3, "tier1", task), {**weights, **shared})
    assert outcome.update is not None
    assert outcome.state is not None
    slices = world.space.slices(smallest)
    cut = extract(weights, slices)
    trained = world.space.parameter_names & cut.keys()
    assert seen.keys() == trained
    assert any(slices[name].region is not None for name in trained)
    for name in trained:
        assert torch.equal(seen[name], cut[name])
        # Sent: the slot's part, in the same region and with the same weight as the model's own tensors.
        place = place_of("control", name)
        assert outcome.update.slices[place] == Slice(place, slices[name].region)
        assert torch.equal(outcome.update.tensors[place], torch.full_like(cut[name], 3.0))
        assert outcome.update.weights[place] == outcome.update.weights[name]
        # Kept: of the supernet's shape, what was moved in the slice and zeros elsewhere.
        kept = outcome.state[f"rule/moved/{name}"]
        expected = torch.zeros_like(weights[name])
        slices[name].of(expected).copy_(outcome.update.tensors[name].detach() - cut[name])
        assert torch.equal(kept, expected)


# -- over rounds ------------------------------------------------------------------------------------------------------


class Counting(LocalRule):
    """Counts a client's rounds in the client's own state, and the answers of all clients in a shared slot."""

    shared = ("answers",)

    def __init__(self, *, step: float = 1.0) -> None:
        self.step = step

    def begin(self, client: LocalClient) -> Correction | None:
        for name in client.parameters:
            client.kept("rounds", name).add_(self.step)
        return None

    def end(self, client: LocalClient) -> None:
        for name, parameter in client.parameters.items():
            client.send("answers", name, torch.ones_like(parameter), weight=1.0)

    def merge(self, step: ServerStep) -> Tensor:
        return step.old + step.contributors


def counted(make: Make, **changes: Any) -> RunConfig:
    train = TrainingConfig(rounds=4, clients_per_round=3, batch_size=16, local_rule="own_local:Counting")
    train.options = {"step": 2.0}
    return make(method=FedAvgConfig(architecture="3-0-3", train=train), **changes)


def test_what_a_client_keeps_comes_back_only_from_those_that_took_part(
    tiny_config: Make, own_module: ModuleType, run_in_memory: Any
) -> None:
    own_module.Counting = Counting  # type: ignore[attr-defined]
    world, memory, ended = run_in_memory(counted(tiny_config, devices=DevicesConfig(dropout=0.4)))
    state = memory.state(3)  # after the last round
    rows = memory.table("clients")
    rows = rows[rows["stage"] == "fedavg"]
    assert set(rows["status"]) == {"ok", "dropped"}
    answers = rows[rows["status"] == "ok"]["client_id"].value_counts().to_dict()
    assert 0 < len(answers) < 8
    assert max(answers.values()) > 1, "somebody takes part twice, and goes on where it stopped"
    for client_id in range(8):
        kept = state.client_state(client_id)
        if client_id not in answers:
            assert kept is None, "it never took part, or was dropped whenever it should have"
            continue
        assert kept
        assert {name.removeprefix("rule/rounds/") for name in kept} < world.space.parameter_names
        assert all(bool((tensor == 2.0 * answers[client_id]).all()) for tensor in kept.values())
    assert all(ended.client_state(client_id) is None for client_id in range(8)), "it belonged to the training alone"


def test_what_is_shared_begins_at_zero_is_merged_and_is_not_part_of_the_model(
    tiny_config: Make, own_module: ModuleType, run_in_memory: Any
) -> None:
    own_module.Counting = Counting  # type: ignore[attr-defined]
    _, memory, state = run_in_memory(counted(tiny_config))
    # The state after each round of training; every round has three answers.
    for round_ in range(4):
        group = memory.state(round_).weights("fedavg")
        slots = {name: tensor for name, tensor in group.items() if name.startswith("answers/")}
        assert {name.removeprefix("answers/") for name in slots} < set(group)
        assert all(bool((tensor == 3.0 * (round_ + 1)).all()) for tensor in slots.values())
        assert not any("running" in name or "num_batches" in name for name in slots), "parameters alone"
    assert not any(name.startswith("answers/") for name in state.weights("fedavg"))


def test_a_slot_travels_and_is_counted(tiny_config: Make, own_module: ModuleType, run_in_memory: Any) -> None:
    own_module.Counting = Counting  # type: ignore[attr-defined]
    sums: dict[str, int] = {}
    for rule in ("sgd", "own_local:Counting"):
        config = counted(tiny_config)
        config.method.train.local_rule = rule
        config.method.train.options = {}
        world, memory, _ = run_in_memory(config)
        rows = memory.table("clients")
        sums[rule] = int(rows[rows["stage"] == "fedavg"]["bytes_up"].iloc[0])
    parameters = int(world.space.cost_table("parameters").cost((3, 0, 3)))
    assert sums["own_local:Counting"] == sums["sgd"] + 4 * parameters


def test_the_next_stage_begins_with_clients_that_kept_nothing(
    elastic_config: Make, own_module: ModuleType, run_in_memory: Any
) -> None:
    # Each member of the family has tensors of its own, of the same names and other shapes.
    own_module.Counting = Counting  # type: ignore[attr-defined]
    train = {"local_rule": "own_local:Counting", "clients_per_round": 8, "evaluate_every": 0}
    family = ["smallest", "largest"]
    world, memory, _ = run_in_memory(elastic_config(method={"separately": True, "family": family}, train=train))
    second = [record.state for record in memory.records if record.state is not None and record.state.stage == 1]
    assert len(second) >= 2
    for round_, state in enumerate(second[-2:]):
        assert state.round == round_ + 1
        for client_id in range(8):
            kept = state.client_state(client_id)
            assert kept is not None
            assert all(bool((tensor == round_ + 1).all()) for tensor in kept.values())
            assert sum(t.numel() for t in kept.values()) == world.space.cost_table("parameters").largest


# -- names and refusals -----------------------------------------------------------------------------------------------


def test_rules_are_found_by_name() -> None:
    assert sorted(LOCAL_RULES.known) == ["feddyn", "fednova", "fedprox", "scaffold", "sgd"]
    with pytest.raises(PluginError, match=r"unknown local rule 'fedprx': known are feddyn, .*, sgd, or module:name"):
        local_rule(ComponentSpec("fedprx"))


class Modest(Counting):
    """Counts rounds, of which a part of a change tells as much."""

    needs_whole_change = False


def test_a_rule_says_whether_it_needs_needs_whole_change(own_module: ModuleType) -> None:
    """Functions correct gradients alone; a class of one's own is taken to need them unless it says otherwise."""
    own_module.Modest, own_module.Counting = Modest, Counting  # type: ignore[attr-defined]
    own_module.modest = lambda client: pull_towards(0.1, client.received)  # type: ignore[attr-defined]
    needed = {name: local_rule(ComponentSpec(name)).needs_whole_change for name in LOCAL_RULES.known}
    assert {name for name, needs in needed.items() if needs} == {"feddyn", "scaffold"}
    for name in ("Modest", "modest"):
        rules_of(TrainingConfig(local_rule=f"own_local:{name}", selection="pyramidfl"), "method.train")
    with pytest.raises(ValueError, match="use another selection rule, or set needs_whole_change = False in the rule"):
        rules_of(TrainingConfig(local_rule="own_local:Counting", selection="pyramidfl"), "method.train")


class NoRule:
    """Has none of the methods."""


class Unsaid(LocalRule):
    """Sends what it does not share."""

    def begin(self, client: LocalClient) -> Correction | None:
        for name in client.parameters:
            client.send("secret", name, client.parameters[name])
        return None


class Letters(Unsaid):
    """Names its slot without a tuple around it."""

    shared = "control"  # type: ignore[assignment]


class Forgetful(LocalRule):
    """Has nothing to begin with."""


class Longer(LocalRule):
    """Sends another shape."""

    shared = ("control",)

    def begin(self, client: LocalClient) -> Correction | None:
        client.send("control", W, torch.ones(7))
        return None


class Heavy(LocalRule):
    """Gives what it sends a weight that is none."""

    shared = ("control",)

    def begin(self, client: LocalClient) -> Correction | None:
        client.send("control", W, client.parameters[W], weight=float("nan"))
        return None


class Wild(Longer):
    """Makes something of what is sent that is not finite."""

    def begin(self, client: LocalClient) -> Correction | None:
        client.send("control", W, client.parameters[W])
        return None

    def merge(self, step: ServerStep) -> Tensor:
        return step.mean * float("inf")


def explodes(client: LocalClient) -> Correction:
    """Makes gradients that are not finite."""

    def correct(name: str, parameter: Tensor, gradient: Tensor) -> None:
        gradient.fill_(float("inf"))

    return correct


def gives_back(client: LocalClient) -> Correction:
    """Makes new gradients, which nobody takes."""
    return lambda _name, parameter, gradient: gradient + parameter  # type: ignore[return-value]


def fails(client: LocalClient) -> Correction | None:
    """Asks for a parameter that is not there."""
    return client.parameters["no such name"]  # type: ignore[return-value]


WRONG: Mapping[str, tuple[Any, str]] = {
    "NoRule": (NoRule, "is no LocalRule: derive the class from fedloom.platform.clients.local_rules.LocalRule"),
    "Unsaid": (Unsaid, "fails: ValueError: there is no shared slot 'secret': name it in `shared`"),
    "explodes": (explodes, "makes a gradient that is not finite"),
    "gives_back": (gives_back, "has a correction that gives something back: change the gradient in place"),
    "text": (lambda _client: "sgd", r"gives 'sgd': give a function of \(name, parameter, gradient\), or None"),
    "Letters": (Letters, r"has shared = 'control': give a tuple of names, such as \('control',\)"),
    "Longer": (Longer, r"fails: ValueError: control: torch.float32 of \(7,\) is sent for layer.weight: give floats"),
    "Heavy": (Heavy, "fails: ValueError: control: the weight nan is sent for layer.weight: give a finite number"),
    "Forgetful": (Forgetful, r"has no begin\(client\): write one"),
    "Wild": (Wild, "gave values for control/layer.weight that are not finite"),
    "fails": (fails, "fails: KeyError: 'no such name'"),
    "number": (3, r"is an int, not a function of \(client\) and of options by keyword, or a class of such options"),
    "lonely": (lambda: None, "has the wrong parameters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_does_not_do_its_work_is_named_before_anything_is_written(
    own_module: ModuleType, name: str
) -> None:
    rule, message = WRONG[name]
    setattr(own_module, name, rule)
    with pytest.raises(PluginError, match=f"local rule 'own_local:{name}' {message}") as caught:
        rules_of(TrainingConfig(local_rule=f"own_local:{name}"), "method.train")
    assert "\n" not in str(caught.value)


def test_a_linear_correction_is_an_offset_and_a_pull_towards_an_anchor() -> None:
    steps = Counter[str]()
    correct = LinearCorrection({"w": torch.tensor([0.5, -0.5])}, 2.0, {"w": torch.tensor([1.0, 2.0])}, (steps,))
    gradient = torch.tensor([1.0, 2.0])
    correct(["w"], [torch.tensor([3.0, 3.0])], [gradient])
    # (1, 2) + (0.5, -0.5) + 2 ((3, 3) - (1, 2))
    assert gradient.tolist() == [5.5, 3.5]
    assert steps == {"w": 1}
