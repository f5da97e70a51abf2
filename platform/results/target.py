"""A folder on a filesystem that pyarrow reads, named by a URL: what is there, and files to and from it, each whole."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from fedloom.platform.data.config import DataConfig, cache_root

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRETS = ("secret", "token", "account_key", "sas")
_OBJECT_STORES = ("s3", "gcs", "abfs")
"""Filesystems without folders, where a file appears whole when it is closed."""
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
    """Whether results are named by a URL (s3://bucket/path, gs://bucket/path, file:///path) and not by a local path."""
    return isinstance(results, str) and _URL.match(results) is not None


def local_root(results: str | Path) -> Path:
    """Where results lie on this machine: a path is its own; a URL has a folder of its own in the cache.

    The cache is the environment's FEDLOOM_CACHE, then ~/.cache/fedloom. Asks nothing of the network. Raises ValueError
    for a URL with a secret in it.
    """
    if not is_remote(results):
        return Path(results)
    return cache_root(DataConfig()) / "results" / hashlib.sha256(_checked(str(results)).encode()).hexdigest()[:12]


def _checked(url: str) -> str:
    """The URL without what does not distinguish it; a secret would be written into every configuration and table."""
    parts = urlsplit(url)
    if parts.password is not None or any(word in key for key, _ in parse_qsl(parts.query) for word in _SECRETS):
        raise ValueError(
            f"results={parts.scheme}://{parts.hostname or ''}{parts.path} was given with a secret in the URL, which "
            "tables would hold: leave it out and set it in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )
    whole = parts._replace(path=parts.path.rstrip("/")).geturl()
    # Of a scheme that it does not know urllib drops the slashes of an empty host; fsspec takes that for a local path.
    return whole if "://" in whole else whole.replace(":", "://", 1)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as a listing shows it; `mtime_ns` is 0 where the filesystem does not tell."""

    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Target:
    """A folder of a filesystem; names are relative to it, with slashes.

    Whatever fails is an OSError of one line; FileNotFoundError if it is a file that is not there.
    """

    filesystem: pafs.FileSystem
    base: str
    url: str

    def list(self, under: Sequence[str] = ("",)) -> dict[str, RemoteFile]:
        """All files below these folders by name, without temporary ones; a folder that is not there has none."""
        found: dict[str, RemoteFile] = {}
        with _told():
            for folder in under:
                selector = pafs.FileSelector(self._path(folder), recursive=True, allow_not_found=True)
                for info in self.filesystem.get_file_info(selector):
                    if info.type == pafs.FileType.File and not _is_temporary(info.base_name):
                        found[self._name(info.path)] = RemoteFile(info.size, info.mtime_ns or 0)
        return found

    def upload(self, name: str, file: BinaryIO, size_bytes: int) -> None:
        """Puts the first bytes of an open file in the place of `name`: readers see the old content or the new one."""
        path = self._path(name)
        with _told():
            if self.filesystem.type_name in _OBJECT_STORES:
                self._write(path, file, size_bytes)
                return
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.tmp"
            self.filesystem.create_dir(folder, recursive=True)
            self._write(temporary, file, size_bytes)
            self.filesystem.move(temporary, path)

    def _write(self, path: str, file: BinaryIO, size_bytes: int) -> None:
        with self.filesystem.open_output_stream(path) as stream:
            while size_bytes > 0 and (content := file.read(min(size_bytes, _CHUNK_BYTES))):
                stream.write(content)
                size_bytes -= len(content)

    def download(self, name: str, path: Path) -> int:
        """Copies a file to a local path, which must not be one that readers use; returns its bytes."""
        with _told(), self.filesystem.open_input_stream(self._path(name)) as stream, open(path, "wb") as file:
            shutil.copyfileobj(stream, file, _CHUNK_BYTES)
            return file.tell()

    def read(self, name: str) -> bytes:
        """The whole content of a small file."""
        with _told(), self.filesystem.open_input_stream(self._path(name)) as stream:
            return bytes(stream.read())

    def delete(self, name: str) -> None:
        """Removes a file; one that is gone already is no error."""
        with _told():
            try:
                self.filesystem.delete_file(self._path(name))
            except FileNotFoundError:
                return

    def check_reachable(self, *, writable: bool) -> None:
        """Raises OSError if the bucket is not there or, if asked, nothing can be written; leaves nothing behind."""
        with _told():
            if self.filesystem.type_name in _OBJECT_STORES:
                bucket = self.base.partition("/")[0]
                if self.filesystem.get_file_info(bucket).type == pafs.FileType.NotFound:
                    raise FileNotFoundError(f"there is no bucket {bucket}")
        if writable:
            with open(os.devnull, "rb") as nothing:
                self.upload(_PROBE, nothing, 0)
            self.delete(_PROBE)

    def _path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    def _name(self, path: str) -> str:
        return path.removeprefix(self.base).lstrip("/")


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_line(error)) from error
    except (OSError, pa.lib.ArrowException) as error:
        raise OSError(_line(error)) from error


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def open_target(results: str) -> Target:
    """The folder that a URL names; ValueError in one line for a URL that leads nowhere, and what to do."""
    url = _checked(results)
    scheme = urlsplit(url).scheme.lower()
    try:
        filesystem, base = pafs.FileSystem.from_uri(_patient(url, scheme))
    except pa.lib.ArrowInvalid as error:
        raise ValueError(
            f"results={results} cannot be used ({_line(error)}): give a local folder, s3://bucket/path, "
            "gs://bucket/path, file:///path or another URL that pyarrow.fs.FileSystem.from_uri takes"
        ) from error
    except (OSError, ImportError, pa.lib.ArrowException) as error:
        raise unusable(results, error) from error
    if not base.strip("/"):
        raise ValueError(f"results={results} names no bucket or folder: give {scheme}://bucket/path")
    return Target(filesystem, base.rstrip("/"), url)


def _patient(url: str, scheme: str) -> str:
    # Google's own default is to try for a quarter of an hour before it says what is wrong.
    if scheme not in ("gs", "gcs") or "retry_limit_seconds=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}retry_limit_seconds={_GCS_PATIENCE_S}"


def unusable(results: str, error: Exception) -> ValueError:
    """The one line about a URL that cannot be read or written."""
    advice = _HELP.get(urlsplit(results).scheme.lower(), "check the URL and what you may do there")
    return ValueError(f"results={results} cannot be used ({_line(error)}): {advice}")


def _line(error: Exception, most: int = 300) -> str:
    # Arrow reports a file that is missing with an errno, others with a text alone.
    text = " ".join(str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error).split())
    return text if len(text) <= most else f"{text[:most]} ..."
