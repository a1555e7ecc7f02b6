"""`castline plan`: that it agrees with the loader to the block, and what it prints and refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from castline import planning
from castline.commands import plan as plan_module
from castline.engines.capacity import blocks_for
from castline.engines.errors import CastlineError, EngineError
from castline.engines.manifest import (
    SCHEMA_VERSION,
    BundleFile,
    DeviceMemory,
    Gpu,
    Host,
    Limits,
    Manifest,
    ModelFacts,
    Plugin,
    Precision,
    Tuning,
    write_manifest,
)
from castline.engines.memory_plan import Asked
from castline.engines.sku import all_skus, load_sku
from castline.runtime import loader
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine, reconcile_limits

GIB = 1 << 30
CPU = Manifest(
    schema_version=SCHEMA_VERSION,
    castline_version="0.1.0",
    created="2026-01-01T00:00:00Z",
    rebuild_command="castline build m --output models",
    model=ModelFacts("m", "llama", "m", 30, 576, 9, 3, 64, 49152, 8192, 134_515_008, (2,), 1),
    precision=Precision("int8", "int8"),
    limits=Limits(max_model_len=8192, block_size=32),
    host=Host("cpu", "x86_64", "Some CPU", (), 2),
    tuning=Tuning(measured=False, num_threads=2),
    parity=None,
    plugin=Plugin("castline_cpu", "1", "ab" * 32),
    graph_file="model.onnx",
    tool_versions={},
    files={"model.onnx": BundleFile(1 << 20, "0"), "weights.bin": BundleFile(137 << 20, "0")},
)
GPU = replace(
    CPU,
    precision=Precision("fp8", "fp8"),
    limits=Limits(8192, 32, 256, 4096),
    host=Host("tensorrt_rtx", "x86_64", "Some CPU", (), 2, Gpu("l4", "", "8.9")),
    device=DeviceMemory(weight_bytes=168 << 20, scratch_bytes=600 << 20),
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(plan_module.command, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Manifest], Path]:
    """Writes a bundle that is only its manifest: a plan must open nothing else."""

    def write(manifest: Manifest) -> Path:
        bundle = tmp_path / "models" / "m" / "1"
        bundle.mkdir(parents=True, exist_ok=True)
        write_manifest(bundle, manifest)
        return bundle.parent.parent

    return write


@pytest.mark.parametrize("manifest", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_utilization": 0.37},
        {"kv_blocks": 300},
        {"max_model_len": 999, "max_num_seqs": 3, "max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 300, "max_num_seqs": 7, "memory_utilization": 1.0},
    ],
)
def test_plan_and_loader_agree_to_the_block(
    save: Callable[[Manifest], Path], monkeypatch: pytest.MonkeyPatch, manifest: Manifest, options: dict[str, Any]
) -> None:
    """A plan that promises one block more than the start finds is worth nothing."""
    available = 5 * GIB + 12345 if manifest is CPU else load_sku("l4").memory_bytes
    monkeypatch.setattr(planning, "available_memory_bytes", lambda: available)
    planned = planning.plan(str(save(manifest)), None, {}, Asked(**options), None).memory
    limits, pool = reconcile_limits(manifest, LoadOptions(**options), available)
    assert planned.pool == pool
    assert planned.pool.num_blocks == limits.num_blocks
    assert planned.pool.max_concurrency == limits.max_concurrency
    assert planned.limits == Limits(
        limits.max_model_len, limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens
    )


@pytest.mark.slow
def test_the_demo_engine_starts_with_the_planned_blocks(default_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with a bundle as it is built and the whole start-up path."""
    for module in (planning, loader):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: 3 * GIB)
    for share in ((), ("--memory-utilization", "0.5")):
        planned = json.loads(invoke("--model", default_engine, "--json", *share).output)
        started = plan_engine(default_engine, LoadOptions(memory_utilization=float(share[1]) if share else None))
        assert planned["kv"]["num_blocks"] == started.pool.num_blocks
        assert planned["kv"]["max_concurrency"] == started.limits.max_concurrency
        assert planned["model"]["num_parameters"] == started.manifest.model.num_parameters == 134515008


