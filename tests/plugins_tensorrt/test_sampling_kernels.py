"""Sampling and input gathering on the device against the runtime's own."""

import numpy as np
import pytest
import torch

from castline.plugins.tensorrt.kernels.inputs import gather_inputs
from castline.plugins.tensorrt.kernels.sampling import greedy, sample
from castline.runtime.draw import Choice, draw

VOCAB, CHUNK = 150, 64


def logits(rows: int, seed: int = 0) -> np.ndarray:
    """With many ties: logits in steps of 1/8."""
    random = np.random.default_rng(seed)
    return (np.round(random.standard_normal((rows, VOCAB)) * 16) / 8).astype(np.float32)


def run(x: np.ndarray, **choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = len(x)
    tokens, finite = torch.full((rows,), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32)
    if choice:
        kinds = {"top_k": np.int32}
        options = [torch.from_numpy(choice[name].astype(kinds.get(name, np.float32)))
                   for name in ("temperature", "top_k", "top_p", "min_p", "uniform")]  # fmt: skip
        sample[(rows,)](torch.from_numpy(x), tokens, finite, *options, vocab=VOCAB, chunk=CHUNK)
    else:
        greedy[(rows,)](torch.from_numpy(x), tokens, finite, vocab=VOCAB, chunk=CHUNK)
    return tokens.numpy(), finite.numpy()


def test_greedy_takes_the_first_of_equals() -> None:
    """Another tie-break than the host's argmax would make one request's text depend on where it was sampled."""
    x = logits(9)
    tokens, finite = run(x)
    np.testing.assert_array_equal(tokens, x.argmax(1))
    assert finite.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, "all"])
def test_broken_rows_are_reported(bad) -> None:
    """NaN must not become a token, whichever chunk it is in."""
    x = logits(3)
    x[1, 140] = bad if bad != "all" else 0
    if bad == "all":
        x[1] = -np.inf
    assert run(x)[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize("options", [
    {}, {"top_k": 1}, {"top_k": 5}, {"top_k": 50}, {"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8}, {"top_k": 30, "top_p": 0.9, "min_p": 0.05}, {"top_p": 0.95, "min_p": 0.5},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_what_the_host_draws(options, temperature) -> None:
    """The same uniform numbers must give the same tokens as the host's sampler: truncation, ties and order."""
    rows = 3
    x = logits(rows, seed=3)
    random = np.random.default_rng(5)
    choice = Choice(
        temperature=np.full(rows, temperature),
        top_k=np.full(rows, options.get("top_k", 0), np.int64),
        top_p=np.full(rows, options.get("top_p", 1.0)),
        min_p=np.full(rows, options.get("min_p", 0.0)),
        uniform=random.uniform(0, 1, rows),
    )
    expected = draw(x, x.max(1), choice)
    fields = {name: getattr(choice, name) for name in ("temperature", "top_k", "top_p", "min_p", "uniform")}
    tokens, finite = run(x, **fields)
    assert finite.all()
    np.testing.assert_array_equal(tokens, expected)


def test_temperature_zero_is_greedy() -> None:
    x = logits(4)
    zeros = np.zeros(4)
    tokens, _ = run(x, temperature=zeros, top_k=zeros, top_p=zeros + 1, min_p=zeros, uniform=zeros + 0.7)
    np.testing.assert_array_equal(tokens, x.argmax(1))


def test_gathered_inputs() -> None:
    """A wrong slot would overwrite another sequence's KV; padding rows must write nowhere and stay padding."""
    block_size, width = 16, 4
    sampled = torch.tensor([11, 22, 33], dtype=torch.int32)
    source = torch.tensor([2, -1, 0, -1, -1], dtype=torch.int32)
    given = torch.tensor([0, 77, 0, 0, 0], dtype=torch.int32)
    table = torch.arange(10, 10 + 5 * 3, dtype=torch.int32).reshape(5, 3)
    lens = torch.tensor([16, 5, 40, 0, 0], dtype=torch.int32)
    ids, positions, slots = (torch.full((5,), -9, dtype=torch.int32) for _ in range(3))
    gather_inputs[(2,)](sampled, source, given, table, lens, ids, positions, slots, 5, 3, block_size=16, width=width)
    assert ids.tolist() == [33, 77, 11, 0, 0]
    assert positions.tolist() == [16, 5, 40, 0, 0]
    assert slots.tolist() == [11 * 16, 13 * block_size + 5, 18 * block_size + 8, -1, -1]
    assert lens.tolist() == [17, 6, 41, 0, 0]
