"""Tokenizers of each kind that causal language models use, trained in memory, and the real one of the demo model."""

from collections.abc import Callable

import pytest
from gguf import GGUFReader
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from castline.builder.model_source import demo_path
from castline.runtime.tokenizer import Tokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
CORPUS = [
    "Hello world, how are you today? The quick brown fox jumps over the lazy dog.",
    "Grüße aus Köln, naïve café, 日本語のテキスト, emoji 🌍👩‍👩‍👧 and  double  spaces\n\tand tabs",
    "def main():\n    return [x * x for x in range(10)]",
] * 4


def byte_level() -> Backend:
    """GPT-2's kind: 256 byte characters and merges, so one character of text may span several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("€ plain", normalized=False)])
    return backend


def llama_like() -> Backend:
    """SentencePiece BPE as Llama 2 has it: a space put before the text, ▁ for spaces, byte tokens for the rest."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = sorted({char for text in CORPUS[:1] for char in text.replace(" ", "▁")} | {"▁"})
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("o", "w"), ("▁", "▁"), ("h", "e"), ("l", "l")]
    words += [left + right for left, right in merges if left + right not in words]
    vocab = {token: place for place, token in enumerate([*SPECIALS, *byte_tokens, *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def gemma_like() -> Backend:
    """As Llama 2's, but no space is put before the text or taken from it."""
    backend = llama_like()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram() -> Backend:
    """SentencePiece unigram with the Metaspace pair."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metaspace_unprefixed() -> Backend:
    """Metaspace where no space is put before the text, so none may be dropped from it."""
    backend = unigram()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "gemma_like": gemma_like,
    "unigram": unigram,
    "metaspace_unprefixed": metaspace_unprefixed,
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Backend]:
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture(scope="session")
def tokenizers_by_kind(backends: dict[str, Backend]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(backend, special_tokens=NAMES) for name, backend in backends.items()}


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer(kind: str, tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    """Each kind in turn."""
    return tokenizers_by_kind[kind]


@pytest.fixture(scope="session")
def backend(kind: str, backends: dict[str, Backend]) -> Backend:
    """The library's tokenizer behind `tokenizer`."""
    return backends[kind]


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The demo model's own vocabulary, from its GGUF file."""
    fields = GGUFReader(demo_path()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    backend = Backend(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True) if kind == 3
    ]
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        chat_template=fields["tokenizer.chat_template"].contents(),
    )
