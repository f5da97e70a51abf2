"""Folders at URLs, on any filesystem that pyarrow supports, and checks of where reports and exports may be written."""

import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs

from fedloom.platform.data.config import machine_cache
from fedloom.platform.results.files import (
    check_writable,
    content_hash,
    first_irregular,
    irregular,
    is_irregular,
    within,
)
from fedloom.platform.results.paths import ABLATIONS, ARTIFACTS, SUPERNETS
from fedloom.platform.results.tables import TABLES

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRETS = ("secret", "token", "key", "sas", "sig", "password", "passwd", "pwd", "credential")
"""Parts of the names, in any case, of those values in a URL's query that are secrets."""
_ALLOWED = (
    "give a local folder, s3://bucket/path, gs://bucket/path, file:///path or another URL that "
    "pyarrow.fs.FileSystem.from_uri takes"
)
_OBJECT_STORES = ("s3", "gcs", "abfs")
"""Filesystems without folders, where a file appears atomically when it is closed."""
_CHUNK_BYTES = 8 << 20
_GCS_PATIENCE_S = 30
_PROBE = ".fedloom-writable.tmp"
_HELP = {
    "s3": "check the bucket's name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and AWS_ENDPOINT_URL "
    "for a server of your own",
    "gs": "check the bucket's name, and that GOOGLE_APPLICATION_CREDENTIALS names the file of your credentials",
}
_HELP["gcs"] = _HELP["gs"]


def is_remote(results: str | Path) -> bool:
    """Whether results are at a URL (s3://bucket/path, gs://bucket/path, file:///path) instead of a local path."""
    return isinstance(results, str) and _URL.match(results) is not None


def local_root(results: str | Path) -> Path:
    """The local folder of results: the path itself, with ~ as the home folder, or for a URL a folder in the cache.

    The cache is the environment's FEDLOOM_CACHE, then ~/.cache/fedloom. Does not use the network. Raises ValueError for
    a URL that contains a secret.
    """
    if not is_remote(results):
        return Path(os.path.expanduser(results))
    return machine_cache() / "results" / content_hash(_checked(str(results)).encode())[:12]


def without_secrets(text: str) -> str:
    """A URL, or a text with one, as it may be shown: without user:password and the values of its query."""
    # Up to the last @, because passwords contain slashes; in some schemes a user alone is the name of a container.
    text = re.sub(r"://[^\s?]*:[^\s?]*@", "://...@", text)
    head, mark, query = text.partition("?") if "://" in text else (text, "", "")
    return head + mark + re.sub(r"(^|[&;])([^&;=\s]*=)?[^&;\s]+", r"\1\2...", query)


def _checked(url: str) -> str:
    """The URL in canonical form; ValueError for a secret in it, which would be stored in configurations and tables."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"results={without_secrets(url)} is not a URL ({error}): {_ALLOWED}") from error
    has_secret = any(word in key.lower() for key, _ in parse_qsl(parts.query) for word in _SECRETS)
    if parts.password is not None or has_secret:
        raise ValueError(
            f"results={without_secrets(url)} was given with a secret in the URL, which would be stored in tables: "
            "leave it out and set it in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )
    whole = parts._replace(path=parts.path.rstrip("/")).geturl()
    # urllib drops the slashes of an empty host for unknown schemes, and fsspec would take the result for a local path.
    return whole if "://" in whole else whole.replace(":", "://", 1)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a listing; `mtime_ns` is 0 if the filesystem has no times."""

    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Target:
    """A folder of a filesystem; names are relative to it, with slashes.

    All failures raise a one-line OSError, missing files a FileNotFoundError. On this machine's filesystem, links are
    not followed and pipes are not waited for: a listing leaves them out, and all else fails.
    """

    filesystem: pafs.FileSystem
    base: str
    url: str

    def list(self, under: Sequence[str] = ("",)) -> dict[str, RemoteFile]:
        """All files below these folders by name, without hidden ones; a missing folder is empty.

        Raises ValueError for a name that cannot be a file's here, such as one that leads out of the results.
        """
        files: dict[str, RemoteFile] = {}
        with _one_line():
            for folder in under:
                for info in self._below(self._path(folder)):
                    if info.type == pafs.FileType.File and not info.base_name.startswith("."):
                        name = info.path.removeprefix(self.base).lstrip("/")
                        within(Path(self.url), name)
                        files[name] = RemoteFile(info.size, info.mtime_ns or 0)
        return files

    def _below(self, folder: str) -> Iterator[pafs.FileInfo]:
        selector = pafs.FileSelector(folder, recursive=not self._has_links, allow_not_found=True)
        for info in self.filesystem.get_file_info(selector):
            if not self._has_links:
                yield info
            elif not is_irregular(info.path):
                yield info
                if info.type == pafs.FileType.Directory:  # a recursive listing would follow links
                    yield from self._below(info.path)

    def folders(self, under: str) -> Sequence[str]:
        """The names of the folders directly in a folder, sorted; none if it is missing."""
        with _one_line():
            infos = self.filesystem.get_file_info(pafs.FileSelector(self._path(under), allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == pafs.FileType.Directory)

    def upload(self, name: str, file: BinaryIO, size_bytes: int) -> None:
        """Replaces `name` atomically by the first `size_bytes` bytes of an open file."""
        path = self._path(name)
        with _one_line():
            if self.filesystem.type_name in _OBJECT_STORES:
                self._write(path, file, size_bytes)
                return
            folder, _, last = path.rpartition("/")
            # A unique name: two machines may write the same file at the same moment, as when both claim a run.
            temporary = f"{folder}/.{last}.{uuid4().hex[:12]}.tmp"
            self.filesystem.create_dir(folder, recursive=True)
            try:
                self._write(temporary, file, size_bytes)
                self.filesystem.move(temporary, path)
            except BaseException:
                with suppress(Exception):  # the first error is raised, not one from tidying up
                    self.filesystem.delete_file(temporary)
                raise

    def _write(self, path: str, file: BinaryIO, size_bytes: int) -> None:
        with self.filesystem.open_output_stream(path) as stream:
            while size_bytes > 0 and (content := file.read(min(size_bytes, _CHUNK_BYTES))):
                stream.write(content)
                size_bytes -= len(content)

    def download(self, name: str, path: Path) -> int:
        """Downloads a file to a local path, not atomically; returns its size in bytes."""
        with (
            _one_line(),
            self.filesystem.open_input_stream(self._path(name)) as stream,
            open(path, "wb") as file,
        ):
            shutil.copyfileobj(stream, file, _CHUNK_BYTES)
            return file.tell()

    def read(self, name: str) -> bytes:
        """The whole content of a small file."""
        with _one_line(), self.filesystem.open_input_stream(self._path(name)) as stream:
            return bytes(stream.read())

    def write(self, name: str, content: bytes) -> None:
        """Replaces a small file atomically."""
        self.upload(name, io.BytesIO(content), len(content))

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""
        with _one_line():
            try:
                self.filesystem.delete_file(self._path(name))
            except FileNotFoundError:
                return

    def check_reachable(self, *, writable: bool) -> None:
        """Raises OSError if the bucket does not exist or, with `writable`, cannot be written; leaves no files."""
        with _one_line():
            if self.filesystem.type_name in _OBJECT_STORES:
                bucket = self.base.partition("/")[0]
                if self.filesystem.get_file_info(bucket).type == pafs.FileType.NotFound:
                    raise FileNotFoundError(f"there is no bucket {bucket}")
        if writable:
            with open(os.devnull, "rb") as nothing:
                self.upload(_PROBE, nothing, 0)
            self.delete(_PROBE)

    @property
    def _has_links(self) -> bool:
        return bool(self.filesystem.type_name == "local")

    def _path(self, name: str) -> str:
        if self._has_links and (path := first_irregular(Path(self.base), name)) is not None:
            raise OSError(irregular(path))
        return f"{self.base}/{name}" if name else self.base


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_line(error)) from error
    except (OSError, pa.lib.ArrowException) as error:
        raise OSError(_line(error)) from error


