"""How a step is cut into work items: every (query, kv head, key tile) exactly once, and as the attributes say."""

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.plugins import cpu

NATIVE = Path(cpu.__file__).parent / "native"
TILE = 256
PROBE = """
#include "partition.h"
// Writes 8 ints an item: sequence, kv head, first and last query, first and last tile, unit, items of the unit.
extern "C" int probe(const int* numbers, const int* cu, const int* kv, int sequences, int workers, int* out, int room) {
  castline::Attributes a = {};
  a.num_heads = numbers[0]; a.num_kv_heads = numbers[1]; a.head_dim = 64; a.block_size = 16;
  a.window = numbers[2]; a.query_tile = numbers[3]; a.kv_split = numbers[4];
  castline::Step s = {};
  s.num_sequences = sequences; s.cu_query_lens = cu; s.kv_lens = kv; s.num_tokens = cu[sequences];
  castline::Partition p;
  castline::make_partition(a, s, 32, workers, &p);
  int n = 0;
  for (const castline::WorkItem& i : p.items) {
    const int row[8] = {i.sequence, i.kv_head, i.first_query, i.last_query, i.first_tile, i.last_tile, i.unit,
                        i.unit < 0 ? 0 : p.pending[i.unit]};
    for (int v : row) if (n < room) out[n++] = v;
  }
  return static_cast<int>(p.items.size());
}
"""


@pytest.fixture(scope="module")
def partition(tmp_path_factory):
    """partition(...) -> [items, 8]; built from the library's own source."""
    folder = tmp_path_factory.mktemp("partition")
    (folder / "probe.cpp").write_text(PROBE)
    library = folder / "probe.so"
    sources = [folder / "probe.cpp", NATIVE / "partition.cpp"]
    subprocess.run(
        ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{NATIVE}", "-o", library, *sources], check=True, timeout=120
    )
    probe = ctypes.CDLL(str(library)).probe

    def cut(lengths, heads=6, kv_heads=2, window=0, query_tile=0, kv_split=0, workers=2):
        cu = np.cumsum([0, *(queries for _, queries in lengths)]).astype(np.int32)
        kv = np.array([before + queries for before, queries in lengths], np.int32)
        numbers = np.array([heads, kv_heads, window, query_tile, kv_split], np.int32)
        out = np.zeros((100_000, 8), np.int32)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (numbers, cu, kv)]
        count = probe(*pointers, len(lengths), workers, ctypes.c_void_p(out.ctypes.data), out.size)
        return out[:count]

    return cut


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3000), st.sampled_from((0, 1, 1, 2, 50, 300))), max_size=6),
    window=st.sampled_from((0, 100, 700)),
    query_tile=st.sampled_from((0, 1, 8, 1000)),
    kv_split=st.sampled_from((0, 1, 256, 1024)),
    workers=st.sampled_from((1, 2, 64)),
)
def test_everything_once(partition, lengths, window, query_tile, kv_split, workers) -> None:
    """A query left out keeps the rotated query as its result; a key tile taken twice doubles its weight."""
    items = partition(lengths, window=window, query_tile=query_tile, kv_split=kv_split, workers=workers)
    seen: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for sequence, head, first, last, first_tile, last_tile, _, _ in items:
        for query in range(first, last):
            seen.setdefault((sequence, head, query), []).append((first_tile, last_tile))
    wanted = {(s, h, q) for s, (_, n) in enumerate(lengths) for h in range(2) for q in range(n)}
    assert seen.keys() == wanted
    for (sequence, _, query), spans in seen.items():
        position = lengths[sequence][0] + query
        spans.sort()
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
        low = max(0, position - window + 1) if window else 0
        assert spans[0][0] * TILE <= low
        assert spans[-1][1] * TILE > position
    units = [tuple(row) for row in items[items[:, 6] >= 0][:, 6:8]]
    assert all(units.count(unit) == unit[1] for unit in units)


def test_query_tile_sets_the_queries_of_an_item(partition) -> None:
    """A tuner whose choice changes nothing tunes nothing."""
    assert {last - first for _, _, first, last, *_ in partition([(0, 64)], query_tile=16)} == {16}
    assert {last - first for _, _, first, last, *_ in partition([(0, 64)], query_tile=64)} == {64}


def test_kv_split_sets_the_keys_of_an_item(partition) -> None:
    """As above, for split-K; a prompt is cut by queries, never by keys."""
    for kv_split in (256, 1024):
        items = partition([(4095, 1)], kv_split=kv_split)
        assert len(items) == 2 * 4096 // kv_split
        assert {last - first for *_, first, last, _, _ in items} == {kv_split // TILE}
    assert (partition([(4000, 96)], kv_split=256)[:, 6] == -1).all()


def test_the_kernel_splits_by_itself_where_work_is_scarce(partition) -> None:
    """One long sequence has as many items as kv heads: fewer than cores."""
    assert len(partition([(8191, 1)], workers=8)) > 16
    assert len(partition([(8191, 1)], workers=1)) == 2
    assert len(partition([(8191, 1)] * 64, workers=8)) == 128


def test_dearest_first(partition) -> None:
    """A long item that is begun last leaves the other threads idle at the end."""
    items = partition([(10, 1), (5000, 1), (100, 1)], workers=1)
    assert [row[0] for row in items] == [1, 1, 2, 2, 0, 0]
