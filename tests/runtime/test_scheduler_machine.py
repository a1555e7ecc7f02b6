"""Random arrivals, aborts, failures and ends over pools tight enough to preempt; invariants after every step.

The scripted executor checks every step: what each block table reaches is exactly the sequence's tokens, and no slot is
written twice. The engine fixture checks budgets and queues. Here: nothing is lost, and tokens are the reference's.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from castline.engines.errors import EngineError
from castline.runtime.events import FinishReason


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, make_engine) -> None:
        super().__init__()
        self.make_engine = make_engine

    @initialize(
        num_blocks=st.integers(8, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        max_drafts=st.sampled_from([0, 1, 3, 7]),
        memory=st.sampled_from([None, 1, 2]),
    )
    def start(self, num_blocks, block_size, budget, max_num_seqs, max_drafts, memory):
        self.engine = self.make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_blocks * block_size + 1,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_drafts=max_drafts,
        )
        self.engine.model.memory = memory
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.sampled_from([None, 0, 1, 5, 20]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        salt=st.sampled_from([None, None, "s"]),
    )
    def arrive(self, prompt, n, max_tokens, prompt_logprobs, salt):
        params = {"n": n, "max_tokens": max_tokens, "prompt_logprobs": prompt_logprobs, "cache_salt": salt}
        self.engine.add(f"r{self.count}", prompt, **params)
        self.count += 1

    @precondition(lambda self: self.engine.core.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            steps = len(self.engine.executor.num_tokens)
            had_work = self.engine.core.scheduler.has_work
            self.engine.step()
            assert len(self.engine.executor.num_tokens) == steps + had_work, "no token in a step that had work"
            if not self.engine.core.has_work:
                break

    @precondition(lambda self: self.engine.core.scheduler.has_work)
    @rule()
    def step_fails(self):
        def fail(step) -> None:
            raise EngineError("scripted")

        self.engine.executor.fail = fail
        self.engine.step()
        self.engine.executor.fail = None

    @precondition(lambda self: self.count)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def abort(self, data, index):
        self.engine.core.abort(f"r{data.draw(st.integers(0, self.count - 1))}", index)

    @invariant()
    def consistent(self):
        if hasattr(self, "engine"):
            self.engine.core.scheduler.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        engine.assert_forgotten()
        for request_id, request in engine.requests.items():
            for index in range(request.params.n):
                self.check_answer(request_id, index)

    def check_answer(self, request_id, index):
        engine, request = self.engine, self.engine.requests[request_id]
        finish, tokens = engine.finish(request_id, index), engine.tokens(request_id, index)
        assert tokens == engine.expected(request_id, len(tokens), index)
        if finish.reason is FinishReason.LENGTH:
            room = engine.limits.max_model_len - len(request.prompt_token_ids)
            asked = request.params.max_tokens
            assert len(tokens) == (room if asked is None else min(room, asked))
            if request.params.prompt_logprobs is not None:
                entries = engine.first_event(request_id, index).prompt_logprobs
                if index > 0:
                    assert entries is None, "they are told once"
                    return
                assert [entry.token_id for entry in entries[1:]] == list(request.prompt_token_ids[1:])


def test_random_life(make_engine):
    """Faults of scheduling show only in sequences of events that nobody thinks of."""
    effort = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
    run_state_machine_as_test(lambda: EngineMachine(make_engine), settings=effort)
