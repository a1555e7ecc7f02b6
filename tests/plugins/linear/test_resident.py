"""Weights that move from the file ONNX Runtime mapped into huge pages, under nodes that go on computing."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import set_external_data

from castline.plugins.cpu.library import library
from castline.plugins.cpu.linear_model import serialise_embedding_model, serialise_linear_model
from castline.plugins.linear import EmbeddingAttributes
from castline.plugins.linear_reference import linear
from castline.runtime.huge_heap import available

pytestmark = pytest.mark.skipif(not available(), reason="this system gives no huge pages of 2 MiB")

K, N = 256, 2048
IDS = np.array([0, 7, 2047, 7, 1023])


@contextmanager
def watching() -> Iterator[int]:
    """The group of the sessions that are opened meanwhile."""
    try:
        yield library().castline_begin_watching()
    finally:
        library().castline_end_watching()


def move(group: int, enough: int = 1 << 40) -> int:
    """The bytes that moved."""
    return library().castline_move_weights(group, enough)


def resident(path) -> int:
    """Bytes of the file that this process has mapped and in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = rest[-1] == str(path)
        elif inside and first == "Rss:":
            total += int(rest[0]) << 10
    return total


class Model:
    """A Linear node and an Embedding node that share their weights, which lie in a file beside the graph."""

    def __init__(self, tools, linear_tools, folder, *, external=True) -> None:
        self.attributes = linear_tools.attributes(k=K, n=N)
        a = self.attributes
        self.packed = linear_tools.weight(a)
        model = onnx.load_from_string(serialise_linear_model(a))
        table = onnx.load_from_string(serialise_embedding_model(EmbeddingAttributes(a.k, a.n, a.format, a.group)))
        table.graph.node[0].output[0] = table.graph.output[0].name = "rows"
        model.graph.node.append(table.graph.node[0])
        model.graph.output.append(table.graph.output[0])
        inputs = [i for i in (*model.graph.input, table.graph.input[0]) if i.name not in ("weight", "scales")]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        self.file = folder / "weights.bin"
        self.bytes = 0
        with self.file.open("wb") as file:
            for name, array in (("weight", self.packed.weight), ("scales", self.packed.scales)):
                tensor = numpy_helper.from_array(array, name)
                if external:
                    set_external_data(tensor, self.file.name, self.bytes, array.nbytes)
                    tensor.ClearField("raw_data")
                file.write(array.tobytes().ljust(-(-array.nbytes // PAGESIZE) * PAGESIZE, b"\0"))
                self.bytes += -(-array.nbytes // PAGESIZE) * PAGESIZE
                model.graph.initializer.append(tensor)
        self.moving = self.packed.weight.nbytes + self.packed.scales.nbytes
        graph = folder / "model.onnx"
        graph.write_bytes(model.SerializeToString())
        with watching() as self.group:
            self.session = tools.session(str(graph), 2)
        self.inputs = linear_tools.inputs(a, 3)

    def __call__(self):
        inputs = {"x": self.inputs.x, "norm_weight": self.inputs.norm_weight, "ids": IDS}
        feeds = {i.name: inputs[i.name] for i in self.session.get_inputs()}
        return self.session.run(None, feeds)


@pytest.fixture
def model(tools, linear_tools, tmp_path) -> Model:
    return Model(tools, linear_tools, tmp_path)


def assert_same(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nodes_compute_the_same(model) -> None:
    """A copy that lacked its end, or scales that went with other weights, would give other numbers."""
    before = model()
    np.testing.assert_allclose(before[0], linear(model.attributes, model.inputs, model.packed), rtol=0.02, atol=0.02)
    assert move(model.group) == model.moving
    assert_same(before, model())
    assert move(model.group) == 0


def test_the_files_pages_go_back(model) -> None:
    """Weights that stayed mapped beside their copy would take twice the memory, and a table of rows that still read the
    file would bring its pages back."""
    model()
    assert resident(model.file) == model.bytes
    move(model.group)
    model()
    assert resident(model.file) < 2 * PAGESIZE


def test_enough_is_enough(model) -> None:
    """A caller that wants to stop between copies could not, were all of them made at once."""
    sizes = {model.packed.weight.nbytes, model.packed.scales.nbytes}
    assert {move(model.group, 1), move(model.group, 1)} == sizes
    assert move(model.group, 1) == 0


def test_weights_inside_the_graph_stay(tools, linear_tools, tmp_path) -> None:
    """They lie in the heap: giving that back as if it were a file's would leave zeros."""
    model = Model(tools, linear_tools, tmp_path, external=False)
    before = model()
    assert move(model.group) == 0
    assert_same(before, model())


def test_weights_that_are_fed_are_read_where_they_are(tools, linear_tools) -> None:
    """A node that kept a copy of the first call's weights would answer later calls with them."""
    a = linear_tools.attributes(k=64, n=32)
    inputs = linear_tools.inputs(a, 1)
    first, second = linear_tools.weight(a, seed=1), linear_tools.weight(a, seed=2)
    with watching() as group:
        node = linear_tools.Node(tools, a, first)
    node(inputs)
    assert move(group) == 0
    fed = node(inputs, weight=second.weight, scales=second.scales)
    np.testing.assert_array_equal(fed, linear_tools.Node(tools, a, second)(inputs))


def test_steps_may_run_meanwhile(tools, linear_tools, tmp_path) -> None:
    """A copy that is read before it is whole, or pages given back that are not the file's, would show."""
    before = Model(tools, linear_tools, tmp_path)()
    steps = 0
    for round_ in range(20):
        folder = tmp_path / str(round_)
        folder.mkdir()
        model = Model(tools, linear_tools, folder)
        mover = threading.Thread(target=move, args=[model.group])
        mover.start()
        while mover.is_alive():
            assert_same(before, model())
            steps += 1
        assert_same(before, model())
    assert steps > 0


def test_a_session_that_closes_takes_only_its_own(tools, linear_tools, tmp_path) -> None:
    """Two sessions' copies may lie in one stretch of memory: who closes first must not pull it from under the other."""
    models = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        models.append(Model(tools, linear_tools, tmp_path / name))
    before = models[1]()
    for model in models:
        assert move(model.group, 1) > 0
    for model in models:
        assert move(model.group) > 0
    del model, models[0]
    gc.collect()
    assert_same(before, models[0]())


def test_groups_are_apart(tools, linear_tools, tmp_path) -> None:
    """A user who wants one engine's weights shared would lose that to another engine of the process; and who closes a
    session knows only of those who move its own weights."""
    (tmp_path / "other").mkdir()
    model, other = Model(tools, linear_tools, tmp_path), Model(tools, linear_tools, tmp_path / "other")
    before = other()
    assert move(model.group) == model.moving
    assert resident(other.file) == other.bytes
    assert_same(before, other())


def test_a_session_may_close_before_it_moves(tools, linear_tools, tmp_path) -> None:
    """An input that stayed registered would be copied from memory that is gone."""
    group = Model(tools, linear_tools, tmp_path).group
    gc.collect()
    assert move(group) == 0
