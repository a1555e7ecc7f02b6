"""``POST /v1/chat/completions``: the body into a job, outputs into one answer or into chunks."""

import time

from msgspec import UNSET

from castline.runtime.client import Output
from castline.runtime.events import TokenLogprobs
from castline.server.job import AnswerWriter, Job, StreamWriter
from castline.server.openai_logprobs import LogprobAligner, chat_logprobs
from castline.server.openai_params import chat_params, messages_of
from castline.server.openai_requests import decode_chat
from castline.server.openai_responses import (
    AnswerHead,
    ChatChoice,
    ChatLogprobs,
    ChunkChoice,
    ChunkEncoder,
    Delta,
    Message,
    UsageCounter,
    encode_answer,
    sse,
)
from castline.server.request_ids import new_id
from castline.server.serving import ServedModel


def chat_job(model: ServedModel, body: bytes) -> Job:
    """Raises RequestError where the body, the conversation or the template refuses."""
    request = decode_chat(body, max_messages=model.engine.limits.max_model_len)
    model.check_name(request.model)
    params = chat_params(request)
    prompt = model.engine.tokenizer.render_chat(messages_of(request.messages))
    request_id = new_id("chatcmpl")
    stream = bool(request.stream)
    kind = "chat.completion.chunk" if stream else "chat.completion"
    head = AnswerHead(request_id, kind, int(time.time()), model.name, model.fingerprint)
    include_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    logprobs = _Logprobs(model, params.logprobs is not None)
    return Job(
        request_id=request_id,
        prompts=[prompt],
        params=params,
        # The template has printed the special tokens that it wants.
        add_special_tokens=bool(request.add_special_tokens),
        cache_salt=request.cache_salt,
        writer=ChatStream(head, logprobs, include_usage) if stream else ChatAnswer(head, logprobs),
    )


class _Logprobs:
    """Aligned entries of every choice, in the chat shape; nothing where they were not asked for."""

    def __init__(self, model: ServedModel, wanted: bool) -> None:
        self._model = model
        self._wanted = wanted
        self._aligners: dict[int, LogprobAligner] = {}

    def entries(self, output: Output) -> list[TokenLogprobs]:
        if not self._wanted:
            return []
        aligner = self._aligners.get(output.index)
        if aligner is None:
            eos_token_ids = self._model.engine.tokenizer.eos_token_ids
            aligner = self._aligners[output.index] = LogprobAligner(self._model.token_texts, eos_token_ids)
        return aligner.push(output)

    def shape(self, entries: list[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(entries, self._model.token_texts) if self._wanted else None


class ChatStream(StreamWriter):
    """Chunks: the role first for each choice, then what is new, the last with the finish_reason."""

    def __init__(self, head: AnswerHead, logprobs: _Logprobs, include_usage: bool) -> None:
        self._head = head
        self._logprobs = logprobs
        self._usage = UsageCounter()
        self._include_usage = include_usage
        self._chunks = ChunkEncoder(head, None if include_usage else UNSET)
        self._begun: set[int] = set()

    def events(self, output: Output) -> bytes:
        self._usage.add(output)
        events = b""
        if output.index not in self._begun:
            self._begun.add(output.index)
            events = self._chunk(ChunkChoice(output.index, Delta(role="assistant", content=""), None, None))
        entries = self._logprobs.entries(output)
        reason = output.finish_reason
        if output.text or entries or reason is not None:
            delta = Delta(content=output.text) if output.text or entries else Delta()
            choice = ChunkChoice(output.index, delta, self._logprobs.shape(entries) if entries else None, reason)
            if reason is not None:
                choice.stop_reason = output.stop_reason
            events += self._chunk(choice)
        return events

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return self._chunks.event(choice)

    def last_events(self) -> bytes:
        return sse(self._head.answer((), self._usage.usage())) if self._include_usage else b""


class ChatAnswer(AnswerWriter):
    """One body when every continuation has ended."""

    def __init__(self, head: AnswerHead, logprobs: _Logprobs) -> None:
        self._head = head
        self._logprobs = logprobs
        self._usage = UsageCounter()
        self._texts: dict[int, list[str]] = {}
        self._entries: dict[int, list[TokenLogprobs]] = {}
        self._ends: dict[int, Output] = {}

    def add(self, output: Output) -> None:
        self._usage.add(output)
        self._texts.setdefault(output.index, []).append(output.text)
        self._entries.setdefault(output.index, []).extend(self._logprobs.entries(output))
        if output.finish_reason is not None:
            self._ends[output.index] = output

    def body(self) -> bytes:
        choices = (self._choice(index, end) for index, end in sorted(self._ends.items()))
        return encode_answer(self._head, choices, self._usage.usage())

    def _choice(self, index: int, end: Output) -> ChatChoice:
        assert end.finish_reason is not None
        message = Message("".join(self._texts[index]))
        logprobs = self._logprobs.shape(self._entries[index])
        return ChatChoice(index, message, logprobs, end.finish_reason, end.stop_reason)
