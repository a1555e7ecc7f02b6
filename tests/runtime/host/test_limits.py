"""Reconciling what the user asks, what the bundle allows and what the host has. No model needed."""

from dataclasses import replace

import pytest

from castline.engines.capacity import blocks_for
from castline.engines.errors import EngineError
from castline.engines.manifest import BundleFile, Manifest
from castline.engines.memory_plan import HOST_POLICY
from castline.runtime.load_options import DEFAULT_DRAFTS, LoadOptions
from castline.runtime.loader import reconcile_limits

GIB = 1 << 30


def test_defaults_are_the_bundles(sample_manifest: Manifest) -> None:
    """Without options nothing may be lowered silently, and the two figures operators look for must agree."""
    limits, pool = reconcile_limits(sample_manifest, LoadOptions(), 8 * GIB)
    built = sample_manifest.limits
    assert limits.max_model_len == built.max_model_len
    assert limits.max_num_seqs == built.max_num_seqs
    assert limits.max_num_batched_tokens == built.max_num_batched_tokens
    assert limits.num_blocks == pool.num_blocks
    assert limits.max_concurrency == pool.num_blocks / blocks_for(built.max_model_len, built.block_size)


def test_the_default_pool_is_no_larger_than_its_sequences_can_fill(sample_manifest: Manifest) -> None:
    """On a host of 1 TiB, 80 % of it must not be zeroed for 64 sequences of 200 tokens."""
    limits, _ = reconcile_limits(sample_manifest, LoadOptions(max_model_len=200), 1024 * GIB)
    assert limits.num_blocks == 64 * blocks_for(200, 16)


def test_the_default_pool_is_bounded_for_a_quick_start(sample_manifest: Manifest) -> None:
    """C11: every page is touched before ready, so the default holds one long sequence and a batch of short ones, and a
    bundle made for very long ones does not take the whole host."""
    limits, _ = reconcile_limits(sample_manifest, LoadOptions(max_num_seqs=4, max_model_len=400), 64 * GIB)
    assert HOST_POLICY.tokens_per_seq == 256
    assert limits.num_blocks == blocks_for(400, 16) + 3 * 256 // 16
    long = replace(sample_manifest, limits=replace(sample_manifest.limits, max_model_len=1 << 20, max_num_seqs=64))
    limits, _ = reconcile_limits(long, LoadOptions(), 64 * GIB)
    assert limits.num_blocks == blocks_for(1 << 20, 16) + 63 * 256 // 16


def test_an_explicit_share_of_memory_is_taken_whole(sample_manifest: Manifest) -> None:
    """--memory-utilization 0.5 means half of what is available, weights and a step's buffers included."""
    heavy = replace(sample_manifest, files={"w": BundleFile(GIB, "")})
    _, pool = reconcile_limits(heavy, LoadOptions(memory_utilization=0.5), 8 * GIB)
    step = 512 * 4 * (256 + 16 * 64)
    assert pool.num_blocks == (4 * GIB - GIB - step) // pool.bytes_per_block


def test_kv_blocks_are_exact(sample_manifest: Manifest) -> None:
    """A test of preemption sets the pool to the block."""
    limits, _ = reconcile_limits(sample_manifest, LoadOptions(kv_blocks=40), 8 * GIB)
    assert limits.num_blocks == 40
    assert limits.max_concurrency == 40 / 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoadOptions(max_model_len=513), "--max-model-len 513 is over the engine's 512: lower it, or rebuild"),
        (LoadOptions(max_model_len=1), "--max-model-len 1 is too small: give at least 2"),
        (LoadOptions(max_num_seqs=65), "--max-num-seqs 65 is over the engine's 64"),
        (LoadOptions(max_num_seqs=0), "--max-num-seqs 0 is too small"),
        (LoadOptions(max_num_batched_tokens=1024), "--max-num-batched-tokens 1024 is over the engine's 512"),
        (LoadOptions(max_num_batched_tokens=8), "lower --max-num-seqs to 8, or raise --max-num-batched-tokens"),
        (LoadOptions(memory_utilization=0.0), "--memory-utilization 0.0 is not a share"),
        (LoadOptions(memory_utilization=1.5), "--memory-utilization 1.5 is not a share"),
        (LoadOptions(memory_utilization=float("nan")), "--memory-utilization nan is not a share"),
        (LoadOptions(speculation="on"), "--speculation 'on' is unknown: give auto or off"),
        (LoadOptions(max_drafts=0), "--max-drafts 0 is out of range: give 1 to 64, or --speculation off"),
        (LoadOptions(max_drafts=65), "--max-drafts 65 is out of range"),
        (LoadOptions(speculation="off", max_drafts=4), "--max-drafts 4 means nothing with --speculation off"),
        (LoadOptions(max_waiting=-1), "--max-waiting -1 is negative"),
        (LoadOptions(kv_blocks=0), "--kv-blocks 0 is too small: give at least 1"),
        (LoadOptions(kv_blocks=-3), "--kv-blocks -3 is too small: give at least 1"),
        (LoadOptions(memory_utilization=1e-6), "raise --memory-utilization$"),  # no length fits an empty pool
        (LoadOptions(kv_blocks=31), "needs 32 .*raise --kv-blocks to 32, or lower --max-model-len to 496"),
        (LoadOptions(kv_blocks=10_000_000), r"--kv-blocks 10000000 takes .* lower it to \d+"),
    ],
)
def test_impossible_limits_name_field_limit_and_cure(
    sample_manifest: Manifest, options: LoadOptions, message: str
) -> None:
    """A limit that does not hold must be refused at start-up in words, never clamped, nor found by a request."""
    with pytest.raises(EngineError, match=message):
        reconcile_limits(sample_manifest, options, 8 * GIB)


