"""Refusing a bundle that does not belong on this host, before anything of it is loaded."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from castline.engines.check import SMALL_FILE_BYTES, check_files, check_host, verify_files
from castline.engines.errors import EngineError, ManifestMismatch
from castline.engines.manifest import BundleFile, Gpu, Host, Manifest, Plugin, read_manifest, write_manifest

HOST = Host("cpu", "x86_64", "Another CPU", ("avx2", "fma", "avx512f"), 8)
PLUGIN = Plugin("castline_cpu", "1", "ab" * 32)


def refusal(
    manifest: Manifest, host: Host = HOST, plugin: Plugin | None = PLUGIN, runtime: str | None = "1.32.1"
) -> str:
    with pytest.raises(ManifestMismatch) as caught:
        check_host(manifest, host, plugin, runtime)
    message = str(caught.value)
    if manifest.host.gpu is None:
        assert f"rebuild it here: {manifest.rebuild_command}" in message
    return message


def test_a_host_that_offers_more_is_accepted(manifest: Manifest) -> None:
    """More cores, another CPU model, a newer ONNX Runtime and more instructions are no reason to refuse."""
    check_host(manifest, HOST, PLUGIN, "1.33.0")


def test_every_mismatch_is_named_at_once(manifest: Manifest) -> None:
    """C01, C02: fixing one mismatch only to be told of the next; each line says built with and found."""
    host = Host("tensorrt", "aarch64", "Arm", ("asimd",), 2)
    message = refusal(manifest, host, Plugin("castline_cpu", "2", "cd" * 32), "1.22.0")
    for line in (
        "host.target: built with cpu, found tensorrt",
        "host.machine: built with x86_64, found aarch64",
        "host.isa: built with avx2 avx512f, found asimd (lacks avx2 avx512f)",
        "plugin.version: built with 1, found 2",
        f"plugin.sha256: built with {'ab' * 32}, found {'cd' * 32}",
        "tool_versions.onnxruntime: built with 1.32.0, found 1.22.0 (older)",
    ):
        assert line in message


def test_a_missing_isa_alone_is_refused(manifest: Manifest) -> None:
    """C02: weights packed for AVX-512 on an AVX2 host end in an illegal instruction."""
    message = refusal(manifest, replace(HOST, isa=("avx2",)))
    assert "(lacks avx512f)" in message
    assert message.count("built with") == 1


def test_a_missing_plugin_is_a_typed_error(manifest: Manifest) -> None:
    """C03: None where a library was expected must not become an AttributeError."""
    assert "plugin: built with castline_cpu 1, found no such library" in refusal(manifest, plugin=None)


@pytest.mark.parametrize(
    ("found", "accepted"), [("1.32.0", True), ("1.100.0", True), ("2.0.0", True), ("1.4.9", False)]
)
def test_runtime_versions_compare_as_numbers(manifest: Manifest, found: str, accepted: bool) -> None:
    """C01: as text 1.4 is newer than 1.32 and 1.100 older."""
    if accepted:
        check_host(manifest, HOST, PLUGIN, found)
    else:
        assert "onnxruntime" in refusal(manifest, runtime=found)


def test_an_absent_runtime_is_named(manifest: Manifest) -> None:
    """C01: not installed at all."""
    assert "tool_versions.onnxruntime: built with 1.32.0, found not installed" in refusal(manifest, runtime=None)


def test_a_tensorrt_plan_wants_the_very_version(manifest: Manifest) -> None:
    """C01: a TensorRT plan of 11.0 is not readable by 11.1: newer is not good enough there."""
    built = replace(manifest, host=replace(manifest.host, target="tensorrt"), tool_versions={"tensorrt": "11.0.0"})
    host = replace(HOST, target="tensorrt")
    check_host(built, host, PLUGIN, "11.0.0")
    assert "tensorrt: built with 11.0.0, found 11.1.0" in refusal(built, host, runtime="11.1.0")


@pytest.mark.parametrize("verified", [None, False])
def test_an_unverified_engine_needs_the_flag(manifest: Manifest, verified: bool | None) -> None:
    """C10: an engine whose parity gate failed, or never ran, must not be served by default."""
    assert manifest.parity is not None
    parity = None if verified is None else replace(manifest.parity, verified=False)
    with pytest.raises(EngineError, match="--allow-unverified"):
        check_host(replace(manifest, parity=parity), HOST, PLUGIN, "1.32.0")
    check_host(replace(manifest, parity=parity), HOST, PLUGIN, "1.32.0", allow_unverified=True)


def test_the_flag_does_not_excuse_a_mismatch(manifest: Manifest) -> None:
    """--allow-unverified is about parity only."""
    with pytest.raises(ManifestMismatch):
        check_host(replace(manifest, parity=None), HOST, None, "1.32.0", allow_unverified=True)


def test_another_schema_names_both_versions_and_the_cure(tmp_path: Path, manifest: Manifest) -> None:
    """C01: a manifest of the future must not be half understood."""
    write_manifest(tmp_path, replace(manifest, schema_version=99))
    with pytest.raises(ManifestMismatch, match=r"built with 99, .* reads 1.*castline build smol"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("section", "name"), [("limits", "block_size"), ("model", "num_layers"), ("model", "head_dim")]
)
def test_sizes_are_positive(tmp_path: Path, manifest: Manifest, section: str, name: str) -> None:
    """A block size of 0 is a ZeroDivisionError at start-up; -2 layers are printed as if they were there."""
    nonsense = replace(getattr(manifest, section), **{name: 0})
    write_manifest(tmp_path, replace(manifest, **{section: nonsense}))
    with pytest.raises(EngineError, match=rf"is damaged: Expected `int` >= 1 - at `\$\.{section}\.{name}`"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b"\xff", b'{"schema_version": 1}', b'{"schema_version": 1, "model": 3}']
)
def test_a_damaged_manifest_is_a_typed_error(tmp_path: Path, raw: bytes) -> None:
    """A truncated copy must say so, not raise whatever the parser raises."""
    (tmp_path / "engine.json").write_bytes(raw)
    with pytest.raises(EngineError, match=re.escape(str(tmp_path))):
        read_manifest(tmp_path)


def test_a_manifest_survives_its_file(tmp_path: Path, manifest: Manifest) -> None:
    """Every field must be written and read back as it was, tuples and nested figures too."""
    full = replace(manifest, files={"a": BundleFile(1, "00")})
    write_manifest(tmp_path, full)
    assert read_manifest(tmp_path) == full
    assert msgspec.json.decode((tmp_path / "engine.json").read_bytes())["schema_version"] == 1


def damage_bundle(tmp_path: Path, manifest: Manifest, size: int) -> Manifest:
    """A bundle of one sparse file of *size* bytes, recorded with a hash that is not its own."""
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(size)
    return replace(manifest, files={"weights.bin": BundleFile(size, "00" * 32)})


def test_start_up_finds_a_changed_small_file(tmp_path: Path, manifest: Manifest) -> None:
    """A tokenizer of another model in the bundle answers fluent nonsense."""
    with pytest.raises(EngineError, match=r"weights\.bin: sha256 [0-9a-f]{64}, built with 0000"):
        check_files(tmp_path, damage_bundle(tmp_path, manifest, 1000))


def test_only_the_full_check_reads_large_files(tmp_path: Path, manifest: Manifest) -> None:
    """Hashing the weights at every start costs seconds; on request every byte counts."""
    changed = damage_bundle(tmp_path, manifest, SMALL_FILE_BYTES + 1)
    check_files(tmp_path, changed)
    with pytest.raises(EngineError, match=r"weights\.bin: sha256"):
        verify_files(tmp_path, changed)


def test_missing_and_truncated_files_are_all_listed(tmp_path: Path, manifest: Manifest) -> None:
    """An interrupted copy lacks several files: one message names them all with their sizes, and the cure."""
    changed = damage_bundle(tmp_path, manifest, SMALL_FILE_BYTES + 1)
    (tmp_path / "weights.bin").write_bytes(b"abc")
    changed = replace(changed, files={**changed.files, "tokenizer.json": BundleFile(10, "00" * 32)})
    with pytest.raises(EngineError) as caught:
        check_files(tmp_path, changed)
    message = str(caught.value)
    assert f"weights.bin: 3 bytes, built with {SMALL_FILE_BYTES + 1}" in message
    assert "tokenizer.json: cannot be read: No such file or directory" in message
    assert manifest.rebuild_command in message


L4 = Gpu("l4", "NVIDIA L4", "8.9")
RTX = Host("tensorrt_rtx", "x86_64", "Some CPU", (), 8, gpu=L4)


@pytest.fixture
def gpu_manifest(manifest: Manifest) -> Manifest:
    """An engine for an L4, built with no GPU present."""
    return replace(
        manifest,
        rebuild_command="castline build smol --target tensorrt --output models --sku l4 --recipe fp8",
        host=replace(RTX, gpu=replace(L4, device_name="")),
        tool_versions={"tensorrt_rtx": "1.7.1"},
    )


def test_a_gpu_engine_runs_on_its_sku(gpu_manifest: Manifest) -> None:
    """What was built with no GPU present names no device, so any board of the SKU will do."""
    check_host(gpu_manifest, RTX, PLUGIN, "1.7.1")
    a100 = replace(gpu_manifest, host=replace(RTX, gpu=Gpu("a100-80", "", "8.0")))
    for board in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"):
        check_host(a100, replace(RTX, gpu=Gpu("a100-80", board, "8.0")), PLUGIN, "1.7.1")


@pytest.mark.parametrize(
    ("found", "runtime", "lines"),
    [
        (None, "1.7.1", ["host.gpu: built with l4 (compute capability 8.9), found no NVIDIA driver or no GPU"]),
        (
            Gpu("rtx5090", "NVIDIA GeForce RTX 5090", "12.0"),
            "1.7.1",
            [
                "host.gpu.compute_capability: built with 8.9, found 12.0 (NVIDIA GeForce RTX 5090)",
                "host.gpu.sku: built with l4, found rtx5090 (NVIDIA GeForce RTX 5090)",
                "rebuild it for rtx5090: castline build smol --target tensorrt --output models --sku rtx5090",
            ],
        ),
        (
            Gpu("l40s", "NVIDIA L40S", "8.9"),
            "1.7.1",
            ["host.gpu.sku: built with l4, found l40s (NVIDIA L40S)", "--sku l40s"],
        ),
        (
            Gpu("", "NVIDIA GeForce RTX 4080", "8.9"),
            "1.7.1",
            [
                "host.gpu.sku: built with l4, found a GPU with no file under engines/skus (NVIDIA GeForce RTX 4080)",
                "write engines/skus/NAME.toml for the NVIDIA GeForce RTX 4080, and rebuild it for that",
            ],
        ),
        (L4, "1.8.0", ["tool_versions.tensorrt_rtx: built with 1.7.1, found 1.8.0"]),
        (L4, None, ["tool_versions.tensorrt_rtx: built with 1.7.1, found not installed"]),
    ],
)
def test_another_gpu_or_runtime_is_refused(
    gpu_manifest: Manifest, found: Gpu | None, runtime: str | None, lines: list[str]
) -> None:
    """C01, C02: TensorRT's own message for each of these is a number; here each has field, wanted, found and cure."""
    message = refusal(gpu_manifest, replace(RTX, gpu=found), runtime=runtime)
    for line in lines:
        assert line in message
    if found is None:
        assert "serve it on a machine with a l4 and its driver, or build the model with --target cpu" in message
    else:
        command = f"castline build smol --target tensorrt --output models --sku {found.sku or 'NAME'} --recipe fp8"
        assert command in message


