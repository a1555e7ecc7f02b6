"""Writing bundles that appear whole or not at all, and finding them again."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from castline.engines.bundle import write_bundle
from castline.engines.errors import BuildError, EngineError
from castline.engines.manifest import Manifest, read_manifest
from castline.engines.repository import MANIFEST_NAME, bundle_models, find_bundle, read_target


def build(repository: Path, manifest: Manifest, model: str = "smol", version: int | None = None) -> Path:
    with write_bundle(repository, model, version) as draft:
        (draft.directory / "model.onnx").write_bytes(b"graph")
        (draft.directory / "kernels").mkdir()
        (draft.directory / "kernels" / "a.bin").write_bytes(b"kernel")
        draft.seal(manifest)
    assert draft.path is not None
    return draft.path


def everything(repository: Path) -> list[Path]:
    return sorted(repository.rglob("*"))


def test_a_bundle_lands_whole_with_the_hash_of_every_file(tmp_path: Path, manifest: Manifest) -> None:
    """A file missing from the manifest could be swapped or lost unseen, one in a subdirectory too."""
    path = build(tmp_path / "models", manifest)
    assert path == tmp_path / "models/smol/1"
    files = read_manifest(path).files
    assert {name: file.sha256 for name, file in files.items()} == {
        "model.onnx": hashlib.sha256(b"graph").hexdigest(),
        "kernels/a.bin": hashlib.sha256(b"kernel").hexdigest(),
    }
    assert files["model.onnx"].size == 5
    assert [p.name for p in (tmp_path / "models/smol").iterdir()] == ["1"]
    assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_build_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    """C04: half a bundle, or empty directories that a later `run` lists as a model, after an error or Ctrl-C."""
    with suppress(failure), write_bundle(tmp_path / "models" / "deep", "smol") as draft:
        (draft.directory / "weights.bin").write_bytes(b"x" * 100)
        assert everything(tmp_path) != []
        raise failure
    assert everything(tmp_path) == []


def test_a_disk_that_fills_up_is_said_in_words(tmp_path: Path) -> None:
    """Room is checked at the start, and another program may take it meanwhile: that was a traceback."""
    home = tmp_path / "models" / "smol"
    with pytest.raises(BuildError, match=f"{home} cannot be written: No space left on device"):  # noqa: SIM117
        with write_bundle(tmp_path / "models", "smol"):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert everything(tmp_path) == []


def test_a_failed_build_leaves_other_versions_alone(tmp_path: Path, manifest: Manifest) -> None:
    """The clean-up of a failure must not reach beyond its own draft."""
    build(tmp_path, manifest)
    before = everything(tmp_path)
    with pytest.raises(RuntimeError), write_bundle(tmp_path, "smol"):
        raise RuntimeError
    assert everything(tmp_path) == before


def test_nothing_is_visible_before_the_end(tmp_path: Path, manifest: Manifest) -> None:
    """A server that looks for models during a build must not find a half-written one."""
    with write_bundle(tmp_path, "smol") as draft:
        (draft.directory / "engine.json").write_text("{}")
        assert bundle_models(tmp_path) == []
        draft.seal(manifest)
    assert bundle_models(tmp_path) == ["smol"]


def test_versions_count_up_and_are_never_overwritten(tmp_path: Path, manifest: Manifest) -> None:
    """A rebuild must not replace an engine that is being served; a gap below is not filled, the latest stays latest."""
    build(tmp_path, manifest, version=3)
    assert build(tmp_path, manifest).name == "4"
    with pytest.raises(BuildError, match="exists and is never overwritten"):
        build(tmp_path, manifest, version=3)
    with pytest.raises(BuildError, match="not valid"):
        build(tmp_path, manifest, version=0)


def test_two_builds_at_once_take_different_versions(tmp_path: Path, manifest: Manifest) -> None:
    """Both saw version 1 free when they began; neither may fail, nor clean away the other's live draft."""
    with write_bundle(tmp_path, "smol") as slow:
        (slow.directory / "model.onnx").write_bytes(b"slow")
        fast = build(tmp_path, manifest)
        slow.seal(manifest)
    assert slow.path is not None
    assert (fast.name, slow.path.name) == ("1", "2")
    assert (slow.path / "model.onnx").read_bytes() == b"slow"


