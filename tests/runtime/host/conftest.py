"""Made-up engines: a manifest with every field set, and a tiny bundle that ONNX Runtime really runs.

The tiny model has two attention layers with seeded random weights over a byte-level vocabulary, so that any text is a
prompt, greedy text wanders, and every token depends on all tokens before it.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Semaphore, Thread
from time import monotonic
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from castline.engines.bundle import write_bundle
from castline.engines.capacity import kv_block_bytes
from castline.engines.host import detect_host
from castline.engines.manifest import (
    SCHEMA_VERSION,
    Host,
    Limits,
    Manifest,
    ModelFacts,
    Parity,
    Plugin,
    Precision,
    Tuning,
)
from castline.plugins.contract import (
    DOMAIN,
    OPSET_VERSION,
    PAGED_ATTENTION,
    AttentionAttributes,
    StepTensors,
    kv_pool_name,
)
from castline.runtime import stream_interval
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.client import EffectiveLimits
from castline.runtime.core import EngineCore
from castline.runtime.engine_loop import CommandSocket, Disconnected, run_engine_loop
from castline.runtime.loader import installed_plugin, installed_version
from castline.runtime.sampler import Sampler
from castline.runtime.stream_interval import AdaptiveInterval
from castline.runtime.tokenizer import load_tokenizer
from castline.runtime.wire import Failed, Ready

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 260, 64, 2, 4, 2, 16
BOS, EOS = 256, 257
MAX_LEN, BLOCK = 256, 16
SMALL = EffectiveLimits(
    max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, block_size=16, num_blocks=64, max_concurrency=4.0
)


def make_manifest() -> Manifest:
    """For arithmetic and checks; there is no bundle behind it."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        castline_version="0.1.0",
        created="2026-01-01T00:00:00Z",
        rebuild_command="castline build smol --target cpu --output models",
        model=ModelFacts("smol", "LlamaForCausalLM", "smol.gguf", 2, 64, 4, 2, 16, 256, 512, 100_000, (2,), 1),
        precision=Precision("int8", "int8"),
        limits=Limits(max_model_len=512, block_size=16),
        host=Host("cpu", "x86_64", "Some CPU", ("avx2",), 2),
        tuning=Tuning(measured=False, num_threads=2),
        parity=Parity(True, 512, 0.01, 0.1, 0.97, 20.0, 19.9, 0.02, 0.94, 1.0),
        plugin=Plugin("castline_cpu", "1", "ab" * 32),
        graph_file="model.onnx",
        tool_versions={"onnxruntime": "1.32.0"},
        files={},
    )


@pytest.fixture
def loaded_interval(monkeypatch: pytest.MonkeyPatch) -> AdaptiveInterval:
    """One that finds a serving process, of however few requests, which takes half of its one core."""
    monkeypatch.setattr(stream_interval, "FEW_REQUESTS", 0)
    windows = itertools.count(step=2)  # a look at the clock closes a window
    cpu = itertools.count()
    return AdaptiveInterval(1, lambda: float(next(windows)), lambda: float(next(cpu)))


