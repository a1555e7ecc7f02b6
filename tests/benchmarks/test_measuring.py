"""Processes, machine and roofline: what figures rest on besides the systems themselves."""

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import bandwidth
from benchmarks.bandwidth import Bandwidth, Roofline, fastest, load_reader, measure
from benchmarks.errors import JobFailed
from benchmarks.machine import ABILITIES, FEATURES, CpuTimes, Machine
from benchmarks.processes import Group, MemoryPiece, parse_memory
from benchmarks.quality import Quality, compare, equal_or_better, of_logprobs
from benchmarks.roofline import weight_bytes
from benchmarks.systems.castline import SERVED_FROM, compile_sources
from benchmarks.systems.llamacpp import KEPT_TILE_CONFIG, TILE_CONFIG, keep_tile_config
from benchmarks.systems.vllm import prompt_logprobs

CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("on", flush=True)
input()
"""


def state(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2]


def test_group_is_the_whole_session(tmp_path: Path) -> None:
    """A server's worker processes are suspended, weighed and ended with it: one left running would disturb the rest."""
    group = Group.start([sys.executable, "-c", CHILD], tmp_path / "log", {}, talks=True)
    try:
        assert group.process.stdout is not None
        assert group.process.stdout.readline() == b"on\n"
        pids = group.pids()
        assert len(pids) == 2
        assert group.memory_bytes() > 2 << 20
        group.suspend()
        assert [state(pid) for pid in pids] == ["T", "T"]
        group.resume()
        assert "T" not in [state(pid) for pid in pids]
    finally:
        group.stop()
    assert not group.alive
    assert group.pids() == []


def test_memory_counts_a_page_once() -> None:
    """Weights that another system maps too must count in full; a library that two processes of a group map, once."""
    smaps = """\
7f00-7f01 r--p 00001000 fe:00 42 /lib/x.so
Size: 100 kB
Rss:                  80 kB
Pss:                  40 kB
7f01-7f02 rw-p 00000000 00:00 0 [heap]
Rss:                  60 kB
Pss:                  30 kB
"""
    mapped, heap = parse_memory(smaps)
    assert mapped == MemoryPiece("fe:00 42 00001000", 80 << 10, 40 << 10)
    assert heap == MemoryPiece(None, 60 << 10, 30 << 10)


def test_stop_ends_a_suspended_group(tmp_path: Path) -> None:
    """A stopped process does not see SIGTERM until it runs again."""
    group = Group.start([sys.executable, "-c", CHILD], tmp_path / "log", {}, talks=True)
    group.suspend()
    group.stop()
    assert not group.alive


