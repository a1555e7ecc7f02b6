"""Token ids to text, a token at a time, in linear time.

The bytes of the tokens go through an incremental UTF-8 decoder, so a delta never ends inside a character: its bytes
wait for the next token. What is no UTF-8 at all becomes U+FFFD at once; an unfinished character becomes one U+FFFD
at the end.
"""

import codecs
from collections.abc import Sequence

from castline.runtime.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One text. All deltas joined are what follows the prompt in the decoded whole."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._is_special = tokenizer.is_special
        self._bytes = tokenizer.continuation(prompt_token_ids)
        self._utf8 = _Utf8(errors="replace")
        self._known = tokenizer.whole_texts
        self._between = not self._bytes.at_start
        """Inside the text and between two characters, where a token's text depends on nothing before it."""

    def push(self, token_id: int) -> str:
        """The text that the next token completes; special tokens have none."""
        if self._between:
            text = self._known.get(token_id)
            if text is not None:
                return text
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        was_between = self._between
        text = ""
        if not self._is_special(token_id):
            text = self._utf8.decode(self._bytes.push(token_id))
            self._between = not self._bytes.at_start and not self._utf8.getstate()[0]
        if was_between and self._between:
            self._known[token_id] = text
        return text

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD if the text ends inside a character."""
        return self._utf8.decode(b"", final=True)
