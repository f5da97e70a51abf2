"""Search of a trained supernet for new targets, outside of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedloom.platform.clients.execution import Executor, SharedWeights, make_chunks
from fedloom.platform.federation.algorithm import SUPERNET, RunState
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.world import World
from fedloom.platform.methods.target_search import (
    FINALISTS,
    SAMPLES,
    SampleStage,
    VerifyStage,
    costs_of,
    samples_in,
    targets_of,
)
from fedloom.platform.search.base import in_unit
from fedloom.platform.search.targets import Sample, TargetSearchConfig, check_reachable, check_target_search, choose
from fedloom.platform.spaces.slices import Architecture, Weights, architecture_id


@dataclass(frozen=True)
class Found:
    """A target's winner, with its predicted and measured scores on validation data."""

    target: str
    architecture: Architecture
    macs: float
    parameters: int
    predicted: float  # in the unit of the search's metric
    metric: float
    loss: float
    latency_s: float | None


def search_supernet(
    world: World,
    config: TargetSearchConfig,
    weights: Weights,
    samples: Sequence[Sample],
    executor: Executor,
) -> list[Found]:
    """Finds the winners for the configured targets with trained weights, by running the stages outside of a run.

    Without `samples`, new ones are measured; their latency is always measured, because it depends on the machine.
    Raises ValueError for targets outside the space, and if a predictor does not reach `min_tau`.
    """
    check_target_search(config, "search")
    targets = targets_of(world, config)
    for target in targets:
        check_reachable(target, costs_of(world), world.config.seed_for("search"))
    state = RunState().with_group(SUPERNET, weights)
    if samples:
        state = state.with_data(SAMPLES, {architecture_id(s.architecture): _plain(s) for s in samples})
        if config.latency_s:
            stage = SampleStage(world, config, targets, [s.architecture for s in samples])
            state = run_rounds(stage, replace(state, round=1), executor)
    else:
        state = run_stage(SampleStage(world, config, targets), state, executor)
    state = run_stage(VerifyStage(world, config, targets), state, executor)
    value = state.data[FINALISTS]
    if value["refused"]:
        raise ValueError(value["refused"])
    verified = {architecture_id(s.architecture): s for s in samples_in(value["measured"])}
    parameters = world.space.cost_table("parameters")
    found = []
    for target in targets:
        predicted = value["found"][target.name]
        own = [verified[name] for name in predicted if name in verified]
        macs = {s.architecture: world.macs_table.cost(s.architecture) for s in own}
        won = choose(target, own, macs, config.metric)
        if won is not None:
            a = won.architecture
            as_predicted = in_unit(config.metric, predicted[architecture_id(a)])
            size = int(parameters.cost(a))
            found.append(Found(target.name, a, macs[a], size, as_predicted, won.metric, won.loss, won.latency_s))
    return found


def run_stage(stage: SampleStage | VerifyStage, state: RunState, executor: Executor) -> RunState:
    """Runs a stage's rounds in memory, without its end, rows and checkpoints."""
    return run_rounds(stage, stage.begin(replace(state, round=0)), executor)


def run_rounds(stage: SampleStage | VerifyStage, state: RunState, executor: Executor) -> RunState:
    """Runs the remaining rounds of a stage in memory."""
    while stage.rounds_left(state) > 0:
        plan = stage.plan(state)
        shared = SharedWeights(state.weights(plan.group), state.version(plan.group))
        result = merge_chunks(executor.run(make_chunks(plan.assignments, 1), shared))
        for report in result.client_results:
            if report.error:
                raise ValueError(f"{stage.name}: {report.error}")
        state = replace(stage.merge(state, plan, result).state, round=state.round + 1)
    return state


def _plain(sample: Sample) -> dict[str, float | None]:
    return {"loss": sample.loss, "accuracy": sample.metric}
