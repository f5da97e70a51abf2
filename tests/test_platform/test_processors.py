"""Processors: a chain on the client, undone in reverse by the server, whose bytes the tables count."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.platform.averaging.average import Averaged, Update, WeightedSums
from fedloom.platform.averaging.processors import (
    Message,
    Payload,
    Processor,
    ServerContext,
    Sparsify,
    Traffic,
    expected_traffic,
    sent,
    with_share,
)
from fedloom.platform.clients.local_rules import LocalClient
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.local_adaptation import LocalAdaptationConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silos import SiloTrainingConfig
from fedloom.platform.plugins import PluginError
from fedloom.platform.spaces.slices import Slice

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PLUGINS))
    yield
    sys.modules.pop("quantise", None)


def traffic(up_bytes: int, changes: int) -> Traffic:
    """Of four trained scalars of one tensor and a counter of 8 bytes."""
    return Traffic(Payload(24, 4, 1), Payload(up_bytes, changes, 1))


def message() -> Message:
    """Four trained scalars with the changes 1, -4, 0.3 and 2, and a counter."""
    received = {"w": torch.zeros(4), "n": torch.tensor(3)}
    tensors = {"w": torch.tensor([1.0, -4.0, 0.3, 2.0]), "n": torch.tensor(5)}
    update = Update(tensors, {"w": Slice("w"), "n": Slice("n")}, {"w": 1.0, "n": 1.0})
    return Message(0, update, received, ("w",), traffic(24, 4))


def test_sparsify_keeps_the_largest_changes_and_counts_them_and_their_places() -> None:
    done = sent((Sparsify(share=0.5),), message())
    assert done.update.tensors["w"].tolist() == [0.0, -4.0, 0.0, 2.0]
    assert done.traffic == traffic(24 - 2 * 4 + 1, 2), "a mask of one byte says which two were left out"
    assert expected_traffic((Sparsify(share=0.5),), traffic(24, 4)) == done.traffic


@dataclass(frozen=True)
class Counts(Processor):
    """Counts its rounds in the client's state."""

    def on_client(self, message: Message) -> Message:
        message.memory("rounds", "w").add_(1)
        return message


class CountsToo(Counts):
    """Counts them as well, under the same name."""


def test_client_state_belongs_to_one_processor_or_to_the_local_rule() -> None:
    def client() -> LocalClient:
        weights = {"w": torch.zeros(2)}
        return LocalClient(0, 0, 8, 2, LocalSGD(1, 4, 0.1), weights, {"w": Slice("w")}, weights, state={})

    alone = client()
    for _ in range(2):
        sent((Counts(),), message(), alone.kept_by)
    assert alone.state["rounds/w"].tolist() == [2, 2]
    with pytest.raises(PluginError, match=r"^processor 2 \(CountsToo\) and processor 1 \(Counts\) keep client state"):
        sent((Counts(), CountsToo()), message(), client().kept_by)
    trained = client()
    trained.kept("rounds", "w")
    with pytest.raises(PluginError, match=r"\(Counts\) and the local rule keep client state called 'rounds': rename"):
        sent((Counts(),), message(), trained.kept_by)


def test_a_quantiser_of_ones_own_rounds_to_steps_of_the_largest_change() -> None:
    from quantise import Quantise

    done = sent((Quantise(bits=3),), message())
    steps = done.update.tensors["w"] / (4 / 3)
    assert steps.tolist() == pytest.approx([1.0, -3.0, 0.0, 2.0])  # .75, -3, .225 and 1.5 steps, halves to even
    assert done.traffic == traffic(24 - 16 + 2 + 4, 4)
    assert expected_traffic((Quantise(bits=3),), traffic(24, 4)) == done.traffic
    assert len((PLUGINS / "quantise.py").read_text().splitlines()) <= 25


@dataclass(frozen=True)
class Times(Processor):
    """Multiplies the change by a factor on the client, and the mean change by another one on the server."""

    client: float
    server: float
    log: Any = None

    def on_client(self, message: Message) -> Message:
        tensors = {**message.update.tensors, "w": message.update.tensors["w"] * self.client}
        return replace(message, update=replace(message.update, tensors=tensors))

    def on_mean(self, averaged: Averaged, context: ServerContext) -> Averaged:
        order.append(self.client)
        weights = {n: context.old[n] + (t - context.old[n]) * self.server for n, t in averaged.weights.items()}
        return Averaged(weights, averaged.coverage)


order: list[float] = []


def test_a_chain_is_undone_in_reverse(tiny_config: Any) -> None:
    train = TrainingConfig(rounds=1, clients_per_round=2)
    stage: Any = build_stages(build_world(tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train))))[0]
    chain = (Times(2.0, 0.5), Times(4.0, 0.25))
    done = sent(chain, message())
    assert done.update.tensors["w"].tolist() == pytest.approx([8.0, -32.0, 2.4, 16.0])
    sums = WeightedSums()
    sums.add(done.update)
    context = stage.processing.context(0, {"w": torch.zeros(4), "n": torch.tensor(3)}, {})
    order.clear()
    averaged = stage.processing.averaged(context, chain, sums, [], (), lambda _index, _clients: [])
    assert order == [4.0, 2.0]
    assert averaged.weights["w"].tolist() == pytest.approx([1.0, -4.0, 0.3, 2.0])


