"""Objectives: the loss of a batch, its metrics, and which targets count."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.trees import rows_of, single
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, an, blaming, is_import_path
from fedloom.platform.settings import UP_TO_A_MILLION

IGNORED = -100
"""The target of padding in a text; loss and metrics ignore it."""


MEASURED = ("loss", "accuracy", "perplexity")
"""The metrics of every evaluation; `Objective.more` must not give them."""


def logits_of(outputs: Any) -> Tensor:
    """A network's logits: its only output, or the one named `logits`; ValueError if there is neither."""
    logits = outputs.get("logits", outputs) if isinstance(outputs, Mapping) else outputs
    if isinstance(logits, Tensor):
        return logits
    kind = f"outputs named {', '.join(map(str, logits))}" if isinstance(logits, Mapping) else an(type(logits).__name__)
    raise ValueError(
        f"the network gives {kind}: give logits, outputs by name with `logits` among them, or an objective of your own"
    )


class Objective:
    """Cross entropy and accuracy over the targets that count: one per image, one per position of a text.

    Outputs are logits (B, classes) or (B, classes, T), alone or as `logits` among several outputs by name; targets are
    (B,) or (B, T). Subclasses override single methods and may take any outputs and targets; the keyword parameters of
    their constructors are options (`objective.options.NAME`).
    """

    def for_client(self, targets: Any) -> "Objective":
        """The objective of a client with these training targets; by default the same for all clients."""
        del targets
        return self

    @property
    def counted_classes(self) -> Tensor | None:
        """The classes, ascending, in whose rows of the classifier this client's update counts; None for all."""
        return None

    def targets(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """The outputs and targets that loss and metrics are computed on; targets equal to `IGNORED` do not count."""
        return logits_of(outputs), targets

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Mean loss over the targets that count."""
        return F.cross_entropy(*self.targets(outputs, targets), ignore_index=IGNORED)

    def loss_sum(self, outputs: Any, targets: Any) -> Tensor:
        """Sum of the losses of the targets that count."""
        return F.cross_entropy(*self.targets(outputs, targets), reduction="sum", ignore_index=IGNORED)

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of every single target; 0 for those that do not count."""
        return F.cross_entropy(*self.targets(outputs, targets), reduction="none", ignore_index=IGNORED)

    def metric_sum(self, outputs: Any, targets: Any) -> Tensor:
        """The number of correct predictions among the targets that count; divided by their number, the accuracy."""
        logits, labels = self.targets(outputs, targets)
        return (logits.argmax(dim=1) == labels).sum()

    def counted(self, outputs: Any, targets: Any) -> Tensor | int:
        """The number of targets that count."""
        _, labels = self.targets(outputs, targets)
        return len(labels) if labels.dim() == 1 else (labels != IGNORED).sum()

    def more(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Sums of further metrics over the targets that count, by name; only evaluations measure them."""
        del outputs, targets
        return {}


class LastPosition(Objective):
    """Only a text's last position with a target counts, as in LEAF's next-character task (Caldas et al. 2018)."""

    def targets(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if targets.dim() != 2:
            raise ValueError("objective.name=last_position needs texts, with one target per position")
        last = ((targets != IGNORED) * torch.arange(targets.shape[1], device=targets.device)).amax(dim=1)
        rows = torch.arange(len(targets), device=targets.device)
        return logits_of(outputs)[rows, :, last], targets[rows, last]

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | int:
        del outputs
        return (targets != IGNORED).any(dim=1).sum()


class LaterPositions(Objective):
    """Only a text's positions from `skip` on count, which have at least that much context (Bai et al.'s code)."""

    def __init__(
        self, *, skip: Annotated[int, UP_TO_A_MILLION, "how many of the first positions do not count"] = 40
    ) -> None:
        self.skip = skip

    def targets(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if targets.dim() != 2 or targets.shape[1] <= self.skip:
            actual = f"{targets.shape[1]} positions" if targets.dim() == 2 else "images"
            raise ValueError(
                f"objective.name=later_positions with objective.options.skip={self.skip} needs texts with more "
                f"positions than skip, given {actual}"
            )
        return logits_of(outputs)[:, :, self.skip :], targets[:, self.skip :]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # At the end of a text a whole batch may be padding, whose mean is not defined.
        return self.loss_sum(outputs, targets) / torch.as_tensor(self.counted(outputs, targets)).clamp_min(1)


class MaskedClasses(Objective):
    """A client's loss ignores the logits of the classes that are absent from its data (HeteroFL).

    The classifier's rows of these classes, which only weight decay changes, are left out of the mean over clients. They
    are sent all the same, so that bytes do not change, but the server ignores them. Evaluation uses all classes.
    Source: Diao et al. 2021, Sec. 3 (masking trick); the rows: the authors' code.
    """

    def __init__(
        self,
        present: Tensor | None = None,
        *,
        in_mean: Annotated[bool, "masked_classes: whether absent classes are masked in the mean, too"] = True,
    ) -> None:
        self.present, self.in_mean = present, in_mean

    def for_client(self, targets: Tensor) -> Objective:
        return MaskedClasses(torch.unique(targets[targets != IGNORED]), in_mean=self.in_mean)

    @property
    def counted_classes(self) -> Tensor | None:
        return self.present if self.in_mean else None

    def targets(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = logits_of(outputs)
        if self.present is None:
            return outputs, targets
        absent = torch.ones(outputs.shape[1], dtype=torch.bool, device=outputs.device)
        absent[self.present] = False
        shape = (1, -1) + (1,) * (outputs.dim() - 2)
        return outputs.masked_fill(absent.view(shape), torch.finfo(outputs.dtype).min), targets


class TopK(Objective):
    """Cross entropy and accuracy, and as a further metric (`top_k`) the share of targets among the k largest logits."""

    def __init__(self, *, k: Annotated[int, UP_TO_A_MILLION, "how many of the largest logits count"] = 5) -> None:
        self.k = k

    def more(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        outputs, targets = self.targets(outputs, targets)
        best = outputs.topk(min(self.k, outputs.shape[1]), dim=1).indices
        return {f"top_{self.k}": (best == targets.unsqueeze(1)).any(dim=1).sum()}


def masks_in_mean(objective: Objective) -> bool:
    """Whether clients' classifier rows of the classes that their data lack are left out of the mean."""
    return isinstance(objective, MaskedClasses) and objective.in_mean


OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    {
        "classification": Objective,
        "last_position": LastPosition,
        "later_positions": LaterPositions,
        "masked_classes": MaskedClasses,
        "top_k": TopK,
    },
    (),
    made=True,
)
CLASSIFICATION = ComponentSpec("classification")


