"""Values as the text of overrides on a command line."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = ("null", "true", "false", "inf", "nan")
"""Words that Hydra does not parse as a string."""


def override_text(value: Any) -> str:
    """Formats a value for Hydra's `key=value`."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, float):
        return repr(value)  # JSON spells infinity and NaN differently
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{override_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(override_text(v) for v in value) + "]"
    return json.dumps(value)