@pytest.fixture
def sample_manifest() -> Manifest:
    return make_manifest()


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one model, ``tiny``: fp32 weights and pool, so that greedy text is exact."""
    repository = tmp_path_factory.mktemp("models")
    plugin = installed_plugin("cpu")
    assert plugin is not None, "build the native library first"
    host = replace(detect_host("cpu"), isa=())
    runtime = installed_version("onnxruntime")
    assert runtime is not None
    with write_bundle(repository, "tiny") as draft:
        onnx.save(tiny_graph(), draft.directory / "model.onnx")
        write_tokenizer(draft.directory)
        draft.seal(
            Manifest(
                schema_version=SCHEMA_VERSION,
                castline_version="0.1.0",
                created="2026-01-01T00:00:00Z",
                rebuild_command="castline build tiny",
                model=ModelFacts(
                    name="tiny",
                    architecture="TinyForCausalLM",
                    source="random",
                    num_layers=LAYERS,
                    hidden_size=HIDDEN,
                    num_heads=HEADS,
                    num_kv_heads=KV_HEADS,
                    head_dim=HEAD_DIM,
                    vocab_size=VOCAB,
                    max_position=MAX_LEN,
                    num_parameters=VOCAB * HIDDEN,
                    eos_token_ids=(EOS,),
                    bos_token_id=BOS,
                ),
                precision=Precision("fp32", "fp32"),
                limits=Limits(MAX_LEN, BLOCK, max_num_seqs=16, max_num_batched_tokens=64),
                host=host,
                tuning=Tuning(measured=False, num_threads=1),
                parity=Parity(True, 1, 0.0, 0.0, 1.0, 1.0, 1.0, 0.1, 0.9, 1.0),
                plugin=plugin,
                graph_file="model.onnx",
                tool_versions={"onnxruntime": runtime},
                files={},
            )
        )
    return repository


def tiny_weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(7)
    weights = {"embedding": rng.normal(0, 1, (VOCAB, HIDDEN)), "head": rng.normal(0, 1, (HIDDEN, VOCAB))}
    for layer in range(LAYERS):
        weights[f"qkv.{layer}"] = rng.normal(0, HIDDEN**-0.5, (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM))
        weights[f"out.{layer}"] = rng.normal(0, 2 * HIDDEN**-0.5, (HEADS * HEAD_DIM, HIDDEN))
    angles = np.arange(MAX_LEN)[:, None] * 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    weights |= {"cos_table": np.cos(angles), "sin_table": np.sin(angles)}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def tiny_reference(token_ids: Sequence[int], count: int) -> list[int]:
    """The next *count* greedy tokens of the tiny model, all computed anew for each: no cache, no batch, no kernel."""
    weights, tokens = tiny_weights(), list(token_ids)
    for _ in range(count):
        hidden = weights["embedding"][tokens]
        for layer in range(LAYERS):
            q, k, v = np.split(
                hidden @ weights[f"qkv.{layer}"], [HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM], axis=1
            )
            heads = [reference_head(weights, q, k, v, head) for head in range(HEADS)]
            hidden = hidden + np.concatenate(heads, axis=1) @ weights[f"out.{layer}"]
        tokens.append(int((hidden[-1] @ weights["head"]).argmax()))
    return tokens[len(token_ids) :]


def reference_head(
    weights: dict[str, NDArray[np.float32]],
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    head: int,
) -> NDArray[np.float32]:
    """Causal attention of one head over whole rows, with rotary positions in the half style."""
    cos, sin = weights["cos_table"][: len(q)], weights["sin_table"][: len(q)]

    def rotate(rows: NDArray[np.float32], number: int) -> NDArray[np.float32]:
        a, b = np.split(rows[:, number * HEAD_DIM : (number + 1) * HEAD_DIM], 2, axis=1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    kv_head = head // (HEADS // KV_HEADS)
    scores = 2 * HEAD_DIM**-0.5 * rotate(q, head) @ rotate(k, kv_head).T
    scores[np.triu_indices(len(q), 1)] = -np.inf
    weight = np.exp(scores - scores.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    return weight @ v[:, kv_head * HEAD_DIM : (kv_head + 1) * HEAD_DIM]


def tiny_graph() -> onnx.ModelProto:
    """Embedding, LAYERS x (qkv, paged attention, output projection, residual), rows asked for, output head."""
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["hidden.0"]),
        helper.make_node("Gather", ["cos_table", "positions"], ["cos"]),
        helper.make_node("Gather", ["sin_table", "positions"], ["sin"]),
    ]
    for layer in range(LAYERS):
        nodes += attention_layer(layer)
    nodes += [
        helper.make_node("Gather", [f"hidden.{LAYERS}", "logits_indices"], ["rows"]),
        helper.make_node("MatMul", ["rows", "head"], ["logits"]),
    ]
    block_bytes = kv_block_bytes(KV_HEADS, HEAD_DIM, BLOCK, "fp32")
    inputs = [
        tensor("input_ids", TensorProto.INT64, ["T"]),
        tensor("positions", TensorProto.INT64, ["T"]),
        tensor("slot_mapping", TensorProto.INT32, ["T"]),
        tensor("cu_query_lens", TensorProto.INT32, ["B1"]),
        tensor("kv_lens", TensorProto.INT32, ["B"]),
        tensor("block_table", TensorProto.INT32, ["B", "M"]),
        tensor("logits_indices", TensorProto.INT64, ["R"]),
        *(tensor(kv_pool_name(layer), TensorProto.UINT8, ["blocks", block_bytes]) for layer in range(LAYERS)),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        inputs,
        [tensor("logits", TensorProto.FLOAT, ["R", VOCAB])],
        [numpy_helper.from_array(value, name) for name, value in tiny_weights().items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def attention_layer(layer: int) -> list[onnx.NodeProto]:
    attributes = AttentionAttributes(
        layer=layer,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=2 * HEAD_DIM**-0.5,
        block_size=BLOCK,
        kv_dtype=0,
        rotary_dim=HEAD_DIM,
    )
    metadata = ["slot_mapping", "cu_query_lens", "kv_lens", "block_table"]
    inputs = [f"qkv_out.{layer}", "cos", "sin", "", "", kv_pool_name(layer), *metadata]
    values = {name: getattr(attributes, name) for name in attributes.__dataclass_fields__}
    return [
        helper.make_node("MatMul", [f"hidden.{layer}", f"qkv.{layer}"], [f"qkv_out.{layer}"]),
        helper.make_node(PAGED_ATTENTION, inputs, [f"attention.{layer}"], domain=DOMAIN, **values),
        helper.make_node("MatMul", [f"attention.{layer}", f"out.{layer}"], [f"projected.{layer}"]),
        helper.make_node("Add", [f"hidden.{layer}", f"projected.{layer}"], [f"hidden.{layer + 1}"]),
    ]


def tensor(name: str, dtype: int, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def write_tokenizer(directory: Path) -> None:
    """A byte is a token; 256 begins a text, 257 ends it, 258 and 259 mark the turns of a chat."""
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in alphabet.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<bos>", "<eos>", "<user>", "<assistant>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    (directory / "generation_config.json").write_text(f'{{"bos_token_id": {BOS}, "eos_token_id": {EOS}}}')


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level tokenizers use for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def scripted_token(token: int, position: int) -> int:
    """What the scripted executor makes of the token at a position: a lower-case letter."""
    return ord("a") + (token * 7 + position * 3) % 26


class ScriptedExecutor:
    """Logits that depend on the last token and its position only, so that the text of any prompt is known.

    While ``gate`` is set each step takes a permit from it. ``on_step`` may raise.
    """

    maxima = None

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.gate: Semaphore | None = None
        self.on_step: Callable[[StepTensors], None] = lambda step: None
        self.num_steps = 0

    def execute(self, step: StepTensors) -> NDArray[np.float32]:
        if self.gate is not None:
            self.gate.acquire()
        self.on_step(step)
        self.num_steps += 1
        rows = step.logits_indices
        tokens = scripted_token(step.input_ids[rows], step.positions[rows])  # type: ignore[arg-type]
        logits = np.zeros((len(rows), self.vocab_size), np.float32)
        logits[np.arange(len(rows)), tokens] = 10.0
        return logits

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def close(self) -> None: ...


class ScriptedEngine:
    """A real core over a scripted executor, its loop in a thread, and an AsyncEngine at the other end of the socket.

    Keyword arguments replace limits.
    """

    def __init__(self, tokenizer_dir: Path, **limits: int) -> None:
        manifest = make_manifest()
        self.manifest = replace(manifest, model=replace(manifest.model, vocab_size=VOCAB))
        self.limits = replace(SMALL, **limits)
        self.tokenizer = load_tokenizer(tokenizer_dir)
        self.executor = ScriptedExecutor()
        self.core = EngineCore(self.executor, self.limits, (EOS,), Sampler(VOCAB, (EOS,)))
        self.now: float | None = None
        """What the serving side's clock shows; None: the real time."""
        self._ours, self._theirs = socket.socketpair()
        self._thread = Thread(target=self._loop)

    def _loop(self) -> None:
        link = CommandSocket(self._theirs)
        try:
            link.send(Ready())
            run_engine_loop(self.core, link)
        except Disconnected:
            return
        except SystemExit as error:
            link.send_last(Failed(str(error)))
        finally:
            self._theirs.close()

    async def start(self, **options: Any) -> AsyncEngine:
        engine = AsyncEngine(self.manifest, self.limits, self.tokenizer, clock=self.clock, **options)
        self._thread.start()
        await engine.connect(self._ours)
        return engine

    def clock(self) -> float:
        return monotonic() if self.now is None else self.now

    def text(self, prompt: str, max_tokens: int) -> str:
        """The text that follows *prompt*."""
        token, position, text = ord(prompt[-1]), len(prompt) - 1, ""
        for _ in range(max_tokens):
            token = scripted_token(token, position)
            position += 1
            text += chr(token)
        return text

    async def idle(self, engine: AsyncEngine) -> None:
        """Waits until *engine* has nothing to do; then neither side may know of any request."""

        async def poll() -> None:
            while self.core.has_work or engine.stats().kv_blocks_used or engine.stats().num_running:
                await asyncio.sleep(0.001)

        await asyncio.wait_for(poll(), 60)
        self.core.scheduler.check()
        assert len(engine._live) == len(engine._live._processor) == len(self.core._sampler) == 0
        assert not self.core.scheduler.groups
        assert not self.core._deadlines

    def open_gate(self) -> None:
        """Steps no longer wait."""
        gate, self.executor.gate = self.executor.gate, None
        if gate is not None:
            gate.release(1000)

    def close(self) -> None:
        self.open_gate()
        self._ours.close()
        if self._thread.ident is not None:
            self._thread.join(60)
            assert not self._thread.is_alive(), "the loop did not end"


@pytest.fixture(scope="session")
def reference() -> Callable[[Sequence[int], int], list[int]]:
    """Greedy continuation by the slow model."""
    return tiny_reference


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture
def scripted(tokenizer_dir: Path) -> Iterator[Callable[..., ScriptedEngine]]:
    """Makes scripted engines; keyword arguments replace limits."""
    made: list[ScriptedEngine] = []

    def make(**limits: int) -> ScriptedEngine:
        made.append(ScriptedEngine(tokenizer_dir, **limits))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
