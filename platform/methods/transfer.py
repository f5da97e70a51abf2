"""Transfer: a model stored by another run is trained on another task (FedorAS, Tab. 16: Speech Commands 12 to 35).

weights <- the other run's model; fresh weights where the tasks differ: the classifier
head:   in every round the clients train and send only the fresh weights; norms keep their statistics
train:  in every round the clients train all weights (FedAvg)
at the end the model is scored on the test set, and on every client's own test data

To measure the gain, compare with a run with `from_scratch`, which takes only the model's architecture (Tab. 16:
rand-init).

The other run is read when this run starts and when it is resumed, and must exist until this run has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

from fedloom.platform.averaging.processors import Payload, Traffic, expected_traffic
from fedloom.platform.clients.networks import Account, Network, Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train, TrainedNetwork
from fedloom.platform.federation.algorithm import SUPERNET, Round, TrainingStage, to_all
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, everybody
from fedloom.platform.results.checkpoint import list_models, load_model
from fedloom.platform.results.paths import RunPaths, find_run
from fedloom.platform.results.store import local_root
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import NOT_EMPTY, ONE_OR_MORE
from fedloom.platform.spaces.base import once, supernet_shapes
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import SliceMap, Weights, bytes_of, parse_architecture

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace

MODEL = "transferred"
"""The name of the last training stage, of the tensor group of both stages, and of the model in the tables."""
HEAD = "head"


@dataclass
class TransferConfig:
    """A stored model, trained on another task: first its fresh weights, then all weights."""

    name: str = "transfer"
    start_from: Annotated[str | None, NOT_EMPTY, "the run whose model is transferred: its id, name or tag"] = None
    model: Annotated[str | None, NOT_EMPTY, "which of that run's models; null: the only one"] = None
    architecture: Annotated[
        str | None, NOT_EMPTY, "the subnet to cut from a supernet, such as smallest; null: the model's own"
    ] = None
    tier: Annotated[int | None, ONE_OR_MORE, "clients of this tier and above train (1 is the lowest); null: all"] = None
    from_scratch: Annotated[bool, "take only the architecture, with fresh weights: the baseline for the transfer"] = (
        False
    )
    head: TrainingConfig = field(default_factory=lambda: TrainingConfig(rounds=25))
    train: TrainingConfig = field(default_factory=lambda: TrainingConfig(rounds=100))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


@dataclass(frozen=True)
class Source:
    """The network that is transferred, and its weights; those named in `fresh` are not the other run's."""

    subnet: Subnet
    weights: Weights
    fresh: tuple[str, ...]


def source_of(config: TransferConfig, world: World) -> Source:
    """The other run's model in this run's space, with fresh weights where the tasks differ, or everywhere.

    Raises ValueError for an unknown run or model, and for one that differs in more than the tensors whose first size is
    the number of classes.
    """
    paths, model = _model_of(config, world)
    stored, card = load_model(paths, model)
    space, source = world.space, parse_architecture(card["architecture"])
    try:
        space.validate(source)
    except ValueError as error:
        raise _unlike(paths.run_id, world, f"{error}; models of several tasks (tiers.tasks) cannot be taken") from error
    architecture = source if config.architecture is None else space.parse(config.architecture)
    if model != SUPERNET and architecture != source:
        raise ValueError(
            f"method.architecture={config.architecture}: model {model} of run {paths.run_id} has architecture "
            f"{space.label(source)}; only supernets can be cut; leave it out (null)"
        )
    if model == SUPERNET and space.slices_tensors and space.keeps_statistics and not config.from_scratch:
        raise ValueError(
            f"method.model={model}: a subnet of {space.name} needs running statistics of its own, which no client has "
            "measured; take a run of space.norm=none or group, or a model of a tier"
        )
    generator = torch_stream(world.config.seed_for("initialisation"), MODEL)
    weights, cut = space.initial_subnet_weights(architecture, generator), space.slices(architecture)
    taken: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stored_name = cut[name].source if model == SUPERNET else name
        if stored_name not in stored:
            raise _unlike(paths.run_id, world, f"it has no {name}")
        there = stored[stored_name]
        if there.shape == tensor.shape:
            taken[name] = there.clone()
        elif model == SUPERNET and tuple(there.shape) == supernet_shapes(space)[stored_name]:
            taken[name] = cut[name].of(there).clone()
        elif tensor.shape[1:] != there.shape[1:] or len(tensor) != world.spec.space.num_classes:
            shapes = f"{name} is {tuple(there.shape)} there and {tuple(tensor.shape)} here"
            raise _unlike(paths.run_id, world, shapes)
    if config.from_scratch:
        taken = {}
    fresh = tuple(name for name in weights if name not in taken)
    return Source(Subnet(architecture, stand_alone=True), {**weights, **taken}, fresh)


def _model_of(config: TransferConfig, world: World) -> tuple[RunPaths, str]:
    """The configured run, and the name of its model."""
    if config.start_from is None:
        raise ValueError("method.start_from: give the run whose model is to be transferred, by its id, name or tag")
    paths = find_run(local_root(world.config.results), config.start_from)
    known = list_models(paths)
    if not known:
        raise ValueError(f"method.start_from: run {paths.run_id} has no model yet, and may never have one")
    if config.model is None and len(known) != 1:
        raise ValueError(f"method.model: run {paths.run_id} keeps {', '.join(known)}; choose one of them")
    return paths, known[0] if config.model is None else config.model


