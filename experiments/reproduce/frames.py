"""Frames that only items read: subnets with names that every scale has, personalisation gains, and searched cells."""

import pandas as pd

from fedloom.experiments.analysis.silos import latest_architectures, p_matrix, personalisation_gains
from fedloom.experiments.analysis.subnets import SEARCHED, labels_of, subnets
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, requires

SMALLEST, LARGEST = "smallest", "largest"


def subnets_by_size(tables: Tables) -> pd.DataFrame:
    """The final evaluation of SuperFedNAS runs: one row per (run, model, target, architecture).

    Columns: those of `subnets.subnets` (model is supernet for subnets of the family, searched or alone; macs,
    parameters, test_accuracy, test_loss, validation_accuracy, ...), size (smallest, largest, or the subnet's label,
    such as d=0,1,0,1 e=0.14; empty for searched ones), and rank: 1 for the fewest MACs among those of a model in its
    run.
    """
    requires(tables, "evaluations", "candidates", "models")
    labels = labels_of(tables)
    frame = subnets(tables, labels)
    ends = {
        (run_id, "-".join(map(str, subnet))): name
        for run_id, space in labels.spaces.items()
        for subnet, name in ((space.smallest, SMALLEST), (space.largest, LARGEST))
    }
    rows = zip(frame["run_id"], frame["model"], frame["architecture"], frame["label"], strict=True)
    size = ["" if model == SEARCHED else ends.get((run, arch), label) for run, model, arch, label in rows]
    rank = frame.groupby(["run_id", "model"])["macs"].rank(method="first")
    return frame.assign(size=pd.Series(size, frame.index, dtype=object), rank=rank.astype("Int64"))


def gains(tables: Tables) -> pd.DataFrame:
    """Personalisation gains, one row per (run, client_id).

    Columns: own (p_ii), others (mean p_ij), best_other, compared, gain (g_i). Source: SPIDER, Eq. 6, Fig. 3.
    """
    requires(tables, "evaluations")
    return personalisation_gains(p_matrix(tables))


def cells(tables: Tables) -> pd.DataFrame:
    """How much the searched cells of a run's silos differ, one row per run.

    Columns: silos, distinct (different architectures), distinct_normal and distinct_reduction (different cells).
    Source: SPIDER, Fig. 2.
    """
    requires(tables, "clients", "evaluations")
    found = []
    for key, rows in latest_architectures(tables).groupby(RUN_KEY, sort=False):
        parts = [text.split("/") for text in map(str, rows["architecture"])]
        halves = [(tuple(p[: len(p) // 2]), tuple(p[len(p) // 2 :])) for p in parts]
        different = (len({*halves}), len({normal for normal, _ in halves}), len({reduction for _, reduction in halves}))
        found.append((*key, len(halves), *different))
    columns = [*RUN_KEY, "silos", "distinct", "distinct_normal", "distinct_reduction"]
    return pd.DataFrame(found, columns=columns)
