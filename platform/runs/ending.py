"""The ending of a run: the only place that turns exceptions into endings."""

from dataclasses import dataclass, replace
from typing import Literal

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import AT_ONCE, InterruptedRunError, RunFailedError
from fedloom.platform.plugins import blaming_own
from fedloom.platform.results.mirror import MirrorError
from fedloom.platform.results.owner import OwnershipLostError
from fedloom.platform.runs.run import Label, MakeExecutor, Watcher, resume_run, start_run

Kind = Literal["done", "refused", "failed", "infrastructure", "interrupted"]


NOT_BEGUN = "its work had not begun"
"""The message of an interruption before the run has an id, where no round can be lost."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: done, refused (invalid configuration), failed, infrastructure (failed copy) or interrupted."""

    run_id: str
    kind: Kind
    message: str = ""


@dataclass(frozen=True)
class Resume:
    """A run to resume; `changed` allows that its plug-ins have changed since it started."""

    run_id: str
    changed: bool = False


def run_to_end(
    config: RunConfig,
    make_executor: MakeExecutor,
    watcher: Watcher,
    resume: Resume | None = None,
    label: Label | None = None,
) -> RunEnd:
    """Starts or resumes a run and returns its ending; all other errors are raised."""
    run_ids: list[str] = []

    def started(run_id: str, supernet_of: str) -> None:
        run_ids.append(run_id)
        watcher.started(run_id, supernet_of)

    watched = replace(watcher, started=started)
    kind, message = _ended(config, make_executor, watched, resume, label)
    if kind == "refused" and run_ids:  # it has begun: its rows and its checkpoint are there to be resumed
        kind = "failed"
    if kind == "interrupted" and not run_ids:
        message = NOT_BEGUN
    return RunEnd(run_ids[0] if run_ids else "", kind, message)


def _ended(
    config: RunConfig, make_executor: MakeExecutor, watcher: Watcher, resume: Resume | None, label: Label | None
) -> tuple[Kind, str]:
    try:
        with blaming_own(RunFailedError, InterruptedRunError, MirrorError, OwnershipLostError):
            if resume is None:
                start_run(config, make_executor, watcher, label)
            else:
                resume_run(config, resume.run_id, make_executor, watcher, label, changed_plugins=resume.changed)
    except (MirrorError, OwnershipLostError) as error:
        return "infrastructure", str(error)
    except ValueError as error:
        return "refused", str(error)
    except RunFailedError as error:
        return "failed", str(error)
    except (InterruptedRunError, KeyboardInterrupt) as error:
        return "interrupted", str(error) or AT_ONCE
    return "done", ""
