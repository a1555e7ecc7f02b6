"""The executor's steps, one property each, on a driver in memory."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_cuda.model import FakeModel

from castline.engines.device_memory import buffer_bytes
from castline.engines.errors import EngineError
from castline.engines.manifest import Limits
from castline.plugins.contract import LOGITS, kv_pool_name
from castline.plugins.cpu.sampling import CHOICE, NO_TOKEN
from castline.plugins.tensorrt.engine import PlanTensor
from castline.runtime.tensorrt import step_outputs
from castline.runtime.tensorrt.executor import TensorRtExecutor

PROMPT = [3, 1, 4, 1, 5]


def prefill(rig: Any, blocks: tuple[int, ...] = (7, 2)) -> int:
    """The token after PROMPT, whose KV then is in *blocks*."""
    return int(rig.run(rig.tensors([(0, PROMPT, blocks)]), [0]).tokens[0])


def test_a_prompt_and_its_decodes(rig: Any) -> None:
    """Tokens and logits are those of the whole text, read back through the block table."""
    text = [*PROMPT, prefill(rig)]
    assert text[-1] == rig.next_token(PROMPT)
    while len(text) < 20:
        blocks = [7, 2, 30, 11, 0][: -(-len(text) // 4)]
        output = rig.run(rig.tensors([(len(text) - 1, text[-1:], blocks)]), [0], [0])
        np.testing.assert_array_equal(output.logits[0], rig.last_logits(text))
        assert output.tokens.tolist() == [rig.next_token(text)]
        text += output.tokens.tolist()


def test_decodes_are_graphs_of_the_next_larger_size(make_rig: Callable[..., Any]) -> None:
    """A decode of 3 rows runs as one of 4, and no kernel of the plan is launched by itself."""
    rig = make_rig(max_num_seqs=6)
    prompts = [[i + 1] for i in range(6)]
    for row in range(6):
        rig.run(rig.tensors([(0, prompts[row], [row])]), [0])
    for count in range(1, 7):
        rig.driver.launched.clear()
        output = rig.run(rig.tensors([(0, prompts[row], [row]) for row in range(count)]), range(count))
        assert rig.driver.launched == ["graph", "greedy"]
        assert output.tokens.tolist() == [rig.next_token(one) for one in prompts[:count]]
    sizes = [graph.layout.sizes.sequences for graph in rig.executor._graphs._graphs]
    assert sizes == [1, 2, 4, 6]
    assert rig.executor._graphs.fitting(3).layout.sizes.sequences == 4


def test_padding_touches_no_block(rig: Any) -> None:
    """Rows that fill up a graph must not read or write anybody's keys: no block is set apart for them."""
    before = [rig.driver.device.view(pool, 40 * rig.model.block_bytes).copy() for pool in rig.executor._pools]
    rig.run(rig.tensors([(0, [1], [9]), (0, [2], [8]), (0, [3], [5])]), [0, 1, 2])
    for pool, old in zip(rig.executor._pools, before, strict=True):
        now = rig.driver.device.view(pool, 40 * rig.model.block_bytes).reshape(40, -1)
        changed = np.flatnonzero((now != old.reshape(40, -1)).any(axis=1))
        assert changed.tolist() == [5, 8, 9]


def test_warm_up_writes_nothing(rig: Any) -> None:
    """The pool is empty when the engine is ready; captures run on sequences of no tokens."""
    rig.driver.synchronize(rig.executor._stream)
    for pool in rig.executor._pools:
        assert not rig.driver.device.view(pool, 40 * rig.model.block_bytes).any()


def test_a_step_that_appends_nothing_writes_nothing(rig: Any) -> None:
    """Slot -1, as steps that only time the engine have it; a decode and a mixed step."""
    for sequences in ([(0, [1], [9])], [(0, [1, 2], [9]), (0, [1], [8])]):
        tensors = rig.tensors(sequences)
        tensors.slot_mapping[:] = -1
        rig.run(tensors, [0])
    for pool in rig.executor._pools:
        assert not rig.driver.device.view(pool, 40 * rig.model.block_bytes).any()


