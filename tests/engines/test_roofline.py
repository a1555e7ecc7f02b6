"""The roofline, against figures worked out by hand."""

from dataclasses import replace

import pytest

from castline.engines.errors import EngineError
from castline.engines.manifest import ModelFacts
from castline.engines.precision import GPU_WEIGHTS, Parameters, bytes_read, gpu_weights
from castline.engines.roofline import Roofline
from castline.engines.sku import Sku, load_sku

MODEL = ModelFacts("m", "llama", "x", 2, 64, 4, 2, 16, 1000, 4096, 300_000, (), None, num_lookup_parameters=64_000)
"""Embedding and head of 64,000 each, 172,000 in the layers; K and V of a token: 2 x 2 x 16 in each of 2 layers."""
PARAMETERS = Parameters(172_000, 64_000, 64_000)


def roofline(sku: str = "l4", form: str = "fp8", model: ModelFacts = MODEL) -> Roofline:
    return Roofline(model, Parameters.of(model), gpu_weights(form), "fp8", load_sku(sku))


def test_parameters_are_told_apart() -> None:
    """A tied embedding is read as the head; one that is only looked up is held but not read."""
    assert Parameters.of(MODEL) == PARAMETERS
    assert PARAMETERS.total == 300_000
    tied = Parameters.of(replace(MODEL, num_lookup_parameters=0, num_parameters=236_000))
    assert tied == Parameters(172_000, 64_000, 0)
    assert tied.head_matmul == PARAMETERS.head_matmul == 64_000


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("fp16", 472_000),
        ("bf16", 472_000),
        ("fp8", 172_000 + 128_000),
        ("int4", 172_000 * 4.125 / 8 + 128_000),
    ],
)
def test_weights_by_format(form: str, read: float) -> None:
    """The head stays at 16 bits, an embedding that is only looked up is not read; int4 has a 16-bit scale for 128."""
    assert bytes_read(PARAMETERS, GPU_WEIGHTS[form]) == int(read)


def test_decode_is_bytes_over_bandwidth() -> None:
    """One sequence of 100 tokens on an L4: weights once, 64 bytes of K and V a token and layer."""
    estimate = roofline().decode(1, 100)
    assert estimate.bound == "memory"
    assert estimate.seconds == pytest.approx((300_000 + 2 * 100 * 64) / 300e9)
    assert estimate.tokens_per_s == pytest.approx(1 / estimate.seconds)


def test_a_batch_shares_the_weights() -> None:
    """Eight sequences read the weights once and each its own K and V."""
    estimate = roofline().decode(8, 100)
    assert estimate.seconds == pytest.approx((300_000 + 8 * 2 * 100 * 64) / 300e9)
    assert estimate.tokens_per_s == pytest.approx(8 / estimate.seconds)


def test_compute_bounds_a_large_batch() -> None:
    """Past the ridge the dense rate counts: layers at fp8's, head and attention at fp16's."""
    batch = 100_000
    estimate = roofline().decode(batch, 1)
    layers = 2 * 172_000 * batch / 242.5e12
    others = (2 * 64_000 * batch + 4 * 64 * 2 * batch) / 121e12
    assert estimate.bound == "compute"
    assert estimate.seconds == pytest.approx(layers + others)


def test_prefill_counts_the_triangle_and_one_row_of_logits() -> None:
    """A causal prompt attends to half of its square, and only its last token needs the head."""
    tokens = 4000
    estimate = roofline().prefill(tokens, tokens)
    layers = 2 * 172_000 * tokens / 242.5e12
    others = (2 * 64_000 + 4 * 64 * 2 * (tokens * (tokens + 1) // 2)) / 121e12
    assert estimate.bound == "compute"
    assert estimate.seconds == pytest.approx(layers + others)
    assert estimate.tokens_per_s == pytest.approx(tokens / estimate.seconds)


def test_prefill_in_chunks_reads_the_weights_again() -> None:
    """One token a step is decoding: bound by memory, and as slow."""
    whole, chunked = roofline().prefill(64, 64), roofline().prefill(64, 1)
    assert chunked.bound == "memory"
    read = 64 * 300_000 + 2 * 64 * (64 * 65 // 2)
    assert chunked.seconds == pytest.approx(read / 300e9)
    assert chunked.seconds > whole.seconds


def test_windows_bound_what_is_read() -> None:
    """A layer with a window reads no K and V past it."""
    windowed = roofline(model=replace(MODEL, windows=(16, 0)))
    assert windowed.decode(1, 100).seconds == pytest.approx((300_000 + (16 + 100) * 64) / 300e9)
    pairs = sum(min(position + 1, 16) for position in range(100)) + 100 * 101 // 2
    others = (2 * 64_000 + 4 * 64 * pairs) / 121e12
    flops = 2 * 172_000 * 100 / 242.5e12 + others
    assert windowed.prefill(100, 100).seconds == pytest.approx(max(flops, (300_000 + (16 + 100) * 64) / 300e9))


def test_a_faster_chip_is_never_slower() -> None:
    """The order of the bounds is the order of the datasheets."""
    speeds = [roofline(sku).decode(1, 1000).tokens_per_s for sku in ("l4", "rtx4090", "rtx5090", "h100-sxm", "h200")]
    assert speeds == sorted(speeds)


def test_a_type_the_chip_lacks_is_refused() -> None:
    """No estimate from a rate that does not exist."""
    sku: Sku = load_sku("a100-80")
    with pytest.raises(EngineError, match=r"A100 80GB .* has no fp8 tensor cores"):
        Roofline(MODEL, PARAMETERS, gpu_weights("fp8"), "fp8", sku).decode(1, 1)
    with pytest.raises(EngineError, match="recipe 'int8' is not for GPUs; choose fp16, bf16, fp8, int4"):
        gpu_weights("int8")
