"""`fedloom reproduce`: lists items, runs one and shows its table, or shows the state of all claims."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from fedloom.experiments.report.content import rich_block
from fedloom.experiments.reproduce.board import (
    board_json,
    claims_block,
    entries,
    list_block,
    missing_sentences,
    papers,
    summary_block,
)
from fedloom.experiments.reproduce.items import Item, all_items, load_given
from fedloom.experiments.reproduce.outcome import Outcome, blocks, outcome_json, outcome_of
from fedloom.experiments.reproduce.plan import (
    DEVICES,
    Asked,
    Part,
    asked,
    missing_data,
    parts_before,
    parts_of,
    planned,
)
from fedloom.experiments.reproduce.records import check_recordable, record
from fedloom.experiments.runs.overrides import read
from fedloom.experiments.store.ablations import FOLDER, PLAN
from fedloom.experiments.store.trials import FAILED, FINAL, TrialState, trial_states
from fedloom.experiments.terminal import OK, complain, console, of_run_end, tell_at_once, write_json
from fedloom.platform.results.copies import check_results

if TYPE_CHECKING:
    from fedloom.experiments.ablation.running import AblationView

DONE, INTERRUPTED = "done", "interrupted"
"""Ends of an ablation."""


def run_command(args: Namespace) -> int:
    """Runs the command; ValueError for an unknown item, and for arguments that do not go together."""
    names = [word for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    if args.record and (args.list or args.scoreboard or args.recorded):
        raise ValueError("--record records the runs of one item: give it alone, or with --show")
    if args.out is not None and not args.scoreboard:
        raise ValueError(f"--out {args.out} is for the page of the scoreboard: give --scoreboard with it")
    if args.list or args.scoreboard:
        if overrides:
            raise ValueError(f"{' '.join(overrides)}: an overview shows only the items' own runs: leave it out")
        return _overview([load_given(name) for name in names] or all_items(), args)
    if args.recorded and not args.show:
        raise ValueError("--recorded is for commands that run nothing: give --show, --list or --scoreboard with it")
    if len(names) != 1:
        said = f"{len(names)} items were given ({', '.join(names)}): " if names else ""
        raise ValueError(f"{said}give one item, such as fedoras/tab6; fedloom reproduce --list shows all")
    item = load_given(names[0])
    wanted = asked(item, overrides)
    if args.recorded and not wanted.is_own:
        raise ValueError(f"--recorded: {item.name} has no record of runs changed by overrides: leave one out")
    if args.record:
        check_recordable(item, wanted)
    kind = run_item(item, wanted, args.results, as_json=args.json) if item.needs_runs and not args.show else DONE
    outcome = outcome_of(item, wanted, args.results, recorded=args.recorded)  # compares with the record so far
    file = record(item, wanted, args.results) if args.record and kind == DONE else None
    _show(outcome, file, as_json=args.json)
    if args.record and file is None:
        complain(f"nothing was recorded: the runs ended as {kind}")
    return of_run_end(kind)


def _overview(items: Sequence[Item], args: Namespace) -> int:
    """Shows the list of items or the scoreboard; `--out` also writes it as a page, whose figures take a minute."""
    tell = None if args.json or args.list else tell_at_once
    board = entries(args.results, items, tell, counting=args.scoreboard, recorded=args.recorded)
    files = None
    if args.out is not None:
        from fedloom.experiments.reproduce.page import write_page  # imports matplotlib

        files = write_page(board, args.results, args.out)
    if args.json:
        paths = {} if files is None else {"html": str(files.html), "markdown": str(files.markdown)}
        write_json({**board_json(board), **paths})
        return OK
    screen = console()
    blocks_shown = [list_block(board)]
    if args.scoreboard:
        blocks_shown = [summary_block(board), *(claims_block(board, paper) for paper in papers(board))]
    for block in blocks_shown:
        screen.print(rich_block(block, stacked=False))
        screen.print()
    for sentence in missing_sentences(board):
        screen.print(Text(sentence, style="yellow"))
    if args.scoreboard and files is None:
        screen.print("as a page with figures: --out FOLDER")
    for file in () if files is None else (files.html, files.markdown, files.latex):
        screen.print(str(file))
    return OK


def run_item(item: Item, wanted: Asked, results: Path, *, as_json: bool) -> str:
    """Runs all parts of an item whose data is present; returns done, or the first other end.

    Raises ValueError, which says which file belongs where, if no part has its data.
    """
    from fedloom.experiments.ablation.view import TerminalView

    parts = [part for part in parts_of(item, wanted) if part.needed]
    missing: dict[str, str] = {}
    for part in parts:  # a part that starts from runs without data cannot be run either
        before = (missing[other.ablation_id] for other in parts_before(part.scale.only(part.needed), parts))
        missing[part.ablation_id] = next(filter(None, before), "") or _missing(part, wanted)
    problems = list(dict.fromkeys(filter(None, missing.values())))
    if all(missing.values()):
        raise ValueError(f"{item.name}: {'; '.join(problems)}")
    for problem in problems:
        complain(f"left out: {problem}")
    ends: dict[str, str] = {}
    for part in parts:
        if missing[part.ablation_id]:
            continue
        ends_before = (ends[other.ablation_id] for other in parts_before(part.scale.only(part.needed), parts))
        if (end := next((end for end in ends_before if end != DONE), DONE)) != DONE:
            ends[part.ablation_id] = end
            left_out = [setting for setting in part.scale.settings if setting in part.needed]
            complain(f"left out: {', '.join(left_out)}: the runs from which they start are not all done")
            continue
        view = TerminalView(quiet=as_json)
        try:
            ends[part.ablation_id] = run_part(item, part, wanted, results, view)
        finally:
            view.close()
        if ends[part.ablation_id] == INTERRUPTED:
            break
    return next((end for end in ends.values() if end != DONE), DONE)


def _missing(part: Part, wanted: Asked) -> str:
    return missing_data(part.dataset, [*part.scale.overrides, *wanted.free])


def run_part(item: Item, part: Part, wanted: Asked, results: Path, view: "AblationView") -> str:
    """Runs the trials of a part that the item needs and that are not done.

    Killed ones resume from their last checkpoint, failed ones are retried. Returns how it ended: done, failed,
    infrastructure or interrupted. Raises ValueError for a configuration that cannot run, before anything is written,
    and if another process is running the part.
    """
    # Imported here: these import torch and Ray, which showing tables does not need.
    from fedloom.experiments.ablation.in_process import is_serial, run_in_process
    from fedloom.experiments.ablation.launch import resume_ablation, retry_failed, start_ablation
    from fedloom.experiments.ablation.plan import planned_ablation
    from fedloom.experiments.ablation.running import ResultsLocation, check_idle, kind_of

    location = ResultsLocation(str(results), check_results(str(results)))
    is_new = not (location.root / FOLDER / part.ablation_id / PLAN).exists()
    if is_new:
        ablation = planned(item, part, wanted, results)
    else:
        devices = [override for override in wanted.free if override.partition("=")[0] in DEVICES]
        free = [override for override in wanted.free if override not in devices]
        ablation = planned_ablation(location.root, part.ablation_id, free)
        tiers = ablation.trials[0].config["tiers"]
        for changed in (o for o in devices if read(o).value != tiers[read(o).key.partition(".")[2]]):
            complain(f"{changed}: these runs keep the shares of devices with which they were begun in {results}")
        check_idle(ablation, location.root)
    needed = [trial.index for trial in ablation.trials if part.needs(trial)]

    def states() -> list[TrialState]:
        return [state for state in trial_states(location.root, ablation) if state.trial.index in needed]

    left = {state.state for state in states()} - {*FINAL}
    if not is_new and not left:
        return DONE
    if is_serial(ablation):
        with suppress(KeyboardInterrupt):
            run_in_process(ablation, location, view, needed, is_new=is_new)
    elif is_new:
        start_ablation(ablation, location.results, view, needed)
    else:
        if left - {"failed", "refused"}:
            resume_ablation(ablation, location.results, view, needed)
        if kind_of(states()) != INTERRUPTED and any(state.state in FAILED for state in states()):
            retry_failed(ablation, location.results, view, needed)
    return kind_of(states())


def _show(outcome: Outcome, file: Path | None, *, as_json: bool) -> None:
    """Prints the tables of an item and where its values were kept, or one JSON object."""
    if as_json:
        write_json({**outcome_json(outcome), **({} if file is None else {"kept": str(file)})})
        return
    screen = console()
    for block in blocks(outcome):
        if block.rows:
            screen.print(rich_block(block, stacked=False))
            screen.print()
    for sentence in outcome.missing:
        screen.print(Text(sentence, style="yellow"))
    if file is not None:
        screen.print(Text(f"kept in {file}"))
