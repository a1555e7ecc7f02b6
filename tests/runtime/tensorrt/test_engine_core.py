"""The engine core over the TensorRT executor: what clients get is what an engine gives that samples on the host.

The driver in memory refuses every wrong pointer, size and order, the scheduler, the sampler and the run-ahead are the
real ones, and the model behind both engines reads its context from the KV pool.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda.model import FakeModel
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.contract import StepTensors
from castline.plugins.tensorrt import cuda_driver
from castline.runtime import startup
from castline.runtime.client import EffectiveLimits
from castline.runtime.core import EngineCore
from castline.runtime.events import FinishReason, SequenceEvent
from castline.runtime.request import Request
from castline.runtime.sampler import Sampler
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.startup import warm_up_device
from castline.runtime.tensorrt.executor import TensorRtExecutor

EOS = 5
MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "ignore_eos": True},
    {"seed": 1, "temperature": 1.2},
    {"seed": 2, "top_k": 20, "n": 3},
    {"seed": 3, "top_p": 0.9, "stop_token_ids": (1, 2, 3, 4)},
    {"seed": 4, "min_p": 0.05, "min_tokens": 4, "stop_token_ids": tuple(range(30))},
    {"seed": 5, "logprobs": 2},
    {"seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {7: 5.0}, "prompt_logprobs": 1},
]


class PlainExecutor:
    """The same model on the host: a pool of token ids by slot."""

    maxima = None

    def __init__(self, model: FakeModel, limits: EffectiveLimits) -> None:
        self.vocab_size = model.vocab_size
        self._model, self._size = model, limits.block_size
        self._slots = np.zeros(limits.num_blocks * limits.block_size, np.int64)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self._slots.reshape(-1, self._size)
        for source, destination in copies:
            blocks[destination] = blocks[source]

    def execute(self, step: StepTensors) -> NDArray[np.float32]:
        self._slots[step.slot_mapping] = step.input_ids
        tags = []
        for number, kv_len in enumerate(step.kv_lens.tolist()):
            positions = np.arange(kv_len)
            blocks = step.block_table[number, positions // self._size]
            tokens = self._slots[blocks * self._size + positions % self._size]
            count = int(step.cu_query_lens[number + 1] - step.cu_query_lens[number])
            tags.append(self._model.tags(tokens.tolist())[kv_len - count :])
        return self._model.logits(np.concatenate(tags)[step.logits_indices])

    def close(self) -> None: ...


class Client:
    """Requests to one core, and what it has said."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.events: list[SequenceEvent] = []

    def add(self, number: int, prompt: Sequence[int], params: SamplingParams) -> None:
        self.core.add_request(Request(str(number), tuple(prompt), params))

    def step(self) -> None:
        self.events += self.core.step()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def answers(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        seen: dict[tuple[str, int], tuple[Any, ...]] = {}
        for event in self.events:
            tokens, logprobs, prompt, _ = seen.get((event.request_id, event.index), ((), (), None, None))
            tokens, logprobs = tokens + event.token_ids, logprobs + (event.logprobs or ())
            seen[event.request_id, event.index] = tokens, logprobs, event.prompt_logprobs or prompt, event.finish
        return seen


@pytest.fixture
def make_clients(make_rig: Callable[..., Any]) -> Callable[..., tuple[Any, Client, Client]]:
    """The rig, a client of its core, and one of the plain core. Both draw with options as a kernel has them."""

    def make(model: FakeModel | None = None, **limits: Any) -> tuple[Any, Client, Client]:
        rig = make_rig(model, max_model_len=60, **limits)
        warm_up_device(rig.executor, rig.limits)

        def draw(logits: Any, choices: Any, maxima: Any) -> Any:
            return rig.expected_tokens(logits, choices).tolist()

        device, plain = (
            EngineCore(executor, rig.limits, (EOS,), Sampler(rig.model.vocab_size, (EOS,), draw=draw))
            for executor in (rig.executor, PlainExecutor(rig.model, rig.limits))
        )
        return rig, Client(device), Client(plain)

    return make


@pytest.mark.parametrize("num_blocks", [18, 60])
@pytest.mark.parametrize("seed", range(3))
def test_random_requests(make_clients: Callable[..., Any], seed: int, num_blocks: int) -> None:
    """Arrivals, aborts, ends, chunks, forks, hits and preemption, with rows drawn, fetched, or both in a step."""
    rng = random.Random(seed)
    _, device, plain = make_clients(num_blocks=num_blocks)
    for number in range(60):
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 25))]
        options = {"temperature": 1.0, "seed": number, "max_tokens": rng.randint(5, 34), **rng.choice(MIXES)}
        params = SamplingParams(**options)
        for client in (device, plain):
            client.add(number, prompt, params)
        for _ in range(rng.choice([0, 1, 2, 30])):
            device.step()
        if rng.random() < 0.15:
            device.core.abort(str(rng.randint(0, number)))
    device.run()
    plain.run()
    answers, expected = device.answers(), plain.answers()
    assert answers.keys() == expected.keys()
    for key, (tokens, logprobs, prompt_logprobs, finish) in answers.items():
        if finish.reason is FinishReason.ABORT:
            assert tokens == expected[key][0][: len(tokens)]
        else:
            assert (tokens, logprobs, prompt_logprobs, finish) == expected[key]
    stats = device.core.stats()
    assert stats.kv_blocks_used == 0
    assert (stats.preemptions > 0) == (num_blocks == 18)


