"""SPIDER: every silo searches a personal architecture while all silos train a shared supernet (Mushtaq et al.).

in every round a silo
    decides one edge of its personal network, if the round searches (Alg. 2; or by gradients, MiLeNAS),
    trains the shared supernet on its data, and sends it,
    trains its personal network on the same batches, pulled towards the shared weights of its operators (Alg. 1)
the server averages the shared supernet; a silo's personal network stays in its state
in the end every silo's network is scored on the silo's own test data, and optionally on all other silos' data (gains)

What Alg. 1 leaves open: a silo trains the shared supernet with fresh momentum in every round (`keep_momentum`: with
what it had, which belongs to the weights before averaging), its own network with the momentum that it had; and its own
network starts from the first shared weights (`own_start`: from weights of its own).
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

from fedloom.platform.clients.assignments import Assignment, ClientResult, client_of
from fedloom.platform.clients.local_rules import pull_towards
from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.scoring import PERSONAL
from fedloom.platform.clients.trainer import client_samples, received, train_network, validation_scores
from fedloom.platform.clients.training import LocalSGD, resumed
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Method, Round, Stage, fresh_supernet, to_all
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.gains import GainConfig, GainStage, check_gains
from fedloom.platform.methods.personal import begun, under
from fedloom.platform.methods.scoring import ScoreOwn
from fedloom.platform.methods.search_config import ArchitectureSearchConfig, check_target, searched_space
from fedloom.platform.methods.searchers import Searcher, own_network, searcher_of
from fedloom.platform.methods.silo_stages import SiloTraining
from fedloom.platform.methods.silos import SiloTrainingConfig, checked_silos, pair_outcome, participation
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import with_cells
from fedloom.platform.spaces.slices import Weights

SHARED_MOMENTUM = "shared_momentum/"
"""The shared supernet's momentum buffers in a silo's state, with `keep_momentum`."""


@dataclass
class SpiderTrainingConfig(SiloTrainingConfig):
    """Training of the silos."""

    pull: Annotated[float, ZERO_OR_MORE, "lambda: the pull towards the shared weights; 0: local training only"] = 0.01
    keep_momentum: Annotated[
        bool, "the shared supernet's momentum stays with each silo between rounds, as its own network's does"
    ] = False
    own_start: Annotated[
        bool, "a silo's own network starts from fresh weights of its own; false: from the first shared ones"
    ] = False


@dataclass
class SpiderConfig:
    """Training with the search, evaluation on every silo's test data, and optionally personalisation gains."""

    name: str = "spider"
    train: SpiderTrainingConfig = field(default_factory=SpiderTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)
    gains: GainConfig = field(default_factory=GainConfig)


@dataclass(frozen=True)
class TrainSpider:
    """One round of a silo.

    The paper trains the two models alternately, batch by batch. Training one after the other over the same batches is
    equivalent, because the pull is towards the received weights, not towards the shared model in training.

    Attributes:
        pull: lambda; 0 trains the personal model without the shared one.
        scored: whether the personal model is scored on the silo's validation data after training.
        use_validation: whether to train also on the validation data once the search has ended.
        keep_momentum, own_start: as in `SpiderTrainingConfig`.
    """

    local: LocalSGD
    pull: float
    search: Searcher
    rules: Rules
    scored: bool = False
    use_validation: bool = True
    keep_momentum: bool = False
    own_start: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds only the shared model; the personal one stays in the silo's state."""
        space = with_cells(worker.space, "spider")
        state, start = assignment.state or {}, weights
        if self.own_start and not state:
            generator = torch_stream(worker.spec.training_seed, "own_start", assignment.stage, client_of(assignment))
            start = worker.space.initial_weights(generator)
        searched = self.search.before(worker, assignment, begun(assignment.state, start, space.largest_subspace))
        silo = searched.silo
        use_validation = self.use_validation and self.search.is_over(space, silo.kept)
        data = client_samples(worker, assignment, use_validation=use_validation)

        supernet = MixedNetwork().on(worker)
        before = under(state, SHARED_MOMENTUM) if self.keep_momentum else {}
        shared = train_network(worker, assignment, supernet, weights, data, self.local, resumed(before)).copied()
        network = own_network(worker, silo)
        pull = pull_towards(self.pull, received(worker, network, weights))
        resume, search_step = resumed(silo.momentum, pull), self.search.step(worker, assignment, silo)
        own = train_network(
            worker, assignment, network, silo.weights, data, self.local.plain, lambda sgd: search_step(resume(sgd))
        )
        unseen = self.scored and not use_validation  # scores on data used for training would not measure generalisation
        scores = validation_scores(worker, assignment, network, PERSONAL) if unseen else ()
        own = own.copied()
        alphas = None if silo.alphas is None else silo.alphas.detach()
        silo = replace(silo, weights=own.tensors, momentum=own.momentum, alphas=alphas)
        passes = 1 if self.search.is_over(space, silo.kept) else self.search.passes
        macs = shared.macs + passes * own.macs + searched.macs
        outcome = pair_outcome(shared, own, data, self.rules.weighting, silo)
        kept = {f"{SHARED_MOMENTUM}{n}": t for n, t in shared.momentum.items()} if self.keep_momentum else {}
        after = {**(outcome.state or {}), **kept}
        return replace(outcome, macs=macs, forward_macs=searched.macs, measurements=scores, state=after)


def stages(config: SpiderConfig, world: World) -> list[Stage]:
    """Training with the search, the evaluation, and the gains if configured."""
    train, rules = config.train, checked_silos(world, config.train)
    space = searched_space(world, config.search, train.rounds, "spider", share=participation(world, train))
    check_target(space, config.search)
    check_gains(config.gains, world)

    def client(round_: Round) -> TrainSpider:
        searcher = searcher_of(config.search, round_.index, train.batch_size)
        return TrainSpider(
            round_.local,
            train.pull,
            searcher,
            rules,
            round_.scored,
            train.use_validation,
            train.keep_momentum,
            train.own_start,
        )

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=fresh_supernet(world),
        tasks=to_all(client),
        test=lambda _state: ScoreOwn(),
    )
    sequence = training.and_evaluation()
    return [*sequence, GainStage(world, config.gains, train, space)] if config.gains.epochs else sequence


METHOD = Method(SpiderConfig, stages, kind="silos", own="model", lacks=("candidates", "models"), needs=with_cells)
