"""Formats numbers in the same way for every output."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.intervals import Estimate, is_absent
from fedloom.experiments.analysis.seeds import SEEDS, estimate_by_seed

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


def two_digits(value: Any) -> str:
    """A number with two decimals; perplexities of diverged models are written with an exponent."""
    if is_absent(value):
        return ABSENT
    return f"{float(value):.2f}" if float(value) < MOST_WRITTEN else f"{float(value):.1e}"


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


def with_interval(value: Estimate | None, write: Write) -> str:
    """The mean with its interval, or the values of one or two seeds; what is equal for all seeds stands alone."""
    if value is None:
        return ABSENT
    if value.half_width is None:
        return ", ".join(dict.fromkeys(map(write, value.values)))
    if value.half_width <= ROUNDING * abs(value.mean):
        return write(value.mean)
    return f"{write(value.mean)} ± {write(value.half_width).removeprefix('+')}"


def mean_over_seeds(rows: pd.DataFrame, column: str, write: Write) -> str:
    """A column over the rows' `seeds`; see `with_interval`."""
    return with_interval(estimate_by_seed(rows[column], rows[SEEDS]), write)
