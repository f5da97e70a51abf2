"""FedMN's router: what it reads of a silo's data, how modules are drawn, and the gradients that their gates have."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.training import LocalSGD, Optimizer
from fedloom.platform.methods.fedmn import (
    Router,
    chosen,
    embedding_of,
    initial_router,
    logistic_noise,
    received_router,
    straight_through,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.operator_choice import SummedOperatorSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import SpaceConfig

SMALL = SpaceConfig("resnet18_modular_small", input_shape=[1, 8, 8], stem_channels=4)


def fresh_router(embedding_size: int, *options: int) -> Router:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Router(embedding_size, options)


def test_what_the_router_reads_with_literal_numbers() -> None:
    image = torch.arange(64.0).reshape(1, 8, 8)
    x = torch.stack([image, image + 4.0])  # whose mean is image + 2
    read = embedding_of((x, torch.tensor([2, 0])), num_classes=3)
    # A 2 x 2 patch that begins with v has v, v + 1, v + 8 and v + 9.
    pooled = [v + 4.5 + 2.0 for start in (0, 16, 32, 48) for v in range(start, start + 8, 2)]
    assert read.tolist() == pytest.approx([*pooled, 0.5, 0.0, 0.5])
    assert read.dtype == torch.float32


def test_what_the_router_reads_is_the_mean_over_pooled_samples() -> None:
    x = torch.randn((7, 3, 9, 6), generator=torch_stream(1, "x"))
    y = torch.tensor([0, 1, 1, 3, 3, 3, 0])
    pooled = torch.stack([F.adaptive_avg_pool2d(sample, 4).flatten() for sample in x]).mean(dim=0)
    read = embedding_of((x, y), num_classes=5)
    assert read.shape == (3 * 16 + 5,)
    torch.testing.assert_close(read[:48], pooled)
    assert read[48:].tolist() == pytest.approx([2 / 7, 2 / 7, 0.0, 3 / 7, 0.0])


def test_every_module_is_likely_at_first_whatever_the_data() -> None:
    space = build_space(SMALL)
    assert isinstance(space, SummedOperatorSpace)
    weights = initial_router(space, 10, torch_stream(1, "supernet"))
    assert sum(t.numel() for t in weights.values()) == (16 + 10) * 64 + 64 + 64 * 16 + 16
    router = received_router(space, 10, weights, torch.device("cpu"))
    logits = router(torch.randn(26, generator=torch_stream(2, "x")))
    assert logits.tolist() == [[1.0, 1.0]] * 8
    assert chosen(logits) == space.largest_subspace
    again = initial_router(space, 10, torch_stream(1, "supernet"))
    assert all(torch.equal(weights[n], again[n]) for n in weights)
    assert weights["router/hidden.weight"].std() > 0


def test_options_that_do_not_exist_are_never_chosen() -> None:
    logits = fresh_router(5, 1, 3, 2)(torch.ones(5))
    assert logits.shape == (3, 3)
    assert torch.isinf(logits).tolist() == [[False, True, True], [False, False, False], [False, False, True]]
    assert chosen(logits + 1e6) == ((0,), (0, 1, 2), (0, 1))


def test_modules_are_drawn_with_the_probability_of_their_logit() -> None:
    noise = logistic_noise((20000,), torch_stream(1, "test"))
    for logit, probability in ((0.0, 0.5), (1.0, 0.7311), (-2.0, 0.1192)):
        assert (logit + noise > 0).float().mean().item() == pytest.approx(probability, abs=0.01)
    assert torch.isfinite(noise).all()
    assert noise.dtype == torch.float32


def test_a_decision_may_choose_nothing() -> None:
    assert chosen(torch.tensor([[0.1, -0.1], [-1.0, 0.0], [2.0, 3.0]])) == ((0,), (), (0, 1))


def test_the_gates_with_literal_numbers() -> None:
    scores = torch.tensor([[2.0, -1.0]], requires_grad=True)
    gates = straight_through(scores, torch.tensor([[1.0, 0.0]]), temperature=2.0)
    assert gates.tolist() == [[1.0, 0.0]]
    (gates * torch.tensor([[3.0, 1.0]])).sum().backward()  # type: ignore[no-untyped-call]
    # sigmoid(1) = .7310586, sigmoid(-.5) = .3775407: 3 s (1 - s) / 2 and s (1 - s) / 2
    assert scores.grad is not None
    assert scores.grad.tolist() == [pytest.approx([0.2949179, 0.1175019])]


def test_gates_are_exact_and_options_that_do_not_exist_have_no_gradient() -> None:
    logits = torch.randn(50, generator=torch_stream(1, "test")).requires_grad_()
    scores = torch.cat([logits, torch.full((1,), -torch.inf)])
    hard = (scores > 0).float()
    gates = straight_through(scores, hard, temperature=0.3)
    assert torch.equal(gates, hard)
    gates.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_logit_of_a_needed_module_rises_above_that_of_a_harmful_one() -> None:
    generator = torch_stream(3, "test")
    x = torch.randn((128, 2), generator=generator)
    y = (x[:, 0] > 0).long()
    needed = torch.stack([-x[:, 0], x[:, 0]], dim=1)
    harmful = -0.5 * needed
    router, embedding = fresh_router(4, 2), torch.ones(4)
    router.load_state_dict({**router.state_dict(), "out.weight": torch.zeros(2, 64), "out.bias": torch.ones(2)})
    local = LocalSGD(epochs=1, batch_size=128, lr=0.1)
    for _round in range(60):
        noise = logistic_noise((1, 2), generator)
        hard = (router(embedding).detach() + noise > 0).float()
        sgd = Optimizer(local, dict(router.named_parameters()))
        gates = straight_through(router(embedding) + noise, hard, 1.0)
        output = sum(gates[0, o] * (needed, harmful)[o] for o in chosen(hard)[0])
        if isinstance(output, Tensor):
            F.cross_entropy(output, y).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    first, second = router(embedding)[0].tolist()
    assert first > 1.0 > second
    assert chosen(router(embedding)) == ((0,),)
