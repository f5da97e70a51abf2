"""JSON files that carry the hash of their own content, so that a changed byte is noticed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.platform.results.files import content_hash, from_json, opened

HASH = "sha256"
_HEAD = b'{"%s": "' % HASH.encode()


def sealed_json(values: Mapping[str, Any]) -> bytes:
    """The values as JSON, with the hash of all of them; ValueError for values that JSON cannot hold."""
    return sealed_text(json.dumps(dict(values)))


def sealed_text(text: str) -> bytes:
    """The text of a JSON object, with its hash inserted."""
    body = text[1:].encode()
    return b'{"%s": "%s"%s' % (HASH.encode(), content_hash(body).encode(), b", " + body if body != b"}" else body)


def unsealed(content: bytes, path: Path) -> dict[str, Any]:
    """The values of a JSON object; ValueError naming `path` if it is not whole, or not what was written."""
    try:
        values = from_json(content, path)
        found = values.pop(HASH)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged (it is not a whole sealed file): {ADVICE}") from error
    head = b'{"%s": "%s"' % (HASH.encode(), str(found).encode())
    body = content[len(head) :].removeprefix(b", ")
    if not content.startswith(head) or content_hash(body) != found:
        raise ValueError(f"{path} is damaged (its content is not what was written): {ADVICE}")
    return dict(values)


def unsealed_if_sealed(content: bytes, path: Path) -> dict[str, Any]:
    """Like `unsealed`, also of a JSON object that an earlier version wrote without a hash; ValueError if it is none."""
    if content.startswith(_HEAD):
        return unsealed(content, path)
    values = from_json(content, path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged (it is not a JSON object): {ADVICE}")
    return values


def is_sealed(path: Path) -> bool:
    """Whether there is such a file, whole or damaged."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except (OSError, ValueError):
        return False


ADVICE = "restore it from a copy, or start a new run"