@pytest.mark.parametrize("sku", [sku.name for sku in all_skus()])
def test_the_pool_is_what_is_left_of_a_gpu(sku: str) -> None:
    """Utilization x memory, less weights and a step, in whole blocks; nothing is bounded as on a host."""
    report = json.loads(invoke("--model", "demo", "--sku", sku, "--json").output)
    memory, kv, chip = report["memory"], report["kv"], load_sku(sku)
    left = int(0.9 * chip.memory_bytes) - memory["weight_bytes"] - memory["step_bytes"]
    assert kv["num_blocks"] == left // kv["bytes_per_block"]
    assert kv["bytes_per_block"] == 30 * 2 * 3 * 32 * 64 * (1 if report["kv_dtype"] == "fp8" else 2)
    assert kv["max_concurrency"] == kv["num_blocks"] / blocks_for(8192, 32)
    assert report["recipe"] == chip.defaults.recipe
    assert report["limits"]["max_num_seqs"] == chip.defaults.max_num_seqs


def test_the_estimate_is_printed_with_its_formula() -> None:
    """An upper bound that is not called one is taken for a promise."""
    text = invoke("--model", "demo", "--sku", "l4").output
    assert "upper bound, 100 % of 300 GB/s and of 242.5 dense TFLOP/s in fp8" in text
    assert "seconds = max(bytes / bandwidth" in text
    report = json.loads(invoke("--model", "demo", "--sku", "l4", "--json").output)["roofline"]
    assert [row["batch"] for row in report["decode"]] == [1, 8, 32, 64]
    assert report["share_of_peak"] == 1.0
    first = report["decode"][0]["estimate"]
    read = 106203456 + 2 * 28311552 + 1024 * 30 * 2 * 3 * 64
    assert first["seconds"] == pytest.approx(read / 300e9)
    assert f"{first['tokens_per_s']:,.0f}" in text


@pytest.mark.parametrize("sku", [*(sku.name for sku in all_skus()), "cpu"])
def test_the_table_fits_a_terminal(sku: str) -> None:
    """80 columns: a table that wraps is not one."""
    lines = invoke("--model", "demo", "--sku", sku).output.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_batches_end_at_what_fits() -> None:
    """No speed for 32 sequences where the pool holds ten."""
    arguments = ("--model", "demo", "--sku", "l4", "--kv-blocks", 320, "--context", 1024, "--json")
    report = json.loads(invoke(*arguments).output)
    assert [row["batch"] for row in report["roofline"]["decode"]] == [1, 8, 10]


def test_options_change_the_plan() -> None:
    """Each option is taken, none only accepted."""
    arguments = (
        "--recipe", "int4", "--kv-dtype", "bf16", "--block-size", "16", "--max-model-len", "2048",
        "--max-num-seqs", "5", "--max-num-batched-tokens", "100", "--memory-utilization", "0.5", "--context", "77",
    )  # fmt: skip
    report = json.loads(invoke("--model", "demo", "--sku", "l4", "--json", *arguments).output)
    assert (report["recipe"], report["kv_dtype"]) == ("int4", "bf16")
    assert report["limits"] == {
        "max_model_len": 2048, "block_size": 16, "max_num_seqs": 5, "max_num_batched_tokens": 100,
    }  # fmt: skip
    assert report["memory"]["utilization"] == 0.5
    assert report["roofline"]["context"] == 77
    assert report["roofline"]["decode"][-1]["batch"] == 5