def test_last_words_come_from_the_log(tmp_path: Path) -> None:
    """Why a peer died goes into the document."""
    group = Group.start([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log", {})
    group.process.wait()
    assert group.last_words() == "no such model"
    group.stop()


def test_others_share() -> None:
    """What neither we nor the measured system used, and what the host took, was others'."""
    one, later = CpuTimes(0.0, 100.0, 5.0), CpuTimes(10.0, 112.0, 6.0)
    capacity = 10.0 * (os.cpu_count() or 1)
    assert one.others_share(later, 12.0) == pytest.approx(1.0 / capacity)
    assert one.others_share(later, 9.0) == pytest.approx(4.0 / capacity)
    assert one.others_share(later, 99.0) == 0.0


def test_machine_is_described() -> None:
    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.memory_gib > 0.1
    assert machine.cpu
    assert machine.huge_pages in (None, "always", "madvise", "never")


def test_huge_pages_are_the_chosen_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file lists every choice, of which the first is not the one in force; some systems have no such file."""
    path = tmp_path / "enabled"
    monkeypatch.setattr("benchmarks.machine.HUGE_PAGES", path)
    assert Machine.here().huge_pages is None
    path.write_text("always [madvise] never\n")
    assert Machine.here().huge_pages == "madvise"


def test_abilities_are_of_features_that_are_looked_for() -> None:
    """A flag that `features` never holds would be called missing on every machine."""
    assert {flag for flags in ABILITIES.values() for flag in flags} <= set(FEATURES)


@pytest.mark.parametrize(("operator", "domain"), [("Gather", ""), ("Embedding", "castline")])
def test_roofline_counts_what_a_step_reads(operator: str, domain: str) -> None:
    """A table of embeddings that is only looked up is not read, unless the head multiplies by the same bytes."""
    tables = {name: np.zeros((8, 4), np.float32) for name in ("embedding", "weight")}
    nodes = [
        helper.make_node(operator, ["embedding", "ids"], ["x"], domain=domain),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in tables.items()]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["T"])], [], initializers
    )
    assert weight_bytes(helper.make_model(graph)) == (128, 128)
    tied = [external("embedding", 0), external("head", 0), external("other", 128)]
    nodes.append(helper.make_node("MatMul", ["y", "head"], ["z"]))
    graph = helper.make_graph(nodes, "g", [], [], tied)
    assert weight_bytes(helper.make_model(graph)) == (128, 128)


def external(name: str, offset: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, dims=[8, 4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "weights.bin", "offset": str(offset), "length": "128"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def test_bandwidth_reads_every_byte(tmp_path: Path) -> None:
    """A loop that skipped a part would measure a bandwidth that the machine does not have."""
    words = np.random.default_rng(0).integers(0, 2**40, 4096, np.uint64)
    total = load_reader(tmp_path).read_all(words.ctypes.data, words.size)
    assert total == int(words.sum())


def test_bandwidth_is_of_both_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reading is one figure for each buffer, of as many threads as asked."""
    monkeypatch.setattr(bandwidth, "PASSES", {1 << 20: 3, 4 << 20: 2})
    measured = measure(load_reader(tmp_path), 2)
    assert [(one.threads, one.buffer_bytes) for one in measured] == [(2, 1 << 20), (2, 4 << 20)]
    assert all(one.gb_per_s > 0 for one in measured)


def test_fastest_of_each_buffer() -> None:
    """A small buffer in a cache must not become the roof of what is read from memory."""
    before = [Bandwidth(2, 64, 50.0), Bandwidth(2, 1024, 20.0)]
    after = [Bandwidth(2, 64, 40.0), Bandwidth(2, 1024, 30.0)]
    assert fastest([*before, *after]) == (before[0], after[1])


def test_roofline_share() -> None:
    roofline = Roofline(weight_bytes=90_000_000, unread_bytes=1, kv_bytes=10_000_000)
    assert roofline.share(100.0, Bandwidth(2, 1 << 30, 20.0)) == pytest.approx(0.5)


def test_quality_of_the_reference_itself(tmp_path: Path) -> None:
    """No divergence from itself, its own perplexity; rows are cut into passages where they belong."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((7, 11)).astype(np.float32)
    np.save(tmp_path / "a.npy", logits)
    passages = [[1, 2, 3], [4, 5, 6, 7]]
    quality = compare(tmp_path / "a.npy", tmp_path / "a.npy", passages, "by hand")
    assert quality.mean_kl == 0
    assert quality.top1 == 1
    assert quality.num_tokens == 7
    p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    followed = [(0, 2), (1, 3), (3, 5), (4, 6), (5, 7)]
    assert quality.perplexity == pytest.approx(np.exp(-np.mean([p[row, token] for row, token in followed])))
    alone = of_logprobs([[float(p[row, token]) for row, token in followed[n]] for n in (slice(2), slice(2, 5))], "")
    assert alone.perplexity == pytest.approx(quality.perplexity)
    assert alone.num_tokens == 7


def test_perplexity_judges_where_there_are_no_logits() -> None:
    """A server that gives log-probabilities alone would be compared with nobody, whatever its quality."""
    ours = Quality(mean_kl=0.003, perplexity=14.722)
    assert equal_or_better(Quality(perplexity=14.74), ours)
    assert not equal_or_better(Quality(perplexity=14.80), ours)
    assert not equal_or_better(Quality(), ours)


class PromptServer:
    """Answers with the log-probabilities that a server would give to a prompt."""

    def __init__(self, given: list[dict[str, dict[str, float]] | None] | None) -> None:
        self.given = given
        self.asked: dict[str, object] = {}

    def complete(self, prompt: list[int], max_tokens: int, **fields: object) -> dict[str, object]:
        self.asked = {"prompt": prompt, "max_tokens": max_tokens, **fields}
        return {"text": "", "prompt_logprobs": self.given}


def test_logprobs_are_the_passages_own() -> None:
    """The first of the list is the best token where the passage's own is not: that is another perplexity."""
    server = PromptServer([None, {"9": {"logprob": -0.5}, "4": {"logprob": -3.0}}, {"7": {"logprob": -1.0}}])
    assert prompt_logprobs(cast(Any, server), [5, 4, 7]) == [-3.0, -1.0]
    assert server.asked == {"prompt": [5, 4, 7], "max_tokens": 1, "prompt_logprobs": 0}


@pytest.mark.parametrize("given", [None, [None, {"4": {"logprob": -3.0}}]])
def test_missing_logprobs_are_a_failure(given: list[dict[str, dict[str, float]] | None] | None) -> None:
    """A server that leaves tokens out would have the perplexity of the others."""
    with pytest.raises(JobFailed, match="tokens of 3"):
        prompt_logprobs(cast(Any, PromptServer(given)), [5, 4, 7])


def test_tile_config_is_kept(tmp_path: Path) -> None:
    """The one change to llama.cpp's source, made once, and not to a source that reads otherwise."""
    path = tmp_path / "mmq.cpp"
    path.write_text(f"a\n{TILE_CONFIG}\nb\n")
    keep_tile_config(path)
    keep_tile_config(path)
    assert path.read_text() == f"a\n{KEPT_TILE_CONFIG}\nb\n"
    keep_tile_config(tmp_path / "missing.cpp")


def test_what_is_served_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are, by the installer: a source tree that is compiled with every start would take half as long again."""
    monkeypatch.setattr("benchmarks.systems.castline.ROOT", tmp_path)
    for folder in SERVED_FROM:
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner" / "module.py").write_text("x = 1\n")
    compile_sources()
    for folder in SERVED_FROM:
        assert Path(cache_from_source(str(tmp_path / folder / "inner" / "module.py"))).is_file()