def test_a_plan_tuned_on_one_board_wants_that_board(gpu_manifest: Manifest) -> None:
    """C02: TensorRT chose its kernels by timing a board; another of the same SKU was not timed."""
    timed = replace(gpu_manifest, host=replace(RTX, gpu=Gpu("a100-80", "NVIDIA A100-SXM4-80GB", "8.0")))
    message = refusal(timed, replace(RTX, gpu=Gpu("a100-80", "NVIDIA A100 80GB PCIe", "8.0")), runtime="1.7.1")
    assert "host.gpu.device_name: built with NVIDIA A100-SXM4-80GB, found NVIDIA A100 80GB PCIe" in message


def test_another_flavour_or_plugin_is_refused(gpu_manifest: Manifest) -> None:
    """C01, C03: a plan of TensorRT for RTX means nothing to TensorRT, nor new kernels to an old plan."""
    message = refusal(gpu_manifest, replace(RTX, target="tensorrt"), runtime=None)
    assert "host.target: built with tensorrt_rtx, found tensorrt" in message
    message = refusal(gpu_manifest, RTX, replace(PLUGIN, sha256="cd" * 32), "1.7.1")
    assert f"plugin.sha256: built with {'ab' * 32}, found {'cd' * 32}" in message


def test_a_cpu_engine_does_not_mind_a_gpu(manifest: Manifest) -> None:
    """A workstation with a GPU serves cpu engines as before."""
    check_host(manifest, replace(HOST, gpu=L4), PLUGIN, "1.32.0")