def test_a_build_recipe_is_planned(tmp_path: Path) -> None:
    """The file that CI builds says model, precision and limits; the command line wins."""
    file = tmp_path / "r.toml"
    file.write_text(
        'summary = "s"\nmodel = "demo"\nname = "m"\ntargets = ["tensorrt"]\nrecipe = "fp16"\nmax_model_len = 4096\n'
    )
    report = json.loads(invoke("--recipe", file, "--sku", "l4", "--json").output)
    assert (report["recipe"], report["limits"]["max_model_len"]) == ("fp16", 4096)
    report = json.loads(invoke("--recipe", file, "--sku", "l4", "--max-model-len", 100, "--json").output)
    assert report["limits"]["max_model_len"] == 100


def test_this_machine_needs_no_sku(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is known, its peaks are not: no speed is made up."""
    monkeypatch.setattr(planning, "available_memory_bytes", lambda: 4 * GIB)
    for arguments in ((), ("--sku", "cpu")):
        text = invoke("--model", "demo", *arguments).output
        assert "int8 weights, int8 KV blocks" in text
        assert "available    4,096  free on this machine" in text
        assert "not estimated" in text
    assert json.loads(invoke("--model", "demo", "--json").output)["roofline"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "demo", "--sku", "a10", "--recipe", "fp8"],
            "cannot multiply fp8 weights; choose fp16, bf16, int4",
        ),
        (["--model", "demo", "--sku", "l4", "--kv-dtype", "int8"], "KV blocks of int8 are not for GPUs"),
        (["--model", "demo", "--kv-dtype", "fp16"], "--kv-dtype fp16 is for GPUs"),
        (["--model", "demo", "--max-model-len", "9000"], "--max-model-len 9000 is outside 2 to 8192"),
        (["--model", "demo", "--sku", "l4", "--context", "9000"], "--context 9000 is outside 1 to 8192"),
        (["--model", "demo", "--sku", "l4", "--max-num-batched-tokens", "3"], "lower --max-num-seqs to 3"),
        (["--model", "demo", "--sku", "l4", "--memory-utilization", "0.01"], "raise --memory-utilization"),
        (["--model", "demo", "--sku", "l4", "--memory-utilization", "2"], "is not a share"),
        (["--model", "demo", "--kv-blocks", "3"], "raise --kv-blocks to 256"),
        (["--model", "nowhere", "--sku", "l4"], "download the model first"),
        (["--sku", "l4"], "--model is missing"),
        (["--model", "demo", "--recipe", "fp8"], "--recipe 'fp8' is unknown; choose one of auto, fp32"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(arguments: list[str], message: str) -> None:
    """Option, limit and cure, as `run` and `build` would say it."""
    with pytest.raises(CastlineError) as caught:
        invoke(*arguments)
    assert message in str(caught.value)


def test_a_bundle_keeps_what_it_was_built_with(save: Callable[[Manifest], Path]) -> None:
    """A bundle planned for another chip or precision would be another bundle."""
    repository = save(GPU)
    with pytest.raises(EngineError, match=r"--sku h200: .* was built for l4; leave --sku out"):
        invoke("--model", repository, "--sku", "h200")
    with pytest.raises(EngineError, match=r"--kv-dtype is settled in .*; leave it out"):
        invoke("--model", repository, "--kv-dtype", "bf16")
    with pytest.raises(EngineError, match="--max-num-seqs 257 is over the engine's 256"):
        invoke("--model", repository, "--max-num-seqs", 257)
    assert "as the bundle records them" in invoke("--model", repository, "--sku", "L4").output
    with pytest.raises(EngineError, match=r"--sku l4: .* was built for cpu"):
        invoke("--model", save(CPU), "--sku", "l4")


def test_planning_imports_no_torch() -> None:
    """Planning is for machines that only serve, and for answers in a moment."""
    code = (
        "import sys; from castline.cli import cli\n"
        "try: cli.main(['plan', '--model', 'demo', '--sku', 'l4'])\nexcept SystemExit: pass\n"
        "print('loaded', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "maximum concurrency" in done.stdout
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "numpy", "gguf"}
