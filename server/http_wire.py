"""HTTP underneath the endpoints: bodies in, bodies and errors out."""

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from castline.engines.errors import ErrorCode, RequestError
from castline.server.errors import ServerCode, ServerError, WireFault
from castline.server.http_exchange import ClientGone, exchange_of

Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]
_RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which a refused request is worth sending again."""


RECEIVE_TIMEOUT_S = 60.0
"""For a request's line and headers, and between two pieces of its body."""


def late_fault() -> ServerError:
    """Of a request that stopped half way: its connection and what has come of it are not kept for ever."""
    return ServerError(
        ServerCode.REQUEST_TIMEOUT, f"the rest of the request did not come within {RECEIVE_TIMEOUT_S:g} s"
    )


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body.

    Raises for a content type other than JSON, as soon as it is more than *max_bytes*, and where its rest does not come.
    """
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ServerError(
            ServerCode.UNSUPPORTED_MEDIA_TYPE, f"content-type is {content_type!r}, and must be 'application/json'"
        )
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    exchange = exchange_of(scope)
    whole = exchange.take_body()
    if whole is None:
        whole = await _receive_body(receive, max_bytes)
        exchange.resume_reading()
    if len(whole) > max_bytes:
        raise _too_large(max_bytes)
    return whole


async def _receive_body(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise late_fault() from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than the limit of {max_bytes} bytes ({max_bytes // 2**20} MiB)",
        code=ErrorCode.REQUEST_TOO_LARGE,
    )


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, body: bytes) -> None:
    await send_body(send, 200, body, _JSON)


def fault_body(fault: WireFault) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {
        "error": {"message": fault.message, "type": fault.row.openai_type, "param": fault.field, "code": fault.code}
    }


def fault_headers(fault: WireFault) -> dict[str, str]:
    seconds = _RETRY_AFTER.get(fault.row.http_status)
    return {} if seconds is None else {"retry-after": seconds}


async def send_fault(send: Send, fault: WireFault) -> None:
    extra = [(name.encode(), value.encode()) for name, value in fault_headers(fault).items()]
    await send_body(send, fault.row.http_status, msgspec.json.encode(fault_body(fault)), [*_JSON, *extra])
