"""Processes in which the builder is imported already and Triton compiles: forks of one that imported it once.

Importing torch, transformers and Triton takes seconds of a processor. A process that has interpreted a kernel compiles
none, so what compiles needs a process of its own; it does not need imports of its own.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

IMPORTED = [
    "castline.commands.build",
    "castline.builder.pipeline",
    "castline.builder.tensorrt.pipeline",
    "triton.compiler",
]


@cache
def _context() -> ForkServerContext:
    """Starts the process that is forked."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        forkserver.ensure_running()
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret
    return context


def _redirected(home: Path, words: Sequence[str], function: Callable[..., object], arguments: Sequence[Any]) -> None:
    for descriptor, name in enumerate(("stdout", "stderr"), 1):
        file = os.open(home / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = list(words)
    function(*arguments)


def run(
    function: Callable[..., object], *arguments: Any, words: Sequence[str] = ("",)
) -> subprocess.CompletedProcess[str]:
    """Calls *function* in a process of its own whose command line is *words*, and waits for its end.

    *function* and *arguments* are pickled: a function of an importable module. An exception ends the process with 1 and
    a traceback in its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="castline-fork-") as name:
        home = Path(name)
        process = _context().Process(target=_redirected, args=(home, words, function, arguments))
        process.start()
        process.join()
        assert process.exitcode is not None
        said = [(home / stream).read_text() for stream in ("stdout", "stderr")]
        return subprocess.CompletedProcess(list(words), process.exitcode, *said)
