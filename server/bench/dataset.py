"""Prompts from a JSONL file: each line an object with ``prompt`` (text) or ``messages``, and perhaps ``max_tokens``."""

from pathlib import Path
from typing import Any

import msgspec

from castline.server.bench.errors import BenchError
from castline.server.bench.settings import Endpoint


class Row(msgspec.Struct, frozen=True):
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None
    """Instead of --output-tokens, for this row."""


def read_dataset(path: Path, endpoint: Endpoint) -> list[Row]:
    """Every row, checked against the endpoint. Raises BenchError naming the line, what is wrong and the cure."""
    decode = msgspec.json.Decoder(Row).decode
    rows: list[Row] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(f"--dataset {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BenchError(f"--dataset {path}, line {number}: {error}") from None
        if problem := _problem(row, endpoint):
            raise BenchError(f"--dataset {path}, line {number}: {problem}")
        rows.append(row)
    if not rows:
        raise BenchError(f"--dataset {path} has no rows; each line is an object with `prompt` or `messages`")
    return rows


def _problem(row: Row, endpoint: Endpoint) -> str | None:
    if (row.prompt is None) == (row.messages is None):
        return "a row has either `prompt` or `messages`"
    if not (row.prompt or row.messages):
        return "the prompt is empty"
    if row.messages is not None and endpoint == "completions":
        return "`messages` need --endpoint chat"
    if row.max_tokens is not None and row.max_tokens < 1:
        return f"max_tokens is {row.max_tokens}, and must be at least 1"
    return None
