"""Elastic spaces (SuperFedNAS): subnets of different depth and width are leading-channel slices of one supernet.

A design builds the stem, each block and the head. Supernet and stand-alone subnet consist of the same modules with the
same tensor names, so that a subnet's tensor of shape (a, b, ...) is the region [0, a) x [0, b) x ... of the supernet's
tensor of that name.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import Measure, SearchSpace, SlicedSpace, samples_of, supernet_shapes
from fedloom.platform.spaces.genome import ElasticGenome
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, Weights, architecture_id, leading
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import shapes_only

_DEPTHS_AND_WIDTHS = re.compile(r"\s*d\s*=\s*([\d\s,]+?)((?:\s+[a-z]\s*=\s*[\d\s.,]+?)+)\s*")


Contents = tuple[tuple[int, ...], ...]
"""Per stage the width index of every kept block."""


class ElasticDesign(Protocol):
    """The parts of an elastic network; all blocks of a stage have the stage's number of output channels."""

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def input_dtype(self) -> torch.dtype: ...

    @property
    def genome(self) -> ElasticGenome:
        """Depths and widths per stage."""
        ...

    @property
    def widths(self) -> Mapping[str, tuple[float, ...]]:
        """Per kind of width the value of each width index: `{"expansions": (0.5, 1.0)}`; labels abbreviate kinds."""
        ...

    @property
    def keeps_statistics(self) -> bool:
        """Whether a subnet's running statistics must be estimated before it is scored."""
        ...

    def distinct_widths(self, stage: int) -> int:
        """The number of distinct widths of a stage's blocks; narrow ones may coincide, because channels are rounded."""
        ...

    def build_stem(self) -> nn.Module:
        """Maps a batch of inputs to the first stage's input."""
        ...

    def build_block(self, stage: int, block: int, width: int) -> nn.Module:
        """One block, given its position and its width index."""
        ...

    def build_head(self) -> nn.Module:
        """Maps the last stage's output to logits."""
        ...

    def join(self, stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module) -> nn.Module:
        """The network of these parts, as the children `stem`, `stages` and `head`."""
        ...


