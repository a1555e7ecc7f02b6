"""Planning: the right bundle, checked before anything of it is loaded."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from castline.engines.device_memory import buffer_bytes
from castline.engines.errors import EngineError, ManifestMismatch
from castline.engines.gpu import FoundGpu
from castline.engines.manifest import DeviceMemory, Gpu, Manifest, read_manifest, write_manifest
from castline.plugins.tensorrt.library import describe as gpu_plugin
from castline.runtime import loader
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine


@pytest.fixture
def bundle(tiny_repository: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return shutil.copytree(tiny_repository / "tiny" / "1", tmp_path / "models" / "tiny" / "1")


def change(bundle: Path, **fields: object) -> Manifest:
    manifest = replace(read_manifest(bundle), **fields)  # type: ignore[arg-type]
    write_manifest(bundle, manifest)
    return manifest


def test_a_plan_decides_everything(tiny_repository: Path) -> None:
    """Bundle, limits, pool and threads: what start-up prints is what is loaded."""
    plan = plan_engine(tiny_repository, LoadOptions(model="tiny", version=1, kv_blocks=20, threads=1))
    assert plan.bundle == tiny_repository / "tiny" / "1"
    assert plan.limits.num_blocks == plan.pool.num_blocks == 20
    assert plan.limits.max_concurrency == 20 / 16
    assert plan.num_threads == 1
    assert plan.pool.total_bytes == 20 * 2 * (2 * 2 * 16 * 16 * 4)


def test_planning_reads_the_manifest_first(bundle: Path) -> None:
    """C01: with every other file gone, the mismatch is still what is reported: nothing else was opened."""
    manifest = read_manifest(bundle)
    for path in bundle.iterdir():
        if path.name != "engine.json":
            path.unlink()
    change(bundle, tool_versions={"onnxruntime": "99.0.0"}, plugin=replace(manifest.plugin, sha256="00" * 32))
    with pytest.raises(ManifestMismatch) as caught:
        plan_engine(bundle)
    assert "tool_versions.onnxruntime: built with 99.0.0" in str(caught.value)
    assert f"plugin.sha256: built with {'00' * 32}, found {manifest.plugin.sha256}" in str(caught.value)


def test_an_engine_of_another_target_is_refused(bundle: Path) -> None:
    """C02: a TensorRT bundle on a host that serves cpu."""
    change(bundle, host=replace(read_manifest(bundle).host, target="tensorrt", machine="aarch64"))
    with pytest.raises(ManifestMismatch, match=r"host\.target: built with tensorrt, found cpu"):
        plan_engine(bundle)


def for_l4(bundle: Path) -> Manifest:
    """The bundle as if it were an engine for an L4."""
    manifest = read_manifest(bundle)
    host = replace(manifest.host, target="tensorrt_rtx", gpu=Gpu("l4", "", "8.9"))
    (bundle / manifest.graph_file).rename(bundle / "model.plan")
    files = {("model.plan" if name == manifest.graph_file else name): file for name, file in manifest.files.items()}
    tools = {"tensorrt_rtx": "1.7.1"}
    return change(
        bundle,
        host=host,
        tool_versions=tools,
        plugin=gpu_plugin(),
        graph_file="model.plan",
        files=files,
        device=DeviceMemory(weight_bytes=1 << 20, scratch_bytes=100 << 20),
    )


def has_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: str, **installed: str) -> FoundGpu:
    """This machine as if it had that GPU, half of its memory taken, and those libraries."""
    gpu = FoundGpu(0, name, capability, 8 << 30, 4 << 30, "13.0")
    monkeypatch.setattr(loader, "detect_gpu", lambda: gpu)
    monkeypatch.setattr(loader, "installed_version", installed.get)
    return gpu


def test_a_gpus_pool_is_planned_from_its_free_memory(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory, or what another process holds of the device, would be allocated and fail."""
    manifest = for_l4(bundle)
    gpu = has_gpu(monkeypatch, "NVIDIA L4", "8.9", tensorrt_rtx="1.7.1")
    pool = plan_engine(bundle).pool
    assert manifest.device is not None
    engine = manifest.device.weight_bytes + manifest.device.scratch_bytes
    buffers = buffer_bytes(manifest.model.vocab_size, manifest.limits)
    assert pool.num_blocks == (int(0.9 * gpu.free_bytes) - engine - buffers) // pool.bytes_per_block


def test_an_engine_that_does_not_say_what_it_takes_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built before scratch memory was planned: its pool would be too large by that."""
    for_l4(bundle)
    change(bundle, device=None)
    has_gpu(monkeypatch, "NVIDIA L4", "8.9", tensorrt_rtx="1.7.1")
    with pytest.raises(EngineError, match=r"engine\.json: device is missing.*rebuild it: castline build tiny"):
        plan_engine(bundle)


def test_threads_that_are_asked_of_a_gpu_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that does nothing must say so."""
    for_l4(bundle)
    has_gpu(monkeypatch, "NVIDIA L4", "8.9", tensorrt_rtx="1.7.1")
    with pytest.raises(EngineError, match="--threads 1: an engine for tensorrt_rtx computes on the GPU"):
        plan_engine(bundle, LoadOptions(threads=1))


