"""Overrides `key=value`: reads them as Hydra does, formats them, and suggests keys for misspelt ones."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from typing import Any

from fedloom.experiments.runs import presets
from fedloom.platform.plugins import nearest
from fedloom.platform.words import shown

_logger = logging.getLogger(__name__)

GROUPS = ("experiment", "method")
"""The keys that choose whole groups of values."""
ENDINGS = (".yaml", ".yml")
"""File endings of the user's own presets."""
TEXT_KEYS = (
    "name", "tags", "results", "data.root", "data.cache", "tracking.project", "method.start_from", "method.model"
)  # fmt: skip
"""The keys whose values are the user's own words, which may look like numbers: 2026_08_07 and 1.10."""
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[+-]?\d[\d_]*)?|[+-]?inf|nan", re.IGNORECASE)
"""What Hydra may read as a number."""
SYNONYMS = {
    "alpha": "concentration, dirichlet, dirichlet_alpha, lda_alpha, non_iid",
    "availability_table": "availability_trace, behavior_trace, client_behave_trace, online, trace",
    "batch_size": "batch, bs, local_batch_size, local_bs, mini_batch_size, train_batch_size",
    "checkpoint.every": "checkpoint_every, checkpoint_interval, save_every",
    "clients_per_round": "clients, cohort, cohort_size, fraction, fraction_fit, num_participants, participants, "
    "participation, participation_rate, sample_size, sampled_clients",
    "clip_norm": "clip_grad, clip_grad_norm, gradient_clipping, max_grad_norm",
    "data.dataset": "data, data_set",
    "data.root": "data_dir, data_path, data_root, dataset_dir",
    "deadline_s": "deadline, round_deadline",
    "dropout": "drop_rate, dropout_rate",
    "epochs": "client_epochs, local_ep, local_epochs, num_epochs",
    "evaluate_every": "eval_every, eval_freq, eval_interval, evaluation_interval",
    "executor.actors": "num_actors, num_workers, workers",
    "executor.precision": "amp, bf16, dtype, fp16",
    "executor.threads": "num_threads, torch_threads",
    "experiment": "config, exp, preset",
    "lr": "client_lr, eta, learning_rate, local_lr, step_size",
    "method": "algo, algorithm, strategy",
    "method.train.options.mu": "mu, prox_mu, proximal_mu",
    "method.train.options.server_lr": "global_lr, server_learning_rate, server_lr",
    "name": "exp_name, run_name",
    "num_clients": "clients, n_clients, num_users, total_clients, users",
    "objective.name": "criterion, loss, loss_function, objective",
    "optimizer": "client_optimizer, local_optimizer, optim, optimiser",
    "partition": "data_split, iid, partitioner, split",
    "ray.num_gpus": "cuda, device, gpus, num_gpus",
    "results": "log_dir, out, out_dir, output, output_dir, results_dir, save_dir",
    "rounds": "comm_round, comm_rounds, communication_rounds, global_rounds, iterations, num_rounds, total_rounds",
    "schedule": "lr_decay, lr_schedule, lr_scheduler, scheduler",
    "seed": "manual_seed, random_seed, rng_seed",
    "selection": "client_selection, sampler, selector",
    "server": "aggregator, optim, optimiser, server_optimizer, server_rule",
    "server_bytes_per_s": "bandwidth, server_bandwidth",
    "space.name": "arch, architecture, backbone, model, net, network, search_space",
    "stop.patience": "early_stop, early_stopping, early_stopping_patience, patience",
    "stop.target": "target, target_acc, target_accuracy",
    "tiers.count": "num_tiers, tiers",
    "weight_decay": "l2, wd",
    "weighting": "aggregation, averaging",
}
"""Names that other programs use for a key, by the whole key or its last part."""


@dataclass(frozen=True)
class Override:
    """A key and its value."""

    text: str
    key: str
    value: Any


