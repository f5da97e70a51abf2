"""What the exit code says: 0 only if everything planned was done."""

OK = 0
CONFIGURATION = 2
CLIENTS_FAILED = 3
INFRASTRUCTURE = 4
INTERRUPTED = 130

_BY_KIND = {
    "done": OK,
    "refused": CONFIGURATION,
    "failed": CLIENTS_FAILED,
    "infrastructure": INFRASTRUCTURE,
    "interrupted": INTERRUPTED,
}


def of_run_end(kind: str) -> int:
    """The exit code for the way a run ended."""
    return _BY_KIND[kind]
