"""Log-probabilities in OpenAI's shapes, aligned with the text that is shown.

The bytes of a choice's entries join to its text: the entry of the token that ended the text is left out, a special
token has no bytes, and an entry is released together with the text it belongs to, never before. So a stream and a whole
answer have the same entries.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from castline.runtime.client import Output
from castline.runtime.events import FinishReason, TokenLogprobs
from castline.runtime.tokenizer import Tokenizer
from castline.server.openai_responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


class TokenTexts:
    """How tokens are shown. Remembers what it has looked up; one for each tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """The token as a string (``bytes:\\xe2\\x82`` for a part of a character) and its bytes in shown text."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            shown = raw.decode()
        except UnicodeDecodeError:
            shown = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return shown, b"" if self._tokenizer.is_special(token_id) else raw


class _LeadingSpaces:
    """Of a text that comes in pieces."""

    def __init__(self) -> None:
        self.count = 0
        self.are_all = False
        """Something else has come."""

    def push(self, text: str) -> None:
        if not self.are_all:
            rest = text.lstrip(" ")
            self.count += len(text) - len(rest)
            self.are_all = bool(rest)


class LogprobAligner:
    """Holds back the entries of one continuation until their text is out.

    It counts characters, as the text's own decoder makes them of the tokens' bytes: what is no UTF-8 is longer in the
    text than in its token.
    """

    def __init__(self, texts: TokenTexts, eos_token_ids: Sequence[int]) -> None:
        self._texts = texts
        self._eos_token_ids = eos_token_ids
        self._held: deque[tuple[int, TokenLogprobs]] = deque()
        """Each with the characters that must be out before it: those that its first byte is of, and all before."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._num_chars_out = 0
        self._spaces = _LeadingSpaces()
        self._spaces_out = _LeadingSpaces()

    def push(self, output: Output) -> list[TokenLogprobs]:
        """The entries that belong to *output*'s text. Call it with every output of the continuation, in order."""
        for entry in output.logprobs or ():
            self._held.append((self._take(self._texts(entry.token_id)[1]), entry))
        self._show(output.text)
        if output.finish_reason is None:
            return self._release()
        return self._release_last(output)

    def _take(self, raw: bytes) -> int:
        """The bytes of the next token. Returns how many characters the text has up to the first of them."""
        self._decode(raw[:1])
        num_unfinished = 1 if self._utf8.getstate()[0] else 0
        needed = self._num_chars + num_unfinished
        self._decode(raw[1:])
        return needed

    def _decode(self, raw: bytes) -> None:
        text = self._utf8.decode(raw)
        self._num_chars += len(text)
        self._spaces.push(text)

    def _show(self, text: str) -> None:
        """SentencePiece drops spaces from the start of a text, which count as shown."""
        self._num_chars_out += len(text)
        if not self._spaces_out.are_all:
            self._spaces_out.push(text)
            if self._spaces_out.are_all:
                self._num_chars_out += self._spaces.count - self._spaces_out.count

    def _release(self) -> list[TokenLogprobs]:
        released: list[TokenLogprobs] = []
        while self._held:
            num_needed, entry = self._held[0]
            if num_needed > self._num_chars_out:
                break
            released.append(entry)
            self._held.popleft()
        return released

    def _release_last(self, output: Output) -> list[TokenLogprobs]:
        """Nothing more comes: what a stop string cut off is dropped, everything else belongs to the text."""
        if output.finish_reason is FinishReason.STOP:
            if isinstance(output.stop_reason, str):
                return self._release()
            ends = self._eos_token_ids if output.stop_reason is None else (output.stop_reason,)
            if self._held and self._held[-1][1].token_id in ends:
                self._held.pop()
        released = [entry for _, entry in self._held]
        self._held.clear()
        return released


def chat_logprobs(entries: Iterable[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(entry, texts) for entry in entries])


def _chat_entry(entry: TokenLogprobs, texts: TokenTexts) -> TokenLogprob:
    top = [TopLogprob(*_chat_token(token_id, logprob, texts)) for token_id, logprob in entry.top]
    return TokenLogprob(*_chat_token(entry.token_id, entry.logprob, texts), top)


def _chat_token(token_id: int, logprob: float, texts: TokenTexts) -> tuple[str, float, list[int] | None]:
    shown, raw = texts(token_id)
    return shown, finite(logprob), list(raw) if raw else None


class CompletionLogprobWriter:
    """The completions shape of one choice, whose offsets go on from one chunk to the next."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def copy(self) -> "CompletionLogprobWriter":
        """One that goes on from here by itself."""
        copied = CompletionLogprobWriter(self._texts)
        copied._decoder.setstate(self._decoder.getstate())
        copied._offset = self._offset
        return copied

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str
    ) -> CompletionLogprobs:
        """The echoed prompt. Its first token has no log-probability; the text that follows starts after *text*."""
        logprobs = self._write(token_ids, entries)
        self._offset = len(text)
        return logprobs

    def generated(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        return self._write([entry.token_id for entry in entries], entries)

    def _write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            shown, raw = self._texts(token_id)
            result.tokens.append(shown)
            result.token_logprobs.append(None if entry is None else finite(entry.logprob))
            result.top_logprobs.append(None if entry is None else self._top(entry))
            result.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(raw))
        return result

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The sampled token is always among them, as OpenAI has it."""
        top = {self._texts(entry.token_id)[0]: finite(entry.logprob)}
        for token_id, logprob in entry.top:
            top.setdefault(self._texts(token_id)[0], finite(logprob))
        return top