@pytest.mark.parametrize(
    ("options", "max_drafts"),
    [(LoadOptions(), DEFAULT_DRAFTS), (LoadOptions(max_drafts=3), 3), (LoadOptions(speculation="off"), 0)],
)
def test_speculation_is_on_unless_turned_off(sample_manifest: Manifest, options: LoadOptions, max_drafts: int) -> None:
    """It changes no token, so nobody should have to ask for it."""
    assert reconcile_limits(sample_manifest, options, 8 * GIB)[0].max_drafts == max_drafts


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions(speculation="off")])
def test_a_gpu_takes_no_guesses(sample_manifest: Manifest, options: LoadOptions) -> None:
    """Its executor draws tokens from rows that are sampled; rows of guesses it would have to send to the host."""
    host = replace(sample_manifest.host, target="tensorrt_rtx")
    limits, _ = reconcile_limits(replace(sample_manifest, host=host), options, 8 * GIB)
    assert limits.max_drafts == 0


def test_guesses_that_are_asked_of_a_gpu_are_refused(sample_manifest: Manifest) -> None:
    """An option that does nothing must say so."""
    host = replace(sample_manifest.host, target="tensorrt_rtx")
    with pytest.raises(EngineError, match=r"--max-drafts 5: an engine for tensorrt_rtx .*; leave --max-drafts out"):
        reconcile_limits(replace(sample_manifest, host=host), LoadOptions(max_drafts=5), 8 * GIB)


def test_the_cure_for_too_many_blocks_works(sample_manifest: Manifest) -> None:
    """The number a message recommends must be accepted."""
    with pytest.raises(EngineError) as caught:
        reconcile_limits(sample_manifest, LoadOptions(kv_blocks=10_000_000), 8 * GIB)
    recommended = int(str(caught.value).rsplit(" ", 1)[1])
    limits, _ = reconcile_limits(sample_manifest, LoadOptions(kv_blocks=recommended), 8 * GIB)
    assert limits.num_blocks == recommended


def test_a_host_without_memory_is_refused_with_the_arithmetic(sample_manifest: Manifest) -> None:
    """C04's shape at load: weights larger than the memory end in a message, not in the out-of-memory killer."""
    heavy = replace(sample_manifest, files={"w": BundleFile(GIB, "")})
    with pytest.raises(EngineError, match=r"0 MiB: 80% of 512 MiB available, less 10\d\d MiB for weights"):
        reconcile_limits(heavy, LoadOptions(), GIB // 2)


def test_a_small_host_lowers_the_pool_not_the_promise(sample_manifest: Manifest) -> None:
    """Where one sequence fits but not all, the engine starts with fewer blocks and max_concurrency says so."""
    _, whole = reconcile_limits(sample_manifest, LoadOptions(), GIB)
    step = 512 * 4 * (256 + 16 * 64)
    limits, _ = reconcile_limits(sample_manifest, LoadOptions(), int((step + 33 * whole.bytes_per_block) / 0.8) + 1)
    assert limits.num_blocks == 33
    assert 1.0 <= limits.max_concurrency < 1.1