def test_a_step_continues_tokens_that_the_host_has_not_seen(rig: Any) -> None:
    """Two steps in flight, rows in another order, one token from the host; only copies of inputs and results move."""
    texts = [[1, 2], [3, 4], [5, 6]]
    rig.run(rig.tensors([(0, text[:1], [row]) for row, text in enumerate(texts)]), [0, 1, 2])
    first = rig.executor.submit(
        rig.step(rig.tensors([(1, text[1:], [row]) for row, text in enumerate(texts)]), [2, 0, 1])
    )
    expected = [rig.next_token(text) for text in texts]
    order = [(2, 0), (1, -1), (0, 1)]  # (row, draw of the step before)
    sequences = [(2, [expected[row] if draw < 0 else 90], [row]) for row, draw in order]
    second = rig.executor.submit(rig.step(rig.tensors(sequences), [0, 1, 2], continues=[draw for _, draw in order]))
    assert rig.executor.collect(first).tokens.tolist() == [expected[2], expected[0], expected[1]]
    following = [rig.next_token([*texts[row], expected[row]]) for row, _ in order]
    assert rig.executor.collect(second).tokens.tolist() == following


def test_collecting_does_not_wait_for_the_next_step(rig: Any) -> None:
    """The device would idle while the host schedules."""
    tensors = rig.tensors([(0, [1], [9])])
    first, second = (rig.executor.submit(rig.step(tensors, [0])) for _ in range(2))
    rig.executor.collect(first)
    pending = rig.executor._pending[0].results
    with pytest.raises(AssertionError, match="unsynchronised"):
        pending.tolist()
    rig.executor.collect(second)


def test_tickets_keep_their_order(rig: Any) -> None:
    tensors = rig.tensors([(0, [1], [9])])
    with pytest.raises(AssertionError, match="no step is in flight"):
        rig.executor.collect(0)
    tickets = [rig.executor.submit(rig.step(tensors, [0])) for _ in range(2)]
    with pytest.raises(AssertionError, match="must be collected"):
        rig.executor.submit(rig.step(tensors, [0]))
    with pytest.raises(AssertionError, match="out of order"):
        rig.executor.collect(tickets[1])
    for ticket in tickets:
        rig.executor.collect(ticket)


def test_blocks_are_copied_in_every_layer_and_in_order(rig: Any) -> None:
    """A fork goes on from a copy; a block that was copied may be copied on."""
    token = prefill(rig)
    rig.executor.copy_blocks([(7, 20), (2, 21), (20, 7), (21, 22)])
    output = rig.run(rig.tensors([(5, [token], [20, 22]), (5, [token], [7, 2])]), [0, 1])
    assert output.tokens.tolist() == [rig.next_token([*PROMPT, token])] * 2


def test_rows_without_a_token(make_rig: Callable[..., Any]) -> None:
    """NaN: the sequence ends with an error, its neighbours do not."""
    rig = make_rig(FakeModel(broken=3))
    prompts = [[i + 1] for i in range(6)]
    found = rig.run(rig.tensors([(0, one, [row]) for row, one in enumerate(prompts)]), range(6)).tokens
    broken = [bool(np.isnan(rig.last_logits(one)).any()) for one in prompts]
    assert {True, False} == set(broken)
    for token, one, bad in zip(found.tolist(), prompts, broken, strict=True):
        assert token == (NO_TOKEN if bad else rig.next_token(one))


def test_options_of_a_row_are_its_own(rig: Any) -> None:
    """Rows drawn in another order, one of them greedy, one not drawn at all."""
    prompts = [[i + 1] for i in range(4)]
    draws = np.zeros(3, CHOICE)
    draws["row"], draws["top_p"] = [3, 0, 1], 1
    draws["temperature"], draws["uniform"], draws["top_k"] = [1.5, 0, 1e-40], [0.9, 0.9, 1 - 2**-53], [50, 0, 0]
    rig.driver.launched.clear()
    output = rig.run(rig.tensors([(0, one, [row]) for row, one in enumerate(prompts)]), draws)
    assert rig.driver.launched == ["graph", "sample"]
    logits = np.stack([rig.last_logits(one) for one in prompts])
    draws["temperature"][2] = 0
    assert output.tokens.tolist() == rig.expected_tokens(logits, draws).tolist()
    assert output.tokens[0] != logits[3].argmax()
    assert output.tokens[1:].tolist() == logits[:2].argmax(axis=1).tolist()


