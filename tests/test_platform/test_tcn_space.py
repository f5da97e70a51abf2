"""Elastic temporal convolutional networks: causal, weight-normed on their slices, tied or not, and reproducible."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, train_locally
from fedloom.platform.clients.worker import own_randomness
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import supernet_shapes
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.platform.spaces.tcn import CausalConv, TcnDesign
from fedloom.tiers.measure import macs_of, parameters_of

TINY = TcnDesign(
    "tiny", input_shape=(12,), num_classes=7, channels=8, embedding_size=6, expansions=(0.25, 0.5, 1.0), dropout=0.0
)
TIED = replace(TINY, embedding_size=8, tied=True)
CPU = torch.device("cpu")


@pytest.fixture(params=["own decoder", "tied"])
def space(request: pytest.FixtureRequest) -> ElasticSpace:
    return ElasticSpace(TIED if request.param == "tied" else TINY)


def tokens(length: int, count: int = 2, vocabulary: int = 7) -> Tensor:
    return torch.randint(0, vocabulary, (count, length), generator=torch_stream(1, "tokens"))


def loaded(space: ElasticSpace, text: str, dtype: torch.dtype = torch.float32) -> Any:
    architecture = space.parse(text)
    module = space.build_subnet(architecture)
    module.load_state_dict(space.initial_subnet_weights(architecture, torch_stream(3, "test")))
    return module.to(dtype).eval()


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_as_many_subnets_as_choices() -> None:
    space = ElasticSpace(TcnDesign())
    assert space.num_architectures == 336 == 4**2 + 4**3 + 4**4
    assert space.options == (336,)


def test_parameters_by_hand() -> None:
    table = ElasticSpace(TcnDesign()).cost_table("parameters")
    space = ElasticSpace(TcnDesign())
    convolution = 600 * 600 * 3 + 600 + 600
    whole = 90 * 600 + 4 * 2 * convolution + 600 * 90 + 90
    assert table.cost(space.largest) == whole == 8_757_690
    narrow = (600 * 60 * 3 + 60 + 60) + (60 * 600 * 3 + 600 + 600)
    assert table.cost(space.smallest) == 90 * 600 + 2 * narrow + 600 * 90 + 90 == 542_730
    tied = ElasticSpace(TcnDesign(tied=True))
    assert tied.cost_table("parameters").cost(tied.largest) == whole - 90 * 600


def test_macs_by_hand() -> None:
    space = ElasticSpace(TcnDesign())
    assert space.cost_table("macs").cost(space.largest) == 80 * (8 * 600 * 600 * 3 + 600 * 90) == 695_520_000


def test_every_cost_is_that_of_the_built_subnet(space: ElasticSpace) -> None:
    tables = {m: space.cost_table(m) for m in ("macs", "parameters", "bytes")}
    x = tokens(12)
    for architecture in list(space.enumerate())[::7]:
        module = space.build_subnet(architecture)
        assert tables["macs"].cost(architecture) == macs_of(module, x)
        assert tables["parameters"].cost(architecture) == parameters_of(module)
        assert tables["bytes"].cost(architecture) == bytes_of(module.state_dict())


# -- causality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["smallest", "largest", "d=1 e=0.25,1,0.5"])
def test_no_output_sees_a_later_token(space: ElasticSpace, text: str) -> None:
    module, x = loaded(space, text), tokens(12)
    with torch.no_grad():
        before = module(x)
        assert before.shape == (2, 7, 12)
        for t in range(12):
            changed = x.clone()
            changed[:, t:] = (x[:, t:] + 1) % 7
            after = module(changed)
            assert torch.equal(after[:, :, :t], before[:, :, :t]), t
            assert not torch.allclose(after[:, :, t], before[:, :, t]), t


@pytest.mark.parametrize(("text", "field"), [("smallest", 12), ("d=1 e=1", 28), ("largest", 60)])
def test_the_receptive_field_by_hand(text: str, field: int) -> None:
    # Two convolutions of kernel 3 per block reach back 2 * 2 * dilation: 4, 8, 16, 32.
    space = ElasticSpace(replace(TINY, input_shape=(70,)))
    module, x = loaded(space, text, torch.float64), tokens(70)
    changed = x.clone()
    changed[:, 0] = (x[:, 0] + 1) % 7
    with torch.no_grad():
        differs = (module(changed) != module(x)).any(dim=1).any(dim=0)
    assert int(differs.nonzero().max()) == field


# -- slices -----------------------------------------------------------------------------------------------------------


def test_a_subnet_is_the_supernet_on_its_slices(space: ElasticSpace) -> None:
    weights = space.initial_weights(torch_stream(1, "test"))
    supernet = space.build_supernet()
    supernet.load_state_dict(weights)
    supernet.eval()
    x = tokens(12)
    for architecture in list(space.enumerate())[::5]:
        subnet = space.build_subnet(architecture)
        subnet.load_state_dict(extract(weights, space.slices(architecture)))
        with torch.no_grad():
            assert torch.equal(supernet(x, architecture), subnet.eval()(x)), architecture


def test_gradients_reach_the_slices_and_nothing_else(space: ElasticSpace) -> None:
    weights = space.initial_weights(torch_stream(1, "test"))
    architecture = space.parse("d=1 e=0.5,0.25,1")
    supernet, subnet = space.build_supernet(), space.build_subnet(architecture)
    supernet.load_state_dict(weights)
    subnet.load_state_dict(extract(weights, space.slices(architecture)))
    x = tokens(12)
    supernet.train()(x, architecture).square().sum().backward()
    subnet.train()(x).square().sum().backward()
    slices, expected = space.slices(architecture), dict(subnet.named_parameters())
    for name, parameter in supernet.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dense, outside = torch.zeros_like(parameter), torch.ones_like(parameter, dtype=torch.bool)
        if name in expected:
            gradient = expected[name].grad
            assert gradient is not None
            assert gradient.any(), name
            slices[name].of(dense).copy_(gradient)
            slices[name].of(outside).fill_(False)
        torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5, msg=name)
        assert not found[outside].any(), name


def test_a_slice_is_normed_as_it_is() -> None:
    # Direction (3, 4) of length 5 and magnitude 10 weigh (6, 8); the first input channel alone weighs 10.
    for channels, expected in ((2, 6.0 + 8.0), (1, 10.0)):
        convolution = CausalConv(channels, 1, 1, 1)
        direction = torch.tensor([[[3.0], [4.0]]])[:, :channels]
        convolution.load_state_dict(
            {"direction": direction, "magnitude": torch.full((1, 1, 1), 10.0), "bias": torch.zeros(1)}
        )
        assert convolution(torch.ones(1, channels, 1)).item() == pytest.approx(expected)


def test_fresh_weights_are_their_direction() -> None:
    space = ElasticSpace(TINY)
    weights = space.initial_weights(torch_stream(1, "test"))
    direction, magnitude = weights["stages.0.0.conv1.direction"], weights["stages.0.0.conv1.magnitude"]
    for row, length in zip(direction, magnitude.flatten().tolist(), strict=True):
        assert row.norm().item() == pytest.approx(length)
    assert not weights["stages.0.0.conv1.bias"].any()


def test_a_tied_network_starts_at_the_loss_of_guessing() -> None:
    space = ElasticSpace(replace(TIED, num_classes=500))
    module = space.build_subnet(space.largest).eval()
    module.load_state_dict(space.initial_weights(torch_stream(1, "test")))
    tokens = torch.randint(500, (4, 12), generator=torch_stream(2, "test"))
    loss = torch.nn.functional.cross_entropy(module(tokens), tokens.roll(-1, 1))
    assert loss.item() == pytest.approx(math.log(500), rel=0.01)


def test_only_a_change_of_width_needs_a_shortcut() -> None:
    names = supernet_shapes(ElasticSpace(TINY))
    assert names["stages.0.0.shortcut.weight"] == (8, 6, 1)
    assert not [n for n in names if "shortcut" in n and not n.startswith("stages.0.0.")]
    assert not [n for n in supernet_shapes(ElasticSpace(TIED)) if "shortcut" in n]


# -- tied weights -----------------------------------------------------------------------------------------------------


def test_a_tied_decoder_reads_with_the_embedding() -> None:
    space = ElasticSpace(TIED)
    assert [n for n in supernet_shapes(space) if n.startswith("head.")] == ["head.bias"]
    module, x = loaded(space, "smallest"), tokens(12)
    module.head.bias.data.copy_(torch.arange(7.0))
    features = module.stages[0](module.stem(x))
    expected = torch.einsum("nct,vc->nvt", features, module.stem.embedding.weight) + torch.arange(7.0)[:, None]
    torch.testing.assert_close(module(x), expected)


def test_a_tied_embedding_learns_from_the_decoder_too() -> None:
    module = loaded(ElasticSpace(TIED), "smallest")
    x = torch.zeros((1, 12), dtype=torch.int64)  # the token 0 alone is looked up
    module(x)[:, 5].sum().backward()
    gradient = module.stem.embedding.weight.grad
    assert gradient[5].any(), "by the decoder"
    assert gradient[0].any(), "by the look-up"
    assert not gradient[3].any()


# -- dropout ----------------------------------------------------------------------------------------------------------

LOCAL = LocalSGD(epochs=2, batch_size=4, lr=0.1, clip_norm=1.0)


def trained(seed: int, disturb: Callable[[], object], dropout: float = 0.5) -> Tensor:
    space = ElasticSpace(replace(TINY, dropout=dropout))
    module = loaded(space, "smallest").train()
    data = (tokens(12, 8), tokens(12, 8).roll(-1, dims=1))
    generator = torch_stream(seed, "batches")
    disturb()
    with own_randomness(generator, CPU):
        sgd = Optimizer(LOCAL, dict(module.named_parameters()))
        train_locally(module, sgd, data, LOCAL, generator, objective=Objective())
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_dropout_depends_on_the_clients_stream_alone() -> None:
    first = trained(1, lambda: torch.manual_seed(11))
    second = trained(1, lambda: torch.manual_seed(12))
    assert torch.equal(first, second)
    assert not torch.equal(first, trained(2, lambda: None))
    assert not torch.equal(first, trained(1, lambda: None, dropout=0.0)), "something is dropped"


def test_the_global_generator_is_left_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(1, lambda: None)
    assert torch.equal(torch.rand(3), expected)


def test_the_block_uses_the_generators_seed_and_does_not_advance_it() -> None:
    generator = torch_stream(1, "batches")
    with own_randomness(generator, CPU):
        first = F.dropout(torch.ones(50), 0.5)
    with own_randomness(generator, CPU):
        assert torch.equal(F.dropout(torch.ones(50), 0.5), first)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch_stream(1, "batches")))


def test_nothing_is_dropped_when_a_subnet_is_scored() -> None:
    module, x = loaded(ElasticSpace(replace(TINY, dropout=0.9)), "largest"), tokens(12)
    with torch.no_grad():
        assert torch.equal(module(x), module(x))


# -- what a configuration may change ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SpaceConfig("tcn_elastic", norm="batch"), "tcn_elastic has no norm; it has .*kernel_size"),
        (SpaceConfig("tcn_elastic", depths=[1]), "tcn_elastic has no depths"),
        (SpaceConfig("tcn_elastic", blocks=[3, 2]), r"blocks=\[3, 2\]: give the fewest and the most"),
        (SpaceConfig("tcn_elastic", blocks=[2]), r"blocks=\[2\]"),
        (SpaceConfig("tcn_elastic", dropout=1.0), r"dropout=1\.0: must be in \[0, 1\)"),
        (SpaceConfig("tcn_elastic", expansions=[1.0, 0.5]), "ascending order"),
        (SpaceConfig("tcn_elastic", kernel_size=0), "at least 1"),
        (SpaceConfig("tcn_elastic", tied=True, embedding_size=100), "embedding_size=100 equal to space.channels=600"),
    ],
)
def test_what_cannot_be_is_refused(config: SpaceConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_space(config)


def test_a_misspelt_subnet_is_answered_by_examples_instead_of_all_labels() -> None:
    with pytest.raises(ValueError, match="no architecture") as caught:
        build_space(SpaceConfig("tcn_elastic")).parse("d=1 w=.5")
    assert str(caught.value) == (
        "'d=1 w=.5' is no architecture of tcn_elastic: give smallest, largest, options such as 335, or depths and "
        "expansions such as 'd=0 e=0.1'"
    )


def test_the_embedding_may_have_a_dropout_of_its_own() -> None:
    for own, expected in ((None, 0.4), (0.25, 0.25), (0.0, 0.0)):
        module = ElasticSpace(replace(TINY, dropout=0.4, embedding_dropout=own)).build_subnet((0,))
        assert module.stem.dropout.p == expected  # type: ignore[union-attr]
        assert module.stages[0][0].dropout.p == 0.4  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match=r"space\.embedding_dropout=1\.0: must be in \[0, 1\)"):
        build_space(SpaceConfig("tcn_elastic", embedding_dropout=1.0))
