"""Model files in safetensors, torch programs and ONNX: encoded, decoded, and compared with the run's own model."""

import copy
import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fedloom.platform.clients.evaluation import batches_of
from fedloom.platform.clients.objectives import IGNORED, Objective, logits_of
from fedloom.platform.clients.training import Samples
from fedloom.platform.data.dataset import StoredSamples
from fedloom.platform.data.trees import Tree, rows_of
from fedloom.platform.results.checkpoint import from_bytes, to_bytes

FORMATS = ("safetensors", "pt2", "onnx")
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INPUT, OUTPUT = "x", "logits"
Forward = Callable[[Any], Tensor]
"""Maps a batch of inputs, one tensor or several by name, to logits."""


@dataclass(frozen=True)
class Encoded:
    """The content of one file, and the forward pass of the model that is loaded from this content.

    `length` is the number of tokens that the model requires; None if it takes any number, or if inputs are no tokens.
    """

    content: bytes
    forward: Forward
    length: int | None = None


def check_formats(formats: Sequence[str]) -> None:
    """Raises ValueError for an unknown format, or one whose packages are not installed."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"--formats {','.join(formats)!r}: give one or more of {','.join(FORMATS)}")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if "onnx" in formats and missing:
        raise ValueError(f"--formats onnx needs {', '.join(missing)}: pip install 'fedloom[onnx]', or leave onnx out")


def encode(module: nn.Module, sample: Tree, formats: Sequence[str]) -> dict[str, Encoded]:
    """Encodes the module, which is in evaluation mode, in every given format.

    `sample` is a batch of two or more inputs. The encoded model takes any batch size and, for tokens (one tensor of
    integers), any length; if it has a step per token, as recurrent networks do, programs and ONNX take only the
    sample's length. Several inputs are passed by their names. Raises ValueError if torch cannot export the module.
    """
    encoded: dict[str, Encoded] = {}
    if "safetensors" in formats:
        encoded["safetensors"] = _safetensors(module)
    if {"pt2", "onnx"} & set(formats):
        program, shapes = _traced(module, sample)
        is_fixed = isinstance(sample, Tensor) and not sample.is_floating_point() and len(shapes[INPUT]) == 1
        length = sample.shape[1] if isinstance(sample, Tensor) and is_fixed else None
        if "pt2" in formats:
            encoded["pt2"] = replace(_pt2(program), length=length)
        if "onnx" in formats:
            with torch.no_grad():
                outputs = module(sample)
            names = [*outputs] if isinstance(outputs, Mapping) else [OUTPUT]
            encoded["onnx"] = replace(_onnx(program, shapes, names), length=length)
    return encoded


Shapes = dict[str, dict[int, Dim]]
"""The dynamic dimensions of every input, by the inputs' names."""


def _traced(module: nn.Module, sample: Tree) -> tuple[ExportedProgram, Shapes]:
    """The exported program, and the dynamic dimensions of its inputs."""
    batch = {0: Dim("batch")}
    if isinstance(sample, Mapping):
        shapes = dict.fromkeys(sample, batch)
        return _program(module, (), dict(sample), shapes), shapes
    if not sample.is_floating_point():
        shapes = {INPUT: {**batch, 1: Dim("length")}}
        with suppress(ValueError):
            return _program(module, (sample,), {}, (shapes[INPUT],)), shapes
    return _program(module, (sample,), {}, (batch,)), {INPUT: batch}


def _called(function: Callable[..., Any], x: Tree) -> Any:
    return function(**x) if isinstance(x, Mapping) else function(x)


def _safetensors(module: nn.Module) -> Encoded:
    content = to_bytes(module.state_dict())
    loaded = copy.deepcopy(module)
    loaded.load_state_dict(from_bytes(content, Path("model.safetensors")))
    return Encoded(content, lambda x: logits_of(loaded(x)))


def _program(module: nn.Module, inputs: tuple[Tensor, ...], by_name: dict[str, Tensor], shapes: Any) -> ExportedProgram:
    try:
        program = torch.export.export(module, inputs, by_name, dynamic_shapes=shapes)
    except RuntimeError as error:  # the base class of torch's tracing errors
        first = str(error).strip().partition("\n")[0]
        if "Constraints violated (batch)" in first:
            first = "it fixes the batch size, as len(x) does: write x.shape[0]"
        raise ValueError(f"torch.export cannot trace this network: {first}; export --formats safetensors") from error
    for node in program.graph.nodes:
        # Stack traces contain local paths, so that files of the same model would differ between machines.
        node.meta.pop("stack_trace", None)
    return program


