"""Methods for silos that cannot run as asked are refused at the start, in one line."""

import re
from collections.abc import Callable

import pytest

Refuse = Callable[..., str]

SILOS = ["experiment=spider_digits", "executor.kind=serial", "tiers.paths=1000"]
FIXED = ["executor.kind=serial", "data.num_clients=4", "tiers.count=1", "tiers.paths=1000"]

SILO_CASES = {
    "no validation data to search with": (
        [*SILOS, "data.validation_share=0"],
        r"data.validation_share=0 leaves a silo without validation samples to search with: raise it",
    ),
    "no operator without parameters": (
        [*SILOS, "method.search.prune_edges=true", "space.operators=[sep_conv_3x3,dil_conv_3x3]"],
        r"prune_edges needs an operator without parameters .* the space has dil_conv_3x3, sep_conv_3x3: add one",
    ),
    "pruning by gradients": (
        [*SILOS, "method.search.prune_edges=true", "method.search.kind=milenas"],
        r"prune_edges: edges are pruned by perturbation, not by milenas",
    ),
    "unknown operator": (
        [*SILOS, "space.operators=[skip_connect,conv]"],
        r"edge normal 0->2: unknown operator 'conv': known are none, noise",
    ),
    "unknown searcher": (
        [*SILOS, "method.search.kind=darts"],
        r"search.kind=darts: must be one of perturbation, milenas",
    ),
    "tau of 0": ([*SILOS, "method.search.every=0"], r"method.search.every=0: must be at least 1"),
    "negative lambda": ([*SILOS, "method.train.pull=-1"], r"method.train.pull=-1: must be 0 or more"),
    "lambda that is no number": ([*SILOS, "method.train.pull=nan"], r"method.train.pull=nan: must be 0"),
    "no round": ([*SILOS, "method.train.rounds=0"], r"method.train.rounds=0: must be at least 1"),
    "space without cells": (
        [*SILOS, "space.name=cnn_digits"],
        r"spider cannot use space cnn_digits, which has no .* and . more; choose space.name=darts_s2, or one of your "
        r"own like this",
    ),
    "gains of one silo": (
        [*SILOS, "method.gains.epochs=1", "method.gains.clients=1"],
        r"gains.clients=1: must be",
    ),
    "unsupported operators": (
        [*SILOS, "tiers.unsupported=[sep_conv_3x3]"],
        r"tiers.unsupported: silos train every operator of their space",
    ),
    "start of gains": ([*SILOS, "method.gains.start=mine"], r"method.gains.start=mine: must be one of shared, own"),
    "too large shares": (
        [*SILOS, "data.test_share=0.8"],
        r"data.validation_share=0.25 and data.test_share=0.8: must sum to less than 1",
    ),
    "images of odd sides": ([*SILOS, "space.input_shape=[1,7,7]"], r"sides that two reductions can halve"),
    "dry run": ([*SILOS, "dry_run=true"], r"dry_run=true: this method has no stage that can be counted"),
    "base of all cells": (
        ["method=fedpnas", "space.name=darts_s2_small", *FIXED, "method.base_cells=3"],
        r"method.base_cells=3: must leave a base and an own part of the 3 cells, 1 to 2",
    ),
    "global search by gradients": (
        ["method=global_nas", "space.name=darts_s2_small", *FIXED, "method.search.kind=milenas"],
        r"method.search.kind=milenas: global_nas searches by perturbation",
    ),
    "text for an architecture": (
        ["method=ditto", *FIXED, "method.architecture=abc"],
        r"method.architecture: 'abc' is no architecture of cnn_digits: give smallest, largest, or an option for each "
        r"of the 5",
    ),
    "unknown option": (["method=ditto", *FIXED, "method.architecture=9-0-0"], r"cnn_digits"),
    "no adaptation": (["method=local_adaptation", *FIXED, "method.adapt.epochs=0"], r"method.adapt.epochs=0"),
    "no inner step": (["method=per_fedavg", *FIXED, "method.train.local_factor=0"], r"local_factor=0: must be great"),
    "correction of pFedMe": (
        ["experiment=pfedme_digits", "executor.kind=serial", "method.train.local_rule=fedprox"],
        r"method.train.local_rule=fedprox: pfedme has rules of its own .*; use sgd",
    ),
    "masks of no layer": (
        ["experiment=fedmask_digits", "executor.kind=serial", "method.train.masked=[head]"],
        r"method.train.masked: no weight of cnn_width .* begins with 'head': they are 0.weight, 4.weight,",
    ),
    "no neighbours": (["method=knn_per", *FIXED, "method.neighbours=0"], r"method.neighbours=0"),
    "more pre-training than training": (
        ["method=fedmn", "space.name=darts_s2_small", *FIXED, "method.train.rounds=4"],
        r"pretraining_rounds=500: must be between 0 and method.train.rounds",
    ),
    "corrections of a part": (
        [
            *("experiment=fednas_cifar10_small", *FIXED, "data.dataset=digits", "space.input_shape=[1,8,8]"),
            *("data.train_samples=200", "data.test_samples=100"),
            *("method.train.local_rule=feddyn", "method.train.server=feddyn", "method.train.momentum=0"),
        ],
        r"method.train.server=feddyn: fednas also averages architecture parameters, which FedDyn's clients do not",
    ),
    "modules of a fixed network": (
        ["method=fedmn", "space.name=resnet18_small", "space.input_shape=[1,8,8]", *FIXED],
        r"fedmn cannot use space resnet18_small, which has no .*; choose space.name=resnet18_modular",
    ),
}


@pytest.mark.parametrize("case", SILO_CASES)
def test_a_run_of_silos_is_refused_at_start_in_one_line(case: str, refused: Refuse) -> None:
    arguments, expected = SILO_CASES[case]
    assert re.search(expected, refused(preset=arguments)), case
