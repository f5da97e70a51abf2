"""`fedloom reproduce`: lists items, runs one and shows its table, or shows the state of all claims."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from fedloom.experiments.report.content import rich_block
from fedloom.experiments.report.pages import ReportFiles
from fedloom.experiments.reproduce.board import (
    Entry,
    all_items,
    board_json,
    claims_block,
    entries,
    list_block,
    missing_sentences,
    papers,
    summary_block,
)
from fedloom.experiments.reproduce.files import load_given
from fedloom.experiments.reproduce.outcome import outcome_of
from fedloom.experiments.reproduce.plan import Asked, Part, asked, parts_before, parts_of
from fedloom.experiments.reproduce.recording import check_recordable, record
from fedloom.experiments.reproduce.schema import Item
from fedloom.experiments.reproduce.settings import missing_data
from fedloom.experiments.reproduce.table import Outcome, blocks, outcome_json
from fedloom.experiments.terminal import OK, complain, console, of_run_end, tell_at_once, write_json

DONE, INTERRUPTED = "done", "interrupted"
"""Ends of an ablation."""


def run_command(args: Namespace) -> int:
    """Does what the arguments ask for; ValueError for an item or a word that is not known."""
    names = [word for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    if args.record and (args.list or args.scoreboard or args.recorded):
        raise ValueError("--record keeps the values of one item's runs here: give it alone, or with --show")
    if args.out is not None and not args.scoreboard:
        raise ValueError(f"--out {args.out} is the folder of the page: give --scoreboard with it")
    if args.list or args.scoreboard:
        if overrides:
            raise ValueError(f"{' '.join(overrides)}: the overview is of the items' own runs: leave it out")
        return _overview([load_given(name) for name in names] or all_items(), args)
    if args.recorded and not args.show:
        raise ValueError("--recorded is for what runs nothing: give --show, --list or --scoreboard with it")
    if len(names) != 1:
        given = f"{len(names)} items were given ({', '.join(names)}): " if names else ""
        raise ValueError(f"{given}give one item, such as fedoras/tab6; fedloom reproduce --list shows all")
    item = load_given(names[0])
    wanted = asked(item, overrides)
    if args.recorded and not wanted.is_own:
        raise ValueError(f"--recorded: {item.name} has no record of runs that the command line changes: leave one out")
    if args.record:
        check_recordable(item, wanted)
    kind = run_item(item, wanted, args.results, as_json=args.json) if item.needs_runs and not args.show else DONE
    kept = record(item, wanted, args.results) if args.record and kind == DONE else None
    show(outcome_of(item, wanted, args.results, recorded=args.recorded), kept, as_json=args.json)
    if args.record and kept is None:
        complain(f"nothing was recorded, as the runs ended so: {kind}")
    return of_run_end(kind)


def _overview(items: Sequence[Item], args: Namespace) -> int:
    """Shows items with what they need, or their claims, with `--out` also as a page, whose figures take a minute."""
    tell = _silent if args.json or args.list else tell_at_once
    found = entries(args.results, items, tell, counting=args.scoreboard, recorded=args.recorded)
    files = _page(found, args.results, args.out) if args.out is not None else None
    if args.json:
        places = {} if files is None else {"html": str(files.html), "markdown": str(files.markdown)}
        write_json({**board_json(found), **places})
        return OK
    screen = console()
    shown = [list_block(found)]
    if args.scoreboard:
        shown = [summary_block(found), *(claims_block(found, paper) for paper in papers(found))]
    for block in shown:
        screen.print(rich_block(block, stacked=False))
        screen.print()
    for sentence in missing_sentences(found):
        screen.print(Text(sentence, style="yellow"))
    if args.scoreboard and files is None:
        screen.print("as a page with figures: --out FOLDER")
    for file in () if files is None else (files.html, files.markdown, files.latex):
        screen.print(str(file))
    return OK


def _silent(_text: str) -> None:
    """Tells nothing."""


def _page(found: Sequence[Entry], results: Path, out: Path) -> ReportFiles:
    from fedloom.experiments.reproduce.page import write_page  # imports matplotlib

    return write_page(found, results, out)


def run_item(item: Item, wanted: Asked, results: Path, *, as_json: bool) -> str:
    """Runs all parts of an item whose data is there; how they ended: done, or the first other end.

    Raises ValueError, which says which file goes where, if no part has its data.
    """
    from fedloom.experiments.ablation.view import TerminalView
    from fedloom.experiments.reproduce.driver import run_part  # imports torch and Ray, which no table needs

    parts = parts_of(item, wanted)
    lacking: dict[str, str] = {}
    for part in parts:  # what starts from runs that lack data lacks it, too
        before = (lacking[other.ablation_id] for other in parts_before(part.scale, parts))
        lacking[part.ablation_id] = next(filter(None, before), "") or _lacking(part, wanted)
    there = [part for part in parts if not lacking[part.ablation_id]]
    problems = list(dict.fromkeys(filter(None, lacking.values())))
    if not there:
        raise ValueError(f"{item.name}: {'; '.join(problems)}")
    for problem in problems:
        _left_out(problem)
    ends: dict[str, str] = {}
    for part in there:
        before_it = (ends[other.ablation_id] for other in parts_before(part.scale, parts))
        if (end := next((end for end in before_it if end != DONE), DONE)) != DONE:
            ends[part.ablation_id] = end
            _left_out(f"{', '.join(part.scale.settings)}: not all runs are done from which they start")
            continue
        view = TerminalView(quiet=as_json)
        try:
            ends[part.ablation_id] = run_part(item, part, wanted, results, view)
        finally:
            view.close()
        if ends[part.ablation_id] == INTERRUPTED:
            break
    return next((end for end in ends.values() if end != DONE), DONE)


def _left_out(what: str) -> None:
    complain(f"left out: {what}")


def _lacking(part: Part, wanted: Asked) -> str:
    return missing_data(part.dataset, [*part.scale.overrides, *wanted.free])


def show(outcome: Outcome, kept: Path | None, *, as_json: bool) -> None:
    """Prints the tables of an item and where its values were kept, or one JSON object."""
    if as_json:
        write_json({**outcome_json(outcome), **({} if kept is None else {"kept": str(kept)})})
        return
    screen = console()
    for block in blocks(outcome):
        if block.rows:
            screen.print(rich_block(block, stacked=False))
            screen.print()
    for sentence in outcome.missing:
        screen.print(Text(sentence, style="yellow"))
    if kept is not None:
        screen.print(Text(f"kept in {kept}"))
