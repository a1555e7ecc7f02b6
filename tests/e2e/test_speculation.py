"""Speculation through the server: the same answers with it and without, on text that repeats itself."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

ARTICLE = (
    "The old lighthouse at Cape Morrow was built in 1871 by the engineer Tobias Hale. The tower is 42 metres tall and "
    "made of grey granite that was brought by ship from the quarries of Saint Aubin. In 1964 the light was automated, "
    "and the last keeper, Maria Lindqvist, moved to the village of Eastport."
)
CODE = '''def read_records(path, delimiter=","):
    """Reads the records of a text file, one a line."""
    records = []
    with open(path) as handle:
        for line in handle:
            records.append(line.strip().split(delimiter))
    return records
'''
ASKED = [
    f"Rewrite this article as a list of facts, keeping its words:\n\n{ARTICLE}",
    f"Summarize the following article in two sentences.\n\n{ARTICLE}",
    f"Rename the variable `handle` to `stream` in this code and print the whole code again:\n\n```python\n{CODE}```",
    f"Copy this code exactly:\n\n```python\n{CODE}```",
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 11},
    {"temperature": 0.4, "seed": 12, "top_p": 0.9, "top_k": 50},
    {"temperature": 0, "frequency_penalty": 0.4, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.5, "seed": 13, "repetition_penalty": 1.05, "n": 2, "stop": ["Eastport", "return"]},
]
BODIES = [
    {
        "model": "smollm2",
        "messages": [{"role": "user", "content": ASKED[number % len(ASKED)]}],
        "max_tokens": 48,
        **sampling,
    }
    for number, sampling in enumerate(SAMPLING)
]

Serve = Callable[..., contextlib.AbstractContextManager[Any]]


def answers(url: str) -> list[Any]:
    """All at once; each once whole and once streamed."""
    with httpx.Client(base_url=url, timeout=240) as client, ThreadPoolExecutor() as threads:
        ways = (whole, streamed)
        return list(threads.map(lambda case: case[0](client, case[1]), itertools.product(ways, BODIES)))


def whole(client: httpx.Client, body: dict[str, Any]) -> Any:
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    document = reply.json()
    usage = {name: document["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return [rounded(choice) for choice in document["choices"]], usage


def rounded(choice: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities to 3 digits: a row of logits is the same to rounding, however many were computed with it."""
    text = json.dumps(choice, sort_keys=True)
    decoded: dict[str, Any] = json.loads(text, parse_float=lambda number: round(float(number), 3))
    return decoded


def streamed(client: httpx.Client, body: dict[str, Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    delta = choice["delta"].get("content") or ""
                    texts[choice["index"]] = texts.get(choice["index"], "") + delta
    return texts


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^castline:(\w+)\{[^}]*\} (\S+)$", text, re.M)}


def test_the_same_answers(fp32_engine: Path, serve: Serve) -> None:
    """Lossless is a promise of every byte: greedy and sampled, with penalties, stops, log-probabilities and n."""
    with serve(fp32_engine, "--speculation", "off") as running:
        without, plain = answers(running.http_url), metrics(running.http_url)
        assert "speculation: off" in running.log
    with serve(fp32_engine) as running:
        with_guesses, counted = answers(running.http_url), metrics(running.http_url)
        assert "speculation: prompt lookup where it pays, up to 7 tokens ahead" in running.log
    assert with_guesses == without
    assert plain["spec_drafted_tokens_total"] == plain["spec_accepted_tokens_total"] == 0
    accepted, drafted = counted["spec_accepted_tokens_total"], counted["spec_drafted_tokens_total"]
    assert counted["generation_tokens_total"] * 0.2 < accepted <= drafted
