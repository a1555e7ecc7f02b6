"""Whole builds of a tiny random checkpoint: what a bundle holds, what the gate stops, what a failure leaves behind."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import tokenizers
import torch
import transformers

from castline.builder import pipeline
from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.cores import physical_cores
from castline.builder.export import export_model
from castline.builder.options import BuildOptions
from castline.builder.progress import BuildLog
from castline.engines.check import check_host, verify_files
from castline.engines.errors import BuildError, EngineError
from castline.engines.manifest import read_manifest

VOCAB_SIZE = 258


def save_tiny_checkpoint(directory: Path) -> None:
    """A llama of two layers over bytes, made sharp: large weights, and layers that add little to a token's own
    embedding. A random model's best two answers are as good as equal, and any rounding swaps them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=True,
        bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.03
        layer.mlp.down_proj.weight.data *= 0.03
    model.save_pretrained(directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(directory)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> Checkpoint:
    return load_checkpoint(str(tiny))


@pytest.fixture(scope="module")
def exported(checkpoint: Checkpoint) -> ir.Model:
    return export_model(checkpoint)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, exported: ir.Model) -> None:
    """Loads and exports once for all tests; every other stage is the real one, every time."""
    monkeypatch.setattr(pipeline, "load_checkpoint", lambda model: checkpoint)
    monkeypatch.setattr(pipeline, "export_model", lambda checkpoint: exported.clone())


def build(output: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {"tune": False, "threads": 1, "max_num_batched_tokens": 64, **changes}
    return pipeline.build(BuildOptions("tiny", output, **options), BuildLog())


def left_behind(output: Path) -> list[Path]:
    return list(output.rglob("*")) if output.exists() else []


@pytest.mark.usefixtures("quick")
def test_bundle_is_complete_and_true(tmp_path: Path) -> None:
    """Everything a loader checks is in the manifest, and every file is what the manifest says."""
    bundle = build(tmp_path / "engines", name="small", max_model_len=128, max_num_seqs=4)
    assert bundle == tmp_path / "engines" / "small" / "1"
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    assert set(manifest.files) == {path.name for path in bundle.iterdir()} - {"engine.json"}
    assert {"model.onnx", "tokenizer.json", "generation_config.json", "report.html"} <= set(manifest.files)
    assert manifest.graph_file == "model.onnx"
    assert (manifest.model.name, manifest.model.num_layers, manifest.model.vocab_size) == ("small", 2, VOCAB_SIZE)
    assert (manifest.limits.max_model_len, manifest.limits.max_num_seqs, manifest.limits.block_size) == (128, 4, 32)
    assert (manifest.precision.recipe, manifest.precision.kv_dtype) == ("int8", "int8")
    assert set(manifest.tuning.matmul.values()) == {"linear-w8-g32"}
    assert not manifest.tuning.measured
    assert manifest.tuning.num_threads == 1
    assert {"onnxruntime", "torch", "transformers"} <= set(manifest.tool_versions)
    assert manifest.parity is not None
    assert manifest.parity.verified
    assert manifest.parity.num_tokens >= 500
    assert set(manifest.parity.by_step) == {"prefill", "decode"}
    check_host(manifest, manifest.host, manifest.plugin, manifest.tool_versions["onnxruntime"])
    assert "small" in (bundle / "report.html").read_text()
    assert build(tmp_path / "engines", name="small").name == "2"


@pytest.mark.usefixtures("quick")
def test_recipe_that_the_weights_do_not_fit_is_refused(tmp_path: Path) -> None:
    """Weights forced onto another 4-bit grid would be another model under an honest recipe's name."""
    with pytest.raises(BuildError, match=r"recipe q4_1: the weights are not on a 4-bit grid"):
        build(tmp_path / "engines", recipe="q4_1")
    assert not left_behind(tmp_path)


@pytest.mark.usefixtures("quick")
def test_report_shows_what_became_linear(tmp_path: Path) -> None:
    """Fusions happen before the tuner and after it: a report of the first alone would tell half."""
    page = (build(tmp_path) / "report.html").read_text()
    assert "matmuls and what surrounds them as Linear" in page
    assert "castline::Linear" in page
    assert "decode steps: mean KL, top-1" in page


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_fp32_engine_is_exact(tmp_path: Path, kv_dtype: str) -> None:
    """Without quantisation nothing but rounding may separate the engine from its model."""
    parity = read_manifest(build(tmp_path, recipe="fp32", kv_dtype=kv_dtype)).parity
    assert parity is not None
    assert parity.mean_kl < (1e-9 if kv_dtype == "fp32" else 1e-3)
    assert parity.greedy_match == 1.0 or kv_dtype == "bf16"


def corrupt_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of one matmul, eight times too large."""
    real = pipeline.quantize

    def corrupted(model: ir.Model, *choices: Any) -> Any:
        done = real(model, *choices)
        name = next(name for name in model.graph.initializers if "layers.0" in name and name.endswith(".scales"))
        value = model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * 8, name=name)
        return done

    monkeypatch.setattr(pipeline, "quantize", corrupted)


def corrupt_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score of one layer eight times too large: what a K scale of eight times its value does."""
    real = pipeline.lower_cpu

    def corrupted(model: ir.Model, **choices: Any) -> ir.Model:
        real(model, **choices)
        node = next(node for node in model.graph if node.op_type == "PagedAttention")
        node.attributes.add(ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 8))
        return model

    monkeypatch.setattr(pipeline, "lower_cpu", corrupted)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("corrupt", [corrupt_weights, corrupt_keys])
