"""The engine core with the real sampler: what a request gets does not depend on what ran beside it."""

from itertools import pairwise

import pytest

from castline.runtime.sampler import Sampler

MIXES = [
    {"temperature": 0.0},
    {"temperature": 5.0, "seed": 3},
    {"temperature": 4.0, "seed": 4, "n": 3, "logprobs": 2},
    {"temperature": 3.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 2.0, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 50.0, 8: -100.0}},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0, "frequency_penalty": 1.5},
]


@pytest.fixture
def serve(make_engine):
    """Runs requests (prompt, params) together on one engine; the tokens of each continuation, and the engine."""

    def serve(requests, **limits):
        engine = make_engine(max_model_len=40, sampler=Sampler(97, (96,)), **limits)
        for number, prompt, params in requests:
            engine.add(f"r{number}", prompt, max_tokens=15, ignore_eos=True, **params)
        engine.run()
        return {(e.request_id, e.index): engine.tokens(e.request_id, e.index) for e in engine.events}, engine

    return serve


@pytest.mark.parametrize("num_blocks", [12, 200])
def test_tokens_do_not_depend_on_the_batch(serve, num_blocks):
    """C13, C27: penalties counted twice after a preemption, or one random stream for a batch, show up here."""
    requests = [(n, [n % 5, *range(n % 7 + 1)], MIXES[n % len(MIXES)]) for n in range(24)]
    together, engine = serve(requests, num_blocks=num_blocks, max_num_batched_tokens=7)
    assert (engine.core.stats().preemptions > 0) == (num_blocks == 12)
    alone = {}
    for request in requests:
        alone |= serve([request], num_blocks=64)[0]
    assert together == alone
    assert len(engine.sampler) == 0


def test_a_row_of_nan_ends_one_sequence(make_engine):
    """The sampler names the broken row; the engine ends that sequence in the same step and no other."""
    engine = make_engine(sampler=Sampler(97, (96,)))
    execute = engine.executor.execute

    def execute_and_break(step):
        logits = execute(step)
        spans = pairwise(step.cu_query_lens.tolist())
        logits[[95 in step.input_ids[begin:end] for begin, end in spans]] = float("nan")
        return logits

    engine.executor.execute = execute_and_break
    engine.add("a", range(6), max_tokens=4)
    engine.add("bad", [1, 2, 95], max_tokens=4)
    engine.run()
    assert "NaN" in engine.finish("bad").message
    assert engine.tokens("a") == engine.expected("a", 4)
