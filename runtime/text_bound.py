"""Whether a text has too many tokens, known without encoding it: encoding one takes a hundred times its memory.

A token stands for so many bytes at most, so a text of more bytes has more tokens. That holds where each part of the
tokenizer keeps every byte, or says how many it loses. A part of which that is not known here (a normalizer that strips,
a pre-tokenizer that drops spaces, a vocabulary without bytes) leaves no bound at all: what fits is never refused.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer as Backend
from tokenizers import models

from castline.runtime.token_bytes import BYTE_LEVEL, steps_of

_NFC_SHRINKS: Final = 4
"""Composition makes a text that many times shorter at most; the worst known is 3.5 (ΐ, of signs in other blocks)."""
_PIECE: Final = 1 << 16
"""Characters that are looked at together."""
_IN_UTF8: Final = frozenset({*range(0xC0), *range(0xC2, 0xF5)})
"""Bytes that a text may have."""
_IN_SPACES: Final = frozenset(byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode())
"""Of all white space, which ends at U+3000."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """``bytes_per_token`` is None where a token may stand for any number of bytes."""

    bytes_per_token: int | None
    free: bytes
    """Bytes that may stand for no token, or be taken into that of others."""

    def is_exceeded(self, text: str, num_tokens: int) -> bool:
        """*text* has more tokens, for sure. Takes no longer for a text that is far too long."""
        if self.bytes_per_token is None:
            return False
        left = num_tokens * self.bytes_per_token
        for start in range(0, len(text), _PIECE):
            left -= len(text[start : start + _PIECE].encode(errors="surrogatepass").translate(None, self.free))
            if left < 0:
                return True
        return False


_NONE: Final = TextBound(None, b"")


def text_bound(backend: Backend, vocab: Collection[str]) -> TextBound:
    """Of the tokenizer as it is now; *vocab* are all of its tokens."""
    model, splits = backend.model, steps_of(backend.pre_tokenizer)
    shrink = math.prod(map(_shrinks, steps_of(backend.normalizer)))
    if not isinstance(model, models.BPE) or not all(map(_keeps_all, splits)) or shrink == math.inf:
        return _NONE
    free: set[int] = set()
    if any(step["type"] == "ByteLevel" for step in splits):
        free |= {byte for char, byte in BYTE_LEVEL.items() if byte in _IN_UTF8 and model.token_to_id(char) is None}
        longest = max(map(len, vocab), default=0)  # a character for each byte
        if free and backend.normalizer is not None:  # another character may become one of them
            return _NONE
    elif model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in _IN_UTF8):
        longest = max((len(token.encode()) for token in vocab), default=0)
    else:
        return _NONE
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        free |= _IN_SPACES
    contents = [token.content for token in added]
    if backend.normalizer is not None:
        contents += [backend.normalizer.normalize_str(content) for content in contents]
    longest = max([longest, *(len(content.encode()) for content in contents)])
    return TextBound(longest * int(shrink), bytes(sorted(free))) if longest else _NONE


def _shrinks(step: dict[str, Any]) -> float:
    """How many times shorter, in bytes, a normalizer may make a text."""
    match step:
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else math.inf
        case {"type": "NFC"}:
            return _NFC_SHRINKS
    return math.inf


def _keeps_all(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer only cuts the text, or adds to it."""
    if step["type"] in ("Split", "Punctuation"):
        return str(step["behavior"]).lower() != "removed"
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")