def _unlike(run_id: str, world: World, difference: str) -> ValueError:
    return ValueError(
        f"method.start_from: the model of run {run_id} does not fit space {world.config.space.name}: {difference}; set "
        "the space's keys as in that run, all but num_classes"
    )


def _skeleton(space: SearchSpace, subnet: Subnet) -> nn.Module:
    """The subnet on the meta device, in evaluation mode."""
    build = partial(space.build_subnet, subnet.architecture)
    return once(space, f"still {subnet.architecture}", lambda _: on_meta(build).eval())


@dataclass(frozen=True)
class OnlyHead:
    """A network in evaluation mode, norms included, of which only the `trained` tensors are trained."""

    subnet: Subnet
    trained: tuple[str, ...]

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network in the subnet's own module, whose other tensors take no part in the backward pass."""
        network = self.subnet.on(worker, assignment)
        skeleton = _skeleton(worker.space, self.subnet)
        compute, tensors = worker.kernels.functional(skeleton, worker.device), worker.tensors_of(network.module)
        views = {name: t if name in self.trained else t.detach() for name, t in tensors.items()}
        views |= worker.constants_of(network.module)
        return replace(network, forward=lambda x: compute(views, worker.kernels.laid_out(x)), compilable=False)

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The subnet's cost."""
        return self.subnet.account(worker, assignment, batches)

    def held(self, space: SearchSpace) -> SliceMap:
        """The subnet's tensors."""
        return self.subnet.held(space)


@dataclass(frozen=True)
class TrainHead(Train):
    """Receives the whole network of an `OnlyHead`, and sends only the tensors that it trains."""

    def outcome(self, trained: TrainedNetwork, samples: int) -> ClientResult:
        whole = super().outcome(trained, samples)
        assert whole.update is not None, "what has been trained is sent"
        tensors = {name: whole.update.tensors[name] for name in self._sent}
        slices = {name: whole.update.slices[name] for name in tensors}
        weights = {name: whole.update.weights[name] for name in tensors}
        update = replace(whole.update, tensors=tensors, slices=slices, weights=weights)
        return replace(whole, update=update, bytes_up=bytes_of(tensors), parameters=_count(tensors))

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        shapes = _skeleton(worker.space, cast(OnlyHead, self.network).subnet).state_dict()
        tensors = {name: shapes[name] for name in self._sent}
        counted = super().account(worker, assignment)
        head = Payload(bytes_of(tensors), _count(tensors), len(tensors))
        up = expected_traffic(self.processors, Traffic(head, head)).up
        return replace(counted, bytes_up=up.size_bytes, parameters=head.scalars)

    @property
    def _sent(self) -> tuple[str, ...]:
        return cast(OnlyHead, self.network).trained


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() for t in tensors.values())


def stages(config: TransferConfig, world: World) -> list[Stage]:
    """Training of the head, training of everything, the final evaluation."""
    source = source_of(config, world)
    subnet = source.subnet
    if config.head.rounds and config.from_scratch:
        raise ValueError(
            f"method.head.rounds={config.head.rounds}: from scratch there are no trained tensors to keep fixed; "
            "give 0, and add these rounds to method.train"
        )
    if config.head.rounds and not source.fresh:
        raise ValueError(
            f"method.head.rounds={config.head.rounds}: all tensors of the model of {config.start_from} fit, so that "
            "there is no fresh classifier to be trained alone; give 0"
        )
    if config.head.rounds and (config.head.local_rule != "sgd" or config.head.server != "replace"):
        raise ValueError("method.head trains a part of the network: use local_rule=sgd and server=replace there")
    if config.head.privacy.clip is not None:
        raise ValueError("method.head.privacy.clip: noise would be added to what is not trained; leave it out (null)")

    def head(round_: Round) -> TrainHead:
        network = OnlyHead(subnet, source.fresh)
        return TrainHead(network, round_.local, round_.rules.weighting)

    def everything(round_: Round) -> Train:
        return Train(subnet, round_.local, round_.rules.weighting)

    def stage(name: str, key: str, training: TrainingConfig, task: Callable[[Round], Train]) -> Stage:
        check_training(training, key, world.num_clients)
        return TrainingStage(
            *(world, training, rules_of(training, key)),
            name=name,
            group=MODEL,
            initial=lambda state: state.weights(MODEL) if MODEL in state.groups else source.weights,
            tasks=to_all(task),
            eligible=world.clients_from_tier(config.tier, subnet.architecture),
            score=lambda _state: [ScoreSubnet(subnet, MODEL, "validation")],
            macs=lambda _state: world.macs_table.cost(subnet.architecture),
        )

    heads = [stage(HEAD, "method.head", config.head, head)] if config.head.rounds else []
    training = stage(MODEL, "method.train", config.train, everything)
    job = EvaluationJob("", MODEL, subnet, MODEL, everybody(world), kept=MODEL)
    return [*heads, training, EvaluationStage(world, config.evaluation, lambda _state: [job], models=1)]


METHOD = Method(TransferConfig, stages, kind="shared", lacks=("candidates",))
