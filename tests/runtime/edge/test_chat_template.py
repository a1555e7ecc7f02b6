"""Chat templates: what Hugging Face templates expect, and whose fault a failure is."""

from datetime import datetime

import jinja2
import pytest
from tokenizers import Tokenizer as Backend

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.chat_template import ChatTemplate
from castline.runtime.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: object = USER, *, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, TOKENS, now=lambda: datetime(2026, 5, 17))
    return template.render(messages, add_generation_prompt=add_generation_prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n    {% set x = 1 %}\na\n{% endif %}\n", "a\n"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ '<é & ü>' | tojson }}", '"<é & ü>"'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "17 May 2026"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|", "<s>|</s>||"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}", "hi!"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)
def test_templates_find_what_they_expect(source: str, expected: str) -> None:
    """Each is a construct of published templates; without it they raise, or print spaces the model never saw."""
    assert render(source) == expected


def test_generation_prompt_is_optional() -> None:
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ messages.append(1) }}", "not safely callable|immutable|unsafe|append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|__class__|undefined"),
        ("{{ range(10000000) | list }}", "Range too big"),
    ],
)
def test_a_template_that_raises_is_the_requests_error(source: str, reason: str) -> None:
    """C44: 400 with the template's own words, never 500; and nothing reaches outside the sandbox."""
    with pytest.raises(RequestError, match=reason) as caught:
        render(source)
    assert (caught.value.field, caught.value.code) == ("messages", ErrorCode.INVALID_VALUE)


def test_text_parts_become_one_string() -> None:
    """OpenAI clients send content as parts; templates know strings."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert render("[{{ messages[0].content }}]", [{"role": "user", "content": []}]) == "[]"


def test_the_callers_messages_are_left_alone() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "one"}]}
    render("{{ messages[0].content }}", [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "one"}]}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_messages_that_cannot_be_used_are_named(messages: object, field: str) -> None:
    """An image that is dropped silently gives a confident answer about nothing."""
    with pytest.raises(RequestError) as caught:
        render("x", messages)
    assert caught.value.field == field
    assert field.split(".")[0].split("[")[0] in caught.value.message


def test_no_template_is_refused_with_the_cure(backends: dict[str, Backend]) -> None:
    """C44: completions still works, and the message says so."""
    tokenizer = Tokenizer(backends["byte_level"], special_tokens=TOKENS)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*completions API.*chat_template\.jinja") as caught:
        tokenizer.render_chat(USER)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_template_with_a_syntax_error_leaves_completions_working(backends: dict[str, Backend]) -> None:
    """One bad file of the model must not keep the engine from starting."""
    tokenizer = Tokenizer(backends["byte_level"], special_tokens=TOKENS, chat_template="a\n{% if %}")
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="error in line 2"):
        tokenizer.render_chat(USER)
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}x", "x", "\n{{ bos_token }}x", "{% for m in messages %}{{ bos_token }}x{% endfor %}"]
)
def test_a_chat_prompt_has_exactly_one_bos(backends: dict[str, Backend], template: str) -> None:
    """C43: two BOS tokens, or none, quietly worsen every answer of a Llama-like model."""
    tokenizer = Tokenizer(backends["llama_like"], special_tokens=TOKENS, chat_template=template)
    ids = tokenizer.encode(tokenizer.render_chat(USER), add_special_tokens=False)
    assert ids.count(1) == 1
    assert ids[0] == 1 or template.startswith("\n")


def test_no_bos_where_the_tokenizer_adds_none(backends: dict[str, Backend]) -> None:
    tokenizer = Tokenizer(backends["byte_level"], special_tokens=TOKENS, chat_template="x")
    assert tokenizer.render_chat(USER) == "x"


def test_the_demo_models_prompt(smollm2: Tokenizer) -> None:
    """The exact text the demo model was trained on."""
    assert smollm2.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