class ElasticNetwork(nn.Module):
    """A stem, stages of blocks and a head, one after the other: `forward(x)`."""

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.stages, self.head = stem, nn.ModuleList(stages), head

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        y: Tensor = self.head(self.features(x))
        return y

    def features(self, x: Tensor) -> Tensor:
        """The last stage's output for a batch."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


def _used(weights: Weights, name: str) -> Tensor:
    """A tensor as its layer uses it: a direction of any length has that of its magnitude (`CausalConv`)."""
    layer, _, kind = name.rpartition(".")
    if kind == "magnitude":
        return weights[name].flatten()  # which is counted with the direction
    if kind != "direction":
        return weights[name]
    return weight_normed(weights[name], weights[f"{layer}.magnitude"])


def weight_normed(direction: Tensor, magnitude: Tensor) -> Tensor:
    """The weights (out, in, kernel) of this direction whose rows have the lengths of the magnitude (out, 1, 1)."""
    return direction * (magnitude / row_lengths(direction))


def row_lengths(direction: Tensor) -> Tensor:
    """The lengths (out, 1, 1) of the rows of a direction (out, in, kernel)."""
    return direction.square().sum(dim=(1, 2), keepdim=True).sqrt()


class ElasticSpace(SlicedSpace):
    """A search space of leading-channel slices."""

    _decision_kind = "stage"
    channels_last = True

    def __init__(self, design: ElasticDesign) -> None:
        self.design = design
        self.name = design.name
        self.input_shape = tuple(design.input_shape)
        self.input_dtype = design.input_dtype
        self.options = tuple(len(stage.contents) for stage in self.genome.stages)
        self._stage_slices = lru_cache(maxsize=None)(self._slices_of_stage)

    # -- architectures ----------------------------------------------------------------------------------------------

    @cached_property
    def genome(self) -> ElasticGenome:
        """Depths and widths per stage."""
        return self.design.genome

    @property
    def keeps_statistics(self) -> bool:
        return self.design.keeps_statistics

    @property
    def num_architectures(self) -> int:
        """The exact number of distinct subnets; options whose blocks have the same channels count once."""
        return math.prod(s.distinct(self.design.distinct_widths(i)) for i, s in enumerate(self.genome.stages))

    def contents(self, architecture: Architecture) -> Contents:
        """Per stage the width indices of the kept blocks."""
        return tuple(s.contents[o] for s, o in zip(self.genome.stages, architecture, strict=True))

    def of_contents(self, contents: Contents) -> Architecture:
        """The inverse of `contents`."""
        return tuple(s.option_of[c] for s, c in zip(self.genome.stages, contents, strict=True))

    def _decision_name(self, decision: int) -> str:
        return f"stage {decision + 1}"

    def sample(self, rng: np.random.Generator) -> Architecture:
        """A random subnet: depths and widths uniform and independent."""
        return tuple(self.genome.draw(1, rng)[0].tolist())

    def sample_depth(self, rng: np.random.Generator) -> Architecture:
        """A random depth per stage, all blocks at their widest (progressive shrinking's first phase)."""
        depths = [rng.integers(s.fewest, s.most + 1) for s in self.genome.stages]
        stages = zip(self.genome.stages, depths, strict=True)
        return tuple(s.option_of[s.widest(int(depth))] for s, depth in stages)

    def parse(self, text: str) -> Architecture:
        """Parses a subnet.

        `smallest`, `largest`, options such as `0-31-154-2`, or extra depths and expansions such as `d=1,0,2,1 e=.14`
        (one width for all blocks, or one per kept block in order).
        Raises ValueError naming the field that is outside the space.
        """
        if match := _DEPTHS_AND_WIDTHS.fullmatch(text):
            try:
                depths = [int(d) for d in match[1].split(",")]
                fields = [part.split("=") for part in re.split(r"\s+(?=[a-z])", match[2].strip())]
                widths = {letter.strip(): [float(v) for v in values.split(",")] for letter, values in fields}
            except ValueError:
                pass  # not options either, which `SearchSpace.parse` reports
            else:
                if [*widths] == [name[0] for name in self.design.widths] and len(fields) == len(widths):
                    return self._of_depths(text, depths, widths)
        # Not of a `SlicedSpace`, which lists all labels of a space of one decision: there may be thousands.
        return SearchSpace.parse(self, text)

    def _examples(self) -> str:
        options, depths = architecture_id(self.largest), self.label(self.smallest)
        return f"options such as {options}, or depths and expansions such as {depths!r}"

    def _of_depths(self, text: str, depths: list[int], widths: Mapping[str, list[float]]) -> Architecture:
        stages = self.genome.stages
        if len(depths) != len(stages):
            raise ValueError(
                f"{text!r}: {len(depths)} depths, {self.name} has {len(stages)} stages: give one per stage"
            )
        for number, (depth, stage) in enumerate(zip(depths, stages, strict=True), start=1):
            extra = stage.most - stage.fewest
            if not 0 <= depth <= extra:
                raise ValueError(f"{text!r}: depth {depth} of stage {number}: allowed are 0 to {extra}")
        blocks = [stage.fewest + depth for stage, depth in zip(stages, depths, strict=True)]
        chosen = [self._nearest(text, name, widths[name[0]], sum(blocks)) for name in self.design.widths]
        index_of = {values: i for i, values in enumerate(zip(*self.design.widths.values(), strict=True))}
        indices = iter([index_of[values] for values in zip(*chosen, strict=True)])
        contents = tuple(tuple(next(indices) for _ in range(n)) for n in blocks)
        if any(content not in stage.option_of for content, stage in zip(contents, stages, strict=True)):
            coupled = self.of_contents(tuple(s.widest(n) for s, n in zip(stages, blocks, strict=True)))
            raise ValueError(f"{text!r}: space.coupled=true gives these depths other widths: {self.label(coupled)!r}")
        return self.of_contents(contents)

    def _nearest(self, text: str, name: str, values: list[float], blocks: int) -> list[float]:
        """The design's exact value for each block, since labels round to six digits."""
        if len(values) not in (1, blocks):
            raise ValueError(f"{text!r}: {len(values)} {name} for {blocks} kept blocks: give one, or one each")
        known, nearest = sorted(set(self.design.widths[name])), []
        for value in (values * blocks)[:blocks]:
            near = [each for each in known if math.isclose(each, value, rel_tol=1e-5)]
            if not near:
                allowed = ", ".join(f"{each:g}" for each in known)
                raise ValueError(f"{text!r}: {name.removesuffix('s')} {value:g}: allowed are {allowed}")
            nearest.append(near[0])
        return nearest

    def label(self, architecture: Architecture) -> str:
        """A subnet's readable name: extra depth per stage, and the widths of the blocks."""
        contents = self.contents(architecture)
        depths = ",".join(str(len(c) - s.fewest) for c, s in zip(contents, self.genome.stages, strict=True))
        texts = [f"d={depths}"]
        for name, values in self.design.widths.items():
            widths = [values[w] for c in contents for w in c]
            shown = widths[:1] if len(set(widths)) == 1 else widths
            texts.append(f"{name[0]}={','.join(f'{w:g}' for w in shown)}")
        return " ".join(texts)

    def meaning(self, architecture: Architecture) -> Mapping[str, Any]:
        """Blocks per stage, and the widths of each."""
        contents = self.contents(architecture)
        widths = {n: [[values[w] for w in c] for c in contents] for n, values in self.design.widths.items()}
        return {"label": self.label(architecture), "depths": [len(content) for content in contents], **widths}

    def figures(self) -> Mapping[str, Any]:
        """Parameters and labels of the smallest and the largest subnet, and the size of the supernet."""
        parameters = self.cost_table("parameters")
        return {
            "parameters": {"smallest": int(parameters.smallest), "largest": int(parameters.largest)},
            "state_bytes": int(self.cost_table("bytes").largest),
            "smallest": self.label(self.smallest),
            "largest": self.label(self.largest),
        }

    # -- networks and tensors ---------------------------------------------------------------------------------------

    def _build_stage(self, stage: int, content: Sequence[int]) -> nn.Module:
        return nn.Sequential(*[self.design.build_block(stage, block, width) for block, width in enumerate(content)])

    def _network(self, architecture: Architecture) -> nn.Module:
        stages = [self._build_stage(stage, content) for stage, content in enumerate(self.contents(architecture))]
        return self.design.join(self.design.build_stem(), stages, self.design.build_head())

    def slices(self, architecture: Architecture) -> SliceMap:
        """The slice of each subnet tensor: leading channels of the supernet tensor of the same name."""
        self.validate(architecture)
        slices_by_name = dict(self._fixed_slices[0])
        for stage, content in enumerate(self.contents(architecture)):
            slices_by_name.update(self._stage_slices(stage, content))
        return slices_by_name | self._fixed_slices[1]

    @cached_property
    def _fixed_slices(self) -> tuple[dict[str, Slice], dict[str, Slice]]:
        stem, head = ({n: Slice(n) for n in supernet_shapes(self) if n.startswith(part)} for part in ("stem.", "head."))
        return stem, head

    def _slices_of_stage(self, stage: int, content: tuple[int, ...]) -> dict[str, Slice]:
        module, shapes = on_meta(partial(self._build_stage, stage, content)), supernet_shapes(self)
        named = {f"stages.{stage}.{name}": tuple(t.shape) for name, t in module.state_dict().items()}
        return {name: leading(name, shape, shapes[name]) for name, shape in named.items()}

    def with_sorted_channels(self, weights: Weights) -> dict[str, Tensor]:
        """The same network with the channels of every block in descending order of their weights' L1 norm.

        Narrow blocks, which keep the leading channels, then have the most important ones (OFA, Sec. 3.3). Channels of
        one group of a group norm stay together.
        """
        after = dict(weights)
        for stage, parts in enumerate(self.genome.stages):
            for block, (dims, unit) in itertools.product(range(parts.most), self._channels_of(stage)):
                named = {f"stages.{stage}.{block}.{name}": dim for name, dim in dims.items()}
                used = {name: _used(weights, name) for name in named}
                matrices = [used[n].movedim(d, 0).flatten(1) for n, d in named.items() if used[n].dim() > 1]
                norms = torch.stack([matrix.abs().sum(dim=1) for matrix in matrices]).sum(dim=0)
                groups = torch.argsort(norms.view(-1, unit).sum(dim=1), descending=True, stable=True)
                order = (groups[:, None] * unit + torch.arange(unit)).flatten()
                after |= {name: weights[name].index_select(dim, order) for name, dim in named.items()}
        return after

    def _channels_of(self, stage: int) -> list[tuple[dict[str, int], int]]:
        """Per kind of width: the dimension that it narrows of each block tensor, and the group size of the norms."""
        kinds = self.design.widths

        def block(narrow: str | None) -> nn.Module:
            """The block that is narrowest in this kind of width and widest in the others."""
            wanted = [min(values) if kind == narrow else max(values) for kind, values in kinds.items()]
            width = [*zip(*kinds.values(), strict=True)].index(tuple(wanted))
            return on_meta(partial(self.design.build_block, stage, 0, width))

        whole = block(None)
        unit = max([1, *(m.num_channels // m.num_groups for m in whole.modules() if isinstance(m, nn.GroupNorm))])
        shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
        narrow = [block(kind).state_dict().items() for kind in kinds]
        dims = [{n: d for n, t in tensors for d in range(t.dim()) if t.shape[d] < shapes[n][d]} for tensors in narrow]
        return [(each, unit) for each in dims if each]

    # -- costs ------------------------------------------------------------------------------------------------------

    def _table_of(self, measure: Measure) -> CostTable:
        """Measures blocks once per position and width, and sums their costs (for peaks: takes the maximum)."""
        design, inputs = self.design, self.stage_inputs
        blocks: dict[tuple[int, int, int], float] = {}
        for stage, parts in enumerate(self.genome.stages):
            for block, width in itertools.product(range(parts.most), range(parts.widths)):
                x = inputs[stage] if block == 0 else inputs[stage + 1]
                blocks[stage, block, width] = measure.cost(partial(design.build_block, stage, block, width), x)
        options = [
            [measure.join(blocks[stage, b, w] for b, w in enumerate(content)) for content in parts.contents]
            for stage, parts in enumerate(self.genome.stages)
        ]
        fixed = [measure.cost(design.build_stem, samples_of(self)), measure.cost(design.build_head, inputs[-1])]
        return measure.table(measure.join(fixed), options)

    @cached_property
    def stage_inputs(self) -> list[Tensor]:
        """The input of each stage for one sample, and the last stage's output, on the meta device."""
        with torch.no_grad(), shapes_only():
            inputs = [on_meta(self.design.build_stem).eval()(samples_of(self))]
            for stage in range(len(self.options)):
                block = on_meta(partial(self.design.build_block, stage, 0, 0)).eval()
                inputs.append(block(inputs[-1]))
        return inputs
