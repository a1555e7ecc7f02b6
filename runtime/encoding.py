"""Text to token ids in the serving process, beside everything else that it does.

A megabyte takes about two seconds of a core. So a long text is encoded in a thread, and the longest ones in threads
that the others do not wait for. They are few: more would take the cores from the engine, and encode no sooner.
"""

import asyncio
from functools import partial
from typing import Final

from castline.engines.errors import ErrorCode, RequestError
from castline.engines.resources import usable_cores
from castline.runtime.side_threads import SideThreads
from castline.runtime.tokenizer import Tokenizer

LONG_CHARS: Final = 4096
LONGEST_CHARS: Final = 65536

TokenIds = list[int]

_long = SideThreads("encode", 2)
_longest = SideThreads("encode-longest", 1 if usable_cores() < 4 else 2)


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_tokens: int) -> TokenIds:
    """Raises RequestError for a text that is known to have more than *max_tokens*, and for what is no text."""
    if len(text) <= LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await begin_encoding(tokenizer, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


def begin_encoding(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_tokens: int
) -> "asyncio.Future[TokenIds]":
    """As `encode_text`, of a long text. Whoever ends the future early is waited for no longer."""
    if tokenizer.has_more(text, max_tokens):
        raise RequestError(
            f"the prompt has {len(text)} characters, which are more than {max_tokens} tokens whatever they are, and "
            f"this engine holds {max_tokens} tokens of prompt and text together: shorten the prompt",
            field="prompt",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )
    threads = _long if len(text) <= LONGEST_CHARS else _longest
    return threads.begin(partial(tokenizer.encode, text, add_special_tokens=add_special_tokens), len(text))
