"""Between the messages of castline.v1 and the runtime's values. Ranges are checked by the engine, shapes here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castline.engines.errors import RequestError
from castline.runtime.chat_template import template_role
from castline.runtime.client import Output, PromptInfo
from castline.runtime.events import FinishReason, TokenLogprobs
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.tokenizer import Tokenizer
from castline.server.errors import too_many_ids, too_many_messages
from castline.server.proto import castline_pb2 as pb
from castline.server.serving import MAX_MESSAGE_BYTES, ServedModel

_PLAIN: dict[str, Callable[[Any], Any]] = {"logit_bias": dict, "stop": tuple, "stop_token_ids": tuple}
"""What the library's own containers become."""
MANY_MESSAGES = 1000
"""A conversation of more is rendered in a thread: it takes tens of milliseconds."""
_FINISH = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Fields have the same names on both sides."""
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}  # those that are present
    for name, plain in _PLAIN.items():
        if name in given:
            given[name] = plain(given[name])
    return SamplingParams(**given)


def has_many_messages(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    """Whether making its prompt takes so long that streams should not stand still for it."""
    return len(request.messages.messages) > MANY_MESSAGES


def prompt_of(request: pb.GenerateRequest, tokenizer: Tokenizer, max_tokens: int) -> tuple[str | list[int], bool]:
    """The prompt, and whether the tokenizer adds its special tokens. On any thread.

    Raises RequestError naming the field, and for what must be more than *max_tokens* before it looks at it.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise RequestError("one of prompt, token_ids and messages must be set", field="input")
    if kind == "token_ids":
        if request.HasField("add_special_tokens"):
            raise RequestError("add_special_tokens has no effect on token_ids", field="add_special_tokens")
        if not request.token_ids.ids:
            raise RequestError("token_ids is empty", field="token_ids")
        if len(request.token_ids.ids) > max_tokens:
            raise too_many_ids(len(request.token_ids.ids), max_tokens, "token_ids")
        return list(request.token_ids.ids), False
    text = request.prompt if kind == "prompt" else render(request.messages, tokenizer, max_tokens)
    return text, _adds_special_tokens(request, is_text=kind == "prompt")


def text_of(request: pb.TokenizeRequest, tokenizer: Tokenizer, max_tokens: int) -> tuple[str, bool]:
    """As prompt_of. Raises RequestError naming the field."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise RequestError("one of text and messages must be set", field="input")
    text = request.text if kind == "text" else render(request.messages, tokenizer, max_tokens)
    return text, _adds_special_tokens(request, is_text=kind == "text")


def _adds_special_tokens(request: pb.GenerateRequest | pb.TokenizeRequest, *, is_text: bool) -> bool:
    """A template prints the special tokens that it wants; a text has none yet."""
    return bool(request.add_special_tokens) if request.HasField("add_special_tokens") else is_text


def render(chat: pb.ChatMessages, tokenizer: Tokenizer, max_tokens: int) -> str:
    """The prompt of a conversation. Raises RequestError where the template, or the lack of one, refuses."""
    if not chat.messages:
        raise RequestError("messages is empty; send at least one message", field="messages")
    if len(chat.messages) > max_tokens:
        raise too_many_messages(max_tokens)
    messages: list[Mapping[str, str]] = []
    for i, message in enumerate(chat.messages):
        rendered = {"role": template_role(message.role, f"messages[{i}].role"), "content": message.content}
        if message.HasField("name"):
            rendered["name"] = message.name
        messages.append(rendered)
    return tokenizer.render_chat(messages)


class ResponseWriter:
    """Outputs of one request to messages; the last one carries the usage."""

    def __init__(self, request_id: str, n: int, tokenizer: Tokenizer) -> None:
        self._request_id = request_id
        self._num_running = n
        self._tokenizer = tokenizer
        self._usage = pb.Usage()

    def message(self, output: Output) -> pb.GenerateResponse:
        message = pb.GenerateResponse(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids,
            request_id=self._request_id,
        )
        if output.logprobs:
            message.logprobs.extend([self._entry(entry) for entry in output.logprobs])
        self._usage.completion_tokens += len(output.token_ids)
        if output.prompt is not None:
            message.prompt.CopyFrom(self._prompt(output.prompt))
            self._usage.prompt_tokens = len(output.prompt.prompt_token_ids)
            self._usage.cached_tokens = output.prompt.cached_tokens
        if output.finish_reason is not None:
            message.finish_reason = _FINISH[output.finish_reason]
            if isinstance(output.stop_reason, str):
                message.stop_string = output.stop_reason
            elif output.stop_reason is not None:
                message.stop_token_id = output.stop_reason
            self._num_running -= 1
            if self._num_running == 0:
                message.usage.CopyFrom(self._usage)
        return message

    def _prompt(self, prompt: PromptInfo) -> pb.PromptInfo:
        entries: Sequence[TokenLogprobs | None] = prompt.prompt_logprobs or ()
        return pb.PromptInfo(
            token_ids=prompt.prompt_token_ids,
            cached_tokens=prompt.cached_tokens,
            logprobs=[pb.TokenLogprobs() if entry is None else self._entry(entry) for entry in entries],
        )

    def _entry(self, entry: TokenLogprobs) -> pb.TokenLogprobs:
        return pb.TokenLogprobs(
            chosen=self._token(entry.token_id, entry.logprob),
            rank=entry.rank,
            top=[self._token(token_id, logprob) for token_id, logprob in entry.top],
        )

    def _token(self, token_id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token_id, token=self._tokenizer.token_bytes(token_id), logprob=logprob)


def model_info(model: ServedModel) -> pb.ModelInfoResponse:
    manifest, limits = model.engine.manifest, model.engine.limits
    facts = manifest.model
    return pb.ModelInfoResponse(
        name=model.name,
        architecture=facts.architecture,
        source=facts.source,
        num_parameters=facts.num_parameters,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        bos_token_id=facts.bos_token_id,
        has_chat_template=model.engine.tokenizer.has_chat_template,
        recipe=manifest.precision.recipe,
        kv_dtype=manifest.precision.kv_dtype,
        target=manifest.host.target,
        limits=pb.ServingLimits(
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_block_size=limits.block_size,
            num_kv_blocks=limits.num_blocks,
            max_concurrency=limits.max_concurrency,
            max_waiting=limits.max_waiting,
            max_message_bytes=MAX_MESSAGE_BYTES,
        ),
        castline_version=manifest.castline_version,
        tool_versions=manifest.tool_versions,
    )
