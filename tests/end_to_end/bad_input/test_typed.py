"""What is typed wrongly is refused in one line that names it as it was typed, whichever command it is for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedloom.platform.results.paths import SUPERNETS, find_runs, list_runs
from fedloom.platform.results.store import STORED

Refuse = Callable[..., str]
Contents = Callable[[Path], dict[str, bytes]]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, own_cache: Path, call: Callable[..., int], quick: Sequence[str]
) -> Path:
    """A results folder with the only run."""
    results = tmp_path_factory.mktemp("only") / "results"
    assert call("run", "--json", *quick, "name=baseline", f"results={results}") == 0
    return results


@pytest.mark.parametrize("words", [("name",), ("name=",), ("tags",), ("executor.actors",)])
def test_a_resume_that_is_typed_wrongly_changes_nothing(
    words: Sequence[str], finished: Path, refusal: Refuse, contents: Contents
) -> None:
    before = contents(finished)
    assert words[0].partition("=")[0] in refusal("resume", "baseline", *words, "--results", str(finished))
    assert contents(finished) == before


@pytest.mark.parametrize(
    "command",
    [
        ("report", ""),
        ("verify", ""),
        ("status", ""),
        ("resume", ""),
        ("search", "", "--macs", "1"),
        ("export", "", "--tier", "tier1"),
        ("ablate", "--resume", ""),
        ("ablate", "--retry-failed", ""),
    ],
    ids=lambda command: " ".join(command),
)
def test_a_variable_of_the_shell_that_is_not_set_means_no_run(
    command: Sequence[str], finished: Path, refusal: Refuse
) -> None:
    line = refusal(*command, "--results", str(finished))
    assert line == ("fedloom: '' names no run and no ablation: give an id, the beginning of one, a name or a tag")
    with pytest.raises(ValueError, match="'' names no run"):
        find_runs(finished, "")


@pytest.mark.parametrize("command", [("status",), ("report",), ("verify", "x"), ("resume", "x"), ("ablate",)])
def test_results_that_are_a_file(command: Sequence[str], tmp_path: Path, refusal: Refuse) -> None:
    (tmp_path / "file").write_text("no folder")
    assert f"--results {tmp_path / 'file'} is not a folder" in refusal(*command, "--results", str(tmp_path / "file"))


@pytest.mark.parametrize("more", [["baseline"], ["--all"]])
def test_what_is_cleaned_belongs_to_no_run(more: Sequence[str], refusal: Refuse) -> None:
    assert "--clean ends the processes of all dead runs on this machine" in refusal("status", *more, "--clean")


@pytest.mark.parametrize("command", [("report",), ("export", "baseline", "--tier", "tier1")], ids=lambda c: c[0])
def test_a_place_where_nothing_may_be_written(
    command: Sequence[str],
    finished: Path,
    refusal: Refuse,
    contents: Contents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = contents(finished)

    def given(out: Path | str) -> str:
        return refusal(*command, "--results", str(finished), "--out", str(out))

    (run,) = list_runs(finished)
    assert "--out /dev/null is not a folder: choose a folder, such as " in given("/dev/null")
    assert "--out /proc/fedloom cannot be written (" in given("/proc/fedloom")
    assert "--out: '' is no path" in given("")
    (tmp_path / "link").symlink_to(finished / "artifacts")
    for out in (run.artifacts, finished / "artifacts", finished / "runs", run.table("rounds") / "x", tmp_path / "link"):
        assert f"--out {out} lies in {finished}/" in given(out)
    monkeypatch.chdir(finished / "artifacts")
    assert "--out reports lies in " in given("reports")
    assert contents(finished) == before


def test_every_folder_of_the_results_is_known() -> None:
    assert SUPERNETS == "supernets"  # where supernets of earlier versions are
    assert {"artifacts", "ablations", "supernets", "runs", "clients"} <= set(STORED)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--macs", "nan"), "--macs: nan: must be a number, greater than 0"),
        (("--macs", "1e9", "--macs", "-1"), "--macs: -1: must be a number, greater than 0"),
        (("--latency-s", "soon"), "--latency-s: soon: must be a number, greater than 0"),
        (("--macs", "1", "--samples", "1.5"), "--samples: 1.5: must be a whole number, between 1 and 1000000"),
        (("--macs", "1", "--min-tau", "nan"), "--min-tau: nan: must be a number, between -1 and 1"),
        (("--macs", "1", "--tolerance", "1"), "--tolerance: 1: must be a number, above 0 and below 1"),
    ],
)
def test_a_number_of_search_is_named_as_it_was_typed(words: Sequence[str], said: str, refusal: Refuse) -> None:
    assert said in refusal("search", "baseline", *words)


@pytest.mark.parametrize(
    ("preset", "given", "line"),
    [
        (
            "fedavg_digits",
            ["method.train.privacy.clip=1e30"],
            "method.train.privacy.clip=1e+30: must be above 0 and at",
        ),
        ("fedavg_digits", ["method.train.privacy.noise=1e30"], "privacy.noise=1e+30: must be between 0 and 1000"),
        (
            "fedavg_digits",
            [
                *(
                    "method.train.privacy.clip=1",
                    "method.train.privacy.noise=0.5",
                    "method.train.privacy.accountant=pld",
                ),
                *("method.train.selection=all", "method.train.clients_per_round=null", "method.train.weighting=plain"),
            ],
            # Sixty rounds of everybody are one of noise / sqrt(60).
            "method.train.privacy.noise=0.5: for accountant pld it must be at least 0.775 here",
        ),
        (
            "fjord_digits",
            ["space.norm=batch", "data.validation_share=0"],
            "data.validation_share=0 leaves no validation samples to estimate the running statistics of batch norms",
        ),
    ],
)
def test_what_would_fail_in_the_first_round_is_refused_before(
    refused: Refuse, preset: str, given: list[str], line: str
) -> None:
    assert line in refused(*given, preset=[f"experiment={preset}", "executor.kind=serial"])
