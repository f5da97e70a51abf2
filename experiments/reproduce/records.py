"""What an item's own runs have measured, kept beside it, so that its claims can be seen without hours of training.

A file per item and scale in the paper's folder `recorded`: JSON with values by quantity, setting, place and seed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.experiments.reproduce.measure import Measured, Values
from fedloom.experiments.reproduce.plan import Asked, parts_of
from fedloom.experiments.reproduce.schema import Item, Read, Scale
from fedloom.experiments.reproduce.settings import overrides_of
from fedloom.platform.results.files import write_atomically

FOLDER = "recorded"
DIGITS = 6


@dataclass(frozen=True)
class Record:
    """Measured values of an item at a scale.

    Attributes:
        ablations: the ids of the ablations whose runs were measured.
        runs: how many of the item's runs were done, and how many it has.
        computed: a hash of all that was computed, the presets included, by which a test finds records that are old.
        day: when it was recorded, as 2026-11-23.
        hours: those of all rounds, one after the other.
        values: by quantity.
    """

    ablations: tuple[str, ...]
    runs: tuple[int, int]
    computed: str
    day: str
    hours: float
    values: Mapping[str, Values]

    @property
    def text(self) -> str:
        """When, and from how much it was measured."""
        done, planned = self.runs
        number = f"{done}" if done == planned else f"{done} of {planned}"
        return f"recorded on {self.day} from {number} runs of {self.hours:g} h"


def record_file(item: Item, scale: str) -> Path:
    """Where the record of an item belongs."""
    return item.file.parent / FOLDER / f"{item.file.stem}.{scale}.json"


def record_of(item: Item, asked: Asked) -> Record | None:
    """The record of the item's own runs at this scale; None if there is none, or if other runs are planned now."""
    file = record_file(item, asked.scale)
    if not asked.is_own or not file.exists():
        return None
    found = _read(file)
    return found if set(found.ablations) <= {part.ablation_id for part in parts_of(item, asked)} else None


def _read(file: Path) -> Record:
    known: dict[str, Any] = json.loads(file.read_text())
    values: dict[str, Values] = {
        quantity: {
            (setting, place): {int(seed): float(value) for seed, value in seeds.items()}
            for setting, places in settings.items()
            for place, seeds in places.items()
        }
        for quantity, settings in known.pop("values").items()
    }
    known |= {name: tuple(known[name]) for name in ("ablations", "runs")}
    return Record(**known, values=values)


def write_record(
    item: Item, scale: str, ablations: Sequence[str], found: Mapping[str, Measured], runs: tuple[int, int], hours: float
) -> Path:
    """Keeps what was read from the item's runs; what is counted or combined is not kept, as it takes seconds."""
    file = record_file(item, scale)
    read = {name: found[name].values for name, q in item.quantities.items() if isinstance(q.source, Read)}
    content = {
        "ablations": [*ablations],
        "runs": runs,
        "computed": computed(item.scales[scale]),
        "day": datetime.now(tz=UTC).strftime("%Y-%m-%d"),
        "hours": float(f"{hours:.3g}"),
        "values": {name: _by_setting(values) for name, values in read.items() if values},
    }
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return file


def _by_setting(values: Values) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (setting, place), seeds in values.items():
        found.setdefault(setting, {})[place] = {str(s): float(f"{v:.{DIGITS}g}") for s, v in sorted(seeds.items())}
    return found


def computed(scale: Scale) -> str:
    """A hash of all that the runs of a scale compute: every setting's whole configuration, and the seeds."""
    from fedloom.experiments.runs.configuration import compose_config
    from fedloom.platform.runs.run import what_is_computed  # imports torch

    configs = [what_is_computed(asdict(compose_config(overrides_of(scale, setting)))) for setting in scale.settings]
    return sha256(json.dumps([configs, scale.seeds], sort_keys=True).encode()).hexdigest()[:16]
