"""Phases: when the search begins, and when which silos have decided."""

from typing import Any

import numpy as np

from fedloom.experiments.analysis.silos import Phases, is_decided, latest_architectures, phases
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report.silos import spans_of
from fedloom.platform.methods.silo_search import is_settled
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import subspace_id


def test_phases_begin_with_the_search_and_end_with_the_last_decision(silos: Any) -> None:
    writer = silos.begin("r1")
    late = (silos.UNDECIDED, silos.HALF, silos.HALF, silos.DECIDED)
    writer.add_training(list(zip(silos.SUBSPACES, silos.SUBSPACES, late, strict=True)))
    writer.close()
    (found,) = phases(load(silos.root))
    # Round 2, the third, began with the first silos' last decision, round 3 with the last silo's.
    assert found == Phases("r1", search_start=1, first_decided=2, last_decided=3, rounds=4)
    assert spans_of(found) == ((0, 1), (1, 3), (3, 4))


def test_what_a_late_silo_decided_is_not_kept_and_does_not_count(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.UNDECIDED,) * 2, (silos.DECIDED,) * 2])
    third = [("timed_out", silos.DECIDED), ("ok", silos.UNDECIDED), ("timed_out", silos.DECIDED)]
    for round_, (status, subspace) in enumerate(third):
        place = {"stage": "spider", "round": round_, "client_id": 2}
        writer.add("clients", **place, subspace=subspace, status=status, loss=1.0)
    writer.close()
    tables = load(silos.root)
    (found,) = phases(tables)
    assert (found.first_decided, found.last_decided) == (1, None)
    assert latest_architectures(tables)["architecture"].tolist() == [silos.DECIDED, silos.DECIDED, silos.UNDECIDED]


def test_rounds_of_decisions_are_counted_over_all_training_stages(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.UNDECIDED,) * 3] * 2, stage="first")
    writer.add_training([(silos.UNDECIDED,) * 3, (silos.DECIDED,) * 3], stage="second")
    writer.close()
    (found,) = phases(load(silos.root))
    assert (found.last_decided, found.rounds) == (3, 4)


def test_a_pruned_edge_is_decided_and_a_running_search_has_no_end(silos: Any) -> None:
    pruned = "/".join(["0", "", "1"] + ["0"] * 7)
    for run_id, last in (("r1", pruned), ("r2", silos.HALF)):
        writer = silos.begin(run_id)
        writer.add_training([(silos.UNDECIDED,) * 3, (pruned, pruned, last)])
        writer.close()
    first, second = phases(load(silos.root, ["r1", "r2"]))
    assert (first.first_decided, first.last_decided) == (1, 1)
    assert (second.first_decided, second.last_decided) == (1, None)
    assert spans_of(second) == ((0, 1), (1, 2), (2, 2))


def test_where_edges_are_pruned_the_search_goes_on_until_every_node_has_two(silos: Any) -> None:
    thin = "/".join(["0", "0", "0", "", "0"] * 2)
    for run_id, prune_edges in (("r1", True), ("r2", False)):
        writer = silos.begin(run_id, method__search__prune_edges=prune_edges)
        writer.add_training([(s,) * 3 for s in (silos.UNDECIDED, silos.DECIDED, thin)])
        writer.close()
    assert [p.last_decided for p in phases(load(silos.root, ["r1", "r2"]))] == [2, 1]


def test_pruned_texts_are_told_apart_as_the_search_itself_does(darts_space: DartsSpace) -> None:
    rng = np.random.default_rng(5)
    told = set()
    for _ in range(200):
        kept = tuple(((), (0,), (1,), (0, 1))[i] for i in rng.choice(4, 10, p=[0.4, 0.3, 0.25, 0.05]))
        for prune_edges in (False, True):
            settled = is_settled(darts_space, kept, prune_edges=prune_edges)
            assert is_decided(subspace_id(kept), prune_edges=prune_edges) == settled
            told.add((prune_edges, settled))
    assert len(told) == 4


def test_milenas_searches_from_the_first_round_for_as_long_as_configured(silos: Any) -> None:
    for run_id, rounds in (("r1", 3), ("r2", 9)):
        writer = silos.begin(run_id, method__search={"kind": "milenas", "rounds": rounds})
        writer.add_training([(s,) * 3 for s in (silos.UNDECIDED, silos.UNDECIDED, silos.UNDECIDED, silos.DECIDED)])
        writer.close()
    assert phases(load(silos.root, ["r1"])) == [Phases("r1", 0, 3, 3, 4)]
    (running,) = phases(load(silos.root, ["r2"]))
    assert (running.search_start, running.last_decided) == (0, None)


def test_methods_without_a_search_have_no_phases(silos: Any) -> None:
    silos.fixed("r1")
    assert phases(load(silos.root)) == []


def test_a_running_search_shows_its_latest_architectures(silos: Any) -> None:
    writer = silos.begin("r1", status="running")
    writer.add_training([(silos.UNDECIDED,) * 3, (silos.HALF, silos.DECIDED, silos.HALF)])
    writer.close()
    assert latest_architectures(load(silos.root))["architecture"].tolist() == [silos.HALF, silos.DECIDED, silos.HALF]