def divergence(outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean of KL(teacher || outputs) over all targets, logits (B, classes) or (B, classes, T) divided by `temperature`.

    The teacher's logits are targets: pass them without gradients.
    """
    return _divergences(outputs, teacher, temperature).mean()


def _divergences(outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    soft, target = F.log_softmax(outputs / temperature, dim=1), F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(soft, target, reduction="none", log_target=True).sum(dim=1)


def mean_counted(losses: Tensor, labels: Tensor) -> Tensor:
    """Mean of the losses of the labels that count, both (B,) or (B, T); 0 if none does."""
    counts = labels != IGNORED
    return (losses * counts).sum() / counts.sum().clamp_min(1)


def taught_loss(objective: Objective, outputs: Any, teacher: Any, targets: Any, temperature: float = 1.0) -> Tensor:
    """`divergence` over the objective's logits and the targets that count."""
    logits, labels = objective.targets(outputs, targets)
    taught, _ = objective.targets(teacher, targets)
    return mean_counted(_divergences(logits, taught, temperature), labels)


def check_divergence(dataset: Dataset, key: str, weight: float) -> None:
    """Raises ValueError if `divergence` would be used, with this weight, where outputs are no logits of classes."""
    if weight and not dataset.has_labels:
        raise ValueError(
            f"{key}={weight:g}: distillation compares logits of classes, and the data set has no class labels: set "
            f"{key}=0"
        )


@dataclass
class DistilledLoss:
    """The losses of a batch's passes: the first pass is the teacher, with the objective's loss.

    The loss of every other pass is (1 - weight) times the objective's plus weight T^2 KL(teacher || pass), both
    softened by the temperature T. No gradient flows through the teacher's outputs.
    """

    weight: float
    temperature: float = 1.0
    passes: int = 2
    passes_made: int = 0
    teacher: Tensor | None = None

    def passed(self, outputs: Any) -> None:
        """Records the outputs of the batch's next pass."""
        if self.passes_made == 0:
            self.teacher = logits_of(outputs).detach()
        self.passes_made += 1

    @property
    def is_first(self) -> bool:
        """Whether the next pass is the teacher's."""
        return self.passes_made == 0

    def loss(self, objective: Objective, outputs: Any, targets: Any) -> Tensor:
        """The loss of the pass that was recorded last."""
        first, self.passes_made = self.passes_made == 1, self.passes_made % self.passes
        hard = objective.loss(outputs, targets)
        if first:
            return hard
        assert self.teacher is not None, "the teacher passes first"
        t = self.temperature
        taught = taught_loss(objective, outputs, self.teacher, targets, t)
        return (1 - self.weight) * hard + self.weight * t * t * taught


def check_objective(choice: ComponentSpec, targets: Any, num_classes: int, outputs: Any = None) -> None:
    """Tests an objective on these targets and a network's outputs for them, by default random logits.

    Raises ValueError for an objective that does not fit the data, PluginError for a user's objective that fails.
    """
    objective = OBJECTIVES.make(choice)
    blame = f"objective {choice.name!r}"
    if not isinstance(objective, Objective):
        kind = type(objective).__name__
        raise PluginError(f"{blame} is {kind}: derive its class from fedloom.platform.clients.objectives.Objective")
    samples = rows_of(targets)
    if not is_import_path(choice.name):
        single(targets, f"objective.name={choice.name}", "labels")
    if outputs is None:
        generator = torch.Generator().manual_seed(0)
        positions = targets.shape[1:] if isinstance(targets, Tensor) else ()
        shape = (samples, num_classes, *positions)
        outputs = torch.randn(shape, generator=generator).requires_grad_()
    with blaming("objective", choice.name):
        local = objective.for_client(targets)
        if not isinstance(local, Objective):
            raise PluginError(f"{blame}: for_client gives {type(local).__name__}: give an Objective")
        loss = _checked(local.loss(outputs, targets), "loss", blame)
        loss.backward()  # type: ignore[no-untyped-call]
        _checked(objective.loss_sum(outputs, targets), "loss_sum", blame)
        _checked(objective.metric_sum(outputs, targets), "metric_sum", blame)
        _checked(objective.losses(outputs, targets), "losses", blame, samples=samples)
        _checked(torch.as_tensor(objective.counted(outputs, targets)), "counted", blame)
        more = objective.more(outputs, targets)
        if not isinstance(more, Mapping):
            raise PluginError(f"{blame}: more gives {type(more).__name__}: give sums of metrics by their names")
        for name, value in more.items():
            if name in MEASURED:
                raise PluginError(
                    f"{blame}: more gives {name}, which is measured anyway: give it another name, or override loss_sum "
                    "or metric_sum to change what is measured"
                )
            _checked(value, f"more, {name}", blame)


def _checked(value: Tensor, what: str, blame: str, samples: int | None = None) -> Tensor:
    """Returns the value if it is one finite number, or finite numbers for each of the samples; else PluginError."""
    if not isinstance(value, Tensor):
        raise PluginError(f"{blame}: {what} gives {value!r:.60}: give a tensor")
    form = (samples, *value.shape[1:]) if samples is not None else ()
    if tuple(value.shape) != form or not bool(torch.isfinite(value).all()):
        wanted = "one finite number" if samples is None else f"finite numbers for each of {samples} samples"
        actual = f"the shape {tuple(value.shape)}" if tuple(value.shape) != form else "values that are not finite"
        raise PluginError(f"{blame}: {what} gives {actual} on samples of the data: give {wanted}")
    return value