def _pt2(program: ExportedProgram) -> Encoded:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # For channels-last weights: torch takes them for views of a larger storage, and stores all of it.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, buffer)
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return Encoded(content, lambda x: logits_of(_called(loaded, x)))


def _onnx(program: ExportedProgram, shapes: Shapes, outputs: list[str]) -> Encoded:
    import onnxruntime

    try:
        exported = torch.onnx.export(
            program, input_names=[*shapes], output_names=outputs, dynamic_shapes=tuple(shapes.values()), verbose=False
        )
    except RuntimeError as error:  # includes torch.onnx.errors.OnnxExporterError
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"ONNX cannot express this space's subnets: {first}; leave onnx out of --formats") from error
    assert exported is not None, "the exporter returns nothing only where it writes a file itself"
    content = exported.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def forward(x: Tree) -> Tensor:
        by_name = x if isinstance(x, Mapping) else {INPUT: x}
        return torch.from_numpy(session.run([OUTPUT], {name: t.numpy() for name, t in by_name.items()})[0])

    return Encoded(content, forward)


LARGEST_DIFFERENCE = 1e-4
"""Allowed difference of two outputs, relative to the largest output if that is above 1, else absolute.

Sums in another order differ by less.
"""

LARGEST_CHANGED_SHARE = 1e-3
"""Allowed share of predicted classes that differ, since two logits may be nearly equal."""


@dataclass
class Agreement:
    """The differences between a file's outputs and the model's, over all compared samples."""

    max_abs_difference: float = 0.0
    largest_output: float = 0.0
    argmax_changed: int = 0
    targets: int = 0
    samples: int = 0

    def add(self, expected: Tensor, output: Tensor, labels: Tree) -> None:
        """Adds a batch; classes are compared for the targets that count, unless labels come by name."""
        # Python's max may drop NaN; torch's max keeps it.
        difference = float((output - expected).abs().max()) if output.shape == expected.shape else math.nan
        self.max_abs_difference = difference if math.isnan(difference) else max(self.max_abs_difference, difference)
        self.largest_output = max(self.largest_output, float(expected.abs().max()))
        if isinstance(labels, Tensor):
            counts = labels != IGNORED
            if expected.dim() > 1:  # a single number per sample predicts no class
                self.argmax_changed += int(((output.argmax(dim=1) != expected.argmax(dim=1)) & counts).sum())
            self.targets += int(counts.sum())
        self.samples += len(expected)


@dataclass(frozen=True)
class Comparison:
    """The number of the model's correct predictions among the targets, and the agreement of each file with the model.

    They are counted by the run's objective, whose own metric need not be a number of predictions.
    """

    correct: float
    targets: int
    samples: int
    agreements: Mapping[str, Agreement]


@torch.no_grad()
def compare(
    reference: Forward, files: Mapping[str, Forward], data: Samples | StoredSamples, objective: Objective
) -> Comparison:
    """Runs the model and its files on all samples, in the batch size that runs use for scoring.

    `data` holds inputs of shape (n, ...) and labels of shape (n,) or (n, T), or labels by name. Classes are compared on
    all targets except padding; the objective says which of them it scores.
    """
    agreements = {name: Agreement() for name in files}
    correct: float = 0
    targets = samples = 0
    for x_B, y_B in batches_of(data):
        outputs = reference(x_B)
        logits = logits_of(outputs)
        correct += objective.metric_sum(outputs, y_B).item()
        targets += int(objective.counted(outputs, y_B))
        samples += rows_of(y_B)
        for name, forward in files.items():
            agreements[name].add(logits, forward(x_B), y_B)
    return Comparison(correct, targets, samples, agreements)


def check_agreement(comparison: Comparison) -> None:
    """Raises ValueError for a file whose outputs differ from the model's by more than rounding errors."""
    for name, agreement in comparison.agreements.items():
        allowed = LARGEST_DIFFERENCE * max(1.0, agreement.largest_output)
        if not agreement.max_abs_difference <= allowed:  # true for NaN as well
            raise ValueError(
                f"the {name} file's outputs differ from the model's by {agreement.max_abs_difference:.3g} (allowed is "
                f"{allowed:.3g}): nothing was written; export other --formats and report this"
            )
        if agreement.argmax_changed > LARGEST_CHANGED_SHARE * agreement.targets:
            raise ValueError(
                f"the {name} file predicts another class for {agreement.argmax_changed} of {agreement.targets} "
                "targets: nothing was written; export other --formats and report this"
            )
