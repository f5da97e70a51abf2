"""Activations that a training step of SPIDER's supernet keeps for its backward pass, with 16 and with 32 channels.

    python -m fedloom.experiments.benchmarks.activations

They are counted, not measured: the bytes of the distinct storages that autograd saves, without parameters and buffers.
`published` is the network as its authors compute it, with every operator on its own; `here` computes only once what
several operators of a node share. `both` holds two models at once, as in the paper's turns (Tab. 3: 4.18 GB for two,
2.14 GB for one); fedloom trains one after the other. Prints one JSON object on its last line.
"""

import json
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.platform.spaces.darts import DARTS_S2, DartsDesign, DartsNetwork
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Subspace

BATCH = 32
CHANNELS = (16, 32)


def saved_bytes(modules: list[nn.Module], x: Tensor) -> int:
    """Bytes that autograd saves for the backward passes of these modules' losses on a batch, parameters not counted."""
    parameters = {t.untyped_storage()._cdata for m in modules for t in (*m.parameters(), *m.buffers())}
    saved: dict[int, Tensor] = {}  # holding the tensors keeps their storages from being reused

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    y = torch.zeros(len(x), dtype=torch.long, device=x.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = [functional.cross_entropy(module(x), y) for module in modules]
    del losses
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in saved.items() if storage not in parameters)


def supernet(channels: int) -> DartsDesign:
    """SPIDER's supernet with this number of initial channels."""
    return DartsDesign("darts_s2", channels=channels, operators=DARTS_S2.operators)


def published(design: DartsDesign, models: int = 1, batch: int = BATCH) -> int:
    """Bytes saved by models that share nothing; on the meta device every operator does all of its own work."""
    modules = [on_meta(partial(DartsNetwork, design, _all(design))).train() for _ in range(models)]
    return saved_bytes(modules, torch.zeros(batch, *design.input_shape, device="meta"))


def here(design: DartsDesign, batch: int = BATCH) -> int:
    """Bytes saved by the network as fedloom trains it.

    All but the norms' statistics are proportional to the batch size, so two small batches give the bytes of any batch.
    """
    network = DartsNetwork(design, _all(design)).train()
    one, two = (saved_bytes([network], torch.zeros(n, *design.input_shape)) for n in (1, 2))
    return one + (batch - 1) * (two - one)


def _all(design: DartsDesign) -> Subspace:
    return tuple(tuple(range(len(names))) for names in design.operator_names)


def main() -> None:
    """Counts and prints the figures in GB."""
    figures = {}
    for channels in CHANNELS:
        design = supernet(channels)
        gb = {"published": published(design), "both": published(design, models=2), "here": here(design)}
        figures[channels] = {name: size / 1e9 for name, size in gb.items()}
        print(f"{channels:>4} channels  " + "  ".join(f"{name} {size:.2f}" for name, size in figures[channels].items()))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
