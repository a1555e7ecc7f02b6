"""Text to token ids and back, and conversations to prompts, from the tokenizer files of a bundle."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as Backend

from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.runtime.chat_template import ChatTemplate
from castline.runtime.text_bound import text_bound
from castline.runtime.token_bytes import TextBytes, TokenBytes

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT_TEMPLATE = "default"


class Tokenizer:
    """Over the `tokenizers` library. Immutable after construction, so every method may be called from any thread.

    Its vocabulary may be smaller than the model's (padded embeddings): such ids stand for no text. It may be
    larger: ids that the model lacks are refused with the prompt.
    """

    vocab_size: int
    """Largest token id + 1."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text: those of generation_config.json and the tokenizer's own."""
    has_chat_template: bool

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """*special_tokens* maps names such as bos_token to their text; *eos_token_ids* adds to eos_token's.

        Raises EngineError for a vocabulary whose tokens have no bytes of their own.
        """
        backend.no_truncation()  # a tokenizer.json may carry the settings it was trained with
        backend.no_padding()
        self._backend = backend
        self._bytes = TokenBytes(backend)
        vocab = backend.get_vocab(with_added_tokens=True)
        self._bound = text_bound(backend, vocab)
        self.whole_texts: dict[int, str] = {}
        """Detokenizer's memory of tokens that are whole characters, or nothing, inside a text."""
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(vocab.values(), default=-1) + 1

        names = dict(special_tokens or {})
        self._bos_text = names.get("bos_token", "")
        self.bos_token_id = backend.token_to_id(self._bos_text) if self._bos_text else None
        own_eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own_eos is None else [own_eos])]))
        self._adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

        self._chat_template: ChatTemplate | None = None
        self._no_template = "this model has no chat template"
        if chat_template is not None:
            try:
                self._chat_template = ChatTemplate(chat_template, names)
            except jinja2.TemplateSyntaxError as error:
                self._no_template = f"this model's chat template has an error in line {error.lineno} ({error.message})"
        self.has_chat_template = self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens spelled out in the text are recognised. Raises RequestError for what is not
        Unicode text.
        """
        try:
            # Encoding a batch lets other threads run meanwhile; encoding one text holds the interpreter lock.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise _not_text(text) from None
        ids: list[int] = encoding.ids
        return ids

    def has_more(self, text: str, num_tokens: int) -> bool:
        """Whether *text* has more tokens than that, as far as it is known without encoding it: True is for sure."""
        return self._bound.is_exceeded(text, num_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; each maximal run of bytes that is no UTF-8 is one U+FFFD."""
        text = TextBytes(self._bytes, at_start=True)
        shown = (t for t in token_ids if not (skip_special_tokens and self.is_special(t)))
        return b"".join(text.push(t) for t in shown).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text; joined over a text they are its UTF-8. Empty for unknown ids."""
        return self._bytes.of(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup, which decoding skips."""
        return token_id in self._special_ids

    def continuation(self, prompt_token_ids: Sequence[int]) -> TextBytes:
        """The bytes of a text that goes on from a prompt: only after a prompt without visible text is it at its
        start.
        """
        for token_id in reversed(prompt_token_ids):  # of most prompts the last token tells
            if token_id not in self._special_ids and self._bytes.of(token_id):
                return TextBytes(self._bytes, at_start=False)
        return TextBytes(self._bytes, at_start=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, to be encoded with ``add_special_tokens=False``.

        It begins with exactly one BOS where the tokenizer would add one, whether or not the template prints it. Raises
        RequestError where there is no template, or the template refuses.
        """
        if self._chat_template is None:
            raise RequestError(
                f"{self._no_template}, so it cannot take messages; send a prompt to the completions API, or build the "
                "engine again from a checkpoint with a valid chat_template.jinja",
                code=ErrorCode.UNSUPPORTED,
            )
        text = self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        if self._adds_bos and not text.lstrip().startswith(self._bos_text):
            return self._bos_text + text
        return text


def _not_text(text: Any) -> RequestError:
    """Why the library takes *text* for no string."""
    if not isinstance(text, str):
        return RequestError(f"a prompt must be a string, not {type(text).__name__}", field="prompt")
    place, code = next((place, ord(char)) for place, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF)
    return RequestError(
        f"character {place} is the lone surrogate U+{code:04X}, which no text may hold; send the full pair or none",
        field="prompt",
    )


def load_tokenizer(bundle_dir: Path) -> Tokenizer:
    """The tokenizer of a bundle: tokenizer.json, and where present tokenizer_config.json, chat_template.jinja and
    generation_config.json. Raises EngineError naming the file that is missing or damaged."""
    path = bundle_dir / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"{bundle_dir} has no tokenizer.json; rebuild the engine")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise EngineError(f"{path} cannot be read: {error}; rebuild the engine") from None
    config = _read_json(bundle_dir / "tokenizer_config.json")
    generation = _read_json(bundle_dir / "generation_config.json")
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(config),
        eos_token_ids=_as_ids(generation.get("eos_token_id"), bundle_dir / "generation_config.json"),
        chat_template=_chat_template(bundle_dir, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path} is not valid JSON: {error}; rebuild the engine") from None
    if not isinstance(content, dict):
        raise EngineError(f"{path} must hold a JSON object; rebuild the engine")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names to texts; a token is written as its text or as an object with its content."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _as_ids(value: Any, path: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise EngineError(f"{path}: eos_token_id is {value!r}, not a token id or a list of them; rebuild the engine")
    return ids


def _chat_template(bundle_dir: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the configuration's template, else the one named default in its list."""
    path = bundle_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get(_DEFAULT_TEMPLATE)
    return template if isinstance(template, str) else None
