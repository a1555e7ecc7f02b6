"""The bytes each token of a vocabulary stands for, read off the decoder of its tokenizer.json.

A decoder is supported if it treats each token apart from its neighbours, so that the bytes of a text are the
tokens' bytes joined: byte-level BPE (GPT-2's table of printable characters) and SentencePiece vocabularies (▁ for a
space, <0xNN> for a byte), which together are what causal language models use. Only the start of a text is special:
SentencePiece drops the space that it put there itself.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from castline.engines.errors import EngineError

_MAX_IDS = 1 << 32  # the library's ids are 32 bits wide
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_alphabet()
"""The byte of each character of a byte-level vocabulary."""


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_LEVEL[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _from_byte_token(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.encode()


class TokenBytes:
    """Token id to bytes. Ids that the vocabulary lacks stand for nothing. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        """Raises EngineError for a decoder whose tokens cannot be told apart."""
        self._backend = backend
        self._rewrites: list[tuple[str, str]] = []
        self._to_bytes: Callable[[str], bytes] = str.encode
        self._before = b""
        """Put before every token but the first of a text."""
        self._dropped_at_start = ""
        """Removed, wherever it stands, from the first token of a text."""
        self.leading_spaces = 0
        """Spaces that are removed from the start of a text."""
        self._cache: dict[int, bytes] = {}
        self._read(steps_of(backend.decoder))

    def _read(self, steps: Sequence[dict[str, Any]]) -> None:
        if not steps:
            self._before = b" "
        settled = False  # bytes were made, or tokens fused: no later step sees single tokens
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if not settled:
                    self._to_bytes, settled = _from_byte_level, True
                case {"type": "ByteFallback"} if not settled:
                    self._to_bytes, settled = _from_byte_token, True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not settled:
                    self._rewrites.append((old, new))
                case {"type": "Metaspace", "replacement": str(mark)} if not settled:
                    self._rewrites.append((mark, " "))
                    self._dropped_at_start = mark if step.get("prepend_scheme", "always") != "never" else ""
                case {"type": "Fuse"}:
                    settled = True
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if settled:
                    self.leading_spaces = start
                case _:
                    raise EngineError(
                        f"tokenizer.json: decoder step {json.dumps(step)} is not supported; castline serves byte-level "
                        "and SentencePiece vocabularies"
                    )

    def of(self, token_id: int) -> bytes:
        """The token's bytes anywhere but at the start of a text."""
        found = self._cache.get(token_id)
        if found is not None:
            return found
        token = self._token(token_id)
        if token is None:
            return b""
        self._cache[token_id] = self._before + self._convert(token)
        return self._cache[token_id]

    def first(self, token_id: int) -> bytes:
        """The token's bytes at the start of a text, before `leading_spaces` are removed."""
        token = self._token(token_id)
        if token is None:
            return b""
        return self._convert(token.replace(self._dropped_at_start, "") if self._dropped_at_start else token)

    def _token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < _MAX_IDS else None
        return token

    def _convert(self, token: str) -> bytes:
        for old, new in self._rewrites:
            token = token.replace(old, new)
        return self._to_bytes(token)


class TextBytes:
    """The bytes of a text, one visible token after the other."""

    def __init__(self, table: TokenBytes, *, at_start: bool) -> None:
        """*at_start* is False where the text continues another."""
        self._table = table
        self._first = at_start
        self._leading_spaces = table.leading_spaces if at_start else 0

    @property
    def at_start(self) -> bool:
        """Whether the next token's bytes may differ from those it has inside a text."""
        return self._first or self._leading_spaces > 0

    def push(self, token_id: int) -> bytes:
        """The bytes that the next token adds."""
        data = self._table.first(token_id) if self._first else self._table.of(token_id)
        self._first = False
        while self._leading_spaces and data:
            if not data.startswith(b" "):
                self._leading_spaces = 0
                break
            data = data[1:]
            self._leading_spaces -= 1
        return data


def steps_of(part: Any) -> list[dict[str, Any]]:
    """A decoder, normalizer or pre-tokenizer as a flat list of its steps, in the words of tokenizer.json."""
    return [] if part is None else _flatten(json.loads(part.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    parts = next(step[name] for name in ("decoders", "normalizers", "pretokenizers") if name in step)
    return [flat for part in parts for flat in _flatten(part)]
