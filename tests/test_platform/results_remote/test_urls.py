"""What a URL of results is, which are refused, and where its files are on this machine."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.platform.results.copies import check_results, fetch, mirror_folder, mirrored
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.store import is_remote, local_root

Machine = Callable[[str], None]


def test_a_path_is_its_own_and_a_url_has_a_folder_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", "/cache")
    assert local_root("some/results") == Path("some/results")
    assert local_root(Path("/x")) == Path("/x")
    monkeypatch.setenv("HOME", "/home/me")
    assert local_root("~/results") == Path("/home/me/results")
    assert not is_remote("some/results")
    assert not is_remote("/s3:/x")
    found = local_root("s3://bucket/path")
    assert found.parent == Path("/cache/results")
    assert len(found.name) == 12
    assert local_root("s3://bucket/path/") == found
    assert local_root("s3://bucket/other") != found
    assert local_root("s3://bucket/path?region=eu-west-1") != found
    monkeypatch.delenv("FEDLOOM_CACHE")
    assert local_root("gs://bucket/path").parent == Path("~/.cache/fedloom/results").expanduser()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ftp://host/x", r"results=ftp://host/x cannot be used .*ftp.*: give a local folder, s3://bucket/path, gs://"),
        ("s3://bucket/x?colour=red", r"colour=\.\.\. .*: give a local folder, s3://bucket/path"),
        ("s3://key:word@bucket/x", r"^results=s3://\.\.\.@bucket/x was given with a secret.*AWS_SECRET_ACCESS_KEY"),
        ("abfs://c@a/x?account_key=word", r"was given with a secret"),
        ("s3://bucket/x?SECRET_KEY=word", r"^results=s3://bucket/x\?SECRET_KEY=\.\.\. was given with a secret"),
        ("s3://bucket/x?region=r&Signature=word", r"\?region=\.\.\.&Signature=\.\.\. was given with a secret"),
        ("s3://bucket/x?sig=word", r"was given with a secret"),
        ("s3://bucket/x?sig=wo=word&word", r"sig=\.\.\.&\.\.\. was given with a secret"),
        ("s3://bucket/x?colour=word", r"^results=s3://bucket/x\?colour=\.\.\. cannot be used"),
        ("s3://key:wo/word@bucket/x", r"^results=s3://\.\.\.@bucket/x cannot be used .*: give a local folder"),
        ("s3://bucket/a b?colour=word", r"^results=s3://bucket/a b\?colour=\.\.\. cannot be used"),
        ("s3://[bad?x=word", r"^results=s3://\[bad\?x=\.\.\. is not a URL \(Invalid IPv6 URL\): give a local folder"),
        ("s3://", r"results=s3:// names no bucket or folder: give s3://bucket/path"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_in_one_line(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        check_results(given)
    assert "\n" not in str(error.value)
    assert "word" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_refused_before_a_run(url: str, machine: Machine, bucket: Path) -> None:
    bucket.parent.mkdir()
    bucket.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"results=file://.* cannot be used .*check the URL and what you may do"):
        check_results(url)


def test_checking_leaves_nothing_at_the_url(url: str, machine: Machine, bucket: Path) -> None:
    assert check_results(url) == local_root(url)
    assert list(bucket.iterdir()) == []


@pytest.mark.parametrize("name", ["artifacts", "clients/deeper", "ablations"])
def test_results_do_not_lie_among_what_other_runs_have_stored(name: str, tmp_path: Path) -> None:
    assert check_results(str(tmp_path / name)) == tmp_path / name
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "runs" / "experiment=e").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"^results=.*{name} lies in .* a folder elsewhere, such as {tmp_path}$"):
        check_results(str(tmp_path / name))
    for free in ("", "reports", "another"):
        assert check_results(str(tmp_path / free)) == tmp_path / free


def test_a_local_path_has_no_mirror_and_is_not_fetched(tmp_path: Path) -> None:
    threads = threading.active_count()
    with mirrored(str(tmp_path), RunPaths(tmp_path, "e", "r1")):
        assert threading.active_count() == threads
    assert fetch(tmp_path, ["r1"]) == tmp_path
    mirror_folder(tmp_path, "nothing/there")
    assert list(tmp_path.iterdir()) == []