@dataclass(frozen=True)
class OnSums(Processor):
    """Changes the sums on the server."""

    def on_sums(self, sums: WeightedSums, context: ServerContext) -> WeightedSums:
        return sums


def test_what_changes_sums_alone_is_refused_where_every_update_is_kept(tiny_config: Any) -> None:
    for aggregator in ("mean", "median"):
        train = TrainingConfig(clients_per_round=4, processors=[f"{__name__}:OnSums"], aggregator=aggregator)
        world = build_world(tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train)))
        if aggregator == "mean":
            build_stages(world)
        else:
            with pytest.raises(
                ValueError, match=r"OnSums changes the sums of updates \(on_sums\), and here the server"
            ):
                build_stages(world)


def clients_of(run_in_memory: Any, config: Any) -> list[dict[str, Any]]:
    _, memory, _ = run_in_memory(config)
    rows = [row for r in memory.records for table, row in r.rows if table == "clients"]
    return [row for row in rows if row["stage"] in ("fedavg", "supernet")]


@pytest.mark.parametrize(("name", "options", "bits"), [("quantise:Quantise", {"bits": 4}, 4), ("sparsify", {}, 0)])
def test_the_tables_count_what_processors_send(
    tiny_config: Any, run_in_memory: Any, name: str, options: dict[str, int], bits: int
) -> None:
    train = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16, processors=[name], options=options)
    rows = clients_of(run_in_memory, tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train)))
    assert len(rows) == 6
    for row in rows:
        scalars, whole = row["parameters"], row["bytes_down"]
        smaller = -(-bits * scalars // 8) + 4 if bits else 4 * -(-scalars // 10) + -(-scalars // 8)
        assert row["bytes_up"] == whole - 4 * scalars + smaller


def test_supernets_are_trained_through_processors(tiny_config: Any, run_in_memory: Any) -> None:
    config = tiny_config()
    config.method.train = replace(config.method.train, processors=["sparsify", "quantise:Quantise"], rounds=1)
    rows = clients_of(run_in_memory, config)
    for row in rows:
        kept = -(-row["parameters"] // 10)
        sparse_and_small = kept + 4 + -(-row["parameters"] // 8)
        assert row["bytes_up"] == row["bytes_down"] - 4 * row["parameters"] + sparse_and_small
    assert rows


def test_silos_score_what_they_have_trained_not_what_they_send(silo_config: Any, run_in_memory: Any) -> None:
    scores = []
    for processors, options in (([], {}), (["noise"], {"noise_std": 10.0})):
        train = SiloTrainingConfig(rounds=1, batch_size=8, use_validation=False, evaluate_every=1)
        config = silo_config(LocalAdaptationConfig(train=replace(train, processors=processors, options=options)))
        config = replace(config, executor=replace(config.executor, stack_clients="off"))
        _, memory, _ = run_in_memory(config)
        rows = memory.table("evaluations").query("stage == 'local_adaptation' and split == 'validation'")
        scores.append(rows["value"].tolist())
    assert scores[0]
    assert scores[1] == scores[0]


def test_a_selection_rule_changes_the_share_that_a_method_sends() -> None:
    assert with_share((), 0.3) == (Sparsify(share=0.3),)
    assert with_share((Sparsify(share=0.5, by="weight"),), 0.3) == (Sparsify(share=0.3, by="weight"),)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"processors": ["sparsfy"]}, "method.train.processors[0]: unknown processor 'sparsfy'"),
        ({"processors": ["math:cos"]}, "processor 'math:cos'"),
        ({"processors": ["quantise:Traffic"]}, "processor 'quantise:Traffic'"),
        ({"processors": ["sparsify"], "options": {"share": 0.0}}, "method.train.options.share=0"),
        (
            {"processors": ["sparsify"], "local_rule": "scaffold", "momentum": 0.0},
            "method.train.local_rule=scaffold needs whole changes",
        ),
        (
            {"processors": ["sparsify"], "privacy": PrivacyConfig(secure=True)},
            "method.train.privacy.secure=true: masked updates are residues in fixed point",
        ),
    ],
)
def test_processors_that_do_not_fit_are_refused(tiny_config: Any, train: dict[str, Any], said: str) -> None:
    config = TrainingConfig(rounds=1, clients_per_round=2, **train)
    world = build_world(tiny_config(method=FedAvgConfig(architecture="0-1-2", train=config)))
    with pytest.raises(ValueError, match=re.escape(said)):
        build_stages(world)
