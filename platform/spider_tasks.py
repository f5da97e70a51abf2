"""A silo's work in SPIDER: the shared model and its own, side by side, and the search of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.averaging import Update
from fedloom.platform.execution import Assignment, Measurement, Outcome
from fedloom.platform.personal import Personal, is_decided, undecided, unpacked, with_row
from fedloom.platform.perturbation import masked_scores, most_missed
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import Slice, Weights, bytes_of
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.darts_network import CELL_TYPES
from fedloom.platform.spaces.operator_choice import Subspace
from fedloom.platform.subspace import size_of
from fedloom.platform.tasks import check_trained, client_of, measurements_of, places_of, subspace_id
from fedloom.platform.training import SGD, LocalSGD, Score, Trained, evaluate, train_locally
from fedloom.platform.weighting import Work, weighting_rule
from fedloom.platform.worker import Worker
from fedloom.tiers.clock import EVALUATION_FACTOR

PERSONAL = "personal"
"""The model of a silo's own."""


@dataclass(frozen=True)
class TrainPair:
    """One round of a silo: SGD on the received weights, and on its own, pulled towards what was received.

    The two take turns batch by batch in the paper; as the pull is towards the weights that were received, not towards
    their copy in training, one after the other over the same batches gives the same.

    Attributes:
        pull: lambda; 0 leaves the silo's model to itself.
        search: whether one undecided edge per cell type is decided after training.
        scored: whether the silo's model is scored on its validation data after training.
        use_validation: whether validation data joins the training data once nothing is left to be decided.
    """

    local: LocalSGD
    pull: float
    search: bool
    scored: bool = False
    use_validation: bool = True
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the shared model alone; the silo's own stays in its state."""
        space = cast(DartsSpace, worker.space)
        personal = first_state(space, weights) if assignment.state is None else unpacked(assignment.state)
        data = self._data(worker, client_of(assignment), personal.kept)
        shared, update = self._train_shared(worker, assignment, weights, data)
        own, personal = self._train_own(worker, assignment, weights, data, personal)
        unseen = not (self.use_validation and is_decided(personal.kept))  # else it has joined the training data
        measurements = score_own(worker, assignment, personal, "validation")[1] if self.scored and unseen else ()
        if self.search and not is_decided(personal.kept):
            personal = self._decide(worker, assignment, personal)
        macs_table = worker.spec.macs_table
        macs = size_of(macs_table, space.largest_subspace) * shared.seen_samples
        macs += size_of(macs_table, personal.kept) * own.seen_samples
        size_bytes = bytes_of(update.tensors)
        return Outcome(
            update=update,
            samples=len(data[1]),
            steps=shared.steps + own.steps,
            macs=macs,
            bytes_down=size_bytes,
            bytes_up=size_bytes,
            loss=own.loss,
            metric=own.accuracy,
            subspace=subspace_id(personal.kept),
            parameters=int(size_of(space.parameters_table(), personal.kept)),
            measurements=measurements,
            state=personal.packed(),
        )

    def _data(self, worker: Worker, client_id: int, kept: Subspace) -> tuple[Tensor, Tensor]:
        x, y = worker.client_data(client_id, "train")
        if not (self.use_validation and is_decided(kept)):
            return x, y
        more_x, more_y = worker.client_data(client_id, "validation")
        return torch.cat([x, more_x]), torch.cat([y, more_y])

    def _train_shared(
        self, worker: Worker, assignment: Assignment, weights: Weights, data: tuple[Tensor, Tensor]
    ) -> tuple[Trained, Update]:
        slices = {name: Slice(name) for name in weights}
        tensors = worker.load(worker.supernet, weights, slices)
        parameters = [t for t in tensors.values() if t.requires_grad]
        trained = self._train(worker, assignment, None, SGD(self.local, parameters), data)
        check_trained(trained)
        # The module trains the silo's own model next.
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        work = Work(len(data[1]), trained.seen_samples, dict.fromkeys(kept, trained.seen_samples))
        return trained, Update(kept, slices, weighting_rule(self.weighting)(work))

    def _train_own(
        self,
        worker: Worker,
        assignment: Assignment,
        weights: Weights,
        data: tuple[Tensor, Tensor],
        personal: Personal,
    ) -> tuple[Trained, Personal]:
        tensors = load_own(worker, personal)
        names = [name for name, tensor in tensors.items() if tensor.requires_grad]
        optimizer = SGD(self.local, [tensors[name] for name in names], pull=self.pull)
        if self.pull:
            optimizer.anchors = [weights[name].to(worker.device) for name in names]
        optimizer.momentum = {
            i: personal.momentum[name].to(worker.device) for i, name in enumerate(names) if name in personal.momentum
        }
        trained = self._train(worker, assignment, personal.kept, optimizer, data)
        check_trained(trained)
        buffers = {names[i]: b.clone() for i, b in optimizer.momentum.items() if b is not None}
        return trained, replace(personal, weights=_copied(tensors), momentum=buffers)

    def _train(
        self,
        worker: Worker,
        assignment: Assignment,
        kept: Subspace | None,
        optimizer: SGD,
        data: tuple[Tensor, Tensor],
    ) -> Trained:
        module = worker.supernet
        worker.set_mode(module, training=True)
        generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
        with worker.randomness(module, generator):
            return train_locally(
                lambda x: cast(Tensor, module(x, kept)), optimizer.parameters, data, self.local, generator, 1, optimizer
            )

    def _decide(self, worker: Worker, assignment: Assignment, personal: Personal) -> Personal:
        """One edge of each cell type, drawn among the undecided: it keeps the operator that is missed most."""
        space = cast(DartsSpace, worker.space)
        rng = stream(worker.spec.training_seed, "edges", *places_of(assignment))
        data = worker.client_data(client_of(assignment), "validation")
        kept = personal.kept
        load_own(worker, personal)
        module = worker.supernet
        worker.set_mode(module, training=False)
        generator = torch_stream(worker.spec.training_seed, "masks", *places_of(assignment))
        with worker.randomness(module, generator):
            for cell_type in CELL_TYPES:
                kept = _decide_one(module, kept, space.decisions(cell_type), data, rng)
        slices = space.subspace_slices(kept)
        return Personal(
            {name: personal.weights[name] for name in slices},
            {name: buffer for name, buffer in personal.momentum.items() if name in slices},
            kept,
        )


