"""Words for stages, models and settings, the same in every output."""

from collections.abc import Sequence

from fedloom.experiments.analysis.intervals import FEWEST
from fedloom.experiments.analysis.settings import Setting

STAGE_NAMES = {
    "supernet": "supernet training",
    "search": "search",
    "fine_tuned": "fine-tuning",
    "rand_init": "rand-init training",
    "evaluation": "final evaluation",
    "alone": "trained alone",
    "method": "method in total",
}
MODEL_NAMES = {
    "supernet_init": "supernet init",
    "fine_tuned": "fine-tuned",
    "rand_init": "rand-init",
    "fedavg": "FedAvg",
}

REPEATED = "a repeated seed counts once, with its mean"
INTERVALS = "Means ± 95 % intervals (Student's t) over seeds; of one or two seeds the values, which give no interval."

BARS = "Bars are 95 % intervals (Student's t) over seeds; one or two seeds are a dash each."
"""What figures draw with `with_bars`."""


def stage_name(kind: str) -> str:
    """The readable name of a kind of stage."""
    return STAGE_NAMES[kind] if kind in STAGE_NAMES else kind.replace("_", " ")


def model_name(model: str) -> str:
    """The readable name of a model."""
    return MODEL_NAMES[model] if model in MODEL_NAMES else model.replace("_", " ")


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop; a first word such as macs=3000000 stays as it is."""
    first = text.split(maxsplit=1)[0]
    return (text if "=" in first else text[:1].upper() + text[1:]) + "."


def over_runs(setting: Setting) -> str:
    """Says whether the numbers of a setting belong to one run or are means over its seeds."""
    runs = len(setting.run_ids)
    if runs == 1:
        return f"run {setting.run_ids[0]}"
    if setting.num_seeds == 1:
        return f"mean over {runs} runs of one seed, which give no interval"
    if setting.num_seeds < FEWEST:
        return f"the values of {_samples(setting.num_seeds, runs)}, which give no interval"
    return f"mean ± 95 % interval (Student's t) over {_samples(setting.num_seeds, runs)}"


def _samples(seeds: int, runs: int) -> str:
    return f"{runs} runs" if seeds == runs else f"{seeds} seeds ({runs} runs; {REPEATED})"


def over_settings(settings: Sequence[Setting]) -> str:
    """Says, for a table with a row per setting, whether numbers belong to single runs or are means over seeds."""
    if all(len(s.run_ids) == 1 for s in settings):
        return "One run each." if len(settings) > 1 else f"Run {', '.join(s.run_ids[0] for s in settings)}."
    counts, repeats = {s.num_seeds for s in settings}, any(s.repeats_seeds for s in settings)
    if counts == {1}:
        return "Mean over the runs of one seed, which give no interval."
    number = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    each = f"{number} seeds of a setting; {REPEATED}" if repeats else f"{number} runs of a setting"
    if max(counts) < FEWEST:
        return f"The values of {each}; they give no interval."
    few = "; of fewer than three the values, without an interval" if min(counts) < FEWEST else ""
    return f"Mean ± 95 % interval (Student's t) over {each}{few}."


def runs_in_brief(setting: Setting) -> str:
    """The number of runs or seeds of a setting, for the legend of a figure; empty for one run."""
    runs, seeds = len(setting.run_ids), setting.num_seeds
    if runs == 1:
        return ""
    return f" ({runs} runs)" if seeds == runs else f" ({seeds} seed{'s' if seeds > 1 else ''}, {runs} runs)"


def setting_head(settings: Sequence[Setting]) -> str:
    """The head of the column of settings: "experiment" if every setting has the name of its experiment."""
    return "experiment" if all(s.name == s.experiment for s in settings) else "setting"
