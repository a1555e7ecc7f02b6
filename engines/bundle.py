"""Bundles on disk: ``<repository>/<model>/<version>/``, Triton's layout.

A bundle appears whole or not at all. It is written in a hidden directory beside its final place, so that the last act
is one rename inside one filesystem. The writer holds a lock on that directory: a build that finds one without a living
owner (killed, out of memory, power lost) removes it, whoever made it and on whatever host.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from castline.engines.errors import BuildError, EngineError
from castline.engines.hashing import sha256_file
from castline.engines.manifest import MANIFEST_NAME, BundleFile, Manifest, write_manifest

_STAGING_PREFIX = ".building-"
MODEL_NAME_RULE = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit"
MAX_VERSION = 999_999_999

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION_NAME = re.compile(r"[1-9][0-9]{0,8}")


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


def find_bundle(repository: Path, model: str | None = None, version: int | None = None) -> Path:
    """The bundle to serve: that of *model*, or of the only model there is; *version*, or the latest.

    *repository* may also be one model's directory, or a bundle itself. Raises EngineError listing what there is.
    """
    if not repository.is_dir():
        raise EngineError(f"{repository} is not a directory; give the --output of `castline build`")
    if (repository / MANIFEST_NAME).is_file():
        if model is not None or version is not None:
            raise EngineError(f"{repository} is one engine: leave out model and version, or give its repository")
        return repository
    is_home = model is None and bool(bundle_versions(repository))
    home = repository if is_home else repository / _pick_model(repository, model)
    versions = bundle_versions(home)
    if version is None:
        return home / str(versions[-1])
    if version not in versions:
        raise EngineError(f"{home} has no version {version}; it has {', '.join(map(str, versions))}")
    return home / str(version)


def bundle_models(repository: Path) -> list[str]:
    """Models of a repository that have a version, sorted."""
    names = (entry.name for entry in repository.iterdir() if entry.is_dir())
    return sorted(name for name in names if _MODEL_NAME.fullmatch(name) and bundle_versions(repository / name))


def bundle_versions(home: Path) -> list[int]:
    """Versions of one model's directory that hold a manifest, ascending."""
    return [version for version in _numbers(home) if (home / str(version) / MANIFEST_NAME).is_file()]


def is_model_name(model: str) -> bool:
    """Whether *model* can name a directory of a repository."""
    return _MODEL_NAME.fullmatch(model) is not None


def check_model_name(model: str) -> None:
    """Raises EngineError unless *model* can name a directory of a repository."""
    if not is_model_name(model):
        raise EngineError(f"model name {model!r} is not valid: it takes {MODEL_NAME_RULE}")


def _pick_model(repository: Path, model: str | None) -> str:
    models = bundle_models(repository)
    listing = f"it has {', '.join(models)}" if models else "it has none; make one with `castline build`"
    if model is None:
        if len(models) != 1:
            raise EngineError(f"{repository} does not have exactly one model: name one with --model ({listing})")
        return models[0]
    check_model_name(model)
    if model not in models:
        raise EngineError(f"{repository} has no engine of model {model!r}; {listing}")
    return model


def _numbers(home: Path) -> list[int]:
    if not home.is_dir():
        return []
    return sorted(int(entry.name) for entry in home.iterdir() if _VERSION_NAME.fullmatch(entry.name))


def _check_free(home: Path, version: int) -> None:
    if not _VERSION_NAME.fullmatch(str(version)):
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
        number = version if version is not None else max(_numbers(home), default=0) + 1
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