def test_the_next_build_removes_the_draft_of_a_killed_one(tmp_path: Path, manifest: Manifest) -> None:
    """A build killed by the kernel cannot clean up; its gigabytes must not stay for ever."""
    script = (
        "import sys, time, pathlib; from castline.engines.bundle import write_bundle\n"
        f"with write_bundle(pathlib.Path({str(tmp_path)!r}), 'smol') as draft:\n"
        "    (draft.directory / 'weights.bin').write_bytes(b'x'); print('written', flush=True); sys.stdin.read()\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"written\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert len(list((tmp_path / "smol").glob(".*"))) == 1
    build(tmp_path, manifest)
    assert [p.name for p in (tmp_path / "smol").iterdir()] == ["1"]


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "-x", "a b", "x" * 200, "é"])
def test_model_names_cannot_leave_the_repository(tmp_path: Path, manifest: Manifest, name: str) -> None:
    """A name is a path component: `../..` must neither write nor read outside."""
    build(tmp_path / "models", manifest)
    with pytest.raises(EngineError, match="not valid"):
        build(tmp_path / "models", manifest, model=name)
    with pytest.raises(EngineError, match="not valid"):
        find_bundle(tmp_path / "models", name)


def test_find_takes_the_latest_version_by_number(tmp_path: Path, manifest: Manifest) -> None:
    """Compared as text, version 9 would win over 10."""
    for version in (9, 10, 2):
        build(tmp_path, manifest, version=version)
    (tmp_path / "smol" / "11").mkdir()
    assert find_bundle(tmp_path).name == "10"
    assert find_bundle(tmp_path, "smol", 9).name == "9"
    with pytest.raises(EngineError, match="has no version 11; it has 2, 9, 10"):
        find_bundle(tmp_path, "smol", 11)


def test_find_accepts_a_model_directory_and_a_bundle(tmp_path: Path, manifest: Manifest) -> None:
    """The path that `build` prints, and the one a user completes with Tab, both serve."""
    bundle = build(tmp_path, manifest)
    assert find_bundle(tmp_path / "smol") == bundle
    assert find_bundle(bundle) == bundle
    with pytest.raises(EngineError, match="is one engine"):
        find_bundle(bundle, "smol")


def test_find_lists_what_there_is(tmp_path: Path, manifest: Manifest) -> None:
    """An error without the names sends the user to `ls`."""
    with pytest.raises(EngineError, match="castline build"):
        find_bundle(tmp_path)
    with pytest.raises(EngineError, match="not a directory"):
        find_bundle(tmp_path / "absent")
    build(tmp_path, manifest, "a")
    build(tmp_path, manifest, "b")
    with pytest.raises(EngineError, match="it has a, b"):
        find_bundle(tmp_path)
    with pytest.raises(EngineError, match="no engine of model 'c'; it has a, b"):
        find_bundle(tmp_path, "c")
    assert find_bundle(tmp_path, "b") == tmp_path / "b/1"


def test_an_unwritable_output_is_the_users_error(tmp_path: Path) -> None:
    """A file in the way must name the option, not raise NotADirectoryError."""
    (tmp_path / "models").write_text("")
    with pytest.raises(BuildError, match="--output"), write_bundle(tmp_path / "models", "smol"):
        pass


@pytest.mark.parametrize("content", ["", "{", "[" * 200_000, '{"host": 3}', "[]"])
def test_a_target_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    """The start goes on with it, and what reads the manifest says in words what is wrong."""
    (tmp_path / MANIFEST_NAME).write_text(content)
    assert read_target(tmp_path) is None
    with pytest.raises(EngineError):
        read_manifest(tmp_path)
