"""Evaluation of a network on data: loss, metrics, running statistics, a confusion matrix, a written paragraph."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.clients.assignments import CONFUSION, PARAGRAPH, Measurement
from fedloom.platform.data import trees
from fedloom.platform.data.trees import Tree, first, mapped, rows_of, single
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import architecture_id

if TYPE_CHECKING:
    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.clients.training import Outputs, Samples
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.data.dataset import StoredSamples
    from fedloom.platform.spaces.slices import Architecture

EVALUATED = 256
"""Samples per batch in evaluations whose result does not depend on the batch size."""


READ_BYTES = 2**26
"""The most bytes of inputs that an evaluation reads at a time, unless a batch has more."""


def batches_of(data: Samples | StoredSamples, sizes: list[int] | None = None) -> Iterator[Samples]:
    """Yields the samples in batches (of the given sizes, if any); stored samples are read several batches at a time."""
    per_position = labels_positions(data[1]) if isinstance(data, tuple) else data.per_position
    # The logits of every position make a batch of texts far larger than one of images.
    split = sizes or (EVALUATED // 8 if per_position else EVALUATED)
    if not isinstance(data, tuple):
        shapes = data.dataset.input_shape
        values = sum(map(math.prod, shapes.values() if isinstance(shapes, Mapping) else [shapes]))
        most = max(1, READ_BYTES // (8 * values))
        batches = [rows_B for rows_B in torch.split(torch.arange(len(data)), split) if len(rows_B)]
        # The indices of the samples are sent to the GPU once per read, not once per batch.
        for _, read in itertools.groupby(batches, lambda rows_B: int(rows_B[-1]) // most):
            rows = list(read)
            yield from batches_of(data.tensors(torch.cat(rows).numpy()), [len(rows_B) for rows_B in rows])
    elif rows_of(data[1]):
        yield from zip(trees.split(data[0], split), trees.split(data[1], split), strict=True)


def labels_positions(y: Tree) -> bool:
    """Whether labels are (n, T), one per position of a text."""
    return isinstance(y, Tensor) and y.dim() > 1 and not y.is_floating_point()


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy over the targets of `samples` samples (one target per image, or per position of a text).

    They are NaN if no target counts. `more` holds the objective's further metrics by name.
    """

    loss: float
    metric: float
    samples: int
    per_position: bool = False
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Sums:
    """Sums over the targets of the batches that a network has seen, left on the device."""

    loss: Tensor
    metric: Tensor  # a user's own metric need not be a count
    more: dict[str, Tensor] = field(default_factory=dict)
    targets: Tensor | int = 0  # on the device, if it depends on the data: it is read once, at the end
    samples: int = 0

    def add(self, outputs: Outputs, y_B: Tree, objective: Objective) -> None:
        self.loss += objective.loss_sum(outputs, y_B).double()
        self.metric += objective.metric_sum(outputs, y_B).double()
        self.targets = self.targets + objective.counted(outputs, y_B)
        self.samples += rows_of(y_B)
        for name, value in objective.more(outputs, y_B).items():
            self.more[name] = self.more.get(name, torch.zeros_like(self.loss)) + value.double()

    def score(self, *, per_position: bool) -> Score:
        known = self.targets if isinstance(self.targets, Tensor) else torch.full_like(self.loss, self.targets)
        sums: list[float] = torch.stack([known.double(), self.loss, self.metric, *self.more.values()]).cpu().tolist()
        # No target may count, such as those of a short text whose first positions are skipped.
        loss, metric, *more = (total / sums[0] if sums[0] else math.nan for total in sums[1:])
        return Score(loss, metric, self.samples, per_position, dict(zip(self.more, more, strict=True)))


def evaluate(
    forward: Callable[[Any], Outputs],
    data: Samples | StoredSamples,
    objective: Objective,
    sizes: list[int] | None = None,
) -> Score:
    """Mean loss and metrics of `forward` over all targets, computed in batches (of the given sizes, if any)."""
    return evaluate_all(lambda x_B: (forward(x_B),), 1, data, objective, sizes)[0]


@torch.no_grad()
def evaluate_all(
    outputs_of: Callable[[Any], Iterable[Outputs]],
    networks: int,
    data: Samples | StoredSamples,
    objective: Objective,
    sizes: list[int] | None = None,
) -> list[Score]:
    """The scores of several networks; `outputs_of` yields all their outputs for a batch, which is loaded only once."""
    sums, per_position = list[_Sums](), False
    for x_B, y_B in batches_of(data, sizes):
        if not sums:
            zero = torch.zeros((), dtype=torch.float64, device=first(x_B).device)
            per_position = labels_positions(y_B)
            sums = [_Sums(zero.clone(), zero.clone()) for _ in range(networks)]
        for of_network, outputs in zip(sums, outputs_of(x_B), strict=True):
            of_network.add(outputs, y_B, objective)
    if not sums:
        return [Score(math.nan, math.nan, 0)] * networks
    return [of_network.score(per_position=per_position) for of_network in sums]


BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def estimate_statistics(
    module: nn.Module,
    x: Tree,
    batch_size: int = 128,
    *,
    forward: Callable[[Any], object] | None = None,
    norms: Iterable[BatchNorm] | None = None,
) -> None:
    """Replaces the running statistics of the module's batch norms by those of the inputs `x` (n, ...).

    For a path of a supernet give its `forward` and its batch norms; by default they are the stand-alone module's. Every
    batch has the same weight, as in the cumulative mean of once-for-all's calibration (Cai et al. 2020).
    """
    forward = module if forward is None else forward
    norms = [part for part in module.modules() if isinstance(part, BatchNorm)] if norms is None else [*norms]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
    # Batch sizes differ by at most one, because batches have equal weight and a batch of one sample may have no
    # variance. Each takes every k-th sample: if samples are grouped by client, consecutive ones have less variance.
    batches = math.ceil(rows_of(x) / batch_size)
    try:
        for start in range(batches):
            for norm in norms:
                # The same mean as with a momentum of None, without reading torch's own counter from the device.
                norm.momentum = 1.0 / (start + 1)
            forward(mapped(itemgetter(slice(start, None, batches)), x))
    finally:  # a worker uses the module again after an error
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


# -- the details of a final evaluation --------------------------------------------------------------------------------

MOST_CLASSES = 35
"""The most classes of a confusion matrix; a larger one would be unreadable."""
PROMPT, WRITTEN = 20, {"characters": 300, "words": 60}
"""The number of prompt tokens, which come from a test text, and the number of tokens that are generated after it."""

Forward = Callable[[Any], Any]


class Predictions:
    """A forward pass that records the class it predicts for each sample.

    Predictions per position are not recorded, nor outputs that are no logits of the `num_classes` classes.
    """

    def __init__(self, forward: Forward, num_classes: int) -> None:
        self.forward, self.num_classes = forward, num_classes
        self.classes: list[Tensor] = []

    def __call__(self, x_B: Tree) -> Outputs:
        outputs = self.forward(x_B)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        if isinstance(logits, Tensor) and logits.shape[1:] == (self.num_classes,):
            self.classes.append(logits.argmax(dim=1))
        return outputs


def details_of(
    worker: Worker, forward: Predictions, data: StoredSamples, model: str, architecture: Architecture
) -> list[Measurement]:
    """The confusion matrix of a classifier, from its recorded predictions, or the paragraph of a language model."""
    names, shown = worker.class_names(architecture), architecture_id(architecture)
    if not data.dataset.has_labels:
        return []
    if not data.per_position:
        return confusion(forward.classes, data.labels, names, model, shown)
    return paragraph(worker, forward.forward, data, names, model, shown)


def confusion(
    predicted: Sequence[Tensor], targets: Tensor, names: Sequence[str], model: str, architecture: str
) -> list[Measurement]:
    """One measurement per pair of true and predicted class that occurs: `value` of the true class's `samples`.

    `detail` is JSON: the names of the true and the predicted class. Empty for more than `MOST_CLASSES` classes.
    """
    classes = len(names)
    if classes > MOST_CLASSES or targets.dim() != 1 or not predicted:
        return []
    pairs = (targets * classes + torch.cat(list(predicted)).cpu()).numpy()
    counts = np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    return [
        Measurement(
            *(model, architecture, "test", CONFUSION, float(counts[true, guess]), int(counts[true].sum())),
            detail=json.dumps([names[true], names[guess]], ensure_ascii=False),
        )
        for true, guess in zip(*np.nonzero(counts), strict=True)
    ]


@torch.no_grad()
def paragraph(
    worker: Worker,
    forward: Forward,
    data: Samples | StoredSamples,
    names: Sequence[str],
    model: str,
    architecture: str,
) -> list[Measurement]:
    """A language model's continuation of a test text, sampled token by token.

    The value is the mean loss of the generated tokens, in nats per token; `detail` is JSON: the prompt and the
    generated text. The samples depend only on the run's seed and the model's name.
    """
    from fedloom.platform.clients.objectives import logits_of  # only language models need it

    texts_of = ((single(x_B, PARAGRAPH), single(y_B, PARAGRAPH)) for x_B, y_B in batches_of(data))
    whole_texts = (x_B[(y_B >= 0).sum(dim=1) == x_B.shape[1]] for x_B, y_B in texts_of)
    x = next((texts[0] for texts in whole_texts if len(texts)), None)
    if x is None:
        return []
    by_character = 2 * sum(len(name) == 1 for name in names) > len(names)
    length, count = len(x), WRITTEN["characters" if by_character else "words"]
    tokens = x[:PROMPT].tolist()
    begin = len(tokens)
    special = torch.tensor([is_special(name) for name in names], device=x.device)
    generator, losses = torch_stream(worker.spec.training_seed, PARAGRAPH, model), list[float]()
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([[*window, *[window[-1]] * (length - len(window))]], device=x.device)
        logits = logits_of(forward(padded))[0, :, len(window) - 1].float()
        if not bool(torch.isfinite(logits).all()):
            return []  # a diverged model writes nothing
        chances = logits.masked_fill(special, -torch.inf).softmax(dim=0).cpu()
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        losses.append(-float(chances[tokens[-1]].log()))
    texts = [joined([names[t] for t in part], by_character) for part in (tokens[:begin], tokens[begin:])]
    detail = json.dumps(texts, ensure_ascii=False)
    return [Measurement(model, architecture, "test", PARAGRAPH, float(np.mean(losses)), count, detail=detail)]


def is_special(name: str) -> bool:
    """Whether a token is not part of the text: padding, unknown, beginning; `<eos>` does not count, it ends a line."""
    return len(name) > 2 and name.startswith("<") and name.endswith(">") and name != "<eos>"


def joined(names: Sequence[str], by_character: bool) -> str:
    """Joins tokens to a text; special tokens are left out, and `<eos>` becomes a line break."""
    shown = ["\n" if name == "<eos>" else name for name in names if not is_special(name)]
    return ("" if by_character else " ").join(shown)
