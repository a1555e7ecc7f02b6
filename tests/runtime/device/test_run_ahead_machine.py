"""Random arrivals, aborts, deadlines, failures and ends on a device that samples, over pools tight enough to preempt.

What the client sees is compared with an engine that samples on the host and ran undisturbed.
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

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.device_executor import MAX_IN_FLIGHT
from castline.runtime.events import FinishReason

PARAMS = st.sampled_from(
    [
        {},
        {},
        {"temperature": 4.0, "seed": 3},
        {"temperature": 4.0, "seed": 4, "n": 3},
        {"temperature": 5.0, "seed": 5, "top_k": 30, "stop_token_ids": tuple(range(0, 60, 3))},
        {"temperature": 3.0, "seed": 6, "min_tokens": 2, "stop_token_ids": tuple(range(40))},
        {"temperature": 3.0, "seed": 7, "logprobs": 1},
        {"frequency_penalty": 1.5, "n": 2},
        {"prompt_logprobs": 0},
    ]
)


class DeviceMachine(RuleBasedStateMachine):
    def __init__(self, make_device_engine, ran_ahead: list[int]) -> None:
        super().__init__()
        self.make = make_device_engine
        self.ran_ahead = ran_ahead

    @initialize(
        num_blocks=st.integers(8, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        eager=st.booleans(),
    )
    def start(self, num_blocks, block_size, budget, max_num_seqs, eager):
        limits = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_model_len": num_blocks * block_size + 1,
            "max_num_batched_tokens": budget,
            "max_num_seqs": max_num_seqs,
        }
        self.engine = self.make(eager=eager, **limits)
        self.plain = self.make(device=False, **limits)
        self.count = 0
        self.fails_later = False
        """An eager device has computed the step ahead, which failed: that shows in its own turn."""

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.sampled_from([None, 1, 5, 20]),
        params=PARAMS,
        salt=st.sampled_from([None, None, "s"]),
        patience=st.sampled_from([None, None, None, 3, 10]),
        streams=st.booleans(),
    )
    def arrive(self, prompt, max_tokens, params, salt, patience, streams):
        """*patience*: steps until its deadline."""
        options = {"max_tokens": max_tokens, "cache_salt": salt, **params}
        self.plain.add(f"r{self.count}", prompt, **options)
        deadline = None if patience is None else self.engine.clock.now + patience
        self.engine.add(f"r{self.count}", prompt, deadline=deadline, streams=streams, **options)
        self.count += 1

    @precondition(lambda self: self.engine.core.has_work)
    @rule(count=st.integers(1, 8), interval=st.sampled_from([1, 2, 8]))
    def step(self, count, interval):
        self.engine.core.report_interval = interval
        for _ in range(count):
            scheduler = self.engine.core.scheduler
            steps, had_work = scheduler.counters.steps, scheduler.has_work
            self.engine.clock.now += 1
            self.engine.step()
            assert scheduler.counters.steps <= steps + 1
            idle = not had_work or not scheduler.has_work
            assert scheduler.counters.steps == steps + 1 or idle or self.fails_later, "no token in a step"
            self.fails_later = False
            if not self.engine.core.has_work:
                break

    @precondition(lambda self: self.engine.core.scheduler.has_work)
    @rule(at_once=st.booleans())
    def step_fails(self, at_once):
        def fail(step) -> None:
            raise EngineError("scripted")

        if at_once:
            self.engine.device.refuse = fail
        else:
            self.engine.executor.fail = fail
        self.engine.step()
        self.engine.executor.fail = self.engine.device.refuse = None
        self.fails_later = self.engine.device.num_in_flight > 0

    @precondition(lambda self: self.count)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def abort(self, data, index):
        self.engine.core.abort(f"r{data.draw(st.integers(0, self.count - 1))}", index)

    @invariant()
    def consistent(self):
        if hasattr(self, "engine"):
            self.engine.core.scheduler.check()
            assert self.engine.device.num_in_flight < MAX_IN_FLIGHT, "between steps, one at most"

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        self.plain.run()
        engine.assert_forgotten()
        engine.device.close()
        assert not engine.device.faults, engine.device.faults
        self.ran_ahead.append(engine.device.num_ahead)
        for request_id, request in engine.requests.items():
            for index in range(request.params.n):
                self.check_answer(request_id, index)

    def check_answer(self, request_id, index):
        engine, plain = self.engine, self.plain
        finish, tokens = engine.finish(request_id, index), engine.tokens(request_id, index)
        expected = plain.tokens(request_id, index)
        assert tokens == expected[: len(tokens)]
        late = finish.error_code is ErrorCode.DEADLINE_EXCEEDED
        if finish.reason is FinishReason.ABORT or late or finish.message == "scripted":
            return
        assert (tokens, finish) == (expected, plain.finish(request_id, index))
        seen, wanted = engine.first_event(request_id, index), plain.first_event(request_id, index)
        assert seen.prompt_logprobs == wanted.prompt_logprobs


def test_random_life(make_device_engine):
    """Faults of run-ahead show only in sequences of events that nobody thinks of."""
    effort = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
    ran_ahead: list[int] = []
    run_state_machine_as_test(lambda: DeviceMachine(make_device_engine, ran_ahead), settings=effort)
    assert sum(count > 0 for count in ran_ahead) > 0.4 * len(ran_ahead), "it is run-ahead that is tested"
