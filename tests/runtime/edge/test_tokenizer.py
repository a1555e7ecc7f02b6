"""Tokenizer: the library's answers, byte by byte, and the bundle's files."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from castline.engines.errors import EngineError, RequestError
from castline.runtime.tokenizer import Tokenizer, load_tokenizer

relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=40)


@relaxed
@given(text=texts)
def test_decoding_an_encoded_text_equals_the_library(tokenizer: Tokenizer, backend: Backend, text: str) -> None:
    """Our decoding goes by bytes of our own; for text it must be the library's, prefix space and all."""
    ids = backend.encode(text, add_special_tokens=True).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


@relaxed
@given(data=st.data())
def test_decoding_random_tokens_equals_the_library_where_bytes_are_valid(
    tokenizer: Tokenizer, backend: Backend, data: st.DataObject
) -> None:
    """A model may emit any sequence. For invalid byte tokens the library has other counts of U+FFFD; both have some."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    ours, theirs = tokenizer.decode(ids), backend.decode(ids)
    assert ours == theirs or ("\ufffd" in ours and "\ufffd" in theirs)


@relaxed
@given(text=texts)
def test_token_bytes_join_to_the_text(tokenizers_by_kind: dict[str, Tokenizer], text: str) -> None:
    """Logprobs report bytes of each token: a client that joins them must get the text (C38)."""
    for name in ("byte_level", "gemma_like"):
        tokenizer = tokenizers_by_kind[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(t) for t in ids).decode() == tokenizer.decode(
            ids, skip_special_tokens=False
        )


def test_ids_outside_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer) -> None:
    """Models pad their embeddings: an id that the tokenizer lacks may be sampled, and must not raise."""
    for unknown in (-1, tokenizer.vocab_size, tokenizer.vocab_size + 1000, 1 << 40):
        assert tokenizer.token_bytes(unknown) == b""
        assert tokenizer.decode([unknown]) == ""


def test_vocab_size_covers_holes() -> None:
    """vocab_size bounds ids, so it is the largest id + 1, not the number of tokens."""
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a")))
    assert tokenizer.vocab_size == 10


def test_bos_is_added_once_to_an_empty_prompt(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """C33: "" is one BOS where the tokenizer adds one, and no token at all where it does not."""
    llama = tokenizers_by_kind["llama_like"]
    assert llama.encode("") == [llama.bos_token_id]
    assert tokenizers_by_kind["byte_level"].encode("") == []


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "x" * 10 + "\udc00y"])
def test_lone_surrogates_are_the_requests_error(tokenizer: Tokenizer, text: str) -> None:
    """JSON can smuggle in half a surrogate pair; the library's TypeError would be a 500."""
    with pytest.raises(RequestError, match=r"surrogate U\+D") as caught:
        tokenizer.encode(text)
    assert caught.value.field == "prompt"


def test_a_prompt_that_is_no_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="must be a string, not int"):
        tokenizer.encode(5)  # type: ignore[arg-type]


def test_encoding_is_thread_safe(tokenizer: Tokenizer) -> None:
    """Every transport shares one tokenizer: answers must not depend on who else is encoding."""
    texts = [f"Grüße {n} 🌍 hello world" * (n % 5 + 1) for n in range(200)]
    expected = [tokenizer.decode(tokenizer.encode(text)) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == expected


def test_other_threads_run_while_a_long_text_is_encoded(smollm2: Tokenizer) -> None:
    """Prevents one long prompt from stopping every stream and health check until it is tokenised."""
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(smollm2.encode, "hello wor " * 100_000)
        while not encoding.done():
            turns += 1
            time.sleep(0.001)
    assert len(encoding.result()) > 100_000
    assert turns > 20


def test_training_settings_in_the_file_do_not_cut_prompts(backends: dict[str, Backend], tmp_path: Path) -> None:
    """tokenizer.json may carry truncation and padding: serving with them would silently shorten or lengthen prompts."""
    backend = Backend.from_str(backends["byte_level"].to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=300)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcdefghijklmnopqrstuvwxyz" * 3)) not in (4, 300)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
    ],
)
def test_a_decoder_that_needs_neighbours_is_refused_at_load(decoder: decoders.Decoder) -> None:
    """Such tokens have no bytes of their own; guessing would garble every streamed text."""
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(EngineError, match=r"decoder step .* is not supported"):
        Tokenizer(backend)


def test_without_a_decoder_tokens_are_joined_by_spaces() -> None:
    """What the library does for word-level vocabularies."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert Tokenizer(backend).decode([0, 1, 1]) == backend.decode([0, 1, 1]) == "a b b"


# Bundles


@pytest.fixture
def bundle(backends: dict[str, Backend], tmp_path: Path) -> Path:
    backends["llama_like"].save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_load_reads_special_tokens_and_template(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_text("{{ bos_token }}hi{{ eos_token }}")
    tokenizer = load_tokenizer(bundle)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>hi</s>"


@pytest.mark.parametrize(("value", "expected"), [([7, 2, 9], (7, 2, 9)), (5, (5, 2)), (None, (2,))])
def test_eos_ids_of_generation_config_and_tokenizer_unite(
    bundle: Path, value: object, expected: tuple[int, ...]
) -> None:
    """C25: chat models list several EOS ids in generation_config.json; missing one means text that never ends."""
    (bundle / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_tokenizer(bundle).eos_token_ids == expected


def test_the_default_of_named_templates_is_taken(bundle: Path) -> None:
    config = json.loads((bundle / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    (bundle / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(bundle).render_chat([{"role": "user", "content": "x"}]) == "<s>plain"


def test_the_template_file_wins_over_the_configuration(bundle: Path) -> None:
    (bundle / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (bundle / "chat_template.jinja").write_text("new")
    assert load_tokenizer(bundle).render_chat([{"role": "user", "content": "x"}]) == "new"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "not a token id"),
    ],
)
def test_damaged_files_are_named(bundle: Path, name: str, content: str, message: str) -> None:
    (bundle / name).write_text(content)
    with pytest.raises(EngineError, match=message):
        load_tokenizer(bundle)


def test_a_bundle_without_tokenizer_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_the_demo_models_tokenizer(smollm2: Tokenizer) -> None:
    """The real vocabulary: ids known from the model's own prompts."""
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.encode("hi") == [6004]
    assert smollm2.decode(smollm2.encode("<|im_start|>Grüße 🌍, 日本!")) == "Grüße 🌍, 日本!"
