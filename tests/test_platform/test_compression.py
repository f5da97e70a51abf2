"""Compression: what arrives, its bytes, what is remembered, and in which order processors may follow each other."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fedloom.platform.averaging.average import Averaged, Coverage, Update
from fedloom.platform.averaging.compression import Clip, Noise, Qsgd, TopK, Uniform, encoded, quantised_bytes
from fedloom.platform.averaging.processors import (
    Message,
    Payload,
    Processor,
    ServerContext,
    Traffic,
    expected_traffic,
    sent,
)
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.processing import from_exact
from fedloom.platform.federation.stopping import StopConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Slice

RECEIVED = 10.0
WHOLE = Payload(24, 4, 1)
"""Four trained scalars of one tensor, and a counter of 8 bytes."""


def up(size_bytes: int, scalars: int) -> Traffic:
    return Traffic(WHOLE, Payload(size_bytes, scalars, 1))


def through(
    chain: Processor | tuple[Processor, ...],
    changes: list[float],
    state: dict[str, Tensor] | None = None,
    round_: int = 0,
) -> tuple[list[float], Traffic]:
    """The changes of four scalars as they arrive, and the traffic."""
    chain = chain if isinstance(chain, tuple) else (chain,)
    received = {"w": torch.full((len(changes),), RECEIVED), "n": torch.tensor(3)}
    tensors = {"w": RECEIVED + torch.tensor(changes), "n": torch.tensor(5)}
    update = Update(tensors, {"w": Slice("w"), "n": Slice("n")}, {"w": 1.0, "n": 1.0})
    memory = {} if state is None else state

    def remembered(slot: str, name: str) -> Tensor:
        return memory.setdefault(f"{slot}/{name}", torch.zeros(len(changes)))

    done = sent(chain, Message(3, update, received, ("w",), Traffic(WHOLE, WHOLE), 7, "train", round_, remembered))
    assert done.traffic == expected_traffic(chain, Traffic(WHOLE, WHOLE)), "a dry run counts the same"
    assert done.update.tensors["n"] == 5
    return (done.update.tensors["w"] - RECEIVED).tolist(), done.traffic


# -- top-k -------------------------------------------------------------------------------------------------------------


def test_two_rounds_of_top_k_with_its_memory_by_hand() -> None:
    state: dict[str, Tensor] = {}
    arrived, traffic = through(TopK(share=0.5), [1.0, -4.0, 0.5, 2.0], state)
    assert arrived == [0.0, -4.0, 0.0, 2.0]
    assert state["top_k/w"].tolist() == [1.0, 0.0, 0.5, 0.0]
    assert traffic == up(8 + 2 * 4 + 1, 2), "the counter, two values, a mask of one byte"
    arrived, _ = through(TopK(share=0.5), [1.0, 0.0, 1.0, -1.0], state, round_=1)
    assert arrived == [2.0, 0.0, 1.5, 0.0]
    assert state["top_k/w"].tolist() == [0.0, 0.0, 0.0, -1.0]


def test_of_a_tensor_that_does_not_count_nothing_is_sent_and_all_is_remembered() -> None:
    """The second tensor has weight 0: nobody would read its memory of 9, which is the largest value."""
    received, memory = (
        {"w": torch.zeros(2), "idle": torch.zeros(2)},
        {"w": torch.zeros(2), "idle": torch.full((2,), 9.0)},
    )
    tensors = {"w": torch.tensor([1.0, 2.0]), "idle": torch.zeros(2)}
    update = Update(tensors, {name: Slice(name) for name in tensors}, {"w": 1.0, "idle": 0.0})
    whole = Traffic(Payload(16, 4, 2), Payload(16, 4, 2))
    message = Message(3, update, received, ("w", "idle"), whole, memory=lambda _slot, name: memory[name])
    done = sent((TopK(share=0.25),), message)
    assert done.update.tensors["w"].tolist() == [0.0, 2.0]
    assert done.update.tensors["idle"].tolist() == [0.0, 0.0]
    assert (memory["w"].tolist(), memory["idle"].tolist()) == ([1.0, 0.0], [9.0, 9.0])


def test_of_few_changes_among_many_the_places_are_listed() -> None:
    whole = Payload(4000, 1000, 3)
    assert TopK(share=0.01).expected(Traffic(whole, whole)) == Traffic(whole, Payload(10 * 4 + 10 * 4, 10, 3))


def test_limits_of_top_k_are_no_processor_and_sparsify(tiny_config: Any, run_in_memory: Any) -> None:
    """Bit for bit: if all is sent, and in the first round, in which there is nothing to remember yet."""

    def weights(processors: list[str], share: float, rounds: int) -> Any:
        options = {"share": share} if processors else {}
        train = TrainingConfig(rounds, clients_per_round=3, batch_size=16, processors=processors, options=options)
        _, memory, _ = run_in_memory(tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train)))
        return memory.state(rounds - 1).weights("fedavg")

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    assert same(weights(["top_k"], 1.0, 2), weights([], 1.0, 2))
    assert same(weights(["top_k"], 0.2, 1), weights(["sparsify"], 0.2, 1))
    assert not same(weights(["top_k"], 0.2, 2), weights(["sparsify"], 0.2, 2))


@given(st.integers(0, 1000))
def test_what_has_arrived_and_what_is_remembered_is_all_that_was_trained(seed: int) -> None:
    state: dict[str, Tensor] = {}
    drawn = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    arrived = [through(TopK(share=0.25), changes, state, i)[0] for i, changes in enumerate(drawn.tolist())]
    assert all(sum(value != 0 for value in values) == 1 for values in arrived)
    together = torch.tensor(arrived).sum(dim=0) + state["top_k/w"]
    assert torch.allclose(together, drawn.sum(dim=0), atol=1e-4)


# -- levels ------------------------------------------------------------------------------------------------------------


def test_qsgd_sends_levels_of_the_norm() -> None:
    arrived, traffic = through(Qsgd(levels=5), [3.0, 0.0, -4.0, 0.0])
    assert arrived == [3.0, 0.0, -4.0, 0.0], "levels 3 and 4 of 5, of the norm 5, need no rounding"
    assert traffic == up(8 + 2 + 4, 4), "eleven values take 4 bits each, the norm 4 bytes"


def test_uniform_steps_are_those_of_the_largest_change() -> None:
    arrived, traffic = through(Uniform(bits=4), [3.5, -1.5, 0.0, 0.5])
    assert arrived == [3.5, -1.5, 0.0, 0.5], "7, 3, 0 and 1 steps of a half"
    assert traffic == up(8 + 2 + 4, 4)
    arrived, traffic = through(Uniform(bits=8), [0.0, 0.0, 0.0, 0.0])
    assert arrived == [0.0] * 4
    assert traffic == up(8 + 4 + 4, 4)


def test_rounding_is_up_or_down_by_a_draw_that_a_stream_of_the_client_gives() -> None:
    values, draws = torch.tensor([0.3, -0.3, 1.0, 0.05]), torch.rand(4, generator=torch_stream(1, "quantise", 0))
    levels = encoded(values, 1.0, 2, torch_stream(1, "quantise", 0)).levels
    expected = [float(draws[0] >= 0.4), -float(draws[1] >= 0.4), 2.0, float(draws[3] >= 0.9)]
    assert levels.tolist() == expected
    first, again, later = (through(Uniform(bits=4), [0.3, -0.31, 1.0, 0.05], round_=r)[0] for r in (0, 0, 4))
    assert first == again
    assert first != later


@pytest.mark.parametrize("processor", [Qsgd(levels=1), Qsgd(levels=7), Uniform(bits=4), Uniform(bits=8)])
def test_levels_are_the_changes_in_expectation(processor: Qsgd | Uniform) -> None:
    values, repeats = torch.tensor([0.9, -0.4, 0.05, 0.0, -0.011]), 4000
    generator, scale = torch.Generator().manual_seed(11), processor.scale_of(values)
    drawn = torch.stack([encoded(values, scale, processor.s, generator).decoded() for _ in range(repeats)])
    step = scale / processor.s
    assert (drawn.mean(dim=0) - values).abs().max() < 4 * (step / 2) / repeats**0.5, "4 standard errors at most"
    assert drawn[:, 3].eq(0).all()
    if processor.s < 127:
        assert drawn.std(dim=0)[1] > 0.1 * step, "it was rounded at random"


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20), st.sampled_from([1, 7, 20, 127]))
def test_decoded_values_are_whole_steps_no_further_than_one_from_the_values(values: list[float], s: int) -> None:
    tensor, generator = torch.tensor(values), torch.Generator().manual_seed(5)
    scale = float(tensor.abs().max())
    sent_levels = encoded(tensor, scale, s, generator)
    assert torch.equal(sent_levels.levels, sent_levels.levels.round())
    assert sent_levels.levels.abs().max() <= s
    assert (sent_levels.decoded() - tensor).abs().max() <= scale / s * (1 + 1e-4)
    assert (sent_levels.decoded() * tensor >= 0).all()
    message = packed(sent_levels.levels, s)
    assert unpacked(message, s, len(values)) == sent_levels.levels.tolist()
    assert len(message) + 4 == quantised_bytes(len(values), 1, s)


def packed(levels: Tensor, s: int) -> bytes:
    """The levels as the message of the docstring: a slow reference for its length."""
    bits = next(b for b in range(1, 32) if 2**b >= 2 * s + 1)
    text = "".join(format(int(level) + s, f"0{bits}b") for level in levels.tolist())
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


def unpacked(message: bytes, s: int, count: int) -> list[float]:
    bits = next(b for b in range(1, 32) if 2**b >= 2 * s + 1)
    text = "".join(format(byte, "08b") for byte in message)
    return [float(int(text[i * bits : (i + 1) * bits], 2) - s) for i in range(count)]


# -- chains ------------------------------------------------------------------------------------------------------------


def test_a_chain_clips_chooses_and_rounds() -> None:
    chain = (Clip(max_norm=2.5), TopK(share=0.5), Uniform(bits=4))
    arrived, traffic = through(chain, [3.0, 0.0, -4.0, 0.0])
    assert arrived == pytest.approx([1.5, 0.0, -2.0, 0.0], abs=2 / 7)
    assert arrived[2] == pytest.approx(-2.0, abs=1e-5)
    assert traffic == up(8 + 1 + 1 + 4, 2), "the counter, a mask, two changes of 4 bits, a scale"


def test_noise_is_the_clients_of_the_round() -> None:
    draws = torch.randn(4, generator=torch_stream(7, "noise", "train", 0, 3))
    arrived, traffic = through(Noise(noise_std=0.5), [1.0, 0.0, 0.0, 0.0])
    assert torch.allclose(torch.tensor(arrived), torch.tensor([1.0, 0, 0, 0]) + 0.5 * draws, atol=1e-5)
    assert traffic == up(24, 4)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"processors": ["top_k", "top_k"]}, "top_k after top_k: only one can choose what is sent"),
        ({"processors": ["top_k", "sparsify"]}, "sparsify after top_k: only one can choose what is sent"),
        ({"processors": ["qsgd", "uniform"]}, "uniform after qsgd: values rounded to whole levels would be rounded"),
        (
            {"processors": ["qsgd", "top_k"]},
            "top_k after qsgd: what is left out would be chosen, and remembered, after",
        ),
        ({"processors": ["qsgd", "noise"]}, "noise after qsgd: values with noise are no longer whole levels"),
        ({"processors": ["top_k", "noise"]}, "noise after top_k: noise on what is sent does not hide which"),
        ({"processors": ["top_k", "clip"]}, "clip after top_k: what is clipped after the choice"),
        ({"processors": ["noise", "clip"]}, "clip after noise: noise must be scaled to the clipping limit"),
        (
            {"processors": ["uniform"], "privacy": PrivacyConfig(secure=True)},
            "method.train.privacy.secure=true: masked updates are residues in fixed point, which cannot be",
        ),
        (
            {"processors": ["top_k"], "selection": "pyramidfl"},
            "top_k and method.train.selection=pyramidfl, whose clients first choose which changes they send: only one",
        ),
        (
            {"processors": ["clip"], "selection": "pyramidfl"},
            "clip and method.train.selection=pyramidfl, whose clients first choose which changes they send: what is",
        ),
        ({"processors": ["top_k"], "local_rule": "scaffold", "momentum": 0.0}, "scaffold needs whole changes"),
        ({"processors": ["uniform"], "options": {"bits": 5}}, "method.train.options.bits=5"),
        ({"processors": ["qsgd"], "options": {"levels": 0}}, "method.train.options.levels=0"),
        ({"processors": ["clip"], "options": {"max_norm": 0.0}}, "method.train.options.max_norm=0"),
    ],
)
def test_orders_that_the_theory_does_not_allow_are_refused(tiny_config: Any, train: dict[str, Any], said: str) -> None:
    config = TrainingConfig(rounds=1, clients_per_round=2, **train)
    world = build_world(tiny_config(method=FedAvgConfig(architecture="0-1-2", train=config)))
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        build_stages(world)
    assert "\n" not in str(caught.value)


# -- from the server ---------------------------------------------------------------------------------------------------


def test_a_quantiser_of_both_directions_encodes_the_weights_too() -> None:
    weights = {"w": torch.tensor([3.0, 0.0, -4.0, 0.0])}
    context = ServerContext("train", 2, 7, weights, {}, 1)
    assert Qsgd(levels=5).on_weights(weights, context) is None
    received = Qsgd(levels=5, direction="down").on_weights(weights, context)
    assert received is not None
    assert received["w"].tolist() == [3.0, 0.0, -4.0, 0.0]
    small, whole = Payload(8 + 2 + 4, 4, 1), Traffic(WHOLE, WHOLE)
    assert Qsgd(levels=5, direction="down").expected(whole) == Traffic(small, WHOLE)
    assert Qsgd(levels=5, direction="both").expected(whole) == Traffic(small, small)
    fewer = TopK(share=0.5).expected(whole)
    assert Uniform(bits=4, direction="down").expected(fewer) == Traffic(small, fewer.up)


def test_the_server_adds_mean_changes_to_its_exact_weights_where_they_are_covered() -> None:
    exact, sent_weights = {"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": torch.tensor([1.5, 1.5, 3.0])}
    mean = Averaged({"w": torch.tensor([1.75, 1.5, 2.0])}, {"w": {((0, 1),): Coverage(1.0, 1), ((2, 3),): Coverage()}})
    assert from_exact(mean, sent_weights, exact, {"w"}).weights["w"].tolist() == [1.25, 2.0, 2.0]
    assert from_exact(mean, sent_weights, exact, ()).weights["w"].tolist() == [1.75, 1.5, 2.0]


def test_what_is_rounded_off_on_the_way_down_is_not_lost(tiny_config: Any, run_in_memory: Any) -> None:
    options = {"bits": 4, "direction": "both"}
    train = TrainingConfig(
        rounds=3, clients_per_round=3, batch_size=16, lr=1e-12, processors=["uniform"], options=options
    )
    world, memory, last = run_in_memory(tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train)))
    after = [memory.state(round_) for round_ in range(3)]
    for name in sorted(world.space.parameter_names & after[0].weights("fedavg").keys()):
        first, third = (state.weights("fedavg")[name] for state in (after[0], after[2]))
        read = [state.weights("sent-fedavg")[name] for state in after]
        step = float(first.abs().max()) / 7
        assert torch.allclose(first, third, atol=1e-5), "nothing was learnt, so that the exact weights stay"
        if step:
            levels = read[0] / step
            assert torch.allclose(levels, levels.round(), atol=1e-3), name
        if first.numel() > 100:
            assert not torch.equal(read[0], read[1]), "every round draws anew"
    assert "sent-fedavg" not in last.groups
    rows = [row for r in memory.records for table, row in r.rows if table == "clients" and row["stage"] == "fedavg"]
    assert rows
    for row in rows:
        assert row["bytes_down"] == row["bytes_up"] < 4 * row["parameters"]


def test_scores_are_those_of_the_servers_weights_whatever_its_messages_make_of_them(
    tiny_config: Callable[..., RunConfig], train_in_memory: Any
) -> None:
    """A score before a round is of the weights that a score after the last one would be of."""
    train = TrainingConfig(rounds=2, clients_per_round=2, batch_size=16, evaluate_every=1, processors=["uniform"])
    train.options = {"bits": 4, "direction": "both"}
    losses = []
    for stop in (StopConfig(), StopConfig(patience=9, weights="last")):
        memory = train_in_memory(tiny_config(method=FedAvgConfig(train=train, evaluate=False), stop=stop))
        rows = memory.table("evaluations")
        losses.append(rows[(rows["metric"] == "loss") & (rows["split"] == "validation")].set_index("round")["value"])
    assert losses[0].index.tolist() == [0, 1, 2]
    assert losses[0].tolist() == losses[1].tolist()
