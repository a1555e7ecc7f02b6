"""What is read off a builder's log: a plan that is not what was asked for must not become an engine."""

import pytest

from castline.builder.tensorrt.plan_log import check_plan, read_layers
from castline.engines.errors import BuildError


def layer(name: str, kind: str, types: list[str], nodes: list[str]) -> str:
    tensors = ", ".join(f"{{ Name: t, Datatype: {one}, Format: Linear }}" for one in types)
    return f"Name: {name}, LayerType: {kind}, Inputs: [ {tensors}], Metadata: " + "".join(
        f"[ONNX Layer: {node}]" for node in nodes
    )


def listing(*layers: str) -> list[str]:
    return ["INFO built", "\n".join(["VERBOSE Layers:", *layers])]


GOOD = (
    layer("attention.0", "PluginV3", ["Half", "Int8", "Half", "Int8"], ["attention.0"]),
    layer("gemm", "gemm", ["FP8", "FP8", "Half"], ["down"]),
    layer("attention.0 [profile 1]", "PluginV3", ["Half", "Int8", "Half", "Int8"], ["attention.0"]),
)


def test_layers_are_read_with_their_types_and_nodes() -> None:
    """The parser of the log is what the other checks stand on."""
    found = read_layers(listing(*GOOD))
    assert [one.kind for one in found] == ["PluginV3", "gemm", "PluginV3"]
    assert found[1].types == ("FP8", "FP8", "Half")
    assert found[1].nodes == ("down",)
    assert check_plan(listing(*GOOD), ["attention.0"], ["down"]) == found


def test_copied_pools_fail_the_build() -> None:
    """A copy of the pool in each layer of each step: right answers at a hundredth of the speed."""
    log = [*listing(*GOOD), "WARNING Inserting copy/copies before plugin attention.0 due to I/O aliasing"]
    with pytest.raises(BuildError, match=r"copies KV pools in every step: .*attention\.0"):
        check_plan(log, ["attention.0"], [])


def test_missing_attention_fails_the_build() -> None:
    """A layer without its plugin in a profile, or a log that lists nothing: never taken for a good plan."""
    with pytest.raises(BuildError, match=r"1 attention layers, 2 expected; these differ: attention\.0 \[profile 1\]"):
        check_plan(listing(*GOOD[:2]), ["attention.0"], [])
    with pytest.raises(BuildError, match="0 attention layers, 2 expected"):
        check_plan(["INFO built"], ["attention.0"], [])


def test_matmul_that_fell_back_to_16_bits_fails_the_build() -> None:
    """Dequantise and multiply in fp16 is right and slow: an fp8 engine that has no e4m3 matmul is none."""
    fallen = layer("gemm", "gemm", ["Half", "FP8", "Half"], ["down"])
    with pytest.raises(BuildError, match="1 matmuls do not multiply e4m3, down among them"):
        check_plan(listing(GOOD[0], fallen, GOOD[2]), ["attention.0"], ["down"])
