"""Who may import whom: the design's table, read off the sources without importing them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "engines": set[str](),
    "plugins": {"engines"},
    "builder": {"plugins", "engines"},
    "runtime": {"plugins", "engines"},
    "server": {"runtime", "engines"},
    "castline": {"engines", "plugins", "builder", "runtime", "server"},
}
ROOMS = set(MAY_IMPORT) - {"castline"}
SERVING = {"engines", "plugins", "runtime", "server"}
BUILD_LIBRARIES = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir"}
FRONT_DOOR = ("__init__.py", "__main__.py", "cli.py", "commands/__init__.py")
"""Of castline/: what a shell imports before it knows which command runs."""
COMMANDS = sorted(path.stem for path in (ROOT / "castline" / "commands").glob("*.py") if path.stem != "__init__")
HEAVY = ("numpy", "onnxruntime", "torch", "transformers", "onnx", "grpc", "starlette", "uvicorn", "matplotlib")


class Imported(NamedTuple):
    line: int
    module: str
    """``castline.runtime.plan``; with ``from castline import runtime`` the names are joined on."""
    on_load: bool
    """Runs when the module is imported: not inside a function, nor under ``if TYPE_CHECKING``."""

    @property
    def room(self) -> str | None:
        """The room of ours that is imported; None for other libraries and for the package's version."""
        parts = self.module.split(".")
        if parts[0] != "castline" or self.module in ("castline", "castline.__version__"):
            return None
        return parts[1] if parts[1] in ROOMS else "castline"


def imports(source: str) -> list[Imported]:
    return list(_imports(ast.parse(source), on_load=True))


def _imports(node: ast.AST, *, on_load: bool) -> Iterator[Imported]:
    if isinstance(node, ast.Import):
        yield from (Imported(node.lineno, alias.name, on_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        names = [f"{base}.{alias.name}" for alias in node.names] if base == "castline" else [base]
        yield from (Imported(node.lineno, name, on_load) for name in names)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, on_load=False)
        for child in node.orelse:
            yield from _imports(child, on_load=on_load)
    else:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, on_load=on_load and not is_function)


def problems(room: str, source: str) -> list[str]:
    """What is wrong with the imports of a module of *room*, each with its line."""
    found: list[str] = []
    for item in imports(source):
        top = item.module.split(".")[0]
        if item.module.startswith("."):
            found.append(f"{item.line}: a relative import; write castline.… in full")
        elif top in ROOMS:
            found.append(f"{item.line}: {item.module} by its bare name; write castline.{item.module}")
        elif item.room is not None and item.room not in MAY_IMPORT[room] | {room}:
            found.append(f"{item.line}: {room} may not import {item.module}")
        elif room in SERVING and item.on_load and top in BUILD_LIBRARIES:
            found.append(f"{item.line}: {item.module} on load; the serving side must work without it")
    return found


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_every_room_keeps_to_the_table(room: str) -> None:
    """A runtime that imports the builder drags torch into serving; rooms that import each other cannot change alone."""
    paths = sources(room)
    assert paths, f"{room}/ has no sources: the table is out of date"
    wrong = [f"{path.relative_to(ROOT)}:{text}" for path in paths for text in problems(room, path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_front_door_loads_nothing_heavy() -> None:
    """`castline --help` is answered in milliseconds only while no room but engines is imported on load."""
    paths = [path for name in FRONT_DOOR if (path := ROOT / "castline" / name).exists()]
    wrong = [
        f"{path.relative_to(ROOT)}:{item.line}: {item.module} on load; import it inside the function that needs it"
        for path in paths
        for item in imports(path.read_text())
        if item.on_load and item.room not in (None, "castline", "engines")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engines", "from castline.runtime.plan import StepPlan"),
        ("builder", "def f():\n    import castline.runtime.plan"),
        ("runtime", "from castline import builder"),
        ("runtime", "from castline.builder import recipes"),
        ("server", "import castline.plugins.contract as contract"),
        ("server", "from castline.cli import cli"),
        ("runtime", "from castline import LLM"),
        ("runtime", "if TYPE_CHECKING:\n    from castline.server.bench import sse"),
        ("runtime", "from runtime.plan import StepPlan"),
        ("castline", "import engines"),
        ("runtime", "from .plan import StepPlan"),
        ("runtime", "from . import plan"),
        ("plugins", "import torch.nn"),
        ("engines", "class A:\n    try:\n        from onnx import helper\n    except ImportError:\n        pass"),
        ("server", "if not TYPE_CHECKING:\n    import transformers"),
    ],
)
def test_scan_finds(room: str, source: str) -> None:
    """The scan sees every way to write an import; one that it missed would pass for ever."""
    assert len(problems(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("runtime", "from castline.runtime.plan import StepPlan\nfrom castline.plugins import contract"),
        ("builder", "import torch\nfrom castline import __version__"),
        ("plugins", "def reference():\n    import torch"),
        ("server", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nimport runtimes"),
        ("castline", "from castline.builder.recipes import RECIPES"),
    ],
)
def test_scan_accepts(room: str, source: str) -> None:
    """What the table allows, and names that only look like rooms."""
    assert problems(room, source) == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name.replace("_", "-"), "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """What the sources promise, seen in a fresh interpreter: the modules loaded when the command line has answered."""
    program = (
        "import sys; from castline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: status = end.code\n"
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "print('status', status or 0, 'loaded', loaded)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["status 0 loaded []"], done.stdout + done.stderr
