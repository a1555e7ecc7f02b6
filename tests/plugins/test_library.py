"""The native library: found, checked, chosen by the host, and proven to work."""

import ctypes
import hashlib
import subprocess
from dataclasses import replace

import numpy as np
import onnx
import pytest

from castline.engines.errors import EngineError
from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm
from castline.plugins.cpu import library, node_model, selftest


def test_path_version_and_hash() -> None:
    """The manifest's plugin entry must describe the file that is loaded."""
    plugin = library.describe()
    assert (plugin.name, plugin.version) == ("castline_cpu", library.PLUGIN_VERSION)
    assert plugin.sha256 == hashlib.sha256(library.library_path().read_bytes()).hexdigest()


def test_missing_library_is_named(tmp_path) -> None:
    """C03: a typed error with plugin, wanted and found; never an AttributeError on None."""
    with pytest.raises(EngineError, match=r"plugin castline_cpu: wanted version .*found no library at .*reinstall"):
        library._open_library(tmp_path / "libcastline_cpu.so")


def test_a_file_that_is_no_library_is_named(tmp_path) -> None:
    """C03: a truncated download or a text file in its place."""
    path = tmp_path / "libcastline_cpu.so"
    path.write_text("not a library")
    with pytest.raises(EngineError, match=r"plugin castline_cpu: wanted version .*not the plugin"):
        library._open_library(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('extern "C" int unrelated() { return 1; }', "not the plugin"),
        (
            'extern "C" { const char* castline_plugin_version() { return "999"; }'
            'const char* castline_available_isas() { return ""; } const char* castline_active_isa() { return ""; } }',
            "found version 999",
        ),
    ],
)
def test_another_version_is_named(tmp_path, source, message) -> None:
    """C03: a library left over from another castline would be called by another contract."""
    path = tmp_path / "other.so"
    (tmp_path / "other.cpp").write_text(source)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", path, tmp_path / "other.cpp"], check=True)
    with pytest.raises(EngineError, match=message):
        library._open_library(path)


def test_old_onnxruntime_is_named() -> None:
    """A runtime older than the interface would fail inside its loader with no hint of the cause."""
    with pytest.raises(EngineError, match=r"wants onnxruntime 1\.23 or newer, found 1\.9\.0"):
        library._check_onnxruntime("1.9.0")
    library._check_onnxruntime("1.23.0")
    library._check_onnxruntime("2.0.1rc1")


def test_isas(tools) -> None:
    """The widest kernels are the default; every one the host has can be asked for; portable is always there."""
    isas = library.available_isas()
    assert isas[-1] == "portable"
    assert set(isas) <= {"portable", "avx2", "avxvnni", "avx512", "avx512fp16", "amx"}
    with tools.isa(None):
        assert library.active_isa() == isas[0]
    for isa in isas:
        with tools.isa(isa):
            assert library.active_isa() == isa


def test_unknown_isa_is_refused(tools) -> None:
    """CASTLINE_ISA misspelt, or naming what the host lacks, must not silently run something else."""
    with tools.isa("avx1024"), pytest.raises(EngineError, match=r"CASTLINE_ISA.*portable"):
        library.active_isa()
    with tools.isa("avx1024"), pytest.raises(Exception, match=r"CASTLINE_ISA is 'avx1024'.*portable"):
        tools.session(node_model.serialise_node_model(tools.attributes()))


@pytest.mark.parametrize("isa", library.available_isas())
def test_self_test_passes(tools, isa) -> None:
    with tools.isa(isa):
        selftest.run_self_test()


def test_self_test_can_fail(monkeypatch) -> None:
    """A self-test that compares nothing passes on a broken host too."""
    wrong = lambda a, inputs, pool: np.zeros((len(inputs.qkv), a.num_heads * a.head_dim), np.float32)  # noqa: E731
    monkeypatch.setattr(selftest, "paged_attention", wrong)
    with pytest.raises(EngineError, match="self-test of fp32 blocks"):
        selftest.run_self_test()


@pytest.mark.parametrize(
    ("reference", "problem"), [("linear", "W4_DM weights in groups of 32"), ("embedding", "the embedding")]
)
def test_self_test_of_linear_can_fail(monkeypatch, reference, problem) -> None:
    """The same of the other operators."""
    right = getattr(selftest, reference)
    monkeypatch.setattr(selftest, reference, lambda *inputs, **options: right(*inputs, **options) + np.float32(0.05))
    with pytest.raises(EngineError, match=f"self-test of {problem}"):
        selftest.run_self_test()


def test_exports_only_its_interface() -> None:
    """A symbol of the plugin that leaks into the process could be bound to by another library, and the reverse."""
    handle = ctypes.CDLL(str(library.library_path()))
    assert hasattr(handle, "RegisterCustomOps")
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library.library_path()], check=True, capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in symbols.splitlines() if " T " in line}
    assert names == {
        "RegisterCustomOps",
        "castline_plugin_version",
        "castline_available_isas",
        "castline_active_isa",
        "castline_draw",
        "castline_begin_watching",
        "castline_end_watching",
        "castline_move_weights",
        "castline_set_rehearsing",
    }


@pytest.mark.parametrize("qk_norm", QkNorm)
@pytest.mark.parametrize("rotary_dim", [0, 8])
def test_node_model_is_what_onnx_reads(tools, qk_norm, rotary_dim) -> None:
    """The model is serialised by hand; onnx must read back the node, its attributes and its inputs."""
    attributes = tools.attributes(
        qk_norm=int(qk_norm), rotary_dim=rotary_dim, kv_dtype=int(KvDtypeCode.INT8), kv_split=300, softcap=30.0
    )
    model = onnx.load_from_string(node_model.serialise_node_model(attributes))
    (node,) = model.graph.node
    assert (node.domain, node.op_type, list(node.output)) == ("castline", "PagedAttention", ["output"])
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert AttentionAttributes(**values) == replace(attributes, norm_eps=values["norm_eps"])
    assert values["norm_eps"] == pytest.approx(attributes.norm_eps)
    assert [name for name in node.input if name] == [i.name for i in model.graph.input]
    pool = next(i for i in model.graph.input if i.name == "kv_pool.0").type.tensor_type
    assert (pool.elem_type, pool.shape.dim[1].dim_value) == (onnx.TensorProto.UINT8, 2 * 2 * 16 * (16 + 4))
    assert {o.domain: o.version for o in model.opset_import} == {"": 21, "castline": 1}
