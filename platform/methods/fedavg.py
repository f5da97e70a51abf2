"""FedAvg of one architecture: the plain baseline, and what the overhead benchmark times."""

from dataclasses import dataclass, field

from fedloom.platform.clients.tasks import parse_architecture
from fedloom.platform.clients.training import TrainingConfig, check_training
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation_stage import EvaluationConfig, EvaluationStage, tier_jobs
from fedloom.platform.methods.search_stage import WINNERS
from fedloom.platform.methods.subnet_stage import SubnetStage


@dataclass
class FedAvgConfig:
    """One architecture (such as "0-0-3"; the space's first if not given) trained by all clients from fresh weights."""

    name: str = "fedavg"
    architecture: str | None = None
    train: TrainingConfig = field(default_factory=TrainingConfig)
    evaluate: bool = True
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


class FixedArchitecture(SubnetStage):
    """Trains a given architecture instead of a search's winner."""

    accountable = True

    def __init__(self, world: World, config: FedAvgConfig) -> None:
        super().__init__(world, config.train, 0, "rand_init")
        text = config.architecture or "-".join("0" for _ in world.space.options)
        world.space.validate(parse_architecture(text))
        self.text = text

    def begin(self, state: RunState) -> RunState:
        """Fresh weights of the given architecture."""
        winners = {tier.name: self.text for tier in self.world.tiers[:1]}
        return super().begin(state.with_data(WINNERS, winners))


def stages(config: FedAvgConfig, world: World) -> list[Stage]:
    """Training, then the final evaluation."""
    check_training(config.train, "method.train", world.num_clients)
    sequence: list[Stage] = [FixedArchitecture(world, config)]
    if config.evaluate:
        sequence.append(EvaluationStage(world, config.evaluation, lambda state: tier_jobs(world, state, ["rand_init"])))
    return sequence
