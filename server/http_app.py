"""The HTTP application: OpenAI-compatible endpoints, health and metrics. Every error has OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from castline.engines.errors import CastlineError
from castline.runtime.client import Health, Phase
from castline.server.errors import ServerCode, ServerError, WireFault, to_wire
from castline.server.http_generate import GenerateEndpoint
from castline.server.http_wire import fault_body, fault_headers
from castline.server.openai_chat import chat_job
from castline.server.openai_completions import completion_job
from castline.server.serving import ServedModel, Serving


def http_app(serving: Serving) -> ASGIApp:
    """The ASGI application over one served model, which may not have loaded yet.

    A POST to a generating endpoint goes there at once: looking for its route through every layer costs more than its
    body.
    """
    generating = {
        "/v1/chat/completions": GenerateEndpoint(serving, chat_job),
        "/v1/completions": GenerateEndpoint(serving, completion_job),
    }
    others = _routed(serving, generating)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = generating.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or others)(scope, receive, send)

    return app


def _routed(serving: Serving, generating: Mapping[str, ASGIApp]) -> Starlette:
    """Everything, and the errors of what is not there."""
    pages = Pages(serving)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/health/live", pages.live),
        Route("/health/ready", pages.ready),
        Route("/metrics", pages.metrics),
    ]
    on_error = {HTTPException: _http_error, CastlineError: _error, ServerError: _error, Exception: _error}
    return Starlette(routes=routes, exception_handlers=on_error)


class Pages:
    """The endpoints that only read."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, request: Request) -> Response:
        return _json(200, {"object": "list", "data": [_model_card(self._serving.model)]})

    async def model(self, request: Request) -> Response:
        model = self._serving.model
        model.check_name(request.path_params["name"])
        return _json(200, _model_card(model))

    async def live(self, request: Request) -> Response:
        health = self._serving.live()
        return _health(health, ok=health.phase is not Phase.FAILED)

    async def ready(self, request: Request) -> Response:
        health = self._serving.ready()
        return _health(health, ok=health.ready)

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._serving.model.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _model_card(model: ServedModel) -> dict[str, Any]:
    facts = model.engine.manifest.model
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "castline",
        "root": facts.source,
        "parent": None,
        "max_model_len": model.engine.limits.max_model_len,
    }


def _health(health: Health, *, ok: bool) -> Response:
    return _json(200 if ok else 503, {"status": health.phase, "reason": health.reason})


_HTTP_CODES = {404: ServerCode.NOT_FOUND, 405: ServerCode.METHOD_NOT_ALLOWED}


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the routing itself."""
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, ServerCode.BAD_REQUEST)
    fault = WireFault(code, f"{request.method} {request.url.path}: {error.detail}")
    return _fault(fault, dict(error.headers or {}))


async def _error(request: Request, error: Exception) -> Response:
    return _fault(to_wire(error), {})


def _fault(fault: WireFault, headers: dict[str, str]) -> Response:
    return _json(fault.row.http_status, fault_body(fault), {**fault_headers(fault), **headers})
