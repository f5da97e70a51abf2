"""What every column of every table means, and its unit: `fedloom tables`.

The schemas are in `tables`; a test compares both.
"""

from collections.abc import Mapping

from fedloom.platform.clients.assignments import RESULT_COLUMNS

OF_EVERY_TABLE: Mapping[str, str] = {
    "experiment": "the experiment's name, from the path of the file",
    "run_id": "the run's id, from the path of the file",
}

_STAGE = "stage of the run, such as supernet, search/tier1, fine_tuned/tier1 or evaluation"
_ROUND = "round of the stage, counted from 0 (whatever people read counts from 1)"
_ARCHITECTURE = "architecture as its options, such as 3-1-8-0"

ABOUT: Mapping[str, str] = {
    "runs": "one row per run",
    "rounds": "one row per round of a stage",
    "clients": "one row per planned client and round, however it ended",
    "candidates": "one row per model that a search has scored",
    "evaluations": "one row per measured value",
    "models": "one row per model that was kept",
}
"""What a row of each table is."""

TEXTS: Mapping[str, Mapping[str, str]] = {
    "runs": {
        "method": "the method, by name or import path",
        "space": "the search space, by name or import path",
        "dataset": "the data set, by name or import path",
        "seeds": "JSON: the seed of each purpose",
        "tiers": "JSON: each tier's name, upper bound and number of clients",
        "config": "JSON: the whole configuration with which the run started",
        "versions": "JSON: versions of fedloom and of the packages that results depend on",
        "source_hash": "hash of fedloom's source and of your own code",
        "dataset_hash": "hash of the prepared data set",
        "partition_hash": "hash of which client has which samples",
        "inputs": "JSON: SHA-256 of each file that the configuration names, by its path",
        "status": "running, done, failed or interrupted, as last recorded (fedloom status also knows dead and stalled)",
        "started": "when it was started",
        "ended": "when it ended; null while it runs",
        "error": "why it ended, unless it is done",
        "ablation": "the ablation's id; null outside of ablations",
        "trial": "the number of the trial in its ablation, from 0",
        "setting": "JSON: the value of each axis of the ablation in this trial",
        "supernet": "the key of the trained supernet that the run shares; null if none",
        "supernet_run_id": "the run that trained this supernet, whose rows of the training are",
        "traits": "JSON: what the method declares of its runs",
        "name": "the name that the run was given (name=...)",
        "tags": "JSON: the list of tags that the run was given (tags=[...])",
        "label_variation": "mean total variation of a client's training labels from uniform ones; null for texts",
        "size_variation": "standard deviation of the clients' numbers of training samples, in units of their mean",
    },
    "rounds": {
        "stage": _STAGE,
        "round": _ROUND,
        "clients_planned": "clients that were selected",
        "clients_ok": "clients whose work was used",
        "clients_failed": "clients that failed; those that dropped out or were late are in neither number",
        "loss": "mean loss over the clients, weighted by samples; in training each client's network on its own samples",
        "metric": "mean accuracy over the clients, likewise: in training not the model's (see the column of clients)",
        "bytes_down": "sum over the clients of what was sent to them",
        "bytes_up": "sum over the clients of what they sent",
        "macs": "sum over the clients of the forward passes of their work",
        "wall_s": "real time here",
        "simulated_s": "time on the simulated devices: of the slowest client, also a lost one, or the deadline",
        "beta": "MaxNet's beta in this round",
        "lr": "learning rate of the clients in this round",
        "schedules": "JSON: the values of all schedules in this round",
        "epsilon": "of differential privacy after this round, at the configured delta; null without noise",
    },
    "clients": {
        "stage": _STAGE,
        "round": _ROUND,
        **{name: column.metadata["meaning"] for name, column in RESULT_COLUMNS.items()},
    },
    "candidates": {
        "stage": _STAGE,
        "round": "round of the stage at whose end the search was over, counted from 0",
        "tier": "the tier or target that was searched for, or samples (of a predictor)",
        "generation": "generation of the search, counted from 0",
        "architecture": _ARCHITECTURE,
        "macs": "MACs of a forward pass",
        "parameters": "number of parameters",
        "loss": "loss on validation data, with the supernet's weights",
        "metric": "accuracy on validation data, with the supernet's weights",
        "feasible": "whether the model could be scored",
        "on_front": "whether no other candidate has more accuracy at less cost, in the end",
        "winner": "whether the search chose it for its tier or target",
    },
    "evaluations": {
        "stage": _STAGE,
        "round": "in training: rounds before it (a client scores its own model after the round); else as in rounds",
        "model": "which model: supernet, supernet_init, fine_tuned, rand_init, ...",
        "tier": "whose model; of a model for all the client's tier, or server",
        "architecture": _ARCHITECTURE,
        "client_id": "on whose data; null on the server's",
        "split": "validation or test; null for what is measured without data",
        "metric": "what was measured: accuracy, loss, macs, latency_s, ...",
        "value": "the measured value, in the unit of the metric; accuracies are shares of 1",
        "samples": "over how many samples",
        "detail": "JSON: of what the value is, where a metric has several: of confusion [class, prediction], of "
        "paragraph [given, written]",
    },
    "models": {
        "stage": _STAGE,
        "round": "round of the stage in which it was kept, counted from 0",
        "tier": "the tier that it is for; empty if it is for all",
        "architecture": _ARCHITECTURE,
        "macs": "MACs of a forward pass",
        "parameters": "number of parameters",
        "file": "its weights, below results/artifacts/RUN/",
        "hash": "SHA-256 of that file",
    },
}
"""The meaning of each column, by table and column."""


def unit_of(column: str) -> str:
    """The unit of a column, which its name tells; empty for texts, shares and other numbers without one."""
    if column.endswith("_bytes") or column.startswith("bytes_"):
        return "bytes"
    if column.endswith("_s"):
        return "s"
    return "MACs" if column == "macs" else ""
