"""Secure aggregation over slices: shares, exact sums, dropouts, what the server sees, bytes, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from torch import Tensor

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.averaging.secure import PRIME, SecureRound, needed_of, restored_secret, secret_shares
from fedloom.platform.federation.config import DevicesConfig, RunConfig, TiersConfig
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.federation.processing import check_privacy
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig, rules_of
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.spaces.slices import Region, Slice, part_of

Make = Callable[..., RunConfig]
SHAPE = (12, 9)


# -- shares of secrets -------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(2, 12), st.data())
def test_enough_shares_restore_a_secret(secret: int, holders: int, data: st.DataObject) -> None:
    needed = data.draw(st.integers(2, holders))
    shares = secret_shares(secret, range(holders), needed, np.random.default_rng(1))
    some = data.draw(st.permutations(range(holders)))[:needed]
    assert restored_secret({holder: shares[holder] for holder in some}) == secret


def test_fewer_shares_say_nothing() -> None:
    # For any two shares of three there is a polynomial with every secret: what they "restore" is spread evenly.
    found = []
    for trial in range(400):
        shares = secret_shares(12345, range(5), 3, np.random.default_rng(trial))
        found.append(restored_secret({0: shares[0], 1: shares[1]}) * 8 // PRIME)
    assert chisquare(np.bincount(found, minlength=8)).pvalue > 1e-3


def test_the_survivors_who_are_needed() -> None:
    assert [needed_of(n, 0.5) for n in (2, 3, 4, 10)] == [2, 2, 3, 6]
    assert needed_of(10, 0.9) == 9


# -- a round -----------------------------------------------------------------------------------------------------------


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[dict[int, Region], set[int]]:
    """The region that each client holds, and who drops out."""
    held = {}
    for client in range(draw(st.integers(3, 7))):
        edges = []
        for n in SHAPE:
            low, high = sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            edges.append((min(low, n - 1), max(high, low + 1) if low < n else n))
        held[client] = tuple(edges)
    return held, draw(st.sets(st.sampled_from(sorted(held)), max_size=len(held)))


def round_of(held: dict[int, Region], needed: int = 2, least: int = 2, names: str = "here") -> SecureRound:
    return SecureRound(7, (names, 0), {c: {"w": region} for c, region in held.items()}, needed, least=least)


def updates_of(held: dict[int, Region], old: Tensor, scale: float = 1.0) -> dict[int, Update]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for client, region in held.items():
        part = part_of(old, region)
        value = part + scale * torch.randn(part.shape, generator=generator)
        found[client] = Update({"w": value}, {"w": Slice("w", region)}, {"w": float(client % 3)})
    return found


def fixed(update: Update, old: Tensor, weight: float) -> np.ndarray:
    """A client's weighted change in fixed point, by itself."""
    region = update.slices["w"].region or ()
    change = (update.tensors["w"] - part_of(old, region)).double() * weight
    whole = np.zeros(SHAPE, dtype=np.int64)
    whole[tuple(slice(*edge) for edge in region)] = (change * 2**16).round().numpy().astype(np.int64)
    return whole


@settings(max_examples=100, deadline=None)
@given(cohorts())
def test_the_sum_is_exact_whoever_drops_out(cohort: tuple[dict[int, Region], set[int]]) -> None:
    held, gone = cohort
    old = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    secure, updates = round_of(held), updates_of(held, old)
    survivors = [c for c in held if c not in gone]
    sums = WeightedSums()
    for client in survivors:
        sums.add(secure.masked(client, updates[client], {"w": part_of(old, held[client])}))
    found = secure.unmasked(sums, survivors, {"w": old})
    if len(survivors) < 2:
        assert found is None
        return
    assert found is not None
    holders = np.zeros(SHAPE, dtype=int)
    for region in held.values():
        holders[tuple(slice(*edge) for edge in region)] += 1
    expected = sum(fixed(updates[c], old, float(c % 3)) for c in survivors)
    weights = np.zeros(SHAPE)
    for client in survivors:
        weights[tuple(slice(*edge) for edge in held[client])] += client % 3
    own = found.tensors["w"]
    # What is decoded is the sum of changes plus the weights times the old values, in float32.
    decoded = np.zeros(SHAPE)
    decoded[tuple(slice(*edge) for edge in own.box)] = own.total.double().numpy()
    changes = (decoded - weights * old.double().numpy()) * 2**16
    summed = holders >= 2
    np.testing.assert_allclose(changes[summed], np.asarray(expected)[summed], atol=0.6 + 2**16 * 1e-5)


