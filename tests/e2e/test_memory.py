"""Resident memory of a server that has answered requests, and where its weights lie."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from castline.llm import LLM
from castline.plugins.cpu.session import CpuSession

pytestmark = pytest.mark.slow

LIMIT_MIB = 400


def test_resident_memory_follows_use(
    default_engine: Path, serve: Callable[..., contextlib.AbstractContextManager[Any]]
) -> None:
    """Weights held twice, a KV pool taken whole, or a build library loaded to serve, shows here.

    Pages that the two processes share count once.
    """
    with serve(default_engine) as server:
        body = {"model": "smollm2", "prompt": "one two three " * 100, "max_tokens": 8}
        parent = psutil.Process(server.process.pid)
        (engine,) = parent.children()
        num_sent = 0
        while num_sent == 0 or (moves(server) and weights_mapped(engine) > 4 << 20 and num_sent < 500):
            num_sent += 1
            assert httpx.post(f"{server.http_url}/v1/completions", json=body, timeout=60).status_code == 200
        resident = sum(process.memory_full_info().pss for process in (parent, engine))
    assert resident / 2**20 < LIMIT_MIB


def test_weights_move_while_it_answers(
    default_engine: Path, serve: Callable[..., contextlib.AbstractContextManager[Any]]
) -> None:
    """A step that met weights half moved would answer otherwise; weights that never move leave every step slow.

    Requests are sent one after the other until the engine's process has let go of the weights' file.
    """
    body = {"model": "smollm2", "prompt": "one two three " * 10, "max_tokens": 16, "temperature": 0}

    def answer(server: Any) -> str:
        response = httpx.post(f"{server.http_url}/v1/completions", json=body, timeout=60)
        return str(response.json()["choices"][0]["text"])

    with serve(default_engine, "--huge-pages", "off") as server:
        (engine,) = psutil.Process(server.process.pid).children()
        expected = answer(server)
        assert weights_mapped(engine) > 50 << 20
        assert "huge pages: off" in server.log
    with serve(default_engine) as server:
        (engine,) = psutil.Process(server.process.pid).children()
        if not moves(server):
            pytest.skip("this system gives no huge pages of 2 MiB")
        answers = [answer(server)]
        while weights_mapped(engine) > 4 << 20 and len(answers) < 500:
            answers.append(answer(server))
        assert weights_mapped(engine) <= 4 << 20
        assert {*answers, answer(server)} == {expected}


def test_an_engine_may_close_while_its_weights_move(default_engine: Path) -> None:
    """ONNX Runtime unmaps a session's weights first of all: a copy that then goes on would crash the process."""
    for parts in (1, 3, 20):
        llm = LLM(default_engine, huge_pages="off", kv_blocks=256)
        session = llm._executor._session
        began = threading.Event()

        def move(session: CpuSession = session, began: threading.Event = began, parts: int = parts) -> None:
            for part in range(1000):
                if part == parts:
                    began.set()
                session.move_weights(1 << 20)
            began.set()

        mover = threading.Thread(target=move)
        mover.start()
        assert began.wait(60)
        llm.close()
        mover.join()
        assert session.move_weights(1) == 0


def weights_mapped(engine: psutil.Process) -> int:
    """Bytes of the weights' file that the process has in memory."""
    return sum(part.rss for part in engine.memory_maps() if part.path.endswith("weights.bin"))


def moves(server: Any) -> bool:
    """Whether the server has said that weights move."""
    return any(line.startswith("huge pages: weights and heap move into them") for line in server.log)