def test_a_step_may_want_nothing(rig: Any) -> None:
    """A chunk of a prompt that goes on: the plan takes a row at least."""
    output = rig.run(rig.tensors([(0, [1, 2, 3], [4])], rows=[]))
    assert (output.tokens.shape, output.logits.shape) == ((0,), (0, rig.executor.vocab_size))


def test_more_rows_than_tokens(make_rig: Callable[..., Any]) -> None:
    """Prompt log-probabilities of a whole prompt and its next token: the last token's row is wanted twice."""
    rig = make_rig(max_num_batched_tokens=5)
    tensors = rig.tensors([(0, PROMPT, [7, 2])], rows=[4, 0, 1, 2, 3, 4])
    output = rig.run(tensors, [0], [1, 2, 3, 4, 5, 0])
    logits = rig.model.logits(rig.model.tags(PROMPT))
    np.testing.assert_array_equal(output.logits, logits[[0, 1, 2, 3, 4, 4]])
    assert output.tokens.tolist() == [logits[4].argmax()]


@pytest.mark.parametrize("tokens", [[7], [7, 8]])
def test_a_token_drawn_twice_in_one_way(make_rig: Callable[..., Any], tokens: list[int]) -> None:
    """As steps that warm an engine up have it, beyond the rows that the plan takes; in two ways it cannot be."""
    rig = make_rig(max_num_batched_tokens=2)
    tensors = rig.tensors([(0, tokens, [3])], rows=[0, 0, 0])
    draws = np.zeros(3, CHOICE)
    draws["row"], draws["top_p"], draws["temperature"], draws["uniform"] = [0, 1, 2], 1, 0.9, 0.4
    token = rig.expected_tokens(rig.model.logits(rig.model.tags(tokens)[:1]), draws[:1])[0]
    assert rig.run(tensors, draws).tokens.tolist() == [token] * 3
    draws["uniform"][1] = 0.7
    with pytest.raises(AssertionError, match="in two ways"):
        rig.executor.submit(rig.step(tensors, draws))


def test_logits_of_any_rows_in_any_order(rig: Any) -> None:
    tensors = rig.tensors([(0, PROMPT, [7, 2])], rows=[4, 0, 1, 2, 3])
    logits = rig.model.logits(rig.model.tags(PROMPT))[[4, 0, 1, 2, 3]]
    for wanted in ([0], [3, 4, 1], [4, 3, 2, 1, 0], [1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 2]):
        np.testing.assert_array_equal(rig.run(tensors, [], wanted).logits, logits[wanted])


