"""Nodes cut their work for the threads of their own session, whatever else the process and the host have."""

import ctypes
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from castline.plugins import cpu
from castline.plugins.cpu import session
from castline.plugins.cpu.library import library_path
from castline.plugins.cpu.linear_model import linear_feeds, serialise_linear_model
from castline.plugins.cpu.node_model import block_bytes, serialise_node_model
from castline.plugins.cpu.session import SessionOptions, native_options
from castline.plugins.linear import LinearAttributes, LinearFormat
from castline.plugins.linear_packing import pack
from castline.plugins.linear_reference import LinearInputs

NATIVE = Path(cpu.__file__).parent / "native"
RECORDER = """
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "ort_abi.h"

// Registers the plugin's operators with an interface that notes how many pieces of work a node hands out.
namespace {
constexpr int kParallelFor = 274;
using Piece = void (*)(void*, size_t);
using ParallelFor = OrtStatus* (*)(const OrtKernelContext*, Piece, size_t, size_t, void*);
void* table[kParallelFor + 1];
ParallelFor parallel_for;
std::atomic<size_t> last{0};

OrtStatus* note(const OrtKernelContext* context, Piece piece, size_t total, size_t batches, void* data) {
  last = total;
  return parallel_for(context, piece, total, batches, data);
}
}  // namespace

extern "C" size_t last_pieces() { return last.exchange(0); }
extern "C" int host_threads() { return static_cast<int>(std::thread::hardware_concurrency()); }
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  std::memcpy(table, base->GetApi(castline::ort::kApiVersion), sizeof table);
  parallel_for = reinterpret_cast<ParallelFor>(table[kParallelFor]);
  table[kParallelFor] = reinterpret_cast<void*>(note);
  const OrtApiBase noting = {[](uint32_t) { return reinterpret_cast<const OrtApi*>(table); }, base->GetVersionString};
  void* plugin = dlopen(PLUGIN, RTLD_NOW);
  using Register = OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*);
  return reinterpret_cast<Register>(dlsym(plugin, "RegisterCustomOps"))(options, &noting);
}
"""
KEYS = 8192
"""Tokens of the attention node's only sequence."""


@pytest.fixture(scope="module")
def recorder_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorder")
    (folder / "recorder.cpp").write_text(RECORDER)
    library = folder / "recorder.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{NATIVE}", f'-DPLUGIN="{library_path()}"', "-o", library]
    subprocess.run([*command, folder / "recorder.cpp", "-ldl"], check=True, timeout=120)
    return library


@pytest.fixture
def recorder(recorder_path, monkeypatch) -> ctypes.CDLL:
    """What options made meanwhile register in place of the plugin."""
    monkeypatch.setattr(session, "library_path", lambda: recorder_path)
    return ctypes.CDLL(str(recorder_path))


class Linear:
    """A Linear node whose weights are 512 strips, one row at a time."""

    def __init__(self, options: onnxruntime.SessionOptions) -> None:
        self.attributes = LinearAttributes(k=64, n=16 * 512, format=int(LinearFormat.W8), group=32, wide_rows=-1)
        model = serialise_linear_model(self.attributes)
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self) -> None:
        packed = pack(np.ones((self.attributes.n, 64), np.float32), LinearFormat.W8, 32)
        self.session.run(None, dict(linear_feeds(LinearInputs(x=np.ones((1, 64), np.float32)), packed)))


class Attention:
    """An attention node of two KV heads, and one token after all others of a long sequence."""

    def __init__(self, tools, options: onnxruntime.SessionOptions) -> None:
        self.attributes = tools.attributes(rotary_dim=0)
        model = serialise_node_model(self.attributes)
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self) -> None:
        a, blocks = self.attributes, KEYS // self.attributes.block_size
        feeds = {
            "qkv": np.ones((1, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim), np.float32),
            "kv_pool.0": np.zeros((blocks, block_bytes(a)), np.uint8),
            "slot_mapping": np.array([KEYS - 1], np.int32),
            "cu_query_lens": np.array([0, 1], np.int32),
            "kv_lens": np.array([KEYS], np.int32),
            "block_table": np.arange(blocks, dtype=np.int32).reshape(1, blocks),
        }
        self.session.run(None, feeds)


def pieces(recorder: ctypes.CDLL, node: Linear | Attention) -> int:
    recorder.last_pieces()
    node.run()
    return int(recorder.last_pieces())


@pytest.fixture
def cut(recorder, tools) -> Callable[[int], tuple[int, int]]:
    """Pieces of a Linear and of an attention node in sessions of so many threads."""

    def cut(threads: int) -> tuple[int, int]:
        options = SessionOptions(num_threads=threads)
        nodes = Linear(native_options(options)), Attention(tools, native_options(options))
        return pieces(recorder, nodes[0]), pieces(recorder, nodes[1])

    return cut


@pytest.mark.parametrize(("threads", "expected"), [(1, (4, 2)), (2, (8, 8)), (3, (12, 14))])
def test_work_is_cut_for_the_sessions_threads(cut, threads, expected) -> None:
    """Work of two threads in the pieces of sixty-four: each costs a dispatch, and keys are added up once more."""
    assert cut(threads) == expected


def test_without_a_number_work_is_cut_for_the_host(recorder, cut) -> None:
    """A session that takes ONNX Runtime's own number must not run on one thread alone."""
    assert cut(0) == cut(recorder.host_threads())


def test_sessions_do_not_share_their_number(recorder) -> None:
    """An engine that is opened while another serves, or by another thread at once, would change the other's number."""
    numbers = [1, 2, 3, 2, 1, 3] * 4
    options = [native_options(SessionOptions(num_threads=number)) for number in numbers]
    with ThreadPoolExecutor(4) as pool:
        nodes = list(pool.map(Linear, reversed(options)))[::-1]
    assert [pieces(recorder, node) for node in nodes] == [4 * number for number in numbers]


@pytest.mark.parametrize("number", ["0", "-1", "two", "2 ", "", "65537", "9" * 15])
def test_wrong_numbers_are_refused(number) -> None:
    """Options in which the number is no number of threads; no pieces at all would leave the output unwritten."""
    native = onnxruntime.SessionOptions()
    native.add_session_config_entry("castline.num_threads", number)
    with pytest.raises(Exception, match=r"castline\.num_threads is '.*', not a number from 1 to 65536"):
        native.register_custom_ops_library(str(library_path()))
