"""Architectures in words: operators, blocks and widths, sums of a cell's inputs."""

import json
from typing import Any

import pytest

from fedloom.experiments import analysis

DARTS = {"name": "darts_s2_small"}


@pytest.mark.parametrize(
    ("space", "text", "words"),
    [
        ({"name": "cnn_digits"}, "8-8-8-2-4", "3× identity, ds(3,1), mb(1,2)"),
        ({"name": "cnn_digits"}, "0,1/8/8/2/4", "conv(1)|ds(3,0.5), 2× identity, ds(3,1), mb(1,2)"),
        ({"name": "resnet_elastic_small"}, "0-0-0-0", "blocks 1/1/1/1; expansions 0.25"),
        (
            {"name": "resnet_elastic_small"},
            "53-55-68-2",
            "blocks 3/3/3/1; expansions 0.75,0.25,0.5/0.75,0.25,1/1,0.25,0.25/0.75",
        ),
        ({"name": "gpt_elastic"}, "184-144", "blocks 3/3; heads 1/0.5,1,0.5; expansions 0.25,1,0.5/1,1,0.25"),
        (
            DARTS,
            "0/1/1/0//1/1/0/0/0,1",
            "normal: 0 = skip(c_k-2) + sep3(c_k-1), 1 = sep3(c_k-2) + skip(c_k-1); "
            "reduction: 0 = sep3(c_k-2, c_k-1), 1 = skip(c_k-2, c_k-1) + skip|sep3(0)",
        ),
        (DARTS, "//////////"[:9], "normal: 0 = 0, 1 = 0; reduction: 0 = 0, 1 = 0"),
        ({"name": "cnn_width", "input_shape": [1, 8, 8]}, "3", "p=0.5"),
        ({"name": "resnet18_small"}, "0", "resnet18_small"),
        ({"name": "my_spaces:build"}, "8-8", "8-8"),  # reading results imports nothing that they name
        ({"name": "module", "build": "my_spaces:build"}, "0", "0"),
        ({"name": "width", "options": {"network": "my_spaces:build"}}, "0", "0"),
        ({"name": "gone"}, "8-8", "8-8"),
        ({"name": "cnn_cifar"}, "8-8", "8-8"),  # of another version: it has more layers
        (DARTS, "8-8", "8-8"),
    ],
)
def test_architectures_are_told_in_the_words_of_their_space(space: dict[str, Any], text: str, words: str) -> None:
    assert analysis.decoder({"space": space})(text) == words


def test_the_space_of_a_run_is_that_of_its_configuration(runs: Any) -> None:
    writer = runs.begin("r1", 1)
    writer.update_run(config=json.dumps({"space": {"name": "cnn_digits"}}))
    writer.close()
    tables = analysis.load(runs.root)
    assert {analysis.decoded(tables, run, "8-8-8-2-4") for run in ("r1", "r")} == {"3× identity, ds(3,1), mb(1,2)"}
    with pytest.raises(ValueError, match=r"^0 runs in the tables have ids that begin with 'r2': give one's id$"):
        analysis.decoded(tables, "r2", "8-8-8-2-4")