def _decide_one(
    module: nn.Module,
    kept: Subspace,
    decisions: Sequence[int],
    data: tuple[Tensor, Tensor],
    rng: np.random.Generator,
) -> Subspace:
    left = undecided(kept, decisions)
    if not left:
        return kept
    decision = left[int(rng.integers(len(left)))]
    scores = masked_scores(lambda x, rest: cast(Tensor, module(x, rest)), kept, decision, data)
    return with_row(kept, decision, (most_missed(scores),))


def first_state(space: DartsSpace, weights: Weights) -> Personal:
    """A silo that never took part: everything is kept, and its weights are those that it received first."""
    return Personal(dict(weights), {}, space.largest_subspace)


def load_own(worker: Worker, personal: Personal) -> dict[str, Tensor]:
    """The silo's own weights in the worker's module; only tensors that it keeps."""
    slices = cast(DartsSpace, worker.space).subspace_slices(personal.kept)
    return worker.load(worker.supernet, personal.weights, slices)


def score_own(
    worker: Worker, assignment: Assignment, personal: Personal, split: str
) -> tuple[Score, tuple[Measurement, ...]]:
    """The silo's own model on its own share of a split."""
    load_own(worker, personal)
    module = worker.supernet
    worker.set_mode(module, training=False)
    generator = torch_stream(worker.spec.training_seed, "score", split, *places_of(assignment))
    with worker.randomness(module, generator):  # the operator `noise` draws whenever it is called
        data = worker.client_data(client_of(assignment), split)
        score = evaluate(lambda x: cast(Tensor, module(x, personal.kept)), data)
    return score, measurements_of(PERSONAL, subspace_id(personal.kept), split, score)


def _copied(tensors: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class ScorePersonal:
    """Scores a silo's own model on its own share of a split."""

    split: str

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """One loss and one metric measurement; a silo that never trained is scored with the shared weights."""
        space = cast(DartsSpace, worker.space)
        personal = first_state(space, weights) if assignment.state is None else unpacked(assignment.state)
        score, measurements = score_own(worker, assignment, personal, self.split)
        return Outcome(
            samples=score.samples,
            macs=size_of(worker.spec.macs_table, personal.kept) * score.samples,
            subspace=subspace_id(personal.kept),
            parameters=int(size_of(space.parameters_table(), personal.kept)),
            measurements=measurements,
            clock_factor=EVALUATION_FACTOR,
        )