def test_corrupted_scale_fails_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrupt: Any) -> None:
    """C10: a silently wrong scale stops the build with the figures, and leaves nothing to serve by mistake."""
    corrupt(monkeypatch)
    with pytest.raises(BuildError, match=r"verify: .*mean KL .*at most 0\.02.*--allow-unverified"):
        build(tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


@pytest.mark.usefixtures("quick")
def test_unverified_bundle_is_marked_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C10: with --allow-unverified the bundle exists, says what it is, and is refused without the explicit flag."""
    corrupt_weights(monkeypatch)
    manifest = read_manifest(build(tmp_path, allow_unverified=True))
    assert manifest.parity is not None
    assert not manifest.parity.verified
    assert manifest.parity.mean_kl > manifest.parity.tolerance_mean_kl
    found = (manifest.host, manifest.plugin, manifest.tool_versions["onnxruntime"])
    with pytest.raises(EngineError, match="failed verification"):
        check_host(manifest, *found)
    check_host(manifest, *found, allow_unverified=True)


@pytest.mark.usefixtures("quick")
def test_no_verify_leaves_no_parity(tmp_path: Path) -> None:
    """A bundle that nobody compared must not carry figures."""
    manifest = read_manifest(build(tmp_path, verify=False))
    assert manifest.parity is None
    with pytest.raises(EngineError, match="was not verified"):
        check_host(manifest, manifest.host, manifest.plugin, manifest.tool_versions["onnxruntime"])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("stage", ["quantize", "save_graph", "measure", "render_report"])
def test_failed_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: type[BaseException]
) -> None:
    """C04: whatever stops a build, at whatever stage, the output is as it was before."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, stage, fail)
    with pytest.raises(error):
        build(tmp_path / "not" / "there")
    assert not left_behind(tmp_path)


@pytest.mark.usefixtures("quick")
def test_second_tuning_is_remembered(tmp_path: Path) -> None:
    """The choices are measured once, written down, and found again by the next build."""
    first, second = (
        read_manifest(build(tmp_path, tune=True, threads=None, cache_dir=tmp_path / "cache", verify=False))
        for _ in range(2)
    )
    assert first.tuning.measured
    assert first.tuning == second.tuning
    assert 1 <= first.tuning.num_threads <= physical_cores()
    assert first.limits.block_size == first.tuning.attention["block_size"]
    shapes = set(first.tuning.matmul)
    assert {
        name.split(",")[0].removeprefix("matmul ") for name in first.tuning.timings_us if "matmul" in name
    } <= shapes


@pytest.mark.usefixtures("quick")
def test_model_without_chat_template_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C44: the build says what the engine will refuse."""
    build(tmp_path, verify=False)
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_more_threads_than_cores_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They make every step slower, and nothing else would say so."""
    build(tmp_path, verify=False, threads=999)
    assert "--threads 999 is over the" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_token_ids_past_the_embeddings_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padding token added by a fine-tune: the shipped text does not hold it, and a user's prompt may."""
    small = dataclasses.replace(checkpoint, facts=dataclasses.replace(checkpoint.facts, vocab_size=VOCAB_SIZE - 1))
    monkeypatch.setattr(pipeline, "load_checkpoint", lambda model: small)
    build(tmp_path, verify=False)
    assert "token ids up to 257, and the model only 257 embeddings" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_directory_whose_name_no_model_can_have(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cure is an option, so the message must name it."""
    spaced = dataclasses.replace(checkpoint, facts=dataclasses.replace(checkpoint.facts, name="my model"))
    monkeypatch.setattr(pipeline, "load_checkpoint", lambda model: spaced)
    with pytest.raises(BuildError, match=r"cannot be called 'my model'.*--name"):
        build(tmp_path)


@pytest.mark.usefixtures("quick")
def test_kernels_that_the_host_lacks_are_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came out after export and fusion: a minute into the build of a real model."""
    monkeypatch.setenv("CASTLINE_ISA", "nonsense")
    monkeypatch.setattr(pipeline, "load_checkpoint", lambda model: pytest.fail("it was loaded"))
    with pytest.raises(EngineError, match="CASTLINE_ISA names kernels this host lacks"):
        build(tmp_path)


@pytest.mark.usefixtures("quick")
def test_length_past_the_model_is_refused(tmp_path: Path) -> None:
    """C09: positions that the model never saw would give garbage."""
    with pytest.raises(BuildError, match=r"--max-model-len 257 is over the model's 256 positions"):
        build(tmp_path / "engines", max_model_len=257)
    assert not (tmp_path / "engines").exists()


@pytest.fixture
def running(tiny: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real build in a process of its own, past its first stage."""
    code = "from castline.cli import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "build", str(tiny), "--no-tune", "--output", str(tmp_path / "engines")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("checkpoint")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_nothing(running: subprocess.Popen[str], tmp_path: Path, signum: int, code: int) -> None:
    """C04: Ctrl-C and SIGTERM while the bundle is being written end the build and clean up."""
    running.send_signal(signum)
    assert running.wait(60) == code
    assert not left_behind(tmp_path / "engines")
