"""FedorAS: federated supernet training, a search per tier, and per-tier fine-tuning (papers: FedorAS, TMLR 2022)."""

from dataclasses import dataclass, field

from fedloom.platform.clients.training import TrainingConfig, check_training
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation_stage import FROM_SUPERNET, EvaluationConfig, EvaluationStage, tier_jobs
from fedloom.platform.methods.search_stage import TierSearchConfig, TierSearchStage, tier_goals
from fedloom.platform.methods.shared_training import SharedTraining
from fedloom.platform.methods.subnet_stage import SubnetStage
from fedloom.platform.methods.supernet_stage import SupernetConfig, SupernetStage


@dataclass
class FedorASConfig:
    """The three stages and the rand-init baseline; a stage with `rounds` 0 is passed over."""

    name: str = "fedoras"
    train: SupernetConfig = field(default_factory=SupernetConfig)
    search: TierSearchConfig = field(default_factory=TierSearchConfig)
    finetune: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(rounds=100, clients_per_round=6, lr=0.01, schedule="cosine")
    )
    rand_init: TrainingConfig = field(default_factory=lambda: TrainingConfig(rounds=500, lr=0.1, schedule="cosine"))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def shared_training(_config: FedorASConfig) -> SharedTraining:
    """Stage 1; what comes after it only reads the supernet."""
    return SharedTraining(later=("search", "finetune", "rand_init", "evaluation"))


def check(config: FedorASConfig, num_clients: int) -> None:
    """Raises ValueError for settings that cannot run."""
    for name, stage in (("train", config.train), ("finetune", config.finetune), ("rand_init", config.rand_init)):
        check_training(stage, f"method.{name}", num_clients)


def stages(config: FedorASConfig, world: World) -> list[Stage]:
    """The stages in their order; every tier has its own search, fine-tuning and rand-init run."""
    check(config, world.num_clients)
    tiers = range(len(world.tiers))
    sequence: list[Stage] = [SupernetStage(world, config.train)]
    sequence += [TierSearchStage(world, config.search, goal) for goal in tier_goals(world, config.search)]
    sequence += [SubnetStage(world, config.finetune, tier, "fine_tuned") for tier in tiers]
    if config.rand_init.rounds:
        sequence += [SubnetStage(world, config.rand_init, tier, "rand_init") for tier in tiers]
    models = [FROM_SUPERNET, "fine_tuned", *(["rand_init"] if config.rand_init.rounds else [])]
    sequence.append(EvaluationStage(world, config.evaluation, lambda state: tier_jobs(world, state, models)))
    return sequence
