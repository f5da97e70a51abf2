"""fedloom from Python: `import fedloom as fl`, then `fl.run`, `fl.ablate`, `fl.load` and so on, as in the README.

This file is the package `fedloom` itself, which contains the other folders. Slow modules are imported when first used.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.experiments.python import (
        Ablation,
        Progress,
        Run,
        RunFailedError,
        StartedRun,
        ablate,
        compare,
        load,
        run,
        start,
    )

__all__ = ["Ablation", "Progress", "Run", "RunFailedError", "StartedRun", "ablate", "compare", "load", "run", "start"]

if not (Path(__file__).parent / "platform").is_dir():
    # An editable install takes this file from the checkout's experiments/fedloom/; the other folders lie at its root.
    __path__.append(str(Path(__file__).parents[2]))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedloom.experiments import python

    return getattr(python, name)


def __dir__() -> list[str]:
    return __all__
