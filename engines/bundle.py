"""Writing bundles, where `castline.engines.repository` finds them.

A bundle appears whole or not at all. It is written in a hidden directory beside its final place, so that the last act
is one rename inside one filesystem. The writer holds a lock on that directory: a build that finds one without a living
owner (killed, out of memory, power lost) removes it, whoever made it and on whatever host.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from castline.engines.errors import BuildError
from castline.engines.hashing import sha256_file
from castline.engines.manifest import BundleFile, Manifest, write_manifest
from castline.engines.repository import MAX_VERSION, check_model_name, is_version, version_numbers

_STAGING_PREFIX = ".building-"


class BundleDraft:
    """A bundle being written. Files go under ``directory``; ``seal`` hands over the manifest that completes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest | None = None
        self.path: Path | None = None
        """Where the bundle is, once it is there."""

    def seal(self, manifest: Manifest) -> None:
        """The manifest of the finished bundle; its ``files`` are filled in from what lies in ``directory``."""
        self.manifest = manifest


@contextmanager
def write_bundle(repository: Path, model: str, version: int | None = None) -> Iterator[BundleDraft]:
    """Gives a draft to fill and seal; on a clean exit it becomes ``<repository>/<model>/<version>/``.

    *version* None takes the next free number. On any exception, KeyboardInterrupt among them, nothing is left, nor any
    directory that was made on the way. Raises BuildError where the version exists, and for an OSError (a full disk).
    """
    check_model_name(model)
    home = repository / model
    if version is not None:
        _check_free(home, version)
    made = _make_directories(home)
    try:
        _clean_dead_drafts(home)
        with _locked_draft_directory(home) as directory:
            draft = BundleDraft(directory)
            try:
                yield draft
                assert draft.manifest is not None, "a bundle was left without its manifest"
                _complete(directory, draft.manifest)
                draft.path = _publish(directory, home, version)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
    except BaseException as error:
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise BuildError(
                f"bundle: {home} cannot be written: {reason}; make room there, or choose another --output"
            ) from error
        raise


def _check_free(home: Path, version: int) -> None:
    if not is_version(version):
        raise BuildError(f"version {version} is not valid: give a number from 1 to {MAX_VERSION}")
    if (home / str(version)).exists():
        raise BuildError(
            f"{home / str(version)} exists and is never overwritten: remove it, "
            "or leave out the version for the next free one"
        )


def _make_directories(home: Path) -> list[Path]:
    """Makes *home* and the parents it lacks; returns those made, outermost first."""
    missing = [path for path in (home, *home.parents) if not path.exists()]
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write to {home}: {error.strerror}; choose another --output") from None
    return missing[::-1]


@contextmanager
def _locked_draft_directory(home: Path) -> Iterator[Path]:
    """A fresh hidden directory in *home*, locked for as long as the block runs."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=home))
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if directory.is_dir():  # else another build took it for a dead one before it was locked
            break
        os.close(descriptor)
    try:
        yield directory
    finally:
        os.close(descriptor)


def _clean_dead_drafts(home: Path) -> None:
    """Removes drafts that no living process holds locked."""
    for directory in home.glob(_STAGING_PREFIX + "*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _complete(directory: Path, manifest: Manifest) -> None:
    """Hashes every file, writes the manifest, and brings all of it to the disk."""
    files: dict[str, BundleFile] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        files[path.relative_to(directory).as_posix()] = BundleFile(path.stat().st_size, sha256_file(path))
    write_manifest(directory, replace(manifest, files=files))
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _publish(directory: Path, home: Path, version: int | None) -> Path:
    """Renames the draft to its version. Another build may take a free number first: then the next one is tried."""
    directory.chmod(0o755)
    while True:
        number = version if version is not None else max(version_numbers(home), default=0) + 1
        if version is not None:
            _check_free(home, version)
        try:
            directory.rename(home / str(number))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue
        _sync(home)
        return home / str(number)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
