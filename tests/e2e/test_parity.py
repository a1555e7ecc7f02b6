"""The demo engine in fp32 says what transformers says, however its tokens were scheduled."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from castline import LLM, SamplingParams
from castline.builder.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

NUM_PROMPTS = 32
NUM_TOKENS = 64
SUBJECTS = ["a lighthouse", "the tax office", "prime numbers", "a cat", "the sea", "a compiler", "rain", "bread"]
TASKS = ["Write a sentence about {}.", "List three facts about {}:", "Q: What is {}?\nA:", "def f():  # about {}\n"]
FILLER = (
    " The answer should be short and plain, in words that a child of ten would know, with one example from daily life"
    " and no numbers above twelve. It should end with a full stop. Begin the answer here, on this very line:"
)
"""Makes every prompt longer than a KV block, and no two share their first block."""


def prompts() -> list[str]:
    texts = [task.format(subject) + FILLER for task in TASKS for subject in SUBJECTS]
    assert len(texts) == NUM_PROMPTS
    return texts


@pytest.fixture(scope="module")
def reference() -> Callable[[Sequence[int]], np.ndarray[Any, Any]]:
    """Argmax of transformers' logits in fp32 at every position of a text."""
    model = load_checkpoint("demo").model

    def argmax(token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        best: np.ndarray[Any, Any] = logits.argmax(-1).numpy()
        return best

    return argmax


def greedy(llm: LLM, texts: list[str]) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [tuple(result.outputs[0].token_ids) for result in llm.generate(texts, params)]


@pytest.fixture(scope="module")
def alone(fp32_engine: Path) -> list[tuple[int, ...]]:
    with LLM(fp32_engine) as llm:
        return [greedy(llm, [text])[0] for text in prompts()]


def test_alone_equals_transformers(
    fp32_engine: Path, alone: list[tuple[int, ...]], reference: Callable[[Sequence[int]], np.ndarray[Any, Any]]
) -> None:
    """A greedy text is right when each token is the reference's argmax after the tokens before it."""
    with LLM(fp32_engine) as llm:
        for text, token_ids in zip(prompts(), alone, strict=True):
            assert len(token_ids) == NUM_TOKENS
            prompt_ids = llm.tokenizer.encode(text)
            best = reference([*prompt_ids, *token_ids])
            np.testing.assert_array_equal(best[len(prompt_ids) - 1 : -1], token_ids, err_msg=text)


def test_batched_equals_alone(fp32_engine: Path, alone: list[tuple[int, ...]]) -> None:
    """Neighbours in the batch change nothing."""
    with LLM(fp32_engine, max_num_seqs=NUM_PROMPTS) as llm:
        assert greedy(llm, prompts()) == alone


def test_chunked_equals_alone(fp32_engine: Path, alone: list[tuple[int, ...]]) -> None:
    """A budget of 9 tokens cuts every prompt into chunks that ride with decodes."""
    with LLM(fp32_engine, max_num_batched_tokens=9, max_num_seqs=6) as llm:
        assert greedy(llm, prompts()) == alone


def test_prefix_hit_equals_alone(fp32_engine: Path, alone: list[tuple[int, ...]]) -> None:
    """Prompts read from the prefix cache give the text that computing them gave."""
    with LLM(fp32_engine) as llm:
        block_size = llm.limits.block_size
        cached = sum((len(llm.tokenizer.encode(text)) - 1) // block_size * block_size for text in prompts())
        assert greedy(llm, prompts()) == alone
        before = llm.stats().prefix_cache_hits
        assert greedy(llm, prompts()) == alone
        assert llm.stats().prefix_cache_hits - before == cached >= NUM_PROMPTS * block_size


def test_preempted_equals_alone(fp32_engine: Path, alone: list[tuple[int, ...]]) -> None:
    """A pool too small for those that run preempts, and no token changes."""
    with LLM(fp32_engine, kv_blocks=12, max_num_seqs=8, max_model_len=256) as llm:
        assert greedy(llm, prompts()) == alone
        assert llm.stats().preemptions > 0