def test_an_engine_for_another_gpu_is_refused_first(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C01, C02: device, flavour and version are compared before any other file is opened."""
    for_l4(bundle)
    for path in bundle.iterdir():
        if path.name != "engine.json":
            path.unlink()
    has_gpu(monkeypatch, "NVIDIA H100 PCIe", "9.0", tensorrt="11.4")
    with pytest.raises(ManifestMismatch) as caught:
        plan_engine(bundle)
    for line in (
        "host.target: built with tensorrt_rtx, found tensorrt",
        "host.gpu.compute_capability: built with 8.9, found 9.0 (NVIDIA H100 PCIe)",
        "host.gpu.sku: built with l4, found h100-pcie (NVIDIA H100 PCIe)",
        "tool_versions.tensorrt_rtx: built with 1.7.1, found not installed",
    ):
        assert line in str(caught.value)


def test_a_gpus_engine_on_a_machine_without_one(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C02: said so, where the driver's library is missing altogether."""
    for_l4(bundle)
    monkeypatch.setattr(loader, "detect_gpu", lambda: None)
    with pytest.raises(ManifestMismatch, match=r"host\.gpu: built with l4 .*, found no NVIDIA driver or no GPU"):
        plan_engine(bundle)


def test_a_spoiled_file_is_found(bundle: Path) -> None:
    """A template edited in place changes every prompt: it must be noticed at the next start."""
    (bundle / "chat_template.jinja").write_text("x")
    with pytest.raises(EngineError, match=r"chat_template\.jinja: 1 bytes"):
        plan_engine(bundle)


def test_an_unverified_engine_needs_the_flag(bundle: Path) -> None:
    """C10."""
    change(bundle, parity=None)
    with pytest.raises(EngineError, match="--allow-unverified"):
        plan_engine(bundle)
    assert plan_engine(bundle, LoadOptions(allow_unverified=True)).bundle == bundle


def test_a_manifest_whose_graph_is_no_file_of_it_is_refused(bundle: Path) -> None:
    """graph_file could name a file outside the bundle, which no hash covers."""
    change(bundle, graph_file="../../elsewhere.onnx")
    with pytest.raises(EngineError, match="graph_file"):
        plan_engine(bundle)


@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_threads_must_fit_the_host(tiny_repository: Path, threads: int) -> None:
    """More threads than cores make every step slower: refused with the number there is."""
    with pytest.raises(EngineError, match=r"--threads .* give 1 to \d+"):
        plan_engine(tiny_repository, LoadOptions(threads=threads))


def test_the_tuners_threads_are_cut_to_the_hosts_cores(bundle: Path) -> None:
    """A bundle tuned on 64 cores, served on 2."""
    change(bundle, tuning=replace(read_manifest(bundle).tuning, num_threads=10_000))
    assert 1 <= plan_engine(bundle).num_threads < 10_000


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("castline.runtime.loader", {"onnxruntime", "numpy"}),
        ("castline.commands.run", {"asyncio", "msgspec", "importlib.metadata"}),
        ("castline.runtime.engine_process", {"tokenizers", "jinja2", "asyncio"}),
    ],
)
def test_each_process_imports_only_its_half(module: str, absent: set[str]) -> None:
    """Start-up time and resident memory: planning loads no inference library, the engine process no tokenizer, and
    little comes before that process."""
    script = f"import sys, {module}; found = {absent!r} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_serving_imports_no_build_library(tiny_repository: Path) -> None:
    """The plain install has no torch, transformers or onnx: importing one of them breaks every user's start."""
    script = (
        "import sys; from castline.llm import LLM; import castline.runtime.async_engine\n"
        f"LLM({str(tiny_repository)!r}, kv_blocks=16).close()\n"
        "found = {'torch', 'transformers', 'onnx', 'onnxscript', 'onnx_ir'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_huge_pages_are_a_choice(tiny_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights would be copied where nothing is gained by it, or where the user wants them shared."""
    for mode, given, used in (("auto", True, True), ("auto", False, False), ("off", True, False)):
        monkeypatch.setattr("castline.runtime.huge_heap.available", lambda given=given: given)
        assert plan_engine(tiny_repository, LoadOptions(huge_pages=mode)).huge_pages is used
    with pytest.raises(EngineError, match="--huge-pages 'on' is unknown: give auto or off"):
        plan_engine(tiny_repository, LoadOptions(huge_pages="on"))
