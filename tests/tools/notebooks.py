"""Executes the notebooks of the documentation, each in an empty folder, and stores what they put out.

python tests/tools/notebooks.py            # all of docs/notebooks, in place
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


def executed(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook as it is after its cells were run in this folder, without what is of the moment alone.

    Raises CellExecutionError, with the cell and the traceback, if one fails.
    """
    node = nbformat.read(notebook, as_version=4)
    at = {"metadata": {"path": str(folder)}}
    client = NotebookClient(node, resources=at, timeout=600, startup_timeout=300, record_timing=False)
    client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"})  # tqdm's, which torch imports
    node.metadata.pop("language_info", None)  # the version of Python
    return node


def main() -> None:
    """Executes and rewrites the notebooks."""
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(notebook, Path(folder)), notebook)
        print(notebook, f"{notebook.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
