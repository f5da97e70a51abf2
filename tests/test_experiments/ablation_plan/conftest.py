"""Plans of ablations of one's own, and trials against what composing their configurations one by one gives."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.store.ablations import Ablation, Trial
from fedloom.platform.federation.config import RunConfig

Compose = Callable[[Sequence[str]], RunConfig]


@pytest.fixture(scope="session")
def composed() -> Compose:
    """Composes a configuration, each but once: it takes most of a plan's time, and plans of one experiment share it."""

    @cache
    def compose(*overrides: str) -> RunConfig:
        return compose_config(overrides)

    return lambda overrides: deepcopy(compose(*overrides))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ablation]:
    """Plans an ablation of one's own, with fedoras_digits."""
    monkeypatch.chdir(tmp_path)

    def make(text: str, *arguments: str, experiment: str = "fedoras_digits") -> Ablation:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        chosen = [f"experiment={experiment}"] if experiment else []
        return plan_ablation([f"ablation={file}", *chosen, *arguments])

    return make


@pytest.fixture(scope="session")
def assert_composed(composed: Compose) -> Callable[[Ablation, Sequence[Trial]], None]:
    """Trials of an ablation have the configurations that composing gives."""

    def check(ablation: Ablation, trials: Sequence[Trial]) -> None:
        for trial in trials:
            expected = composed([*ablation.overrides, *trial.overrides, f"seed={trial.seed}"])
            assert dict(trial.config) == asdict(expected)

    return check
