"""Numbers and names as text, the same in every table, figure and page."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.settings import FEWEST, SEEDS, Estimate, Setting, estimate_by_seed, is_absent

Write = Callable[[Any], str]
ABSENT = "–"
MOST_WRITTEN = 1e5

ROUNDING = 1e-9
"""Share of a mean by which equal values of several seeds may differ."""

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si_scale(largest: float) -> tuple[float, str]:
    """The divisor and the SI prefix for numbers of this size, such as (1e6, "M")."""
    return next(((scale, prefix) for scale, prefix in _SI if abs(largest) >= scale), (1.0, ""))


def si(value: Any, unit: str = "") -> str:
    """Three significant digits with an SI prefix: 182376 is "182 k", and 1.2e9 with unit B is "1.20 GB"."""
    if is_absent(value):
        return ABSENT
    scale, prefix = si_scale(_three_digits(float(value)))
    number = _three_digits(float(value)) / scale
    digits = 0 if scale == 1.0 and float(value).is_integer() else max(0, 2 - _magnitude(number))
    return f"{number:.{digits}f} {prefix}{unit}".rstrip()


def _magnitude(number: float) -> int:
    return math.floor(math.log10(abs(number))) if number else 0


def _three_digits(value: float) -> float:
    # Rounding comes first, so that 999 999 is 1.00 M and not 1000 k.
    return float(f"{value:.3g}") if abs(value) >= 1e3 else value


def percent(value: Any, *, sign: bool = False) -> str:
    """A share as percent with one decimal, without the sign %."""
    if is_absent(value):
        return ABSENT
    return f"{100 * float(value):{'+' if sign else ''}.1f}"


def times(value: Any) -> str:
    """A ratio with two decimals, such as "10.38×"."""
    return ABSENT if is_absent(value) else f"{float(value):.2f}×"


def two_digits(value: Any, *, sign: bool = False) -> str:
    """A number with two decimals; perplexities of diverged models are written with an exponent."""
    if is_absent(value):
        return ABSENT
    return f"{float(value):{'+' if sign else ''}{'.2f' if abs(float(value)) < MOST_WRITTEN else '.1e'}}"


def seconds(value: Any) -> str:
    """A duration: "0.25 s", "83 s", "12 min", "3.4 h"."""
    if is_absent(value):
        return ABSENT
    number = float(value)
    if number < 120:
        return f"{number:.3g} s" if number < 100 else f"{number:.0f} s"
    return f"{number / 60:.0f} min" if number < 7200 else f"{number / 3600:.1f} h"


def points(value: Any) -> str:
    """A difference of shares in percentage points, with its sign."""
    return percent(value, sign=True)


def size(value: Any) -> str:
    """A number of bytes."""
    return si(value, "B")


def count(value: Any) -> str:
    """A count, with one decimal if it is a mean and not whole."""
    return f"{float(value):.0f}" if float(value).is_integer() else f"{float(value):.1f}"


def with_interval(value: Estimate | None, write: Write, num_seeds: int = 0) -> str:
    """The mean with its interval, or the values of one or two seeds; one number if all seeds have the same value.

    Fewer values than `num_seeds` are counted behind it: the text above the table says how many seeds there are.
    """
    if value is None:
        return ABSENT
    counted = f" (n = {value.runs})" if value.runs < num_seeds else ""
    if value.half_width is None:
        return ", ".join(dict.fromkeys(map(write, value.values))) + counted
    if value.half_width <= ROUNDING * abs(value.mean):
        return write(value.mean) + counted
    return f"{write(value.mean)} ± {write(value.half_width).removeprefix('+')}{counted}"


def mean_over_seeds(rows: pd.DataFrame, column: str, write: Write, num_seeds: int = 0) -> str:
    """A column over the rows' `seeds`; see `with_interval`."""
    return with_interval(estimate_by_seed(rows[column], rows[SEEDS]), write, num_seeds)


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
INTERVALS = "Means ± 95 % intervals (Student's t) over seeds; for one or two seeds, their values without an interval."

BARS = "Error bars are 95 % intervals (Student's t) over seeds; with one or two seeds, each value is a dash instead."
"""Explains, in captions, the bars that `with_bars` draws."""


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
        return f"The values of {each}; fewer than three seeds give no interval."
    few = "; for fewer than three, the values without an interval" if min(counts) < FEWEST else ""
    return f"Mean ± 95 % interval (Student's t) over {each}{few}."


def runs_in_brief(setting: Setting) -> str:
    """The number of runs or seeds of a setting, for the legend of a figure; empty for one run."""
    runs, seeds = len(setting.run_ids), setting.num_seeds
    if runs == 1:
        return ""
    return f" ({runs} runs)" if seeds == runs else f" ({seeds} seed{'s' if seeds > 1 else ''}, {runs} runs)"


PANELS = "One panel per setting; all panels have the same axes."


def caption_of(
    settings: Sequence[Setting], text: str, over_runs: str = "", *, panels: str = "", averaged: bool = True
) -> str:
    """The caption of a figure of these settings.

    `over_runs` says how several runs of a setting are shown, `panels` how several settings of an experiment are;
    seeds that were run repeatedly are mentioned if they are `averaged`.
    """
    lines = [text]
    if over_runs and any(len(s.run_ids) > 1 for s in settings):
        lines.append(over_runs)
    if averaged and any(s.repeats_seeds for s in settings):
        lines.append(sentence(REPEATED))
    if panels and not settings[0].is_alone:
        lines.append(panels)
    return " ".join(lines)


def setting_head(settings: Sequence[Setting]) -> str:
    """The head of the column of settings: "experiment" if every setting has the name of its experiment."""
    return "experiment" if all(s.name == s.experiment for s in settings) else "setting"