def test_without_the_old_values_the_sum_is_exact_to_the_bit() -> None:
    held = {0: ((0, 12), (0, 9)), 1: ((0, 6), (0, 9)), 2: ((3, 12), (2, 9)), 3: ((0, 12), (0, 4))}
    old = torch.zeros(SHAPE)
    secure, updates = round_of(held), updates_of(held, old)
    for survivors in ([0, 1, 2, 3], [0, 2], [1, 3], [3, 2, 0]):
        sums = WeightedSums()
        for client in survivors:
            sums.add(secure.masked(client, updates[client], {"w": part_of(old, held[client])}))
        found = secure.unmasked(sums, survivors, {"w": old})
        assert found is not None
        own = found.tensors["w"]
        expected = sum(fixed(updates[c], old, float(c % 3)) for c in survivors)
        part = np.asarray(expected)[tuple(slice(*edge) for edge in own.box)]
        assert np.array_equal(own.total.double().numpy() * 2**16, part)


def test_what_the_server_sees_is_uniform_whatever_the_update() -> None:
    held: dict[int, Region] = dict.fromkeys(range(3), ((0, 200), (0, 100)))
    old = torch.zeros(200, 100)
    views = []
    for scale in (0.0, 1.0):
        update = updates_of(held, old, scale)[1]
        seen = round_of(held, names=f"scale {scale}").masked(1, update, {"w": old}).tensors["w"].numpy()
        views.append(seen)
        for shift in (0, 8, 16, 24):
            octets = (seen.view(np.uint32) >> shift) & 255
            assert chisquare(np.bincount(octets.ravel(), minlength=256)).pvalue > 1e-4
        correlation = np.corrcoef(seen.ravel(), update.tensors["w"].numpy().ravel() + 1e-9 * np.arange(20_000))[0, 1]
        assert abs(correlation) < 0.03
    assert abs(np.corrcoef(views[0].ravel(), views[1].ravel())[0, 1]) < 0.03


def test_what_one_client_alone_holds_is_not_sent() -> None:
    held: dict[int, Region] = {0: ((0, 12), (0, 9)), 1: ((0, 12), (0, 4)), 2: ((0, 12), (0, 4))}
    old = torch.zeros(SHAPE)
    secure, seen = round_of(held), []
    for scale in (1.0, 5.0):  # different updates, the same masks
        update = updates_of(held, old, scale)[0]
        seen.append(secure.masked(0, replace(update, weights={"w": 1.0}), {"w": old}).tensors["w"])
    assert torch.equal(seen[0][:, 4:], seen[1][:, 4:]), "random bits, whatever was trained"
    assert not torch.equal(seen[0][:, :4], seen[1][:, :4])


def test_changes_that_do_not_fit_are_refused() -> None:
    held: dict[int, Region] = dict.fromkeys(range(4), ((0, 12), (0, 9)))
    old = torch.zeros(SHAPE)
    huge = Update({"w": torch.full(SHAPE, 9000.0)}, {"w": Slice("w", held[0])}, {"w": 1.0})
    with pytest.raises(OverflowError, match="does not fit 32 bits: clip, use weighting=plain, or fewer"):
        round_of(held).masked(0, huge, {"w": old})


def test_the_messages_of_a_cohort_of_ten() -> None:
    held: dict[int, Region] = dict.fromkeys(range(10), ((0, 1), (0, 1)))
    # Nine others' two keys and two shares each; two keys, 18 shares, and ten revealed shares of 16 bytes.
    assert round_of(held).message_bytes == (9 * (64 + 96), 64 + 18 * 48 + 160)


# -- in runs -----------------------------------------------------------------------------------------------------------

METHODS = ("fedavg", "fedoras", "superfednas")


def configured(method: str, tiny_config: Make, elastic_config: Make, privacy: PrivacyConfig) -> RunConfig:
    if method == "fedavg":
        train = TrainingConfig(
            rounds=1, clients_per_round=5, batch_size=16, weighting="plain", min_contributors=2, privacy=privacy
        )
        return tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train))
    if method == "fedoras":
        config = tiny_config()
        train = replace(config.method.train, privacy=privacy, min_contributors=2, rounds=1)
        config.method.train = train
        return config
    return elastic_config(train={"privacy": privacy, "weighting": "plain", "min_contributors": 2, "rounds": 1})


