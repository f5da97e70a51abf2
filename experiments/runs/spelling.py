"""Misspelt keys, presets and methods, found before torch is loaded: whoever mistypes waits for no import."""

import logging
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache

from fedloom.experiments.runs.presets import CONF, DEFAULT_METHOD, PRESET, experiments, method_in
from fedloom.platform.plugins import is_import_path, nearest
from fedloom.platform.words import shown

_logger = logging.getLogger(__name__)

METHOD = "method="
FREE = ("options", "cost_weights", "label_sets")
"""Mappings of the configuration that accept arbitrary keys."""
ENDINGS = (".yaml", ".yml")
"""Endings of presets of the user's own."""
TRUTH = ("true", "false", "yes", "no", "y", "n", "on", "off", "0", "1", "null")
"""How a value that is true or false is given; Hydra takes any other number for true."""
MOST_NAMES = 8
SYNONYMS = {
    "alpha": "concentration, dirichlet, dirichlet_alpha, lda_alpha, non_iid",
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
    "local_rule": "client_optimizer, local_optimizer, optim, optimiser, optimizer",
    "lr": "client_lr, eta, learning_rate, local_lr, step_size",
    "method": "algo, algorithm, strategy",
    "method.train.options.mu": "mu, prox_mu, proximal_mu",
    "method.train.options.server_lr": "global_lr, server_learning_rate, server_lr",
    "name": "exp_name, run_name",
    "num_clients": "clients, n_clients, num_users, total_clients, users",
    "objective.name": "criterion, loss, loss_function, objective",
    "partition": "data_split, iid, partitioner, split",
    "ray.num_gpus": "cuda, device, gpus, num_gpus",
    "results": "log_dir, out, out_dir, output, output_dir, results_dir, save_dir",
    "rounds": "comm_round, comm_rounds, communication_rounds, global_rounds, iterations, num_rounds, total_rounds",
    "schedule": "lr_decay, lr_schedule, lr_scheduler, scheduler",
    "seed": "manual_seed, random_seed, rng_seed",
    "selection": "client_selection, sampler, selector",
    "server": "aggregator, optim, optimiser, optimizer, server_optimizer, server_rule",
    "space.name": "arch, architecture, backbone, model, net, network, search_space",
    "tiers.count": "num_tiers, tiers",
    "weight_decay": "l2, wd",
    "weighting": "aggregation, averaging",
}
"""What other programs call a key, by the key, whole or its last part."""
KEYS = CONF / "keys.txt"
"""All keys of the configuration, of a method's with `method(NAME)` for `method`; a test keeps the file up to date."""


def check_spelling(overrides: Sequence[str]) -> None:
    """Raises ValueError for a preset, a method or a key that does not exist; one with code of the user's own passes."""
    given = [(key.lstrip("+"), value) for key, _, value in (unquoted(o).partition("=") for o in overrides)]
    for key, value in given:
        if problem := _not_there(key, value):
            raise ValueError(problem)
    chosen = [(f"{key}=", value) for key, value in given if f"{key}=" in (PRESET, METHOD)]
    if any(is_own(value) for _, value in chosen):
        return
    method = next((value for key, value in reversed(chosen) if key == METHOD), None)
    known = keys_of(method or next((method_in(value) for _, value in reversed(chosen)), DEFAULT_METHOD))
    for key, value in given:
        head, _, last = key.rpartition(".")
        key = head if last.isdigit() else key  # an entry of a list
        inside = free_part(key) or key
        if value and key and inside not in known and f"{key}=" not in (PRESET, METHOD) and not key.startswith("~"):
            raise ValueError(unknown(inside, known))
        if (
            known.get(key, "").startswith("true or false")
            and "${" not in value
            and value.strip(" '\"").lower() not in TRUTH
        ):
            raise ValueError(f"{key}={shown(value)}: must be {known[key]}")


def last_values(overrides: Sequence[str]) -> list[str]:
    """Leaves out overrides of a key that is given again later, as in Hydra, and warns if its values differ."""
    by_key: dict[str, str] = {}
    for override in overrides:
        key, equals, value = unquoted(override).lstrip("+").partition("=")
        before = by_key.pop(key + equals, override)
        if unquoted(before).partition("=")[2] != value:
            _logger.warning("%s is given twice: %s holds, which comes last", shown(key), shown(override))
        by_key[key + equals] = override
    return [*by_key.values()]