def test_consecutive_rows_are_one_copy(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for each row of a batch costs more than its bytes."""
    sizes = []
    copy = rig.driver.copy_to_host
    monkeypatch.setattr(rig.driver, "copy_to_host", lambda t, a, s: (sizes.append(t.nbytes), copy(t, a, s))[1])
    rig.run(rig.tensors([(0, PROMPT, [7, 2])], rows=[0, 1, 2, 3, 4]), [], [0, 1, 2, 4])
    row = rig.model.vocab_size * 4
    assert sizes == [3 * row, row]


def test_one_copy_brings_a_step(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy costs the device a gap; the table's rows of the padding stay on the host."""
    sizes = []
    copy = rig.driver.copy_to_device
    monkeypatch.setattr(rig.driver, "copy_to_device", lambda a, m, s: (sizes.append(m.nbytes), copy(a, m, s))[1])
    rig.run(rig.tensors([(0, [1], [9]), (0, [2], [8]), (0, [3], [7])]), [0])
    layout = rig.executor._graphs.fitting(3).layout
    assert sizes == [layout.total - 16 * 4 - (layout.total - layout.offsets["block_table"] - 4 * 16 * 4)]


def test_more_logits_than_pinned_memory_holds(make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of a prompt at a large vocabulary: fetched piece by piece, and right."""
    monkeypatch.setattr(step_outputs, "PINNED_LOGITS_BYTES", 0)
    rig = make_rig(max_num_seqs=2)
    output = rig.run(rig.tensors([(0, PROMPT, [7, 2])], rows=[0, 1, 2, 3, 4]), [4], [0, 1, 2, 3, 4])
    logits = rig.model.logits(rig.model.tags(PROMPT))
    np.testing.assert_array_equal(output.logits, logits)
    assert output.tokens.tolist() == [logits[4].argmax()]
    assert type(output.logits) is np.ndarray, "in pinned memory"


# Failures


def test_a_fault_of_the_device_comes_out_when_its_step_is_collected(rig: Any) -> None:
    """And the ticket is spent, so that the core can tell its sequences."""
    rig.driver.failing["head"] = "an illegal memory access was encountered"
    ticket = rig.executor.submit(rig.step(rig.tensors([(0, [1], [9])]), [0]))
    with pytest.raises(EngineError, match="illegal memory access"):
        rig.executor.collect(ticket)
    assert not rig.executor._pending
    with pytest.raises(EngineError, match="illegal memory access"):
        rig.run(rig.tensors([(0, [1], [9])]), [0])
    rig.executor.close()
    assert rig.driver.closed


def test_a_step_that_cannot_be_queued_takes_no_ticket(rig: Any) -> None:
    """The next step packs into the same memory: nothing may still be copied from it."""
    tensors = rig.tensors([(0, [1, 2], [9])])
    rig.driver.failing["record"] = "invalid handle"
    for _ in range(3):
        with pytest.raises(EngineError, match="invalid handle"):
            rig.executor.submit(rig.step(tensors, [0]))
    rig.driver.failing.clear()
    output = rig.run(tensors, [0])
    assert output.tokens.tolist() == [rig.next_token([1, 2])]


def test_a_capture_that_fails_says_so(make_rig: Callable[..., Any]) -> None:
    """At the start, and in words; everything made so far is released (the driver's close checks it)."""
    driver = FakeModel().driver()
    driver.failing["begin_capture"] = "operation not permitted"
    with pytest.raises(EngineError, match=r"a decode of 1 sequences cannot be captured as a CUDA graph: .*permitted"):
        make_rig(driver=driver)
    assert driver.closed


def test_a_pass_that_fails_within_a_capture_ends_the_capture(make_rig: Callable[..., Any]) -> None:
    """Else the stream could not even be destroyed."""
    passes = []

    def fail_second(plan: Any) -> None:
        create = plan.create_context

        def failing(profile: int, *arguments: Any, **options: Any) -> Any:
            context = create(profile, *arguments, **options)
            enqueue = context.enqueue

            def second(stream: int) -> None:
                passes.append(stream)
                if len(passes) == 2:
                    raise EngineError("no more")
                enqueue(stream)

            context.enqueue = second
            return context

        plan.create_context = failing

    driver = FakeModel().driver()
    with pytest.raises(EngineError, match=r"cannot be captured as a CUDA graph: no more"):
        make_rig(driver=driver, on_plan=fail_second)
    assert driver.closed


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (0, "a step's inputs"),
        (1, "tokens"),
        (2, "logits"),
        (3, "the KV pool of layer 0"),
        (4, "the KV pool of layer 1"),
        (5, "activations"),
    ],
)
def test_memory_that_does_not_fit_is_named(make_rig: Callable[..., Any], number: int, what: str) -> None:
    """With the options that would help; and what was had is given back."""
    driver = FakeModel().driver()
    allocate, count = driver.allocate, iter(range(100))

    def limited(num_bytes: int) -> int:
        if next(count) == number:
            raise EngineError("out of memory")
        return allocate(num_bytes)

    driver.allocate = limited  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=rf"MiB of device memory for {what} .*out of memory.*--kv-blocks"):
        make_rig(driver=driver)
    assert driver.closed


def grow(plan: Any) -> None:
    """TensorRT asks for 16 KiB more than was planned."""
    plan.scratch_bytes += 16 << 10


