"""Timings remembered between builds, found by the content of what was timed.

An entry's name is the sha256 of everything that could change its timing: the operator, its shape, the candidate, the
host, ONNX Runtime's version, the plugin's hash and the instruction set it was told to use. Nothing is ever invalidated;
other circumstances have other names. Entries are written whole or not at all, so that builds may share a cache; one
that does not read back is timed again.
"""

import hashlib
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from castline.engines.errors import BuildError
from castline.engines.manifest import Host
from castline.engines.user_cache import user_cache

CACHE_SCHEMA = 2
"""Of the entries, and of how a case is timed."""

CaseValue = str | int | float


@dataclass(frozen=True, slots=True)
class TuningEnvironment:
    """What a timing depends on besides the case."""

    host: Host
    onnxruntime: str
    plugin_sha256: str
    plugin_isa: str
    """Whose kernels ran: the host's widest, or CASTLINE_ISA."""


class _Entry(msgspec.Struct):
    key: str
    microseconds: float


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/castline``, or ``~/.cache/castline``. Raises BuildError for a user without a home."""
    found = user_cache()
    if found is None:
        raise BuildError("autotune: this user has no home directory: name a --cache-dir for the timings")
    return found


class TuningCache:
    """Microseconds by case. A directory that cannot be written only makes the next build slower."""

    def __init__(self, directory: Path, environment: TuningEnvironment) -> None:
        self._directory = directory / "autotune"
        self._environment = environment
        self.hits = 0
        self.misses = 0

    def key(self, op: str, case: Mapping[str, CaseValue]) -> str:
        """The content address of a case."""
        content = {"schema": CACHE_SCHEMA, "op": op, "case": dict(case), "environment": self._environment}
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()

    def get(self, op: str, case: Mapping[str, CaseValue]) -> float | None:
        """Microseconds of the case, or None where it is unknown or its entry is damaged."""
        key = self.key(op, case)
        try:
            entry = msgspec.json.decode(self._path(key).read_bytes(), type=_Entry)
        except (OSError, msgspec.DecodeError):
            entry = None
        if entry is None or entry.key != key or not math.isfinite(entry.microseconds) or entry.microseconds <= 0:
            self.misses += 1
            return None
        self.hits += 1
        return entry.microseconds

    def put(self, op: str, case: Mapping[str, CaseValue], microseconds: float) -> None:
        """Remembers a timing; silently does not where the directory cannot be written."""
        key = self.key(op, case)
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, msgspec.json.encode(_Entry(key, microseconds)))
        except OSError:
            return

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / f"{key}.json"


def _write_whole(path: Path, content: bytes) -> None:
    """Another process sees the old file, no file, or all of the new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