@lru_cache(maxsize=4096)
def read(text: str) -> Override:
    """Reads an override with Hydra's grammar; names of presets and methods are taken as they are, without quotes.

    Raises ValueError for text that cannot be parsed, for several values, and for Hydra's own directives such as `~key`.
    """
    key, equals, value = text.partition("=")
    key = key.lstrip("+")
    if not equals or not key or key.startswith("~"):
        named = f"; did you mean experiment={text}?" if text in presets.experiments() else ""
        raise ValueError(f"{shown(text, repr)} is not of the form key=value{named}")
    if key in GROUPS:
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        return Override(text, key, value[1:-1] if quoted else value)
    if re.search(r"\d{400}", value):
        raise ValueError(f"{shown(text)}: a number of too many digits")
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        typed = f"{key}={_numbers_quoted(value)}" if key in TEXT_KEYS else text
        override = OverridesParser.create().parse_overrides([typed])[0]
        if override.is_sweep_override():
            raise ValueError(f"{shown(text)}: give one value; a list is [1,2]")
        return Override(text, key, override.value())
    except (HydraException, OverflowError, RecursionError) as error:
        if "://" in text:  # without the parser's message, which quotes parts of it
            from fedloom.platform.results.store import without_secrets

            unread = shown(without_secrets(text.lstrip("+")))
            raise ValueError(
                f"{unread} cannot be read: put the URL in quotes, as in results='\"s3://bucket/path?region=eu\"'"
            ) from error
        if isinstance(error, HydraException):
            why = shown(first_line(error), most=100)
            advice = f"give key=value, a list as [1,2], or the value in quotes: {key}='\"...\"'"
            raise ValueError(f"{shown(text)} cannot be read ({why}): {advice}") from error
        raise ValueError(f"{shown(text)}: the value is too large or nested too deeply") from error


def _numbers_quoted(value: str) -> str:
    """The value, or the list, with quotes around what looks like a number and has none."""
    words = r"""(["'])(?:\\.|(?!\1)[^\\])*\1|(?:\\.|[^\\,\[\]"'])+"""
    return re.sub(words, lambda w: f'"{w[0].strip()}"' if NUMBER.fullmatch(w[0].strip()) else w[0], value)


def override_text(value: Any) -> str:
    """Formats a value for `key=value`, so that `read` gives it again.

    Raises ValueError for a mapping with a name that cannot be written so, such as the text 1.
    """
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value)
        if plain and value.lower() not in ("null", "true", "false", "inf", "nan"):
            return value
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, float):
        return repr(value)  # JSON spells infinity and NaN differently
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_name_text(k)}:{override_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(override_text(v) for v in value) + "]"
    return json.dumps(value)


def _name_text(name: Any) -> str:
    """Formats a name inside a mapping, which Hydra takes with backslashes and without quotes."""
    text = re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(name))
    try:
        (same,) = read(f"key={{{text}:0}}").value
    except ValueError:
        same = None
    if same != name or type(same) is not type(name):
        raise ValueError(
            f"{name!r} cannot be a name inside a mapping: give a word of plain letters that is not a number, true, "
            "false or null"
        )
    return text


def last_values(overrides: Sequence[str]) -> list[str]:
    """Drops overrides of a key that is given again later, as in Hydra, and warns if its values differ."""
    by_key: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        before = by_key.pop(key + equals, override)
        if before.partition("=")[2].strip("\"'") != value.strip("\"'"):
            _logger.warning("%s is given twice: %s is used, as it comes last", shown(key), shown(override))
        by_key[key + equals] = override
    return [*by_key.values()]


def first_line(error: BaseException) -> str:
    """The first line of the innermost cause, because Hydra wraps the messages of its parser and of OmegaConf."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def unknown(key: str, known: Iterable[str]) -> str:
    """The error message for an unknown key, with the keys that may have been meant."""
    return f"unknown configuration key {key!r}{meant(key, known) or '; fedloom keys lists all'}"


def meant(key: str, known: Iterable[str]) -> str:
    """`; did you mean X or Y?`: known keys whose last part equals the key's, is a synonym of it, or else is similar.

    Of several keys with such a last part, the one whose section is most similar, or the one in `method.train`.
    """
    keys = sorted(known)
    section, _, last = key.rpartition(".")

    def ending_in(ending: str) -> list[str]:
        inside_options = ".options." in ending and ending.rpartition(".")[0] in keys
        like = [k for k in keys if k == ending] or [ending] * inside_options
        like = like or [k for k in keys if _plain(k.rpartition(".")[2]) == _plain(ending)]

        def distance(k: str) -> tuple[float, bool, int]:
            alike = SequenceMatcher(None, section, k.rpartition(".")[0]).ratio() if section else 0.0
            return -alike, not k.startswith("method.train."), k.count(".")

        return sorted(like, key=distance)[:1]

    endings = [*(k for k, names in SYNONYMS.items() if _plain(last) in _plain(names).split(", ")), last]
    suggestions = [k for ending in endings for k in ending_in(ending)]
    if not suggestions:
        similar = get_close_matches(_plain(last), {_plain(k.rpartition(".")[2]) for k in keys}, n=1, cutoff=0.7)
        suggestions = [k for ending in similar for k in ending_in(ending)]
    return (
        f"; did you mean {' or '.join(map(repr, dict.fromkeys(suggestions)))}?" if suggestions else nearest(key, keys)
    )


def _plain(name: str) -> str:
    """A name for comparisons: batchsize, batch-size and BatchSize equal batch_size."""
    return name.replace("_", "").replace("-", "").lower()
