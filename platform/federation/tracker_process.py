"""A process that forwards a run's rounds, read as messages from standard input, to one experiment tracker.

It is a separate process because trackers hook into exits and signals, print, take locks, and hang without a network:
none of that reaches the run. It needs only the standard library and the tracker's package. Every message and every
answer is one line of JSON; an answer with `error` holds the tracker's exception in one line.
"""

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

LONGEST_ERROR = 300
MOST_PARAMS = 100
"""Largest number of parameters that MLflow takes in one call."""


class Tracker(Protocol):
    """One run in a tracker. Any exception is answered as an error, and the next message is still tried."""

    def __init__(self, package: str, run: Mapping[str, Any]) -> None: ...

    def handle(self) -> dict[str, Any]:
        """The id by which the tracker finds the run again (`handle`), and the run's web page (`url`)."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a round; `step` counts the rounds of all stages."""
        ...

    def model(self, path: str, name: str) -> None:
        """Stores a model's file."""
        ...

    def close(self, state: str) -> None:
        """Ends the run, whose state is done, failed or interrupted, or killed if its process is gone."""
        ...


class WandB:
    """W&B, and Trackio, which has the same API without ids and tags."""

    def __init__(self, package: str, run: Mapping[str, Any]) -> None:
        self._package = importlib.import_module(package)
        common = {"project": run["project"], "group": run["group"], "resume": "allow"}
        if package == "trackio":
            config = {**run["config"], "tags": run["tags"], "name": run["name"]}
            self._run = self._package.init(name=run["id"], config=config, embed=False, **common)
        else:
            quiet = self._package.Settings(silent=True, console="off", disable_git=True, disable_code=True)
            identity = {"id": run["id"], "name": run["name"], "tags": run["tags"], "config": run["config"]}
            self._run = self._package.init(settings=quiet, **identity, **common)

    def handle(self) -> dict[str, Any]:
        return {"url": getattr(self._run, "url", None)}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values}, step=step)

    def model(self, path: str, name: str) -> None:
        artifact = self._package.Artifact(name, type="model")
        artifact.add_file(path)
        self._run.log_artifact(artifact)

    def close(self, state: str) -> None:
        if self._package.__name__ == "trackio":
            self._package.finish()
        else:
            self._run.finish(exit_code=int(state != "done"))


class MLflow:
    """MLflow, at the server or database in MLFLOW_TRACKING_URI. It chooses ids itself, so a tag holds the run's id."""

    STATES: Mapping[str, str] = {"done": "FINISHED", "failed": "FAILED"}

    def __init__(self, package: str, run: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module(package)
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        experiment = self._client.get_experiment_by_name(run["project"])
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run["project"])
        tags = {"fedloom.run": run["id"], "group": run["group"] or "", **dict.fromkeys(run["tags"], "true")}
        earlier = self._client.search_runs([experiment_id], f"tags.`fedloom.run` = '{run['id']}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment_id, run_name=run["name"], tags=tags).info.run_id
        params = [mlflow.entities.Param(_allowed(key), value) for key, value in flat(run["config"])]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])

    def handle(self) -> dict[str, Any]:
        return {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [self._metric(_allowed(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def model(self, path: str, name: str) -> None:
        self._client.log_artifact(self._id, path, f"models/{name}")

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, self.STATES.get(state, "KILLED"))


class Aim:
    """Aim, whose repository is the nearest `.aim` above the working directory, or a new one in it."""

    def __init__(self, package: str, run: Mapping[str, Any]) -> None:
        aim = importlib.import_module(package)
        quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
        if run["handle"] is not None:
            self._run = aim.Run(run["handle"], force_resume=True, **quiet)
            return
        self._run = aim.Run(experiment=run["project"], **quiet)
        self._run.name = run["name"]
        self._run["fedloom"] = {"run": run["id"], "group": run["group"] or "", "config": run["config"]}
        for tag in run["tags"]:
            self._run.add_tag(tag)

    def handle(self) -> dict[str, Any]:
        return {"handle": self._run.hash, "url": None}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def model(self, path: str, name: str) -> None:
        raise NotImplementedError("Aim stores no models")

    def close(self, state: str) -> None:
        self._run["fedloom", "state"] = state
        self._run.close()


TRACKERS: Mapping[str, type[Tracker]] = {"wandb": WandB, "trackio": WandB, "mlflow": MLflow, "aim": Aim}


def _allowed(name: str) -> str:
    """The name of a parameter or metric, with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of nested mappings by dotted key, as text; None values are left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)[:500]


def in_a_line(error: BaseException) -> str:
    """An error as one line, without what may be a password or a key."""
    text = re.sub(r"//[^/@\s]+@", "//***@", " ".join(f"{error}".split()) or type(error).__name__)
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|PASS|SECRET|CREDENTIAL", name.upper()) and len(value) > 3:
            text = text.replace(value, "***")
    return text[:LONGEST_ERROR]


def main() -> None:
    """Answers the messages until the last one, or until the run's process is gone."""
    # What the packages print must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    name, tracker = sys.argv[1], None
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a package may fail in any way
        answer(error=in_a_line(error))
        return
    answer()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "begin" in message:
                tracker = TRACKERS[name](name, message["begin"])
                answer(**tracker.handle())
                continue
            assert tracker is not None, "a run begins first"
            if "step" in message:
                tracker.log(message["step"], message["values"])
            elif "model" in message:
                tracker.model(message["model"], message["name"])
            else:
                tracker.close(message["end"])
                tracker = None
            answer()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything
            answer(error=in_a_line(error))
            if tracker is None:
                return
    if tracker is not None:
        tracker.close("killed")


if __name__ == "__main__":
    main()