def test_a_steady_decode_runs_ahead(make_clients: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real executor, too, a step is queued while the one before it is waited for."""
    rig, device, plain = make_clients()
    waiting: list[int] = []
    collect = rig.executor.collect

    def observed(ticket: int) -> Any:
        waiting.append(len(rig.executor._pending))
        return collect(ticket)

    monkeypatch.setattr(rig.executor, "collect", observed)
    for client in (device, plain):
        for number in range(4):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=50, ignore_eos=True)
            client.add(number, [number, 1, 2], params)
        client.run()
    assert device.answers() == plain.answers()
    assert waiting.count(2) > 0.9 * len(waiting)


@pytest.mark.parametrize("vocab_size", [97, 98])
def test_a_core_is_loaded_with_its_executor(
    make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    """Bundle, limits and driver reach the executor, which is warmed up and serves; one of another model is closed."""
    rig = make_rig()
    model = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=(EOS,))
    host = SimpleNamespace(target="tensorrt_rtx")
    manifest = SimpleNamespace(host=host, model=model, graph_file="model.plan", rebuild_command="castline build")
    handed: list[Any] = []

    def load(*arguments: Any) -> TensorRtExecutor:
        handed.extend(arguments)
        return rig.executor

    monkeypatch.setattr(startup, "read_manifest", lambda bundle: manifest)
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda: rig.driver)
    monkeypatch.setattr(TensorRtExecutor, "load", load)
    if vocab_size != rig.model.vocab_size:
        with pytest.raises(EngineError, match=r"gives 97 logits a row, and engine\.json says vocab_size 98"):
            startup.load_core(Path("bundle"), rig.limits, 1)
        assert rig.driver.closed
        return
    core, executor = startup.load_core(Path("bundle"), rig.limits, 1)
    assert handed == [Path("bundle"), manifest, rig.limits, rig.driver]
    client = Client(core)
    client.add(0, [1, 2, 3], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(5):
        client.step()
    assert core.has_work
    (tokens, *_) = client.answers()["0", 0]
    text = [1, 2, 3]
    for token in tokens:
        assert token == rig.next_token(text)
        text.append(token)
    assert len(tokens) == 5
    core.close()
    executor.close()


def test_rows_of_nan_end_their_sequences(make_clients: Callable[..., Any]) -> None:
    """The step in flight goes on from a token that is none: nothing may be read by it, and the others are untouched."""
    _, device, plain = make_clients(FakeModel(broken=41))
    for client in (device, plain):
        for number in range(30):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=30, ignore_eos=True)
            client.add(number, [number % 5, number % 7, number], params)
        client.run()
    assert device.answers() == plain.answers()
    reasons = [finish.reason for *_, finish in device.answers().values()]
    assert 3 < reasons.count(FinishReason.ERROR) < 27
