"""Tokenizer and chat template of a bundle."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. Implemented over the `tokenizers` library; no transformers."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; joined over a text they are its UTF-8."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises RequestError where there is no template or the template refuses."""
        ...
