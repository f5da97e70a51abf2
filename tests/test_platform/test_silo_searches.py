"""Searches by silos and by the server: what they decide on, what of it all travels, what is refused and warned of."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients import trainer
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.dataset import StoredSamples
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import fedpnas
from fedloom.platform.methods.fedmn import FedMnConfig
from fedloom.platform.methods.fednas import FedNasConfig
from fedloom.platform.methods.fedpnas import FedPnasConfig, TrainSplit
from fedloom.platform.methods.global_nas import DecideCentrally, GlobalNasConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig, Milenas, Perturbation, with_row
from fedloom.platform.methods.silos import Personal, SiloTrainingConfig, unpacked
from fedloom.platform.methods.spider import SpiderConfig, SpiderTrainingConfig, TrainSpider
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Subspace, Weights, bytes_of, parse_subspace, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
Refused = Callable[[RunConfig], str]

LOCAL = LocalSGD(epochs=1, batch_size=8, lr=0.05, momentum=0.9, clip_norm=5.0)
RULES = rules_of(SiloTrainingConfig(), "method.train")
NO_SEARCH = Perturbation(turns=0)
ONE_NODE = SpaceConfig("darts_s2_small", channels=4, nodes=1)
"""Two edges per cell, for what is trained; neither can be pruned."""


@dataclass(frozen=True)
class Federation:
    """Three silos, a small supernet, and its first weights."""

    world: World
    worker: Worker
    weights: Weights

    @property
    def space(self) -> DartsSpace:
        assert isinstance(self.world.space, DartsSpace)
        return self.world.space

    def do(self, task: Task, state: Weights | None = None, round_: int = 0, client_id: int | None = 0) -> ClientResult:
        """One piece of a silo's (or the server's) work, with a copy of its state, as the executor hands it in."""
        own = None if state is None else {name: tensor.detach().clone() for name, tensor in state.items()}
        return task.run(self.worker, Assignment("train", round_, client_id, "tier1", task, state=own), self.weights)


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    return partial(silo_config, space=SpaceConfig("darts_s2_small", channels=4))


@pytest.fixture
def federation(make_config: Make) -> Federation:
    return first_of(make_config(SpiderConfig(), space=ONE_NODE))


def first_of(config: RunConfig) -> Federation:
    """A federation before its first round."""
    world = build_world(config)
    return Federation(world, Worker(world.spec), world.space.initial_weights(torch_stream(1, "first")))


def sent(outcome: ClientResult) -> Weights:
    assert outcome.update is not None
    return outcome.update.tensors


def own(outcome: ClientResult) -> Personal:
    assert outcome.state is not None
    return unpacked(outcome.state)


def silo_samples(clients: pd.DataFrame, stage: str, client_id: int = 0) -> list[int]:
    found: list[int] = clients[(clients.stage == stage) & (clients.client_id == client_id)].samples.tolist()
    return found


def assert_nothing_of_its_own_is_sent(outcome: ClientResult, state: Personal) -> None:
    update = sent(outcome)
    same = [n for n, t in update.items() if n in state.weights and t.is_floating_point() and t.numel() > 1]
    assert [n for n in same if torch.equal(update[n], state.weights[n])] == []
    mine = {t.data_ptr() for t in (*state.weights.values(), *state.momentum.values()) if t.numel()}
    assert mine.isdisjoint(t.data_ptr() for t in update.values())


# -- the server searches ----------------------------------------------------------------------------------------------


def test_a_decision_of_the_server_holds_for_all_from_the_next_round_on(make_config: Make, run_in_memory: Run) -> None:
    train = SiloTrainingConfig(rounds=5, batch_size=16, evaluate_every=1)
    method = GlobalNasConfig(train=train, search=ArchitectureSearchConfig(start=1, every=1))
    world, memory, _ = run_in_memory(make_config(method, space=ONE_NODE))
    space = cast(DartsSpace, world.space)
    clients = memory.table("clients")
    trained = clients[clients.stage == "global_nas"]
    at_the_beginning = [subspace_id(space.largest_subspace), *(memory.state(r).data["kept"] for r in range(4))]
    assert trained.groupby("round").subspace.unique().apply(list).tolist() == [[kept] for kept in at_the_beginning]
    left = [sum(len(row) > 1 for row in parse_subspace(kept)) for kept in at_the_beginning]
    assert left == [4, 4, 2, 0, 0]
    for round_ in range(5):
        kept = parse_subspace(memory.state(round_).data["kept"])
        assert memory.state(round_).weights("supernet").keys() == set(space.subspace_slices(kept))
    train_size, validation_size = (world.data.size(0, s) for s in ("train", "validation"))
    assert silo_samples(memory.table("clients"), "global_nas") == [train_size] * 3 + [train_size + validation_size] * 2
    rows = memory.table("evaluations")
    assert set(rows[rows.split == "validation"]["round"]) == set(range(3))
    assert set(rows.model) == {"global"}
    assert rows[rows.split == "test"].stage.unique().tolist() == ["evaluation"]


@pytest.mark.parametrize("method", [SpiderConfig, GlobalNasConfig, FedNasConfig, FedMnConfig])
def test_scaffolds_own_pass_changes_nothing_of_a_first_round_of_mixed_networks(
    make_config: Make, run_in_memory: Run, method: Callable[..., Any]
) -> None:
    """All control variates are zero in the first round: what is trained beside the network takes no step more."""
    config = make_config(method(), space=ONE_NODE)
    train = {"rounds": 1, "batch_size": 16, "pretraining_rounds": 0, "use_validation": False}
    own = {name: value for name, value in train.items() if hasattr(config.method.train, name)}
    if method in (FedNasConfig, SpiderConfig):
        config.method.search.rounds = 1
    states = []
    for rule, options in (("sgd", {}), ("scaffold", {"option": 1})):
        config.method.train = replace(config.method.train, **own, local_rule=rule, options=options)
        states.append(run_in_memory(config)[2].weights("supernet"))
    sgd, scaffold = states
    assert {name for name in scaffold if name not in sgd} == {name for name in scaffold if name.startswith("control/")}
    assert [name for name, tensor in sgd.items() if not torch.equal(tensor, scaffold[name])] == []


@pytest.mark.parametrize("name", ["global_nas", "fednas"])
def test_what_a_local_rule_shares_goes_with_the_weights_that_a_search_removes(
    make_config: Make, run_in_memory: Run, name: str
) -> None:
    train = SiloTrainingConfig(rounds=3, batch_size=16, lr=0.01, momentum=0.0, clip_norm=0.0, local_rule="scaffold")
    method = (
        GlobalNasConfig(train=train, search=ArchitectureSearchConfig(start=0, every=1))
        if name == "global_nas"
        else FedNasConfig(train=train, search=ArchitectureSearchConfig("milenas", rounds=1))
    )
    world, memory, _ = run_in_memory(make_config(method, space=ONE_NODE))
    space = cast(DartsSpace, world.space)
    for round_ in range(3):
        state = memory.state(round_)
        left = set(space.subspace_slices(parse_subspace(state.data["kept"])))
        controls = {f"control/{parameter}" for parameter in left & space.parameter_names}
        assert state.weights("supernet").keys() == left | controls


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_the_server_decides_on_validation_data_with_the_weights_that_the_round_began_with(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, statistics: str
) -> None:
    asked: list[str] = []
    central_data = Worker.central_data

    def spy(worker: Worker, split: str, share: float = 1.0) -> StoredSamples:
        asked.append(split)
        return central_data(worker, split, share)

    monkeypatch.setattr(Worker, "central_data", spy)
    kept = federation.space.largest_subspace
    outcome = federation.do(
        DecideCentrally(kept, Perturbation(99, statistics=statistics, batch_size=8)), client_id=None
    )
    assert asked == ["validation"]
    assert outcome.update is None
    assert outcome.samples == sum(federation.world.data.sizes("validation"))
    found = parse_subspace(outcome.subspace or "")
    assert [sum(len(found[d]) == 1 for d in federation.space.decisions(t)) for t in ("normal", "reduction")] == [1, 1]
    assert found == decided_by_hand(federation, kept, statistics)
    looked_at = federation.worker.tensors_of(federation.worker.supernet)
    assert [n for n, t in federation.weights.items() if not torch.equal(looked_at[n], t)] == [], "statistics, too"


def decided_by_hand(federation: Federation, kept: Subspace, statistics: str) -> Subspace:
    """The operators without which a network in training or evaluation mode is worst, on the same edges."""
    worker, space = federation.worker, federation.space
    module = space.build_supernet().train(statistics == "batch")
    module.load_state_dict({n: federation.weights[n] for n in module.state_dict()})
    x, y = worker.central_data("validation").tensors()
    shuffle = torch_stream(worker.spec.training_seed, "masked_batches", "train", 0, "server")
    order = torch.randperm(len(y), generator=shuffle)
    x, y = x[order], y[order]
    rng = stream(worker.spec.training_seed, "edges", "train", 0, "server")
    for cell_type in ("normal", "reduction"):
        decision = space.decisions(cell_type)[int(rng.integers(2))]
        pain = []
        for option in (0, 1):
            logits = torch.cat([module(x_B, with_row(kept, decision, (1 - option,))) for x_B in torch.split(x, 8)])
            accuracy = (logits.argmax(dim=1) == y).double().mean().item()
            pain.append((accuracy, -F.cross_entropy(logits, y).item(), option))
        kept = with_row(kept, decision, (min(pain)[2],))
    return kept


# -- FedPNAS ----------------------------------------------------------------------------------------------------------


def split_task(due: bool = False) -> TrainSplit:
    return TrainSplit(LOCAL, Perturbation(due), base_cells=1, rules=RULES)


def test_a_silo_of_fedpnas_sends_the_base_alone(federation: Federation) -> None:
    base = set(federation.space.base_tensors(1))
    assert {"stem.0.weight", "cells.0.preprocess1.conv.weight"} <= base
    assert "head.bias" not in base
    first = federation.do(split_task())
    second = federation.do(split_task(due=True), first.state, round_=1)
    for outcome in (first, second):
        assert outcome.update is not None
        assert sent(outcome).keys() == base
        assert outcome.update.weights.keys() == outcome.update.slices.keys() == base
        assert outcome.bytes_up == outcome.bytes_down == bytes_of({n: federation.weights[n] for n in base})
        assert base.isdisjoint(own(outcome).weights)
        assert base.isdisjoint(own(outcome).momentum)
        mine = {t.data_ptr() for t in own(outcome).weights.values()}
        assert mine.isdisjoint(t.data_ptr() for t in sent(outcome).values())
    after = own(second)
    assert set(after.weights) == set(federation.space.subspace_slices(after.remaining)) - base
    assert sum(len(row) == 1 for row in after.remaining) == 2


def test_all_silos_begin_a_round_with_the_same_base_and_their_own_rest(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {c: federation.do(split_task(), client_id=c).state for c in range(3)}
    begun: list[dict[str, Tensor]] = []

    def spy(worker: Worker, assignment: Assignment, network: Network, weights: Weights, *rest: Any, **more: Any) -> Any:
        begun.append({name: tensor.clone() for name, tensor in weights.items()})
        return trainer.train_network(worker, assignment, network, weights, *rest, **more)

    monkeypatch.setattr(fedpnas, "train_network", spy)
    for client_id, state in states.items():
        federation.do(split_task(), state, round_=1, client_id=client_id)
        assert state is not None
        for name, tensor in begun[client_id].items():
            is_base = name in federation.space.base_tensors(1)
            assert torch.equal(tensor, federation.weights[name] if is_base else unpacked(state).weights[name])
    assert not torch.equal(begun[0]["head.bias"], begun[1]["head.bias"])


def test_a_run_of_fedpnas_ends_with_an_architecture_of_its_own_for_every_silo(
    make_config: Make, run_in_memory: Run
) -> None:
    train = SiloTrainingConfig(rounds=4, batch_size=16, evaluate_every=1)
    method = FedPnasConfig(train=train, search=ArchitectureSearchConfig(start=1, every=1))
    world, memory, state = run_in_memory(make_config(method, space=ONE_NODE))
    space = cast(DartsSpace, world.space)
    kept = [unpacked(state.groups[f"client-{c}"].tensors).remaining for c in range(3)]
    for found in kept:
        space.validate_subspace(found)
        assert [len(row) for row in found] == [1] * 4
    heads = {tuple(unpacked(state.groups[f"client-{c}"].tensors).weights["head.bias"].tolist()) for c in range(3)}
    assert len(heads) == 3
    first = world.space.initial_weights(torch_stream(world.config.seed_for("initialisation"), "supernet"))
    shared, base = state.weights("supernet"), set(space.base_tensors(1))
    assert [n for n in shared if n not in base and not torch.equal(shared[n], first[n])] == []
    assert not torch.equal(shared["stem.0.weight"], first["stem.0.weight"])
    train_size, validation_size = (world.data.size(0, s) for s in ("train", "validation"))
    assert silo_samples(memory.table("clients"), "fedpnas") == [train_size] * 2 + [train_size + validation_size] * 2
    rows = memory.table("evaluations")
    assert set(rows[rows.split == "validation"]["round"]) == set(range(2))
    test = rows[rows.metric == "parameters"]
    expected = [space.cost_of_cells("parameters", found, 1) for found in kept]
    assert test.sort_values("client_id").value.tolist() == expected


# -- pruned edges -----------------------------------------------------------------------------------------------------


def test_a_pruned_edge_and_its_tensors_are_gone(make_config: Make) -> None:
    federation = first_of(make_config(SpiderConfig()))
    space = federation.space
    kept: Subspace = ((1,),) * 10
    state = Personal({n: federation.weights[n] for n in space.subspace_slices(kept)}, {}, kept).packed()
    task = TrainSpider(LOCAL, 0.1, Perturbation(turns=99, prune_edges=True), RULES)
    outcome = federation.do(task, state)
    after = own(outcome)
    assert [sum(not row for row in after.remaining[first : first + 5]) for first in (0, 5)] == [1, 1]
    assert set(after.weights) == set(space.subspace_slices(after.remaining))
    assert set(after.momentum) <= set(after.weights)
    joined = sum(federation.world.data.size(0, s) for s in ("train", "validation"))
    assert outcome.samples == joined, "nothing is left to be searched"
    not_yet = federation.do(TrainSpider(LOCAL, 0.1, Perturbation(turns=0, prune_edges=True), RULES), state)
    assert not_yet.samples == federation.world.data.size(0, "train")
    assert own(not_yet).remaining == kept


# -- what crosses the boundary ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [Perturbation(turns=99), Milenas(ends=False, lr=0.1)])
def test_nothing_of_a_silos_own_is_in_an_update_of_spider(make_config: Make, search: Any) -> None:
    federation = first_of(make_config(SpiderConfig()))
    first = federation.do(TrainSpider(LOCAL, 0.1, search, RULES))
    second = federation.do(TrainSpider(LOCAL, 0.1, search, RULES), first.state, round_=1)
    assert sent(second).keys() == federation.weights.keys()
    assert_nothing_of_its_own_is_sent(second, own(second))
    # By a worker of its own: what is sent may lie in a worker's module.
    other = replace(federation, worker=Worker(federation.world.spec))
    alone = other.do(TrainSpider(LOCAL, 0.0, NO_SEARCH, RULES), round_=1)
    assert all(torch.equal(t, sent(alone)[n]) for n, t in sent(second).items()), "whatever the silo's own model is"


# -- what is refused, and what is warned of ---------------------------------------------------------------------------

METHODS: dict[str, Callable[..., Any]] = {
    "spider": SpiderConfig,
    "global_nas": GlobalNasConfig,
    "fedpnas": FedPnasConfig,
}


@pytest.mark.parametrize("method", [SpiderConfig, GlobalNasConfig, FedNasConfig, FedPnasConfig])
def test_a_search_without_validation_data_is_refused(
    make_config: Make, method: Callable[..., Any], refused: Refused
) -> None:
    assert refused(make_config(method(), validation_share=0.0)) == (
        "data.validation_share=0 leaves a silo without validation samples to search with: raise it, or give each silo "
        "more samples"
    )


def test_searches_that_cannot_run_are_refused_in_one_line(make_config: Make, refused: Refused) -> None:
    def spider(**search: Any) -> RunConfig:
        return make_config(SpiderConfig(search=ArchitectureSearchConfig(**search)))

    assert refused(spider(kind="x")) == "method.search.kind=x: must be one of perturbation, milenas"
    assert refused(spider(kind="milenas", prune_edges=True)) == (
        "method.search.prune_edges: edges are pruned by perturbation, not by milenas; leave it out"
    )
    for name, value, allowed in (
        ("every", 0, "at least 1"),
        ("start", -1, "0 or more"),
        ("rounds", 0, "at least 1"),
        ("lr", 0.0, "greater than 0"),
        ("validation_weight", -0.5, "0 or more"),
    ):
        assert refused(spider(**{name: value})) == f"method.search.{name}={value}: must be {allowed}"
    pruning = spider(prune_edges=True)
    pruning.space.operators = ["sep_conv_3x3", "dil_conv_3x3"]
    assert refused(pruning) == (
        "method.search.prune_edges needs an operator without parameters (none, noise, skip_connect, max_pool_3x3, "
        "avg_pool_3x3), and the space has dil_conv_3x3, sep_conv_3x3: add one to space.operators, or leave it out"
    )
    for config in (GlobalNasConfig, FedPnasConfig):
        name = config().name
        assert refused(make_config(config(search=ArchitectureSearchConfig("milenas")))) == (
            f"method.search.kind=milenas: {name} searches by perturbation"
        )
    assert refused(make_config(FedNasConfig(search=ArchitectureSearchConfig()))) == (
        "method.search.kind=perturbation: fednas searches by milenas"
    )
    both = "leave a base and an own part of the 3 cells, 1 to 2"
    for base_cells, allowed in (
        (0, "be between 1 and 1000, or null"),
        (-1, "be between 1 and 1000, or null"),
        (3, both),
    ):
        assert refused(make_config(FedPnasConfig(base_cells=base_cells))) == (
            f"method.base_cells={base_cells}: must {allowed}"
        )
    assert refused(make_config(SpiderConfig(train=SpiderTrainingConfig(pull=-1.0)))) == (
        "method.train.pull=-1.0: must be 0 or more"
    )


def warned(config: RunConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build_stages(build_world(config))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("fedloom")]
    # Three cells with a base of one leave no normal cell to the silos: said once, here expected.
    return [message for message in messages if "own part has no normal cell" not in message]


@pytest.mark.parametrize(("name", "enough"), [("spider", 7), ("fedpnas", 7), ("global_nas", 8)])
def test_edges_that_will_not_be_searched_are_counted(
    make_config: Make, caplog: pytest.LogCaptureFixture, name: str, enough: int
) -> None:
    def config(rounds: int, **search: Any) -> RunConfig:
        found = METHODS[name](search=ArchitectureSearchConfig(start=1, every=1, **search))
        found.train.rounds = rounds
        return make_config(found)

    assert warned(config(enough), caplog) == []
    assert warned(config(enough - 1), caplog) == [
        "2 of 10 edges will not be searched before the last round: lower method.search.start or "
        "method.search.every, or train for more rounds"
    ]
    assert warned(config(enough, prune_edges=True), caplog) == [
        "not all edges will be pruned before the last round: that takes 6 search rounds, there are 5"
    ]
    assert warned(config(enough + 1, prune_edges=True), caplog) == []


def test_a_search_by_gradients_that_does_not_end_is_warned_of(
    make_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def config(rounds: int, search_rounds: int) -> RunConfig:
        search = ArchitectureSearchConfig("milenas", rounds=search_rounds)
        return make_config(SpiderConfig(train=SpiderTrainingConfig(rounds=rounds), search=search))

    assert warned(config(7, 5), caplog) == []
    for rounds in (6, 5, 4):
        assert warned(config(rounds, 5), caplog) == [
            "none of the 10 edges will be decided before the last round: lower method.search.rounds (5), or train for "
            "more than 6 rounds"
        ]


def test_a_base_that_leaves_no_normal_cell_to_the_silos_is_warned_of(
    make_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build_stages(build_world(make_config(FedPnasConfig())))
    assert "the silos' own part has no normal cell" in caplog.text
