"""Runs of an item that start from another run of it, such as transfer from each seed's own supernet."""

from dataclasses import replace

from fedloom.experiments.reproduce.schema import Scale
from fedloom.experiments.reproduce.settings import part_of
from fedloom.experiments.store.ablations import Trial

START_FROM = "method.start_from"
RUN_OF = "run of "
"""Before the name of a setting, as the value of `method.start_from`: its run with the same seed."""


def starts_of(scale: Scale) -> dict[str, str]:
    """The settings whose runs start from another one's, with the name of that one."""
    given = {name: str(changes.get(START_FROM, "")) for name, changes in scale.settings.items()}
    return {name: text.removeprefix(RUN_OF) for name, text in given.items() if text.startswith(RUN_OF)}


def started_from(trial: Trial, run_id: str) -> Trial:
    """The trial with a run in the place of the setting's name; its override is what repeats it by hand."""
    section, _, key = START_FROM.partition(".")
    config = {**trial.config, section: {**trial.config[section], key: run_id}}
    own = [f"{START_FROM}={run_id}" if o.startswith(f"{START_FROM}=") else o for o in trial.overrides]
    return replace(trial, config=config, overrides=tuple(own))


def check_starts(scale: Scale, where: str) -> None:
    """Raises ValueError for runs that start from a setting that is not there, or is not run before them."""
    if any(override.startswith(f"{START_FROM}={RUN_OF}") for override in scale.overrides):
        raise ValueError(f"{where}: {START_FROM}={RUN_OF}NAME stands in settings, not in overrides")
    starts = starts_of(scale)
    if not starts:
        return
    parts = [part_of(scale, name) for name in scale.settings]
    places = {name: parts.index(part) for name, part in zip(scale.settings, parts, strict=True)}
    for name, other in starts.items():
        given = f"{where}: {name}: {START_FROM}={RUN_OF}{other}"
        if other not in places:
            known = ", ".join(scale.settings)
            raise ValueError(f"{given}: there is no such setting; there are {known}, and those of items in runs_of")
        if places[other] >= places[name]:
            raise ValueError(
                f"{given}: that setting is not run before: write it above, with another preset, or as that of an item "
                "in runs_of"
            )
