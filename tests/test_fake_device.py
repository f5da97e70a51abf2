"""What a GPU would be asked for by every family of methods: nothing is mixed up, nothing falls back, no step waits.

The first chunk of each kind of work runs on a fake device (see `tools.fake_device`) before it runs in earnest.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.worker import Worker
from tools.fake_device import FAMILIES, PAPERS, Work, family, first_work_of, work_of
from tools.frozen_runs import RUNS

MOST_WAITS = 9
"""Per client: its figures, whether its values are finite, what it sends back, and each model that it scores."""
MOST_COPIES = 11
"""Per client: its samples and their order, what is drawn for augmentation, its state by type."""
PLAIN = [*RUNS["fedavg"], "method.train.rounds=1", "method.evaluate=false", "method.train.batch_size=8"]


def done(tmp_path: Path, *overrides: str) -> list[Work]:
    return work_of(compose_config([*overrides, "executor.kind=serial", f"results={tmp_path / 'results'}"]))


def first_of_plain() -> Work:
    return first_work_of(compose_config([*PLAIN, "executor.kind=serial"]))


needs_data = pytest.mark.skipif(
    not os.environ.get("FEDLOOM_DATA"), reason="needs CIFAR-10 and Shakespeare: set FEDLOOM_DATA to their folder"
)


def marks(name: str) -> list[pytest.MarkDecorator]:
    slow = name not in (*FAMILIES[:3], "fedoras_shakespeare", "superfednas_cifar10")
    data = name in PAPERS or name == "superfednas_shakespeare"
    return [*([pytest.mark.slow] if slow else []), *([needs_data] if data else [])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAMILIES])
def test_a_gpu_is_asked_for_no_more_than_it_has_to_be(name: str, tmp_path: Path) -> None:
    work = work_of(family(name, f"results={tmp_path / 'results'}"))
    assert any(w.steps for w in work), "something has trained"
    for w in work:
        what = f"{name}, {w.stage}, {w.task}"
        assert w.failures == [], what
        assert w.fallbacks == [], what
        assert w.sums_elsewhere == [] or name == "fedavg_secure", what  # masks are added in main memory
        assert w.steps or not w.task.startswith("Train"), f"{what}: its steps are seen"
        assert w.waits_per_step == {}, what
        assert w.waits_per_client <= MOST_WAITS, (what, w.counts.waits)
        assert w.counts.copies <= MOST_COPIES * w.clients, (what, w.counts.events)


@pytest.mark.parametrize("preset", [pytest.param(name, marks=marks(name)) for name in PAPERS])
def test_a_papers_step_has_no_more_kernels_than_it_had(preset: str) -> None:
    few = (
        ["data.train_samples=10000"] if "cifar" in preset else []
    )  # steps are alike, and all images take long to prepare
    first = first_work_of(compose_config([f"experiment={preset}", *few]))
    assert first.failures == []
    assert first.waits_per_step == {}
    assert 0 < first.kernels_per_step <= PAPERS[preset]


@needs_data
def test_randaugment_does_not_wait_and_costs_less_than_200_kernels() -> None:
    kernels = []
    for name in ("crop_flip_cutout", "crop_flip_randaugment_cutout"):
        given = [*RUNS["fedavg_cifar10"], f"data.augment={name}", "executor.stack_clients=off"]
        first = first_work_of(compose_config([*given, "executor.kind=serial"]))
        assert first.waits_per_step == {}
        kernels.append(first.kernels_per_step)
    assert 0 < kernels[1] - kernels[0] < 200


def test_single_updates_come_back_in_one_copy_per_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    kept = [*PLAIN, "executor.stack_clients=off", "method.train.aggregator=median:median"]
    (first, *_) = done(tmp_path, *kept)
    assert first.failures == []
    back = first.counts.of("copy from the device")
    types = {tensor.dtype for tensor in first.result.sums.kept[0].tensors.values()}  # type: ignore[union-attr]
    assert len(types) == 2, "weights, and the counters of batch norms"
    assert sum(n for where, n in back.items() if "aggregators" in where or "on_device" in where) == 2 * first.clients


# -- the device notices what it is there for --------------------------------------------------------------------------


def test_of_a_tensor_that_was_left_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Worker.client_data

    def left(self: Worker, client_id: int, split: str) -> tuple[Tensor, Tensor]:
        x, y = real(self, client_id, split)
        return x, torch.zeros(len(y), dtype=y.dtype)

    monkeypatch.setattr(Worker, "client_data", left)
    first = first_of_plain()
    assert "device" in first.failures[0]


def test_of_a_wait_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Objective.loss

    def looks(self: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
        assert outputs.sum().item() != 0
        return real(self, outputs, targets)

    monkeypatch.setattr(Objective, "loss", looks)
    first = first_of_plain()
    assert [(where.split(" at ")[0], "test_fake_device" in where) for where in first.waits_per_step] == [("item", True)]


def test_of_a_copy_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Objective.loss

    def copies(self: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
        return real(self, outputs * torch.ones(1).to(outputs.device), targets)

    monkeypatch.setattr(Objective, "loss", copies)
    first = first_of_plain()
    assert [where.split(" at ")[0] for where in first.waits_per_step] == ["blocking copy to the device"]


def test_of_a_stack_that_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_at_once(_stack: object, _local: object, _objective: object) -> None:
        raise RuntimeError("no kernel for so many")

    monkeypatch.setattr("fedloom.platform.clients.stacks.train_stack", none_at_once)
    (first, *_) = done(tmp_path, *RUNS["fedavg_stacked"], "method.train.rounds=1", "method.evaluate=false")
    assert first.failures == []
    assert {why.split(" (line")[0] for why in first.fallbacks} == {"RuntimeError: no kernel for so many"}
