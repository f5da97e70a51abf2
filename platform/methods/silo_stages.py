"""The stages of a cross-silo method: training, watched on test data if asked for, and the final evaluation."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from fedloom.platform.clients.assignments import Task
from fedloom.platform.federation.algorithm import (
    Plan,
    PostRoundEvaluation,
    RoundResult,
    RoundUpdate,
    Row,
    RunState,
    Stage,
    TrainingStage,
    evaluation_rows,
)
from fedloom.platform.methods.evaluation import ClientEvaluation, as_measured
from fedloom.platform.methods.silos import SiloTrainingConfig

WATCHED = "accuracy_while_training"
"""The metric of silos' test accuracies during training; a name of its own keeps them apart from final results."""


@dataclass(eq=False)
class SiloTraining(TrainingStage):
    """A training stage that also measures the silos' test accuracies every `test_every` rounds and after the last.

    The papers report the best test accuracy of all rounds (SPIDER, App. B.1). It is measured after a round has ended,
    by tasks that return nothing but rows, so that no test datum can change what is trained, searched or chosen.

    Attributes:
        test: the task that scores each silo's model on its test data.
        ready: whether there is a model to score before the end; a method may not have chosen one yet.
    """

    config: SiloTrainingConfig
    _: KW_ONLY
    test: Callable[[RunState], Task]
    ready: Callable[[RunState], bool] = lambda _state: True

    def and_evaluation(self) -> list[Stage]:
        """This stage, and the evaluation of every silo's model."""
        return [self, ClientEvaluation(self.world, self.test)]

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """The training stage's, with an evaluation by all silos where it is due."""
        merged = super().merge(state, plan, result)
        if not (self._is_tested(state.round) and self.ready(merged.state)):
            return merged
        assert merged.evaluation is None, "silos' models are scored by the silos, not by the server"
        planned = ClientEvaluation(self.world, self.test).planned(state.round, self.test(merged.state))
        tests = [replace(a, stage=self.name) for a in as_measured(planned)]
        return replace(merged, evaluation=PostRoundEvaluation(Plan(tests, self.group), _watched))

    def _is_tested(self, index: int) -> bool:
        every = self.config.test_every
        return every > 0 and (index % every == 0 or self._is_last(index))


def _watched(result: RoundResult) -> list[Row]:
    rows = evaluation_rows(result.client_results)
    of_test = [(t, row) for t, row in rows if row["split"] == "test" and row["metric"] == "accuracy"]
    return [(table, {**row, "metric": WATCHED}) for table, row in of_test]
