"""A model's chat template: Jinja source from the bundle, rendered as Hugging Face templates expect.

The template came with a model and the messages come from users, so it runs in Jinja's immutable sandbox, and
whatever it raises is the request's error.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from castline.engines.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant")


def template_role(role: str, field: str) -> str:
    """The *role* that a message came with, as templates know it. Raises RequestError for *field* where it is none."""
    if role not in _ROLES:
        raise RequestError(f"{field} is {role!r}, and must be one of {', '.join(_ROLES)}", field=field)
    return "system" if role == "developer" else role


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; for serving it is its
    content.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """*special_tokens* are the names a template may use (bos_token, eos_token, …). Raises
        jinja2.TemplateSyntaxError.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt's text. Raises RequestError naming the message that cannot be used, or with the template's
        complaint.
        """
        if not messages:
            raise RequestError("messages is empty; send at least one message", field="messages")
        plain = [_plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=plain,
                tools=None,  # what transformers passes where there are none
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program that may fail in any way on messages it did not foresee
            reason = str(error) or type(error).__name__
            raise RequestError(f"the model's chat template refused the messages: {reason}", field="messages") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _plain_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The message with its content as one string: text parts are joined by line feeds."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} must be an object with role and content", field=name)
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{name}.role must be a string such as user", field=f"{name}.role")
    return {**message, "content": _plain_content(message.get("content"), f"{name}.content")}


def _plain_content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_part_text(part, f"{name}[{place}]") for place, part in enumerate(content))
    raise RequestError(f"{name} must be a string or a list of text parts", field=name)


def _part_text(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f'{name} has type {kind!r}; this model reads text only: {{"type": "text", "text": …}}', field=f"{name}.type"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{name}.text must be a string", field=f"{name}.text")
    text: str = part["text"]
    return text