def after_training(train_in_memory: Any, config: RunConfig) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    memory = train_in_memory(config)
    states = [r.state for r in memory.records if r.state is not None and r.state.stage == 0 and r.state.round]
    rows = [row for r in memory.records for table, row in r.rows if table == "clients" and row["stage"] in BAGS]
    return dict(next(b for n, b in states[-1].groups.items() if n in BAGS).tensors), rows


BAGS = ("fedavg", "supernet")


@pytest.mark.parametrize("method", METHODS)
def test_sums_behind_masks_train_what_plain_sums_do(
    tiny_config: Make, elastic_config: Make, train_in_memory: Any, method: str
) -> None:
    plain, rows = after_training(train_in_memory, configured(method, tiny_config, elastic_config, PrivacyConfig()))
    hidden = configured(method, tiny_config, elastic_config, PrivacyConfig(secure=True))
    secure, masked_rows = after_training(train_in_memory, hidden)
    names = [name for name, t in plain.items() if t.is_floating_point()]
    for name in names:
        # Five clients are rounded by up to 2^-17 each, in weighted sums; later rounds only amplify that.
        torch.testing.assert_close(secure[name], plain[name], rtol=1e-5, atol=3e-5, msg=name)
    assert any(not torch.equal(secure[n], plain[n]) for n in names), "rounded to fixed point"
    assert all(m["bytes_up"] > r["bytes_up"] for m, r in zip(masked_rows, rows, strict=True))


def test_a_round_survives_dropouts_and_is_lost_without_enough(
    tiny_config: Make, run_in_memory: Any, train_in_memory: Any
) -> None:
    config = configured("fedavg", tiny_config, tiny_config, PrivacyConfig(secure=True))
    config.method.train.rounds = 3
    some = replace(config, devices=DevicesConfig(dropout=0.3))
    weights, rows = after_training(train_in_memory, some)
    assert {row["status"] for row in rows} == {"ok", "dropped"}
    for tier in ("tier1", "tier2"):
        times_s = [row["simulated_s"] for row in rows if row["tier"] == tier]
        assert times_s == pytest.approx([times_s[0]] * len(times_s)), "all do the same work, or are waited for as long"
    assert all(bool(torch.isfinite(t).all()) for t in weights.values() if t.is_floating_point())
    all_gone = replace(config, devices=DevicesConfig(dropout=0.95))
    with pytest.raises(RunFailedError, match="no update arrived in any of the 3 rounds of fedavg"):
        run_in_memory(all_gone)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"local_rule": "scaffold", "momentum": 0.0}, "hides only parameter changes"),
        ({"weighting": "fedavg_whole"}, "hides only parameter changes"),
        ({"clients_per_round": 1}, "the sum of one client is its update; raise clients_per_round"),
    ],
)
def test_what_masks_do_not_hide_is_refused(train: dict[str, Any], said: str) -> None:
    config = TrainingConfig(**train, privacy=PrivacyConfig(secure=True))
    with pytest.raises(ValueError, match=said):
        check_privacy(config, rules_of(config, "method.train"))


def test_secure_sums_of_one_client_and_aggregators_of_none(
    tiny_config: Callable[..., RunConfig],
) -> None:
    config = tiny_config(tiers=TiersConfig(count=2, clients=[0] * 7 + [1], paths=2000))
    secure = replace(config.method.finetune, privacy=PrivacyConfig(secure=True))  # type: ignore[union-attr]
    one = replace(config, method=replace(config.method, finetune=secure))  # type: ignore[type-var]
    with pytest.raises(
        ValueError, match=r"secure=true: 1 client takes part in a round of fine_tuned/tier2, and the sum"
    ):
        build_stages(build_world(one))
    median = replace(config.method.finetune, aggregator="median")  # type: ignore[union-attr]
    nobody = replace(config, tiers=TiersConfig(count=2, shares=[1, 0], paths=2000))
    build_stages(build_world(replace(nobody, method=replace(config.method, finetune=median))))  # type: ignore[type-var]
