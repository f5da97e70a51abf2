"""What a search by masking scores: whose statistics norms use, what it leaves behind, and who makes up for what."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.trainer import client_samples, train_network
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.silo_search import Perturbation, batch_statistics, with_row
from fedloom.platform.methods.spider import SpiderConfig
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Subspace, Weights
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]

STEM = SpaceConfig("darts_s2_small", channels=4)


@dataclass(frozen=True)
class Silo:
    """A silo whose supernet is trained for a few steps."""

    worker: Worker
    weights: Weights

    @property
    def space(self) -> DartsSpace:
        assert isinstance(self.worker.space, DartsSpace)
        return self.worker.space

    def decided(self, search: Perturbation, kept: Subspace, round_: int = 0) -> Subspace:
        place = Assignment("train", round_, 0, "tier1", None)  # type: ignore[arg-type]
        network, data = MixedNetwork(kept).on(self.worker), self.worker.scored_data(0, "validation")
        return search.decided(self.worker, place, network, self.weights, data)[0]


@pytest.fixture(scope="module")
def silo(tiny_config_in: Make, tmp_path_factory: pytest.TempPathFactory) -> Silo:
    data = DataConfig(num_clients=3, train_samples=300, test_samples=80, validation_share=0.25)
    tiers = TiersConfig(count=1, paths=100)
    folder = tmp_path_factory.mktemp("silo")
    config = tiny_config_in(folder, method=SpiderConfig(), space=STEM, data=data, tiers=tiers)
    worker = Worker(build_world(config).spec)
    first = worker.space.initial_weights(torch_stream(1, "first"))
    place = Assignment("train", 0, 0, "tier1", None)  # type: ignore[arg-type]
    local = LocalSGD(epochs=4, batch_size=16, lr=0.05, momentum=0.9)
    network = MixedNetwork().on(worker)
    trained = train_network(worker, place, network, first, client_samples(worker, place), local)
    return Silo(worker, trained.copied().tensors)


def chosen_by_hand(silo: Silo, kept: Subspace, decision: int, order: torch.Tensor, statistics: str) -> int:
    """The operator without which a network of its own, in training or evaluation mode, is worst."""
    x, y = (tensor[order] for tensor in silo.worker.client_data(0, "validation"))
    pain = []
    for option in kept[decision]:
        rest = with_row(kept, decision, tuple(o for o in kept[decision] if o != option))
        module = silo.space.build_subspace(rest).train(statistics == "batch")
        module.load_state_dict({n: silo.weights[n] for n in module.state_dict()})
        logits = torch.cat([module(x_B) for x_B in torch.split(x, 9)])
        pain.append(((logits.argmax(1) == y).double().mean().item(), -F.cross_entropy(logits, y).item(), option))
    return min(pain)[2]


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_masked_network_scores_as_one_of_its_own_that_lacks_the_operator(silo: Silo, statistics: str) -> None:
    kept, search = silo.space.largest_subspace, Perturbation(99, statistics=statistics, batch_size=9)
    assert len(silo.worker.client_data(0, "validation")[1]) % 9 != 1, "no sample joins another batch"
    for round_ in range(2):
        found = silo.decided(search, kept, round_)
        seed = silo.worker.spec.training_seed
        shuffle = torch_stream(seed, "masked_batches", "train", round_, 0)
        order = torch.randperm(len(silo.worker.client_data(0, "validation")[1]), generator=shuffle)
        for cell_type in ("normal", "reduction"):
            (decision,) = (d for d in silo.space.decisions(cell_type) if found[d] != kept[d])
            chosen = chosen_by_hand(silo, kept, decision, order, statistics)
            assert found[decision] == (chosen,)
            kept = with_row(kept, decision, (chosen,))
        assert found == kept


def test_the_two_statistics_can_choose_differently(silo: Silo) -> None:
    """In a trained supernet: the stored statistics are those of the sum of both operators, a mask leaves one."""
    kept = silo.space.largest_subspace
    everything = torch.arange(len(silo.worker.client_data(0, "validation")[1]))
    assert any(
        chosen_by_hand(silo, kept, d, everything, "batch") != chosen_by_hand(silo, kept, d, everything, "running")
        for d in range(10)
    )


def test_scoring_with_batch_statistics_leaves_the_stored_ones_and_the_modes(silo: Silo) -> None:
    silo.decided(Perturbation(99, batch_size=9), silo.space.largest_subspace)
    module = silo.worker.supernet
    tensors = silo.worker.tensors_of(module)
    assert [name for name, tensor in silo.weights.items() if not torch.equal(tensors[name], tensor)] == []
    assert not any(part.training for part in module.modules())
    x, _ = silo.worker.client_data(0, "validation")
    stored = module(x)
    with batch_statistics(module):
        assert not torch.allclose(module(x), stored)
    assert torch.equal(module(x), stored)


def test_a_silo_makes_up_for_one_missed_step_in_each_round_that_it_takes_part_in(silo: Silo) -> None:
    space, kept = silo.space, silo.space.largest_subspace
    assert [Perturbation(turns).is_due(space, kept) for turns in (0, 1, 5)] == [False, True, True]
    for made in range(1, 6):
        kept = silo.decided(Perturbation(99, batch_size=9), kept, made)
        due = [Perturbation(turns).is_due(space, kept) for turns in (made, made + 1)]
        assert due == [False, made < 5], "made are as many as edges are decided of each cell"
    pruning = [Perturbation(turns, prune_edges=True).is_due(space, kept) for turns in (5, 6)]
    assert pruning == [False, True]


def test_batch_statistics_need_two_samples(silo_config: Make, refused: Callable[[RunConfig], str]) -> None:
    config = silo_config(SpiderConfig(), space=STEM, train_samples=90, alpha=1000.0, validation_share=0.03)
    assert refused(config) == (
        "method.search.statistics=batch: a silo has a single validation sample, which has no variance; raise "
        "data.validation_share, or set running"
    )
