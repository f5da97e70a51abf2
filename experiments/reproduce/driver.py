"""Runs, or goes on with, the ablations of an item."""

from pathlib import Path

from fedloom.experiments.ablation.at_work import AblationView, Place, check_idle, kind_of
from fedloom.experiments.ablation.in_process import is_serial, run_in_process
from fedloom.experiments.ablation.plan import planned_ablation
from fedloom.experiments.reproduce.plan import Asked, Part, planned
from fedloom.experiments.reproduce.schema import Item
from fedloom.experiments.store.ablations import FOLDER, PLAN, Ablation
from fedloom.experiments.store.trials import FAILED, FINAL, trial_states
from fedloom.platform.results.copies import check_results


def run_part(item: Item, part: Part, asked: Asked, results: Path, view: AblationView) -> str:
    """Runs what is not done of a part; what was killed goes on from its last checkpoint, what failed is tried again.

    Returns how it ended: done, failed, infrastructure or interrupted. Raises ValueError for a configuration that cannot
    run, before anything is written, and if another process runs it.
    """
    place = Place(str(results), check_results(str(results)))
    is_new = not (place.root / FOLDER / part.ablation_id / PLAN).exists()
    if is_new:
        ablation = planned(item, part, asked, results)
    else:
        ablation = planned_ablation(place.root, part.ablation_id, asked.free)
        check_idle(ablation, place.root)
    if is_new or not is_over(place.root, ablation):
        run = run_in_process if is_serial(ablation) else _run_on_ray
        run(ablation, place, view, is_new=is_new)
    return kind_of(trial_states(place.root, ablation))


def is_over(root: Path, ablation: Ablation) -> bool:
    """Whether every trial of the ablation is done."""
    return all(state.state in FINAL for state in trial_states(root, ablation))


def _run_on_ray(ablation: Ablation, place: Place, view: AblationView, *, is_new: bool) -> None:
    from fedloom.experiments.ablation.launch import resume_ablation, retry_failed, start_ablation

    if is_new:
        start_ablation(ablation, place.results, view)
        return
    states = {state.state for state in trial_states(place.root, ablation)}
    if states - {*FINAL, "failed", "refused"}:
        resume_ablation(ablation, place.results, view)
    if any(state.state in FAILED for state in trial_states(place.root, ablation)):
        retry_failed(ablation, place.results, view)