def test_scratch_memory_beyond_the_plan_is_named_with_its_cure(make_rig: Callable[..., Any]) -> None:
    """Pools sized for a bound that TensorRT does not keep would fail somewhere in the start, saying less. The blocks
    that the message names must then be right: they start, and one more does not."""
    model = FakeModel()
    rig = make_rig(model, num_blocks=900)
    total = rig.driver.device.total_bytes - rig.driver.device.free_bytes
    planned = rig.plan.scratch_bytes
    with pytest.raises(EngineError, match=r"MiB to work in, where .* MiB were planned.*give --kv-blocks \d+") as caught:
        make_rig(model, driver=model.driver(total_bytes=total), on_plan=grow, planned_scratch=planned, num_blocks=900)
    blocks = int(re.findall(r"--kv-blocks (\d+)", str(caught.value))[0])
    assert 0 < blocks < 900
    driver = model.driver(total_bytes=total)
    make_rig(model, driver=driver, on_plan=grow, planned_scratch=planned, num_blocks=blocks)
    driver = model.driver(total_bytes=total)
    with pytest.raises(EngineError, match="were planned"):
        make_rig(model, driver=driver, on_plan=grow, planned_scratch=planned, num_blocks=blocks + 1)


def test_scratch_memory_beyond_the_plan_is_taken_from_what_is_unused(make_rig: Callable[..., Any]) -> None:
    """An engine that fits is not refused because a bound was a little low."""
    rig = make_rig(on_plan=grow, planned_scratch=1)
    assert rig.run(rig.tensors([(0, PROMPT, [7, 2])]), [0]).tokens.tolist() == [rig.next_token(PROMPT)]


def test_a_plan_that_no_pool_fits_beside_is_to_be_rebuilt(make_rig: Callable[..., Any]) -> None:
    """Fewer blocks would not help."""
    with pytest.raises(EngineError, match="rebuild the engine with a lower --max-num-batched-tokens"):
        make_rig(driver=FakeModel().driver(total_bytes=1 << 13), planned_scratch=1)


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 64}, {"max_num_seqs": 1}, {"max_model_len": 160}])
def test_buffers_are_within_their_bound(make_rig: Callable[..., Any], changes: dict[str, int]) -> None:
    """What `castline plan` reserves for a step is what the executor allocates, and not a multiple of it."""
    rig = make_rig(**changes)
    held = rig.driver.device.total_bytes - rig.driver.device.free_bytes
    buffers = held - 2 * rig.limits.num_blocks * rig.model.block_bytes - rig.plan.scratch_bytes
    sizes = rig.limits
    limits = Limits(sizes.max_model_len, sizes.block_size, sizes.max_num_seqs, sizes.max_num_batched_tokens)
    assert buffers <= buffer_bytes(rig.model.vocab_size, limits) <= buffers + 8192


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.tensors.pop(kv_pool_name(1)), r"no kv_pool.1, and engine.json says 2 layers"),
        (lambda plan: plan.tensors.pop(LOGITS), "no output logits"),
        (
            lambda plan: plan.tensors.update({LOGITS: PlanTensor(False, "half", (-1, 97))}),
            "no output logits of float32",
        ),
        (
            lambda plan: plan.tensors.update({kv_pool_name(0): PlanTensor(True, "int8", (39, 64))}),
            "a pool of 40 KV blocks is over the plan's 39: give --kv-blocks 39",
        ),
    ],
)
def test_another_plan_is_refused(make_rig: Callable[..., Any], change: Callable[[Any], None], words: str) -> None:
    """Before anything is allocated for it."""
    driver = FakeModel().driver()
    with pytest.raises(EngineError, match=words):
        make_rig(driver=driver, on_plan=change)
    assert driver.closed


def test_close_waits_and_releases_whatever_is_in_flight(rig: Any) -> None:
    for _ in range(2):
        rig.executor.submit(rig.step(rig.tensors([(0, [1], [9])]), [0]))
    rig.executor.close()
    assert rig.driver.closed
    assert rig.plan.closed


def test_it_is_a_device_executor() -> None:
    from castline.runtime.device_executor import DeviceExecutor

    names = {name for name in vars(DeviceExecutor) if not name.startswith("_")}
    assert names <= set(dir(TensorRtExecutor))
