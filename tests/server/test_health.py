"""C51: live and ready are different questions, and say why in the body."""

from typing import Any

import pytest

from castline.runtime.client import Phase

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def ask(app: Any, question: str) -> tuple[int, str]:
    reply = app.http.get(f"/health/{question}")
    body = reply.json()
    assert set(body) == {"status", "reason"}
    assert body["reason"]
    return reply.status_code, body["status"]


def test_before_the_engine_has_loaded(start: Any, make_engine: Any) -> None:
    """Prevents a restart by the liveness probe during a slow start, and requests that nobody can answer."""
    with start(make_engine(), opened=False) as app:
        assert ask(app, "live") == (200, "starting")
        assert ask(app, "ready") == (503, "starting")
        for reply in (
            app.http.post("/v1/chat/completions", json=CHAT),
            app.http.post("/v1/completions", json={"prompt": "a", "stream": True}),
            app.http.get("/v1/models"),
            app.http.get("/metrics"),
        ):
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "not_ready"
            assert "starting" in reply.json()["error"]["message"]
        app.call(app.server.open(app.engine)).result(10)
        assert ask(app, "ready") == (200, "ready")
        assert app.http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_open_waits_for_the_engine_to_warm_up(start: Any, make_engine: Any) -> None:
    """C11: prevents a ready server whose first request is slow."""
    with start(make_engine(), opened=False) as app:
        app.engine.phase = Phase.STARTING
        opening = app.call(app.server.open(app.engine))
        assert ask(app, "ready") == (503, "starting")
        assert not opening.done()
        app.engine.phase = Phase.READY
        opening.result(10)
        assert ask(app, "ready") == (200, "ready")


@pytest.mark.parametrize(
    ("phase", "live", "ready"),
    [(Phase.READY, 200, 200), (Phase.STALLED, 200, 503), (Phase.DRAINING, 200, 503), (Phase.FAILED, 503, 503)],
)
def test_the_engines_phase_decides(app: Any, phase: Phase, live: int, ready: int) -> None:
    """Prevents a stalled engine from getting requests, and a restart of what would recover by itself."""
    app.engine.phase = phase
    assert ask(app, "live") == (live, phase)
    assert ask(app, "ready") == (ready, phase)


def test_a_server_that_ends_because_its_engine_failed_says_so(app: Any) -> None:
    """Prevents a crash that looks like an orderly shutdown to whoever asks."""
    app.engine.phase = Phase.FAILED
    app.server.serving.begin_drain()
    assert ask(app, "ready") == (503, "failed")
