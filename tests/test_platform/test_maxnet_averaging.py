"""MaxNet and overlap: worked numbers over overlapping slices, and a reference that goes scalar by scalar."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedloom.platform.averaging.average import Update, WeightedSums, average
from fedloom.platform.averaging.weighting import Work, fedavg, plain
from fedloom.platform.methods.shares import SharesConfig, Sharing, maxnet, overlap
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.resnet import ResnetDesign
from fedloom.platform.spaces.slices import Architecture, Slice, extract
from fedloom.platform.spaces.tcn import TcnDesign

TINY = ElasticSpace(
    TcnDesign(
        "tiny",
        (6,),
        num_classes=3,
        channels=4,
        embedding_size=3,
        blocks=(1, 2),
        kernel_size=2,
        expansions=(0.25, 0.5, 1.0),
    )
)
"""12 subnets of a few hundred scalars, so that a reference can look at each of them."""
IMAGES = ElasticSpace(ResnetDesign("images", (1, 4, 4), 3, 8, (16,), (2,), (1,), expansions=(0.5, 1.0), norm="batch"))


def trained(space: ElasticSpace, architecture: Architecture, client: int) -> dict[str, Tensor]:
    """What a client returns: tensors of the subnet's shapes with values of its own."""
    return space.initial_subnet_weights(architecture, torch_stream(client, "trained"))


def update(space: ElasticSpace, architecture: Architecture, client: int, weight: float) -> Update:
    tensors = trained(space, architecture, client)
    return Update(tensors, space.slices(architecture), dict.fromkeys(tensors, weight))


def weights_of(samples: Sequence[int], shares: Sequence[float], rule: object = fedavg) -> list[float]:
    """The weight of each client's tensors, as a task works it out: share times what the rule says."""
    works = [Work(n, 5 * n, {"w": 5 * n}, share) for n, share in zip(samples, shares, strict=True)]
    return [work.share * rule(work)["w"] for work in works]  # type: ignore[operator]


def old_weights(space: ElasticSpace) -> dict[str, Tensor]:
    return space.initial_weights(torch_stream(77, "old"))


# -- worked numbers ---------------------------------------------------------------------------------------------------


def test_three_clients_by_hand() -> None:
    # beta = 1/2, the others 1/4 each; n = 10, 20, 40. Weights a_k n_k: 5, 5, 10.
    shares = maxnet(Sharing(SharesConfig(beta_0=0.5), 0, 100, (True, False, False)))
    weights = weights_of((10, 20, 40), shares.values)
    assert weights == [5.0, 5.0, 10.0]
    old = {"w": torch.tensor([9.0, 9.0, 9.0, 9.0, 9.0])}
    values = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0], [10.0, 20.0])
    updates = [
        Update({"w": torch.tensor(v)}, {"w": Slice("w", ((0, len(v)),))}, {"w": weight})
        for v, weight in zip(values, weights, strict=True)
    ]
    # (5*1 + 5*5 + 10*10)/20; (5*2 + 5*6 + 10*20)/20; (5*3 + 5*7)/10; client 1 alone; nobody.
    assert average(old, updates)["w"].tolist() == [6.5, 12.0, 5.0, 4.0, 9.0]


def test_three_clients_without_samples_by_hand() -> None:
    shares = maxnet(Sharing(SharesConfig(beta_0=0.9), 0, 100, (False, True, False)))
    weights = weights_of((10, 20, 40), shares.values, plain)
    assert weights == pytest.approx([0.05, 0.9, 0.05])
    old = {"w": torch.full((2, 3), 9.0)}
    pieces = (torch.ones(1, 3), torch.full((2, 2), 2.0), torch.full((1, 1), 3.0))
    updates = [
        Update({"w": p}, {"w": Slice("w", tuple((0, n) for n in p.shape))}, {"w": weight})
        for p, weight in zip(pieces, weights, strict=True)
    ]
    expected = [[(0.05 + 1.8 + 0.15) / 1.0, (0.05 + 1.8) / 0.95, 1.0], [2.0, 2.0, 9.0]]
    torch.testing.assert_close(average(old, updates)["w"], torch.tensor(expected))


def test_overlap_by_hand_is_the_mean_of_who_has_the_scalar() -> None:
    weights = weights_of((10, 30), overlap(Sharing(SharesConfig("overlap"), 0, 100, (True, False))).values)
    old = {"w": torch.tensor([9.0, 9.0, 9.0])}
    updates = [
        Update({"w": torch.tensor([4.0, 8.0])}, {"w": Slice("w", ((0, 2),))}, {"w": weights[0]}),
        Update({"w": torch.tensor([8.0])}, {"w": Slice("w", ((0, 1),))}, {"w": weights[1]}),
    ]
    assert average(old, updates)["w"].tolist() == [7.0, 8.0, 9.0]


# -- what it comes to in special cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [TINY, IMAGES], ids=["tokens", "images"])
@pytest.mark.parametrize("text", ["smallest", "d=1 e=0.5", "largest"])
def test_with_one_subnet_for_all_overlap_is_fedavg(space: ElasticSpace, text: str) -> None:
    architecture, samples = space.parse(text), (7, 30, 13, 50)
    shares = overlap(Sharing(SharesConfig("overlap"), 3, 10, (False,) * 4)).values
    weights = weights_of(samples, shares)
    updates = [update(space, architecture, c, w) for c, w in enumerate(weights)]
    old, slices = old_weights(space), space.slices(architecture)
    new = extract(average(old, updates), slices)
    # FedAvg of models that know nothing of a supernet.
    alone = [Update(u.tensors, {n: Slice(n) for n in u.tensors}, u.weights) for u in updates]
    fedavg_alone = average(extract(old, slices), alone)
    for name, tensor in new.items():
        assert torch.equal(tensor, fedavg_alone[name]), name
        if tensor.is_floating_point():
            by_hand = sum(n * u.tensors[name].double() for n, u in zip(samples, updates, strict=True)) / 100
            torch.testing.assert_close(tensor.double(), by_hand, rtol=1e-5, atol=1e-6)


