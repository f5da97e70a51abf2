"""`fedloom new FOLDER`: a project with a data set, a network, a server rule, a preset and a test that run at once."""

from importlib import resources
from pathlib import Path

from fedloom.platform.results.files import check_name

TEMPLATE = "template"
"""The folder of the project's files, which are checked and tested like fedloom's own code."""


def new_project(folder: Path) -> list[Path]:
    """Writes the project and returns its files; raises ValueError if the path is a file or a non-empty folder."""
    name = check_name("FOLDER", folder.absolute().name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty: give a new folder")
    template = resources.files("fedloom.experiments") / TEMPLATE
    texts = {file.name: file.read_text() for file in template.iterdir() if file.is_file()}
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (folder / file).write_text(text.replace("my_project", name))
    return [folder / file for file in sorted(texts)]
