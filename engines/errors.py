"""The errors of castline: whose fault it is decides the type, and the type decides the wire status.

``RequestError`` is the user's, ``EngineError`` the environment's; an ``assert`` is ours.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong, in the vocabulary of the wire; the server maps each code to HTTP, gRPC and OpenAI types."""

    INVALID_VALUE = "invalid_value"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    MODEL_NOT_FOUND = "model_not_found"
    UNSUPPORTED = "unsupported"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    ENGINE_FAILED = "engine_failed"


class CastlineError(Exception):
    """Base of every error castline raises on purpose. ``str(error)`` says the field, the limit and the cure."""


class RequestError(CastlineError):
    """A request that cannot be served as it stands.

    ``field`` names the offending request field (``logit_bias[-1]``), or is None when the whole request is meant.
    """

    def __init__(self, message: str, *, field: str | None = None, code: ErrorCode = ErrorCode.INVALID_VALUE) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request_error, (self.message, self.field, self.code))


def _rebuild_request_error(message: str, field: str | None, code: ErrorCode) -> RequestError:
    return RequestError(message, field=field, code=code)


class EngineError(CastlineError):
    """The environment's fault: a wrong bundle, a missing library, a host without memory, a failed step."""


class ProfileRefused(EngineError):
    """A recording that does not begin; what runs goes on as it was."""


class ManifestMismatch(EngineError):
    """The bundle was built for something else. One line for each field that differs: built with, found, cure."""


class BuildError(CastlineError):
    """A build that cannot go on; names the stage and the cure."""
