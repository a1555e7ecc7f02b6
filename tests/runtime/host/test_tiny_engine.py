"""Greedy text of a real engine does not depend on what runs beside it, nor on how its prompt was computed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from castline.llm import LLM
from castline.runtime.sampling_params import SamplingParams

Reference = Callable[[Sequence[int], int], list[int]]

PROMPTS = [
    "The quick brown fox jumps over the lazy dog",
    "x",
    "abcdefghijklmno",
    "abcdefghijklmnop",
    "abcdefghijklmnopq",
    "Byte by byte, " * 8,
    "same beginning, first end",
    "same beginning, second end",
]
LENGTH = 48
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [reference(prompt.encode(), LENGTH) for prompt in PROMPTS]


def tokens(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"max_model_len": 192, "kv_blocks": 12},
    ],
    ids=["batched", "chunks of 16", "chunks of 8", "one at a time", "preempted"],
)
def test_greedy_tokens_equal_the_slow_model(
    tiny_repository: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    """C27: a neighbour, a chunk boundary or a preemption that changes a text; block edges at 15 to 17 tokens too."""
    with LLM(tiny_repository, **options) as llm:
        assert tokens(llm, PROMPTS) == expected
        if "kv_blocks" in options:
            assert llm.stats().preemptions > 0, "the pool was meant to be too small"


def test_alone_and_after_a_prefix_hit(tiny_repository: Path, expected: list[list[int]]) -> None:
    """C27, C14: tokens read from the prefix cache must be those that computing gives, at every block edge."""
    with LLM(tiny_repository) as llm:
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            for expect_hit in (False, True):
                (result,) = llm.generate(prompt, GREEDY)
                assert result.outputs[0].token_ids == wanted
                if expect_hit:
                    assert result.cached_tokens == (len(prompt) - 1) // 16 * 16


def test_continuations_share_their_prompt(tiny_repository: Path, expected: list[list[int]]) -> None:
    """n > 1 forks blocks and copies on write: greedy, every continuation is the same text."""
    with LLM(tiny_repository) as llm:
        (result,) = llm.generate(PROMPTS[0], SamplingParams(n=4, temperature=0, max_tokens=LENGTH, ignore_eos=True))
        assert [output.token_ids for output in result.outputs] == [expected[0]] * 4
        assert llm.stats().kv_blocks_used == 0
