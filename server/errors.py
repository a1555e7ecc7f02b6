"""The one table from an error to the wire: HTTP status, gRPC code, OpenAI error type.

``to_wire`` classifies any exception; each transport only spells the result.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

import grpc

from castline.engines.errors import EngineError, ErrorCode, RequestError

log = logging.getLogger(__name__)


class ServerCode(StrEnum):
    """Errors that arise in front of the engine and have no ErrorCode of their own."""

    NOT_READY = "not_ready"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    BAD_REQUEST = "bad_request"
    REQUEST_TIMEOUT = "request_timeout"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Row:
    http_status: int
    grpc_code: grpc.StatusCode
    openai_type: str


_INVALID = "invalid_request_error"
_SERVER = "server_error"

TABLE: dict[ErrorCode | ServerCode, Row] = {
    ErrorCode.INVALID_VALUE: Row(400, grpc.StatusCode.INVALID_ARGUMENT, _INVALID),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Row(400, grpc.StatusCode.INVALID_ARGUMENT, _INVALID),
    ErrorCode.REQUEST_TOO_LARGE: Row(413, grpc.StatusCode.RESOURCE_EXHAUSTED, _INVALID),
    ErrorCode.MODEL_NOT_FOUND: Row(404, grpc.StatusCode.NOT_FOUND, _INVALID),
    ErrorCode.UNSUPPORTED: Row(400, grpc.StatusCode.UNIMPLEMENTED, _INVALID),
    ErrorCode.DEADLINE_EXCEEDED: Row(504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error"),
    ErrorCode.CANCELLED: Row(499, grpc.StatusCode.CANCELLED, _INVALID),
    ErrorCode.OVERLOADED: Row(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded_error"),
    ErrorCode.SHUTTING_DOWN: Row(503, grpc.StatusCode.UNAVAILABLE, _SERVER),
    ErrorCode.ENGINE_FAILED: Row(500, grpc.StatusCode.INTERNAL, _SERVER),
    ServerCode.NOT_READY: Row(503, grpc.StatusCode.UNAVAILABLE, _SERVER),
    ServerCode.NOT_FOUND: Row(404, grpc.StatusCode.UNIMPLEMENTED, _INVALID),
    ServerCode.METHOD_NOT_ALLOWED: Row(405, grpc.StatusCode.UNIMPLEMENTED, _INVALID),
    ServerCode.UNSUPPORTED_MEDIA_TYPE: Row(415, grpc.StatusCode.INVALID_ARGUMENT, _INVALID),
    ServerCode.BAD_REQUEST: Row(400, grpc.StatusCode.INVALID_ARGUMENT, _INVALID),
    ServerCode.REQUEST_TIMEOUT: Row(408, grpc.StatusCode.DEADLINE_EXCEEDED, _INVALID),
    ServerCode.INTERNAL: Row(500, grpc.StatusCode.INTERNAL, _SERVER),
}


MAX_MESSAGE_CHARS, MAX_FIELD_CHARS = 400, 100
"""On the wire. Escaped, a character may take 12 bytes, and gRPC clients may drop metadata of more than 8 KiB."""


def too_many_messages(max_tokens: int) -> RequestError:
    """Of a conversation with more than one message for each of the model's tokens."""
    return RequestError(
        f"there are more than {max_tokens} messages, each of at least a token, and this engine holds {max_tokens} "
        "tokens of prompt and text together: send fewer messages",
        field="messages",
        code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    )


def too_many_ids(count: int, max_tokens: int, field: str) -> RequestError:
    """Of a prompt of *count* token ids, before anything is done for each of them."""
    return RequestError(
        f"{field} has {count} tokens, and this engine holds {max_tokens} tokens of prompt and text together: "
        "shorten it",
        field=field,
        code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    )


class ServerError(Exception):
    """An error that a transport finds itself: an unknown path, a wrong content type, an engine not loaded yet."""

    def __init__(self, code: ServerCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class WireFault:
    """An error as every transport reports it."""

    code: ErrorCode | ServerCode
    message: str
    field: str | None = None

    @property
    def row(self) -> Row:
        return TABLE[self.code]


def to_wire(error: Exception) -> WireFault:
    """Classifies *error*. What castline did not raise on purpose is logged, and reported without detail.

    A message that quotes much of the request is cut.
    """
    match error:
        case RequestError():
            field = None if error.field is None else _cut(error.field, MAX_FIELD_CHARS)
            return WireFault(error.code, _cut(error.message), field)
        case ServerError():
            return WireFault(error.code, _cut(error.message))
        case EngineError():
            return WireFault(ErrorCode.ENGINE_FAILED, _cut(str(error)))
    log.error("unexpected error while serving a request", exc_info=error)
    return WireFault(ServerCode.INTERNAL, "internal error; the server's log has the details")


def _cut(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """The start and the end of a text that is too long."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
