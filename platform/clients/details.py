"""What a final evaluation tells beside numbers: a confusion matrix, a paragraph that a text model writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedloom.platform.clients.assignments import CONFUSION, PARAGRAPH, Measurement
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import architecture_id

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.clients.training import Samples
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.spaces.slices import Architecture

MOST_CLASSES = 35
"""Confusion matrices of more classes could not be read."""
PROMPT, WRITTEN = 20, {"characters": 300, "words": 60}
"""Tokens of the test text that are given, and tokens that are written."""

Forward = Callable[["Tensor"], "Tensor"]


class Predictions:
    """A forward pass that remembers what it predicted, of whole samples alone: not of every position of a text."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.classes: list[Tensor] = []

    def __call__(self, x_B: Tensor) -> Tensor:
        outputs = self.forward(x_B)
        if outputs.dim() == 2:
            self.classes.append(outputs.argmax(dim=1))
        return outputs


def details_of(
    worker: Worker, forward: Predictions, data: Samples, model: str, architecture: Architecture
) -> list[Measurement]:
    """The confusion matrix of a classifier that has predicted the data, the paragraph of a language model."""
    names, shown = worker.class_names(architecture), architecture_id(architecture)
    if data[1].dim() == 1:
        return confusion(forward.classes, data[1], names, model, shown)
    return paragraph(worker, forward.forward, data, names, model, shown)


def confusion(
    predicted: Sequence[Tensor], targets: Tensor, names: Sequence[str], model: str, architecture: str
) -> list[Measurement]:
    """One measurement for each pair of a class and a prediction that occurs: the number of samples, of the class's.

    `detail` is JSON: the names of the class and of the prediction. Empty for more than `MOST_CLASSES`.
    """
    classes = len(names)
    if classes > MOST_CLASSES or targets.dim() != 1 or not predicted:
        return []
    pairs = (targets * classes + torch.cat(list(predicted))).cpu().numpy()
    counts = np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    return [
        Measurement(
            *(model, architecture, "test", CONFUSION, float(counts[true, found]), int(counts[true].sum())),
            detail=json.dumps([names[true], names[found]], ensure_ascii=False),
        )
        for true, found in zip(*np.nonzero(counts), strict=True)
    ]


@torch.no_grad()
def paragraph(
    worker: Worker, forward: Forward, data: Samples, names: Sequence[str], model: str, architecture: str
) -> list[Measurement]:
    """A text that a language model goes on with after the beginning of a test text, drawn token by token.

    The value is the mean loss of what is written, in nats per token; `detail` is JSON: the beginning, and what is
    written after it. The draws depend only on the run's seed and the model's name.
    """
    x, y = data
    ends = (y >= 0).sum(dim=1) if y.dim() == 2 else y
    whole = torch.nonzero(ends == x.shape[1]).flatten()
    if y.dim() != 2 or not len(whole):
        return []
    by_character = 2 * sum(len(name) == 1 for name in names) > len(names)
    length, count = x.shape[1], WRITTEN["characters" if by_character else "words"]
    tokens = x[whole[0], : min(PROMPT, length)].tolist()
    begin = len(tokens)
    special = torch.tensor([is_special(name) for name in names], device=x.device)
    generator, losses = torch_stream(worker.spec.training_seed, PARAGRAPH, model), list[float]()
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([[*window, *[window[-1]] * (length - len(window))]], device=x.device)
        logits = forward(padded)[0, :, len(window) - 1].float()
        if not bool(torch.isfinite(logits).all()):
            return []  # a diverged model writes nothing
        chances = logits.masked_fill(special, -torch.inf).softmax(dim=0).cpu()
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        losses.append(-float(chances[tokens[-1]].log()))
    texts = [joined([names[t] for t in part], by_character) for part in (tokens[:begin], tokens[begin:])]
    detail = json.dumps(texts, ensure_ascii=False)
    return [Measurement(model, architecture, "test", PARAGRAPH, float(np.mean(losses)), count, detail=detail)]


def is_special(name: str) -> bool:
    """Whether a token is none of a text's: padding, an unknown one, a beginning; ends are line breaks."""
    return len(name) > 2 and name.startswith("<") and name.endswith(">") and name != "<eos>"


def joined(names: Sequence[str], by_character: bool) -> str:
    """Tokens as text; what is special is left out, and ends are line breaks."""
    shown = ["\n" if name == "<eos>" else name for name in names if not is_special(name)]
    return ("" if by_character else " ").join(shown)