@cache
def is_own(value: str) -> bool:
    """Whether a value names code or a preset of the user's own."""
    return is_import_path(value) or value.endswith(ENDINGS)


def keys_of(method: str) -> dict[str, str]:
    """The keys of a configuration with a built-in method and what their values are, sections included."""
    own = f"method({method})."
    lines = [line.partition(": ") for line in KEYS.read_text().splitlines()]
    keys = {k.replace(own, "method.", 1): kind for k, _, kind in lines if k.startswith(own) or "(" not in k}
    sections = {".".join(parts[:n]) for parts in (key.split(".") for key in keys) for n in range(1, len(parts))}
    return keys | dict.fromkeys(sorted(sections), "")


@cache
def methods() -> list[str]:
    """The names of the built-in methods."""
    lines = [line for line in KEYS.read_text().splitlines() if line.startswith("method(")]
    return list(dict.fromkeys(line.removeprefix("method(").partition(")")[0] for line in lines))


def _not_there(key: str, value: str) -> str:
    """That there is no such preset or method, and which there are; empty for other keys, and if there is."""
    own = value.endswith(ENDINGS) if f"{key}=" == PRESET else is_import_path(value)
    for choice, kind, there in (("experiment", "preset", experiments), ("method", "method", methods)):
        if key == choice and value not in there() and not own:
            return f"{key}={shown(value)}: no such {kind}{nearest(value, there())}; there are {_some(value, there())}"
    return ""


def unknown(key: str, known: Iterable[str]) -> str:
    """That there is no such key, and which ones may have been meant."""
    return f"unknown configuration key {key!r}{meant(key, known) or '; fedloom keys lists all'}"


def meant(key: str, known: Iterable[str]) -> str:
    """`; did you mean X or Y?`: known keys whose last part is the key's, a synonym of it, or else similar to it.

    Of several that end so, it is the one that begins most like the key, or the one of `method.train`.
    """
    keys = [*known]
    section, _, last = key.rpartition(".")

    def ending_in(ending: str) -> list[str]:
        whole = [k for k in keys if k == ending] or [ending] * (free_part(ending) in keys)
        found = whole or [k for k in keys if _plain(k.rpartition(".")[2]) == _plain(ending)]

        def distance(k: str) -> tuple[float, bool, int]:
            alike = SequenceMatcher(None, section, k.rpartition(".")[0]).ratio() if section else 0.0
            return -alike, not k.startswith("method.train."), k.count(".")

        return sorted(found, key=distance)[:1]

    endings = [*(k for k, names in SYNONYMS.items() if _plain(last) in _plain(names).split(", ")), last]
    found = [k for ending in endings for k in ending_in(ending)]
    if not found:
        similar = get_close_matches(_plain(last), {_plain(k.rpartition(".")[2]) for k in keys}, n=1, cutoff=0.7)
        found = [k for ending in similar for k in ending_in(ending)]
    return f"; did you mean {' or '.join(map(repr, dict.fromkeys(found)))}?" if found else nearest(key, keys)


def _plain(name: str) -> str:
    """batchsize, batch-size and BatchSize are batch_size."""
    return name.replace("_", "").replace("-", "").lower()


def unquoted(override: str) -> str:
    """Removes the quotes that a shell or an ablation leaves around the name of a preset or a method."""
    key, _, value = override.partition("=")
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return f"{key}={value[1:-1]}" if quoted and f"{key}=" in (PRESET, METHOD) else override


def free_part(key: str) -> str:
    """The mapping in a key that takes keys of the user's own, as it is called; empty if there is none."""
    parts = key.split(".")
    places = [place for place, part in enumerate(parts) if part in FREE]
    return ".".join(parts[: places[0] + 1]) if places else ""


def _some(given: str, names: list[str]) -> str:
    """All names, or the most similar ones if there are more than `MOST_NAMES`."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    like = sorted(get_close_matches(given, names, n=MOST_NAMES, cutoff=0.0))
    return f"{', '.join(like)} and {len(names) - len(like)} more (fedloom run --help lists all)"
