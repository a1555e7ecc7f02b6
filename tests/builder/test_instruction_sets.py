"""The default demo engine on every instruction set that this host has: as near to the model in fp32 as its recipe
promises, and the same text however its tokens were scheduled.

CASTLINE_ISA counts when nodes are made, so that one process can have them all. Portable kernels take a tenth of a
second a token: texts are short.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from castline import LLM, SamplingParams
from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.recipes import recipe
from castline.builder.torch_reference import torch_reference
from castline.builder.verify import Reference, VerifyCase, judge, measure, shipped_case
from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import read_manifest
from castline.engines.repository import find_bundle
from castline.plugins.cpu.library import active_isa, available_isas
from castline.plugins.cpu.session import CpuSession, SessionOptions

pytestmark = pytest.mark.slow

COMPARED = 20
"""Tokens of each of the five passages: a hundred in all, in steps of many and again in steps of few."""
PROMPT, NEW = 36, 6
"""Tokens of a prompt, which is longer than a KV block, and of its continuation."""
NOT_SCHEDULED = {"amx", "portable"}
"""With matrix units steps of many rows take wide kernels, which round otherwise: a token's logits follow from the size
of its step, and texts that were scheduled otherwise may differ. Portable kernels are slow, and tests/plugins holds them
to the same bits, kernel by kernel."""


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CASTLINE_ISA", request.param)
    assert active_isa() == request.param
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("demo")


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Reference:
    """Asks transformers once about each text."""
    logits = cache(torch_reference(checkpoint.model))
    return lambda tokens: logits(tuple(tokens))


@pytest.fixture(scope="module")
def case(checkpoint: Checkpoint) -> VerifyCase:
    """What builds are verified on."""
    encode = checkpoint.tokenizer.backend_tokenizer.encode
    return shipped_case(lambda text: encode(text).ids, checkpoint.facts.vocab_size, checkpoint.facts.max_position)


@pytest.mark.parametrize("isa", available_isas(), indirect=True)
def test_distance(isa: str, default_engine: Path, case: VerifyCase, reference: Reference) -> None:
    """A build verifies the kernels of its own host: those of others would be wrong where nobody looks."""
    bundle = find_bundle(default_engine)
    manifest = read_manifest(bundle)
    model, limits, kv_dtype = manifest.model, manifest.limits, manifest.precision.kv_dtype
    assert (manifest.precision.recipe, kv_dtype) == ("q4_1", "int8")
    short = replace(
        case, passages=tuple(tokens[:COMPARED] for tokens in case.passages), prompts=case.prompts[:1], greedy_tokens=1
    )
    with CpuSession(
        bundle / manifest.graph_file,
        num_blocks=short.num_blocks(limits.block_size),
        block_size=limits.block_size,
        block_bytes=kv_block_bytes(model.num_kv_heads, model.head_dim, limits.block_size, kv_dtype),
        options=SessionOptions(num_threads=1),
    ) as engine:
        report = judge(measure(short, engine, reference, limits), recipe("q4_1").tolerance_for(kv_dtype))
    assert report.parity.num_tokens == 5 * COMPARED
    assert report.parity.verified, report.parity


def greedy(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    return [tuple(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa not in NOT_SCHEDULED], indirect=True)
def test_schedules(isa: str, default_engine: Path, case: VerifyCase) -> None:
    """C27: rows of 8-bit activations and int8 KV blocks in kernels that see their neighbours, or the step's size."""
    prompts = [tokens[:PROMPT] for tokens in case.passages[:2]]

    def load(max_num_batched_tokens: int) -> LLM:
        """Small limits: a start warms up with the largest step."""
        limits = {"kv_blocks": 8, "max_model_len": 64, "max_num_seqs": 2}
        return LLM(
            default_engine, threads=1, speculation="off", max_num_batched_tokens=max_num_batched_tokens, **limits
        )

    with load(PROMPT) as llm:
        alone = [greedy(llm, [prompt])[0] for prompt in prompts]
        assert llm.stats().prefix_cache_hits == 0
    with load(2 * PROMPT) as llm:
        assert greedy(llm, prompts) == alone, "batched"
        assert greedy(llm, prompts) == alone, "from the prefix cache"
        cached = (PROMPT - 1) // llm.limits.block_size * llm.limits.block_size
        assert llm.stats().prefix_cache_hits == len(prompts) * cached > 0
    with load(9) as llm:
        assert greedy(llm, prompts) == alone, "in chunks"