def open_target(results: str) -> Target:
    """The folder at a URL; one-line ValueError with advice if it cannot be used."""
    url = _checked(results)
    scheme, shown = urlsplit(url).scheme.lower(), without_secrets(url)
    patient = url
    if scheme in ("gs", "gcs") and "retry_limit_seconds=" not in url:
        # By default Google's client retries for 15 minutes before it reports an error.
        patient = f"{url}{'&' if '?' in url else '?'}retry_limit_seconds={_GCS_PATIENCE_S}"
    try:
        filesystem, base = pafs.FileSystem.from_uri(patient)
    except pa.lib.ArrowInvalid as error:
        said = _line(error).replace(patient, shown).replace(url, shown)
        raise ValueError(f"results={shown} cannot be used ({said}): {_ALLOWED}") from error
    except (OSError, ImportError, pa.lib.ArrowException) as error:
        raise unusable(results, error) from error
    if not base.strip("/"):
        raise ValueError(f"results={shown} names no bucket or folder: give {scheme}://bucket/path")
    return Target(filesystem, base.rstrip("/"), shown)


def unusable(results: str, error: Exception) -> ValueError:
    """The one-line error for a URL that cannot be read or written."""
    advice = _HELP.get(urlsplit(results).scheme.lower(), "check the URL and what you may do there")
    shown = without_secrets(results)
    return ValueError(f"results={shown} cannot be used ({_line(error).replace(results, shown)}): {advice}")


def _line(error: Exception, most: int = 300) -> str:
    # Arrow reports a missing file with an errno, other errors only with a text.
    text = " ".join(str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error).split())
    return text if len(text) <= most else f"{text[:most]} ..."


STORED = (ARTIFACTS, ABLATIONS, SUPERNETS, *TABLES)
"""The folders below the results folder that hold what runs and ablations have stored."""


def check_outside(root: Path) -> None:
    """Raises ValueError if a new results folder would lie inside what another results folder stores."""
    for folder in [root.resolve(), *root.resolve().parents]:
        others = folder.parent
        if folder.name in STORED and (others / ARTIFACTS).is_dir() and any((others / "runs").glob("experiment=*")):
            raise ValueError(
                f"results={root} lies in {folder}, which holds what runs have stored: choose a folder elsewhere, "
                f"such as {others}"
            )


def output_folder(results: Path, out: Path | None, default: str) -> Path:
    """The folder `out`, or RESULTS/DEFAULT if it is None, after checking that files may be written there.

    Raises ValueError for a folder that cannot be written, and for one where readers of the results, or checks of their
    files, would come across what is written.
    """
    if out is None:
        for folder in reversed([Path(default), *Path(default).parents]):
            if folder != Path() and (results / folder).is_symlink():
                raise ValueError(f"{irregular(results / folder)}, or give --out")
        check_writable(Path(results) / default)
        return Path(results) / default
    resolved = Path(out).resolve()
    for name in STORED:
        stored = Path(results, name).resolve()
        if resolved.is_relative_to(stored):
            raise ValueError(
                f"--out {out} lies in {Path(results, name)}, which holds what runs have stored: choose a folder "
                f"elsewhere, such as {Path(results) / default}"
            )
    if resolved.exists() and not resolved.is_dir():
        raise ValueError(f"--out {out} is not a folder: choose a folder, such as {Path(results) / default}")
    check_writable(resolved, "--out")
    return Path(out)
