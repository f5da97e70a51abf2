"""Attackers: who they are, what they train on and send, and runs with them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.averaging.attacks import (
    Alie,
    Attack,
    Attackers,
    Collusion,
    Gaussian,
    InnerProduct,
    LabelFlip,
    SignFlip,
    attack as made_attack,
    largest_deviation,
)
from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.processors import Message, Payload, ServerContext, Traffic
from fedloom.platform.federation.config import AttackConfig, DevicesConfig, ExecutorConfig, RunConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import drawn_attackers
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.spaces.slices import Slice

TINY = (
    *("experiment=fedavg_digits", "tiers.paths=200", "data.num_clients=10", "method.train.rounds=2"),
    *("method.train.clients_per_round=6", "method.train.epochs=1", "method.train.evaluate_every=1"),
    *("space.stem_channels=4", "executor.kind=serial", "data.train_samples=300", "executor.chunk_size=2"),
)

PAYLOAD = Payload(12, 2, 1)


def test_attackers_are_a_share_of_the_clients_whatever_the_attack() -> None:
    drawn = drawn_attackers(0.26, 10, seed=1)
    assert len(drawn) == 3
    assert drawn <= set(range(10))
    assert drawn == drawn_attackers(0.26, 10, seed=1) != drawn_attackers(0.26, 10, seed=3)
    assert drawn_attackers(0.0, 10, seed=1) == frozenset()
    with pytest.raises(ValueError, match=r"attack.share=0.05 of 8 clients is rounded to no attacker: give 0, or at"):
        drawn_attackers(0.05, 8, seed=1)


def test_labels_in_reverse_order() -> None:
    flipped = Attackers(LabelFlip(), frozenset({3}))
    labels = torch.tensor([0, 2, -100, 9])
    assert flipped.on_labels(3, labels, 10).tolist() == [9, 7, -100, 0]
    assert flipped.on_labels(4, labels, 10) is labels


def sent(attack: Attack, client_id: int = 3) -> tuple[Tensor, Tensor]:
    """What client 3, an attacker, or another sends of a parameter and a buffer that it has trained."""
    tensors = {"w": torch.tensor([1.5, 0.0]), "mean": torch.tensor([5.0])}
    update = Update(tensors, {name: Slice(name) for name in tensors}, dict.fromkeys(tensors, 1.0))
    received = {"w": torch.tensor([1.0, 1.0]), "mean": torch.tensor([4.0])}
    message = Message(client_id, update, received, ("w",), Traffic(PAYLOAD, PAYLOAD))
    after = Attackers(attack, frozenset({3}), seed=7, places=("train", 1)).on_client(message).update
    return after.tensors["w"], after.tensors["mean"]


def test_a_change_with_its_sign_flipped() -> None:
    weight, statistic = sent(SignFlip(scale=2.0))
    assert weight.tolist() == [0.0, 3.0]  # 1 - 2 * .5, 1 + 2 * 1
    assert statistic.tolist() == [5.0]
    assert sent(SignFlip(), client_id=4)[0].tolist() == [1.5, 0.0]


def test_noise_instead_of_a_change_comes_from_the_clients_stream() -> None:
    small, large = sent(Gaussian(deviation=0.5))[0] - 1, sent(Gaussian(deviation=1.0))[0] - 1
    torch.testing.assert_close(2 * small, large)
    assert large.abs().min() > 0


def test_alie_stays_where_enough_honest_clients_are_further_away() -> None:
    # 50 clients, 12 of them attackers: 26 - 12 = 14 supporters, (50 - 12 - 14) / (50 - 12) = .6316 (Baruch et al., 4)
    assert largest_deviation(50, 12) == pytest.approx(0.336, abs=0.001)
    assert largest_deviation(10, 6) == 0.0
    changes = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    about = Collusion(changes, clients=50, attackers=12)
    torch.testing.assert_close(Alie().colluding(about), torch.tensor([2 + largest_deviation(50, 12), 0.0]))
    assert Alie(z=1.5).colluding(about).tolist() == [3.5, 0.0]
    assert InnerProduct(epsilon=0.5).colluding(about).tolist() == [-1.0, 0.0]


def test_colluders_that_hold_different_slices_agree_where_both_hold_a_scalar() -> None:
    def update(values: list[float], start: int) -> Update:
        tensors = {"part": torch.tensor(values), "mean": torch.tensor([2.0])}
        slices = {"part": Slice("w", ((start, start + len(values)),)), "mean": Slice("mean")}
        return Update(tensors, slices, {"part": 1.0, "mean": 1.0})

    old = {"w": torch.ones(4), "mean": torch.zeros(1)}
    context = ServerContext("train", 0, 7, old, {}, 1, parameters={"w"})
    updates = {1: update([2.0, 3.0], 0), 5: update([9.0], 3), 8: update([5.0, 7.0, 0.0], 1)}
    colluding = Attackers(InnerProduct(epsilon=1.0), frozenset({1, 8}), needs_updates=True)
    after = colluding.on_updates(updates, context)
    assert [*after] == [1, 5, 8]
    assert after[1].tensors["part"].tolist() == [0.0, -2.0]  # 1 - 1, 1 - (2 + 4) / 2
    assert after[8].tensors["part"].tolist() == [-2.0, -5.0, 2.0]
    assert after[5] is updates[5]
    assert after[1].tensors["mean"].tolist() == [2.0]
    assert updates[1].tensors["part"].tolist() == [2.0, 3.0]


# -- runs --------------------------------------------------------------------------------------------------------------


Make = Callable[..., RunConfig]


def fedavg_under(
    tiny_config: Make, attack: str, chunk_size: int, rounds: int, stack_clients: str = "auto", **train: Any
) -> RunConfig:
    """Six of eight clients in each round of FedAvg, of whom two fifths attack if an attack is named."""
    training = TrainingConfig(rounds=rounds, clients_per_round=6, batch_size=16, evaluate_every=1, **train)
    return tiny_config(
        method=FedAvgConfig(architecture="0-1-2", train=training, evaluate=False),
        attack=AttackConfig(share=0.4, name=attack) if attack else AttackConfig(),
        executor=ExecutorConfig(kind="serial", chunk_size=chunk_size, stack_clients=stack_clients),
    )


@pytest.mark.parametrize("attack", ["label_flip", "gaussian", "alie"])
def test_attacks_on_the_mean_and_on_a_median(attack: str, tiny_config: Make, run_in_memory: Any) -> None:
    """On labels, on each change alone, and in collusion."""

    def run(chunk_size: int, aggregator: str) -> tuple[pd.DataFrame, list[float]]:
        config = fedavg_under(tiny_config, attack, chunk_size, rounds=2, aggregator=aggregator)
        _, memory, _ = run_in_memory(config)
        return memory.table("clients"), memory.table("evaluations")["value"].tolist()

    rows, attacked = run(2, "mean")
    rows = rows[rows["client_id"].notna()]
    assert set(rows.loc[rows["attacker"].astype(bool), "client_id"]) <= drawn_attackers(0.4, 8, seed=1)
    assert 0 < rows["attacker"].mean() < 1
    assert all(map(math.isfinite, attacked))
    assert run(1, "median")[1] == run(6, "median")[1] != attacked


def test_labels_are_flipped_in_stacks_as_in_single_clients(tiny_config: Make, run_in_memory: Any) -> None:
    def losses(attack: str, stack_clients: str) -> Tensor:
        _, memory, _ = run_in_memory(fedavg_under(tiny_config, attack, 6, rounds=1, stack_clients=stack_clients))
        return torch.tensor(memory.table("clients")["loss"].dropna().tolist())

    stacked, alone = losses("label_flip", "6"), losses("label_flip", "off")
    torch.testing.assert_close(stacked, alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(stacked, losses("", "6"), rtol=1e-2)


def test_colluders_of_asynchronous_rounds_are_those_that_answer(
    tiny_config: Make, run_in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that began in an earlier round."""
    forged, on_updates = list[int](), Attackers.on_updates

    def watched(self: Attackers, updates: Mapping[int, Update], context: ServerContext) -> Mapping[int, Update]:
        after = on_updates(self, updates, context)
        forged.extend(client for client, update in updates.items() if after[client] is not update)
        return after

    monkeypatch.setattr(Attackers, "on_updates", watched)
    train = TrainingConfig(rounds=6, clients_per_round=4, batch_size=16, asynchronous="fedbuff", arrivals=2)
    config = tiny_config(
        method=FedAvgConfig(architecture="0-1-2", train=train, evaluate=False),
        devices=DevicesConfig(macs_per_s=[1e7, 3e7]),
        attack=AttackConfig(share=0.5, name="inner_product"),
    )
    _, memory, _ = run_in_memory(config)
    attacks = memory.table("clients").query("attacker")
    assert (attacks["staleness"] > 0).any()
    assert forged == attacks["client_id"].tolist()


