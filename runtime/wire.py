"""What crosses between the serving process and the engine process: commands in, reports of steps out.

MessagePack with a length before each message, over a stream socket. Types are checked when a message is read, so that
neither side trusts more than this file says.
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

from castline.runtime.client import EffectiveLimits, Stats
from castline.runtime.events import SequenceEvent
from castline.runtime.profile_options import ProfileOptions
from castline.runtime.request import Request

_LENGTH = struct.Struct("<I")


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first command: what to load."""

    bundle: str
    limits: EffectiveLimits
    num_threads: int
    huge_pages: bool = False
    profile: ProfileOptions | None = None


class Add(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    index: int | None = None
    """One continuation, or all."""


class Pace(msgspec.Struct, tag=True, frozen=True):
    """From now on a continuation's events have at least so many tokens, where nothing asks for each at once."""

    report_interval: int


class Profile(msgspec.Struct, tag=True, frozen=True):
    """Write the profile that is being recorded, if there is one, and begin the next. Only after a Load with one."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Leave the loop; requests still running are dropped without a report."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Loaded and warm."""


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """Not after every step: one that brought neither events nor statistics says nothing."""

    events: list[SequenceEvent]
    stats: Stats | None
    """None where they were reported a moment ago, and more steps follow."""
    core: int | None = None
    """Where the engine loop goes on, told with its statistics; None where it has no more to do, or cannot tell."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The last report of an engine that cannot go on."""

    reason: str


Command = Load | Add | Abort | Pace | Profile | Stop
Report = Ready | StepDone | Failed

Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Report) -> bytes:
    """One framed message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[Message]):
    """Cuts a byte stream into messages of one type. Raises msgspec.DecodeError for bytes that are none."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that *data* completes, in order."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + _LENGTH.unpack_from(self._buffer, start)[0]
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[body:end]))
            start = end
        del self._buffer[:start]
        return messages


def command_reader() -> FrameReader[Command]:
    return FrameReader(Command)


def report_reader() -> FrameReader[Report]:
    return FrameReader(Report)
