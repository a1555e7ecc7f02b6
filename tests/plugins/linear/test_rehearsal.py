"""A rehearsal takes a step's memory and leaves everything else as it was. Linear and Embedding nodes."""

import mmap
import resource
import threading

import numpy as np
import pytest

from castline.plugins.cpu.library import rehearsal
from castline.plugins.cpu.linear_model import linear_feeds, serialise_embedding_model
from castline.plugins.linear import MAXIMA_BLOCK, EmbeddingAttributes

PAGE = mmap.PAGESIZE


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def fresh(shape: tuple[int, ...]) -> np.ndarray:
    """Memory of which the system has given no page yet."""
    size = int(np.prod(shape)) * 4
    return np.frombuffer(mmap.mmap(-1, size), np.float32).reshape(shape)


def run_into(session, feeds, **outputs: np.ndarray) -> int:
    """Faults of a run that writes *outputs*."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    before = faults()
    session.run_with_iobinding(binding)
    return faults() - before


@pytest.mark.parametrize("threads", [1, 2])
def test_linear_takes_the_pages_of_its_step(tools, linear_tools, threads: int) -> None:
    """The first large step would stop at every page of its outputs and of the rows that it prepares."""
    attributes = linear_tools.attributes(k=512, n=1024)
    node = linear_tools.Node(tools, attributes, linear_tools.weight(attributes), maxima=True, threads=threads)
    inputs = linear_tools.inputs(attributes, 1024)
    feeds = linear_feeds(inputs, node.packed)
    expected = node.outputs(linear_tools.inputs(attributes, 1))  # what any step touches, of few rows
    output, maxima = fresh((1024, 1024)), fresh((1024, 1024 // MAXIMA_BLOCK))
    pages = (output.nbytes + maxima.nbytes) // PAGE
    with rehearsal():
        assert run_into(node.session, feeds, output=output, **{"output.1": maxima}) >= pages
    assert not output.any(), "it computes nothing"
    assert run_into(node.session, feeds, output=output, **{"output.1": maxima}) < pages / 20
    np.testing.assert_array_equal(output[:1], expected[0])
    np.testing.assert_array_equal(maxima[:1], expected[1])


def test_few_rows(tools, linear_tools) -> None:
    """They are prepared elsewhere than many."""
    attributes = linear_tools.attributes(k=64, n=65536)
    node = linear_tools.Node(tools, attributes, linear_tools.weight(attributes))
    feeds = linear_feeds(linear_tools.inputs(attributes, 2), node.packed)
    output = fresh((2, 65536))
    with rehearsal():
        assert run_into(node.session, feeds, output=output) >= output.nbytes // PAGE
    assert not output.any()


def test_embedding_takes_the_pages_of_its_step(tools, linear_tools) -> None:
    attributes = EmbeddingAttributes(512, 64, int(linear_tools.attributes().format), 32)
    packed = linear_tools.weight(linear_tools.attributes(k=512, n=64))
    session = tools.session(serialise_embedding_model(attributes))
    feeds = {"ids": np.arange(512) % 64, "weight": packed.weight, "scales": packed.scales}
    output = fresh((512, 512))
    with rehearsal():
        assert run_into(session, feeds, output=output) >= output.nbytes // PAGE
        assert not output.any()
    assert run_into(session, feeds, output=output) < 13
    np.testing.assert_array_equal(output, session.run(None, feeds)[0])


def test_other_threads_compute_meanwhile(tools, linear_tools) -> None:
    """An embedder has two engines, and starts the second while the first one serves."""
    attributes = linear_tools.attributes()
    node = linear_tools.Node(tools, attributes, linear_tools.weight(attributes), threads=2)
    inputs = linear_tools.inputs(attributes, 64)
    expected, found = node(inputs), []
    with rehearsal():
        other = threading.Thread(target=lambda: found.append(node(inputs)))
        other.start()
        other.join()
    np.testing.assert_array_equal(found[0], expected)


def test_it_ends_with_an_error(tools, linear_tools) -> None:
    """A start that fails in one engine must not leave the thread's others computing nothing."""
    attributes = linear_tools.attributes()
    node = linear_tools.Node(tools, attributes, linear_tools.weight(attributes))
    inputs = linear_tools.inputs(attributes, 3)
    expected = node(inputs)
    with pytest.raises(ZeroDivisionError), rehearsal():
        raise ZeroDivisionError
    np.testing.assert_array_equal(node(inputs), expected)