def four_subnets(space: ElasticSpace) -> list[Architecture]:
    architectures = list(space.enumerate())
    return [space.smallest, architectures[len(architectures) // 2], space.largest, architectures[1]]


def test_at_beta_one_over_s_maxnet_is_overlap_bit_for_bit() -> None:
    # 4 clients with as many samples each: all weights are the same power of two apart.
    given_ = four_subnets(IMAGES)
    is_largest = tuple(a == IMAGES.largest for a in given_)
    sharing = Sharing(SharesConfig(beta_0=0.25, decay="constant"), 0, 10, is_largest)
    results = []
    for rule in (maxnet, overlap):
        weights = weights_of((50,) * 4, rule(sharing).values)
        results.append(average(old_weights(IMAGES), [update(IMAGES, a, c, weights[c]) for c, a in enumerate(given_)]))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@pytest.mark.parametrize("config", [SharesConfig(), SharesConfig(decay="linear", decay_share=0.5)])
def test_after_the_decay_maxnet_is_overlap(config: SharesConfig) -> None:
    given_ = [*four_subnets(TINY), TINY.smallest]
    is_largest = tuple(a == TINY.largest for a in given_)
    results = {}
    for name, rule, round_ in (("maxnet", maxnet, 9), ("overlap", overlap, 9), ("early", maxnet, 0)):
        weights = weights_of((50, 20, 30, 7, 11), rule(Sharing(config, round_, 10, is_largest)).values)
        results[name] = average(old_weights(TINY), [update(TINY, a, c, weights[c]) for c, a in enumerate(given_)])
    for name, tensor in results["maxnet"].items():
        torch.testing.assert_close(tensor, results["overlap"][name], rtol=1e-6, atol=1e-6)
    early = results["early"]["stem.embedding.weight"]
    assert not torch.allclose(early, results["overlap"]["stem.embedding.weight"], rtol=1e-3)


# -- against a slow reference -----------------------------------------------------------------------------------------


def reference(old: Mapping[str, Tensor], updates: Sequence[Update]) -> dict[str, Tensor]:
    """W = sum_k a_k n_k w_k / sum_k a_k n_k over the clients whose subnet has the scalar, one after the other."""
    new = {}
    for name, tensor in old.items():
        result = tensor.double().clone()
        holders = [u for u in updates if name in u.tensors]
        values: list[Any] = [u.tensors[name].double().tolist() for u in holders]
        for index in itertools.product(*(range(n) for n in tensor.shape)):
            total = weight_sum = 0.0
            for holder, nested in zip(holders, values, strict=True):
                # Leading channels: who has an index has all below it.
                if holder.weights[name] > 0 and all(
                    i < n for i, n in zip(index, holder.tensors[name].shape, strict=True)
                ):
                    value = nested
                    for i in index:
                        value = value[i]
                    total += holder.weights[name] * value
                    weight_sum += holder.weights[name]
            if weight_sum > 0:
                result[index] = total / weight_sum
        new[name] = result
    return new


OPTIONS = st.integers(0, TINY.num_architectures - 1)
CLIENTS = st.lists(st.tuples(OPTIONS, st.integers(1, 90), st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.0])), max_size=5)


@given(CLIENTS, st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_any_subnets_average_as_the_reference_does(clients: list[tuple[int, int, float]], chunk: int) -> None:
    old = old_weights(TINY)
    weights = weights_of([n for _, n, _ in clients], [share for _, _, share in clients])
    updates = [update(TINY, (option,), c, weights[c]) for c, (option, _, _) in enumerate(clients)]
    sums = WeightedSums()
    for start in range(0, len(updates), chunk):
        part = WeightedSums()
        for each in updates[start : start + chunk]:
            part.add(each)
        sums.merge(part)
    new, expected = sums.finish(old).weights, reference(old, updates)
    assert new.keys() == old.keys()
    for name, tensor in new.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
        untouched = ~covered(old[name], name, updates)
        assert torch.equal(tensor[untouched], old[name][untouched]), name


def covered(like: Tensor, name: str, updates: Sequence[Update]) -> Tensor:
    mask = torch.zeros_like(like, dtype=torch.bool)
    for each in updates:
        if name in each.tensors and each.weights[name] > 0:
            each.slices[name].of(mask).fill_(True)
    return mask


def test_without_the_largest_the_rest_of_the_supernet_stays_bit_for_bit() -> None:
    old = old_weights(IMAGES)
    updates = [update(IMAGES, IMAGES.smallest, c, 1.0) for c in range(3)]
    new = average(old, updates)
    outside = [name for name in old if name not in updates[0].tensors]
    assert len(outside) == 12, "the second block"
    assert all(torch.equal(new[name], old[name]) for name in outside)
    weight, before = new["stages.0.0.conv1.weight"], old["stages.0.0.conv1.weight"]
    assert torch.equal(weight[8:], before[8:])
    assert not torch.equal(weight[:8], before[:8])


def test_updates_only_read_the_shared_weights() -> None:
    old = old_weights(IMAGES)
    before = {name: tensor.clone() for name, tensor in old.items()}
    average(old, [update(IMAGES, a, c, 1.0) for c, a in enumerate(four_subnets(IMAGES))])
    assert all(torch.equal(old[name], tensor) for name, tensor in before.items())
