"""`castline build` for GPUs as a user runs it, on a machine that has none."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castline import planning
from castline.cli import main
from castline.engines.check import check_complete, check_host, verify_files
from castline.engines.errors import EngineError, ManifestMismatch
from castline.engines.gpu import detect_gpu
from castline.engines.manifest import Gpu, read_manifest
from castline.engines.memory_plan import Asked
from castline.engines.sku import load_sku
from castline.plugins.tensorrt.kernel_set import read_kernel_set

Castline = Callable[..., subprocess.CompletedProcess[str]]
TOKENS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--block-size", "16")


@pytest.fixture(scope="module")
def castline(compile_environment: dict[str, str]) -> Castline:
    """``castline(*words)``: the command, finished."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "castline", *words]
        return subprocess.run(command, env=compile_environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def build(fork: Callable[..., subprocess.CompletedProcess[str]]) -> Castline:
    """``build(*words)``: `castline build`, which imports for ten seconds, in a process that has imported."""
    return lambda *words: fork(main, words=("castline", "build", *words))


@pytest.fixture(scope="module")
def bundle(
    rtx: None, build: Castline, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A whole engine for an RTX 4090: fp8 weights, activations and KV. A random model amplifies what they round."""
    output = tmp_path_factory.mktemp("engines")
    words = ("--target", "tensorrt", "--sku", "rtx4090", "--name", "tiny", "--output", str(output))
    done = build(str(tiny_checkpoint("llama")), *words, *TOKENS, "--allow-unverified")
    assert done.returncode == 0, done.stderr
    assert "built, not executed" in done.stderr
    return output / "tiny" / "1"


def test_bundle_has_what_a_gpu_needs_and_says_what_it_is(bundle: Path) -> None:
    """C01: SKU, flavour, versions, plugin and parity of the graph are in the manifest; plan and cubins in the files."""
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    assert (manifest.host.target, manifest.graph_file) == ("tensorrt_rtx", "model.plan")
    assert manifest.host.gpu == Gpu("rtx4090", "", "8.9")
    assert (manifest.precision.recipe, manifest.precision.kv_dtype) == ("fp8", "fp8")
    assert manifest.plugin.name == "castline_tensorrt"
    assert {"tensorrt_rtx", "triton"} <= set(manifest.tool_versions)
    assert manifest.parity is not None
    assert manifest.parity.subject == "graph"
    assert len(manifest.inputs_sha256) == 64
    kernels = read_kernel_set(bundle / "kernels")
    assert kernels.compute_capability == "8.9"
    assert {kernel.name for kernel in kernels.kernels} >= {"rope_append", "decode", "prefill", "sample"}
    assert all(not kernel.spill_bytes for kernel in kernels.kernels)
    assert {f"kernels/{kernel.cubin}" for kernel in kernels.kernels} <= set(manifest.files)
    assert "model.onnx" not in manifest.files
    assert not any(path.name.startswith(".") for path in bundle.iterdir())


def test_model_and_bundle_are_planned_alike(bundle: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """To the block: what `castline plan` promises before a build is what the engine then has."""
    asked = Asked(max_num_batched_tokens=64, max_num_seqs=4)
    model = planning.plan(str(tiny_checkpoint("llama")), load_sku("rtx4090"), {"block_size": 16}, asked, None)
    built = planning.plan(str(bundle), None, {}, Asked(), None)
    assert not model.engine.is_built
    assert built.engine.is_built
    assert model.memory == built.memory


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("host.gpu.compute_capability", lambda m: {"gpu": Gpu("a10", "NVIDIA A10", "8.6")}),
        ("host.gpu.sku", lambda m: {"gpu": Gpu("l4", "NVIDIA L4", "8.9")}),
        ("host.target", lambda m: {"target": "tensorrt"}),
    ],
)
def test_another_gpu_or_flavour_is_refused(bundle: Path, tools: Any, field: str, change: Any) -> None:
    """C01: before anything is deserialised, naming the field."""
    manifest = read_manifest(bundle)
    host = tools.replace(manifest.host, **change(manifest))
    with pytest.raises(ManifestMismatch, match=field):
        check_host(manifest, host, manifest.plugin, manifest.tool_versions["tensorrt_rtx"], allow_unverified=True)


def test_another_version_or_plugin_is_refused(bundle: Path, tools: Any) -> None:
    """C02, C03: a plan runs on the very release that wrote it, and with the kernels it was compiled with."""
    manifest = read_manifest(bundle)
    with pytest.raises(ManifestMismatch, match=r"tool_versions\.tensorrt_rtx: built with .*, found 1\.0"):
        check_host(manifest, manifest.host, manifest.plugin, "1.0", allow_unverified=True)
    other = tools.replace(manifest.plugin, sha256="0" * 64)
    with pytest.raises(ManifestMismatch, match=r"plugin\.sha256"):
        check_host(manifest, manifest.host, other, manifest.tool_versions["tensorrt_rtx"], allow_unverified=True)


@pytest.mark.skipif(detect_gpu() is not None, reason="there is a GPU here")
def test_run_without_a_gpu_is_refused_in_words(bundle: Path, castline: Castline) -> None:
    """The message is all that a user has: what is missing, and what to do."""
    done = castline("run", str(bundle), "--allow-unverified")
    assert done.returncode != 0
    assert "no NVIDIA driver or no GPU" in done.stderr
    assert "serve it on a machine with a rtx4090" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_centre_gpu_without_tensorrt_is_refused_in_one_line(
    castline: Castline, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Before the model is read: what is needed, and the option that does the rest."""
    words = ("--sku", "b200", "--output", str(tmp_path / "engines"))
    done = castline("build", str(tiny_checkpoint("llama")), *words, *TOKENS)
    assert done.returncode != 0
    assert "needs TensorRT and that GPU" in done.stderr
    assert "--kernels-only" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "engines").exists()


def test_kernels_only_builds_all_but_the_plan(
    rtx: None, build: Castline, castline: Castline, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """For an H100 on a machine without one: graph and kernels are there to build a plan from, and nothing serves it."""
    words = ("--sku", "h100-sxm", "--kernels-only", "--name", "tiny", "--output", str(tmp_path), "--recipe", "fp16")
    done = build(str(tiny_checkpoint("llama")), *words, *TOKENS, "--allow-unverified")
    assert done.returncode == 0, done.stderr
    assert "no plan (--kernels-only)" in done.stderr
    bundle = tmp_path / "tiny" / "1"
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    assert (manifest.host.target, manifest.graph_file) == ("tensorrt", "model.onnx")
    assert {"model.onnx", "weights.bin", "kernels/kernels.json"} <= set(manifest.files)
    assert read_kernel_set(bundle / "kernels").compute_capability == "9.0"
    refused = castline("run", str(bundle), "--allow-unverified")
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr
    with pytest.raises(EngineError, match="no plan: it was built with --kernels-only"):
        check_complete(manifest)
