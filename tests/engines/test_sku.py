"""The GPUs that castline knows: every file is whole, and a wrong one is refused with its field."""

from pathlib import Path

import pytest

from castline.engines.errors import EngineError
from castline.engines.sku import (
    RTX_CAPABILITIES,
    SKU_DIRECTORY,
    Sku,
    all_skus,
    check_flavour,
    check_precision,
    load_sku,
    read_sku,
    sku_of_device,
)

WANTED = {
    "a10", "a100-40", "a100-80", "l4", "l40s", "rtx4090", "rtx5090", "rtxpro6000",
    "h100-sxm", "h100-pcie", "h200", "b200",
}  # fmt: skip
L4 = (SKU_DIRECTORY / "l4.toml").read_text()


def skus() -> list[pytest.param]:  # type: ignore[valid-type]
    return [pytest.param(sku, id=sku.name) for sku in all_skus()]


def test_the_promised_skus_are_there() -> None:
    """A SKU that the workflow builds for and the README names must have a file."""
    assert {sku.name for sku in all_skus()} == WANTED


@pytest.mark.parametrize("sku", skus())
def test_figures_are_dense_and_of_one_chip(sku: Sku) -> None:
    """A datasheet's sparse rate is twice the dense one: bf16 equals fp16, fp8 is twice it, fp4 four or eight times."""
    rates = sku.dense_tflops
    assert rates.bf16 == rates.fp16
    if rates.fp8 is not None:
        assert rates.fp8 / rates.fp16 == pytest.approx(2, rel=0.02)
    assert rates.int8 / rates.fp16 == pytest.approx(2, rel=0.02) or sku.name in ("rtx4090", "rtx5090")
    if rates.fp4 is not None:
        assert rates.fp4 / rates.fp16 == pytest.approx(8 if sku.name == "rtx5090" else 4, rel=0.02)
    per_sm = rates.fp16 / sku.sm_count
    assert 1 < per_sm < 16, "TFLOP/s a multiprocessor"


@pytest.mark.parametrize("sku", skus())
def test_a_step_over_the_memory_takes_milliseconds(sku: Sku) -> None:
    """A bandwidth in TB/s or GiB of memory in MiB would be out by a thousand: no chip reads itself in under 5 ms."""
    assert 0.005 < sku.memory_bytes / sku.bytes_per_s < 0.12


@pytest.mark.parametrize("sku", skus())
def test_flavours_follow_the_capability(sku: Sku) -> None:
    """TensorRT for RTX rejects 9.0 and 10.0; a SKU that claimed it would fail at the end of a build."""
    assert ("tensorrt_rtx" in sku.flavours) == (sku.compute_capability in RTX_CAPABILITIES)
    assert "tensorrt" in sku.flavours
    check_flavour(sku, "tensorrt")


@pytest.mark.parametrize("sku", skus())
def test_defaults_can_be_computed(sku: Sku) -> None:
    """fp8 weights by default on a chip without the type would make every build of it fail."""
    check_precision(sku, sku.defaults.recipe, sku.defaults.kv_dtype)
    assert sku.defaults.max_num_batched_tokens >= sku.defaults.max_num_seqs
    assert sku.has_fp8 == (sku.defaults.recipe == "fp8")


def test_names_are_forgiving() -> None:
    """RTX 4090 is written in many ways; each must find the one file."""
    for name in ("rtx4090", "RTX-4090", "rtx 4090", "Rtx_4090"):
        assert load_sku(name).name == "rtx4090"
    assert load_sku("H100 SXM").name == "h100-sxm"


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A typing error is cured by the list."""
    with pytest.raises(EngineError, match=r"SKU 'rtx409' is unknown; known are a10, a100-40, .*rtxpro6000"):
        load_sku("rtx409")


def test_a_device_is_recognised_by_the_drivers_name() -> None:
    """Both boards of the A100 80GB are one SKU; a board that is not listed is none, and never a similar one."""
    for name, sku in (
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
    ):
        found = sku_of_device(name)
        assert found is not None
        assert found.name == sku
    assert sku_of_device("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    names = [name for sku in all_skus() for name in sku.device_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_mib = 23034\n", ""), "missing required field `memory_mib`"),
        (("memory_mib = 23034", "memory_gb = 24"), "memory_gb"),
        (("memory_mib = 23034", "memory_mib = 24"), r">= 4096 - at `\$.memory_mib`"),
        (("bandwidth_gb_per_s = 300", "bandwidth_gb_per_s = 0.3"), r">= 100.* - at `\$.bandwidth_gb_per_s`"),
        (("fp16 = 121", "fp16 = 121e12"), r"<= 100000.* - at `\$.dense_tflops.fp16`"),
        (("fp16 = 121", "fp12 = 121"), "fp12|fp16"),
        (("fp8 = 242.5\n", ""), "dense_tflops.fp8 is needed from compute capability 8.9"),
        (('"8.9"', '"8.6"'), "dense_tflops.fp8 does not exist before compute capability 8.9"),
        (('"8.9"', '"sm89"'), r"at `\$.compute_capability`"),
        (('name = "l4"', 'name = "l5"'), "name 'l5' must be the file's, 'l4'"),
        (('"tensorrt_rtx", ', ""), "flavours: tensorrt_rtx is for compute capability 8.0"),
        (('"tensorrt_rtx", ', '"tensorrt_lite", '), "flavours"),
        (('recipe = "fp8"', 'recipe = "fp7"'), "defaults: recipe 'fp7' is not for GPUs; choose fp16"),
        (('kv_dtype = "fp8"', 'kv_dtype = "int8"'), "defaults: KV blocks of int8 are not for GPUs; choose fp8"),
        (("memory_utilization = 0.9", "memory_utilization = 90"), r"at `\$.defaults.memory_utilization`"),
        (("l2_mib = \"", "l2_size = \""), "sources lacks l2_mib: every figure names the document"),
        (('compute_capability = "NVIDIA CUDA', 'compute_capability = "" #'), "sources.compute_capability is empty"),
        (("name", "name ="), "l4.toml: "),
    ],
)  # fmt: skip
def test_a_wrong_file_names_file_and_field(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """A figure in the wrong unit, left out or of no known name must not become a plan."""
    assert change[0] in L4
    (tmp_path / "l4.toml").write_text(L4.replace(*change, 1))
    with pytest.raises(EngineError, match=message) as caught:
        read_sku(tmp_path / "l4.toml")
    assert str(tmp_path / "l4.toml") in str(caught.value)


def test_precisions_a_chip_lacks_are_refused_with_those_it_has() -> None:
    """fp8 weights on an A10: the cure is the list."""
    with pytest.raises(EngineError, match=r"A10 \(compute capability 8.6\) cannot multiply fp8.*fp16, bf16, int4"):
        check_precision(load_sku("a10"), "fp8", "fp16")
    with pytest.raises(EngineError, match="KV blocks of fp32 are not for GPUs; choose fp8, fp16, bf16"):
        check_precision(load_sku("l4"), "fp8", "fp32")
    check_precision(load_sku("a10"), "fp16", "fp8")


def test_rtx_is_refused_where_it_does_not_build() -> None:
    """C02: said before the build, with the target that does."""
    with pytest.raises(EngineError, match=r"h200 has 9\.0; use --target tensorrt"):
        check_flavour(load_sku("h200"), "tensorrt_rtx")
