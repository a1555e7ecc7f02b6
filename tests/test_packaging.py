"""The wheel: what it adds to an environment, and what an engine depends on inside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of a wheel built from a copy of the sources, so that nothing built in place is picked up."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        str(out),
    ]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_adds_one_name(names: list[str]) -> None:
    """A wheel that brought `runtime` or `server` along would break whoever has a module of that name."""
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"castline"}


def test_the_wheel_is_whole(names: list[str]) -> None:
    """Every module, the native library, and the data that is read at run time."""
    rooms = ("castline", "engines", "plugins", "builder", "runtime", "server")
    modules = [path.relative_to(ROOT) for room in rooms for path in (ROOT / room).rglob("*.py")]
    wanted = {(path if path.parts[0] == "castline" else "castline" / path).as_posix() for path in modules}
    assert wanted <= set(names), wanted - set(names)
    for data in (
        "castline/py.typed",
        "castline/plugins/cpu/libcastline_cpu.so",
        "castline/builder/data/verify.txt",
        "castline/builder/data/report.html.j2",
        "castline/server/proto/castline.proto",
    ):
        assert data in names
    files = [path.relative_to(ROOT) for folder in ("skus", "recipes") for path in (ROOT / "engines" / folder).iterdir()]
    assert files, "no SKUs and no recipes"
    assert {f"castline/{path.as_posix()}" for path in files} <= set(names)
