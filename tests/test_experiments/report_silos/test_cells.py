"""Drawings of cells, by Graphviz where it is installed and by Matplotlib where it is not."""

import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedloom.experiments.analysis.architectures import subspace_of
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report import cells
from fedloom.experiments.report.cells import Cell, CellEdge, cell_edges, darts_space_of, dot_source
from fedloom.experiments.report.drawing import png
from fedloom.platform.spaces.darts import DartsSpace

EDGES = tuple(CellEdge(s, n, ("skip_connect", "sep_conv_3x3")) for n in range(2, 6) for s in range(n))
CELL = Cell("silo 0", 4, EDGES)


def test_cells_hold_the_kept_operators_of_their_type(darts_space: DartsSpace) -> None:
    kept = subspace_of(darts_space, "0//1/0,1/1/0/0/0/0/")
    assert kept == ((0,), (), (1,), (0, 1), (1,), (0,), (0,), (0,), (0,), ())
    assert cell_edges(darts_space, kept, "normal") == (
        CellEdge(0, 2, ("skip_connect",)),
        CellEdge(0, 3, ("sep_conv_3x3",)),
        CellEdge(1, 3, ("skip_connect", "sep_conv_3x3")),
        CellEdge(2, 3, ("sep_conv_3x3",)),
    )
    assert len(cell_edges(darts_space, kept, "reduction")) == 4
    assert subspace_of(darts_space, "0-1-0-1-0-1-0-1-0-1") == tuple((i % 2,) for i in range(10))


@pytest.mark.parametrize("text", ["0", "0/1", "x/" * 10, "/".join(["7"] * 10), "1,0/" * 9 + "0"])
def test_texts_of_other_spaces_are_no_cells(text: str, darts_space: DartsSpace) -> None:
    assert subspace_of(darts_space, text) is None


@pytest.mark.parametrize("space", [{"name": "resnet18"}, {"name": "nobody_knows"}, {"name": "darts_s2", "future": 1}])
def test_other_spaces_have_no_cells(space: dict[str, Any]) -> None:
    assert darts_space_of({"space": space}) is None


def test_graphviz_is_told_every_edge_with_its_operator() -> None:
    source = dot_source(Cell("silo 0", 2, (CellEdge(0, 2, ("skip_connect",)), CellEdge(2, 3, ("sep_conv_3x3", "new")))))
    drawn = [line for line in source.splitlines() if "->" in line and "invis" not in line]
    assert [line.split(" [")[0] for line in drawn] == ["n0 -> n2", "n2 -> n3", "n2 -> n3", "n2 -> n4", "n3 -> n4"]
    assert ['label="skip"' in drawn[0], 'label="sep3"' in drawn[1], 'label="new"' in drawn[2]] == [True] * 3
    assert 'label="c_k-2"' in source
    assert "dashed" not in next(line for line in source.splitlines() if line.startswith("n3 ["))
    pruned = dot_source(Cell("silo 0", 2, (CellEdge(0, 2, ("skip_connect",)),)))
    assert "dashed" in next(line for line in pruned.splitlines() if line.startswith("n3 ["))
    assert "rankdir=LR" in source


@pytest.fixture(scope="module")
def drawn_by_matplotlib() -> bytes:
    """A cell where Graphviz is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells.shutil, "which", lambda _name: None)
        return png(cells.cells_figure([CELL]))


def test_matplotlib_draws_cells_without_graphviz(drawn_by_matplotlib: bytes, colours: Callable[[bytes], int]) -> None:
    assert colours(drawn_by_matplotlib) > 50


def test_a_dot_that_fails_leaves_the_drawing_to_matplotlib(
    drawn_by_matplotlib: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("dot") == str(broken)
    assert png(cells.cells_figure([CELL])) == drawn_by_matplotlib


def test_a_dot_that_draws_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    red = tmp_path / "red.png"
    Image.new("RGB", (40, 30), (250, 10, 20)).save(red)
    (tmp_path / "dot").write_text(f"#!/bin/sh\n/bin/cat > /dev/null\n/bin/cat {red}\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with Image.open(BytesIO(png(cells.cells_figure([CELL])))) as picture:
        assert (250, 10, 20) in set(picture.convert("RGB").getdata())


def test_silos_with_the_same_cell_share_a_drawing(silos: Any) -> None:
    silos.spider("r1")
    found = {name: (len(figure.axes), left) for name, figure, left in cells.cell_pictures(load(silos.root))}
    assert found == {"reduction": (2, 0), "normal": (2, 0)}
    first = next(iter(cells.cell_pictures(load(silos.root))))[1]
    assert [a.get_title(loc="left") for a in first.axes] == ["silos 0, 2", "silo 1"]