def test_attackers_of_a_supernet_send_slices(tiny_config: Make, train_in_memory: Any) -> None:
    config = tiny_config()
    train = replace(config.method.train, rounds=2, clients_per_round=6, min_contributors=1, aggregator="rfa")
    attack = replace(config.attack, share=0.3, name="alie", options={"z": 1.0})
    memory = train_in_memory(replace(config, attack=attack, method=replace(config.method, train=train)))
    assert memory.table("clients")["attacker"].any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("attack.share=0.2", "attack.name=alei"), "unknown attack 'alei'.*did you mean 'alie'"),
        (("attack.share=1.0",), r"attack.share=1.0.*below 1"),
        (("attack.share=0.2", "attack.options.scale=0"), r"attack.options.scale.*greater than 0"),
        (("attack.share=0.2", "attack.options.z=1"), r"attack.options.z: not an option of attack sign_flip"),
        (
            ("attack.share=0.2", "attack.name=alie", "method.train.privacy.secure=true"),
            r"attack.name=alie needs every single update, and method.train.privacy leaves only sums",
        ),
        (
            ("attack.share=0.2", "attack.name=alie", "method.train.weighting=fedavg_whole"),
            r"method.train.weighting=fedavg_whole counts clients that do not hold a scalar",
        ),
        (
            ("method.train.aggregator=bulyan", "method.train.clients_per_round=2"),
            r"method.train.aggregator=bulyan needs more than the 2 clients of a round",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        start_run(compose_config([*TINY, f"results={tmp_path}", *changes]), make_serial)
    assert not [*tmp_path.iterdir()]


class Shorter(Attack):
    def change(self, change: Tensor, generator: torch.Generator) -> Tensor:
        return change[:1]


class Silent(Attack):
    def colluding(self, about: Collusion) -> None:
        pass


class Wrong(Attack):
    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        raise KeyError("no")


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (Shorter, r"Shorter' gives the shape \(1, 3\) for a tensor of the shape \(2, 3\): give one of the same shape"),
        (Silent, r"Silent' gives None for a tensor of the shape \(3,\): give one of the same shape"),
        (Wrong, r"Wrong' fails: KeyError: 'no'"),
    ],
)
def test_an_attack_of_ones_own_is_tried_before_a_run(own: type[Attack], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made_attack(ComponentSpec(f"{__name__}:{own.__name__}"))


def test_methods_whose_clients_do_more_than_train_one_network_refuse_attackers(tmp_path: Path) -> None:
    silos: list[Any] = ["method=ditto", "data.num_clients=4", "tiers.paths=100", "tiers.count=1"]
    config = compose_config([*silos, "executor.kind=serial", f"results={tmp_path}", "attack.share=0.5"])
    with pytest.raises(ValueError, match=r"attack.share=0.5: the clients of ditto cannot attack"):
        start_run(config, make_serial)
