"""Processes that dead runs left behind on this machine: `fedloom status --clean`."""

import sys

from fedloom.actors.watcher import clean, left_over, records_folder
from fedloom.experiments.terminal.output import write_json


def clean_leftovers(*, as_json: bool) -> None:
    """Ends the processes that dead drivers of this machine left behind, and says which."""
    records = left_over(records_folder())
    ended = clean(records)
    if as_json:
        write_json({"drivers": [r.driver.pid for r in records], "ended": sorted(p.pid for p in ended)})
    elif not ended:
        sys.stdout.write("no processes of dead runs are left on this machine\n")
    else:
        numbers = ", ".join(str(p.pid) for p in sorted(ended))
        drivers = ", ".join(str(r.driver.pid) for r in records)
        sys.stdout.write(f"ended {len(ended)} processes that dead runs (drivers {drivers}) left behind: {numbers}\n")


def hint_at_leftovers() -> None:
    """Says on standard error if there are such processes."""
    left = [process for record in left_over(records_folder()) for process in record.processes]
    if left:
        sys.stderr.write(
            f"fedloom: {len(left)} processes of dead runs are left on this machine; fedloom status --clean ends them\n"
        )
