"""From a repository to a plan of what to serve: which bundle, under which limits, with how large a pool.

Planning reads the manifest and the host, and no weight: it takes milliseconds, imports no inference library, and every
refusal comes before anything is deserialised or allocated.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from castline.engines.bundle import find_bundle
from castline.engines.capacity import KvCapacity, blocks_for, plan_kv
from castline.engines.check import RUNTIME_TOOLS, check_files, check_host, verify_files
from castline.engines.errors import EngineError
from castline.engines.host import available_memory_bytes, detect_host
from castline.engines.manifest import MANIFEST_NAME, Manifest, Plugin, read_manifest
from castline.plugins.cpu.library import describe
from castline.runtime.client import EffectiveLimits

DEFAULT_UTILIZATION = 0.8
"""Share of the available memory that an engine may take where the user does not say."""

DEFAULT_POOL_BYTES = 512 << 20
"""Bound of the pool where the user does not say. Every page of the pool is touched before the engine is ready, so that
no request pays for it: 0.1 s for 512 MiB of huge pages, and up to 0.8 s in a virtual machine that has to get them from
its host first. --kv-blocks or --memory-utilization lift the bound, and the start takes what it takes."""

SPECULATION_MODES = ("auto", "off")
DEFAULT_DRAFTS = 7
"""With the token before them they fill the 8 rows that kernels take at a time."""
MOST_DRAFTS = 64

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the user may choose at start-up. None: the bundle's or the host's own value."""

    model: str | None = None
    version: int | None = None
    memory_utilization: float | None = None
    """Share of the available memory for weights, a step's buffers and the KV pool, 0..1."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    """Exactly this many KV blocks, whatever the memory utilization."""
    threads: int | None = None
    speculation: str = "auto"
    """Whether to guess tokens ahead by prompt lookup: "auto", where it pays, or "off". It changes no token."""
    max_drafts: int | None = None
    """Tokens guessed ahead at most, for one sequence in a step. None: DEFAULT_DRAFTS."""
    max_waiting: int = 4096
    allow_unverified: bool = False
    """Serve an engine whose parity with its reference was not shown."""
    verify_files: bool = False
    """Hash every file of the bundle before loading, large ones too."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What will be loaded, all of it decided."""

    bundle: Path
    manifest: Manifest
    limits: EffectiveLimits
    pool: KvCapacity
    num_threads: int


def plan_engine(repository: Path | str, options: LoadOptions | None = None) -> EnginePlan:
    """Finds the bundle, checks it against this host, and reconciles the limits.

    Raises EngineError (ManifestMismatch where the bundle was built for another host), naming field, limit and cure.
    """
    options = options or LoadOptions()
    bundle = find_bundle(Path(repository), options.model, options.version)
    manifest = read_manifest(bundle)
    host = detect_host("cpu")
    check_host(
        manifest,
        host,
        installed_plugin(),
        installed_version(RUNTIME_TOOLS[manifest.host.target]),
        allow_unverified=options.allow_unverified,
    )
    _check_graph_file(bundle, manifest)
    check_files(bundle, manifest)
    if options.verify_files:
        verify_files(bundle, manifest)
    limits, pool = reconcile_limits(manifest, options, available_memory_bytes())
    return EnginePlan(bundle, manifest, limits, pool, _threads(manifest, options, host.cores))


def installed_version(tool: str) -> str | None:
    """Version of an installed inference library, without importing it. Its GPU distribution has the same module."""
    for distribution in (tool, f"{tool}-gpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def reconcile_limits(
    manifest: Manifest, options: LoadOptions, available_bytes: int
) -> tuple[EffectiveLimits, KvCapacity]:
    """The limits in force and the pool, for a host with *available_bytes* of memory. Raises EngineError."""
    built = manifest.limits
    max_model_len = _at_most("--max-model-len", options.max_model_len, built.max_model_len, least=2)
    max_num_seqs = _at_most("--max-num-seqs", options.max_num_seqs, built.max_num_seqs, least=1)
    max_tokens = _at_most(
        "--max-num-batched-tokens", options.max_num_batched_tokens, built.max_num_batched_tokens, least=1
    )
    if max_tokens < max_num_seqs:
        raise EngineError(
            f"--max-num-batched-tokens {max_tokens} is under --max-num-seqs {max_num_seqs}, and every running sequence "
            f"takes a token of each step: lower --max-num-seqs to {max_tokens}, or raise --max-num-batched-tokens"
        )
    if options.kv_blocks is not None and options.kv_blocks < 1:
        raise EngineError(f"--kv-blocks {options.kv_blocks} is too small: give at least 1")
    if options.max_waiting < 0:
        raise EngineError(f"--max-waiting {options.max_waiting} is negative: give 0 or more")
    pool = _plan_pool(manifest, options, available_bytes, max_model_len, max_num_seqs, max_tokens)
    limits = EffectiveLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        block_size=built.block_size,
        num_blocks=pool.num_blocks,
        max_concurrency=pool.max_concurrency,
        max_waiting=options.max_waiting,
        max_drafts=_max_drafts(options),
    )
    return limits, pool


def _max_drafts(options: LoadOptions) -> int:
    asked = options.max_drafts
    if options.speculation not in SPECULATION_MODES:
        raise EngineError(f"--speculation {options.speculation!r} is unknown: give {' or '.join(SPECULATION_MODES)}")
    if options.speculation == "off":
        if asked is not None:
            raise EngineError(f"--max-drafts {asked} means nothing with --speculation off: leave one of them out")
        return 0
    if asked is None:
        return DEFAULT_DRAFTS
    if not 1 <= asked <= MOST_DRAFTS:
        raise EngineError(f"--max-drafts {asked} is out of range: give 1 to {MOST_DRAFTS}, or --speculation off")
    return asked


def installed_plugin() -> Plugin | None:
    """The attention library of this installation, or None where there is none."""
    try:
        return describe()
    except EngineError:
        return None


def _check_graph_file(bundle: Path, manifest: Manifest) -> None:
    if manifest.graph_file not in manifest.files:
        raise EngineError(
            f"{bundle / MANIFEST_NAME}: graph_file {manifest.graph_file!r} is not among the bundle's files; "
            f"rebuild it: {manifest.rebuild_command}"
        )


def _at_most(option: str, asked: int | None, built: int, *, least: int) -> int:
    if asked is None:
        return built
    if asked < least:
        raise EngineError(f"{option} {asked} is too small: give at least {least}")
    if asked > built:
        raise EngineError(
            f"{option} {asked} is over the engine's {built}: lower it, or rebuild the engine with {option} {asked}"
        )
    return asked


def _threads(manifest: Manifest, options: LoadOptions, cores: int) -> int:
    """The tuner's choice, cut to the cores of this host; more threads than cores only wait for each other."""
    if options.threads is None:
        return max(1, min(manifest.tuning.num_threads, cores))
    if not 1 <= options.threads <= cores:
        raise EngineError(f"--threads {options.threads} does not fit this host: give 1 to {cores}, its usable cores")
    return options.threads


def _plan_pool(
    manifest: Manifest,
    options: LoadOptions,
    available_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    max_tokens: int,
) -> KvCapacity:
    block_size, kv_dtype = manifest.limits.block_size, manifest.precision.kv_dtype
    needed = blocks_for(max_model_len, block_size)
    utilization = DEFAULT_UTILIZATION if options.memory_utilization is None else options.memory_utilization
    if not 0 < utilization <= 1:
        raise EngineError(f"--memory-utilization {utilization} is not a share: give more than 0, at most 1")
    engine_bytes = _engine_bytes(manifest, max_tokens)
    budget = int(utilization * available_bytes) - engine_bytes
    fitting = plan_kv(manifest.model, kv_dtype, block_size, max_model_len, budget)
    asked = options.kv_blocks
    if asked is None and options.memory_utilization is None:
        bound = max(needed, min(max_num_seqs * needed, DEFAULT_POOL_BYTES // fitting.bytes_per_block))
        asked = min(fitting.num_blocks, bound)
    pool = plan_kv(manifest.model, kv_dtype, block_size, max_model_len, budget, asked)
    if pool.num_blocks < needed:
        holds = pool.num_tokens
        cure = f"raise --kv-blocks to {needed}" if options.kv_blocks is not None else "raise --memory-utilization"
        if holds >= 2:
            cure += f", or lower --max-model-len to {holds}"
        raise EngineError(
            f"the pool would have {pool.num_blocks} KV blocks of {block_size} tokens, and one sequence of "
            f"max_model_len {max_model_len} needs {needed} ({needed * pool.bytes_per_block / MIB:.0f} MiB; there are "
            f"{max(0, budget) / MIB:.0f} MiB: {utilization:.0%} of {available_bytes / MIB:.0f} MiB available, less "
            f"{engine_bytes / MIB:.0f} MiB for weights and a step): {cure}"
        )
    if pool.total_bytes > available_bytes - engine_bytes:
        raise EngineError(
            f"--kv-blocks {pool.num_blocks} takes {pool.total_bytes / MIB:.0f} MiB, and "
            f"{available_bytes / MIB:.0f} MiB are available, less {engine_bytes / MIB:.0f} MiB for weights and a step: "
            f"lower it to {max(0, available_bytes - engine_bytes) // pool.bytes_per_block}"
        )
    return pool


def _engine_bytes(manifest: Manifest, max_tokens: int) -> int:
    """Upper bound of what the engine takes beside the pool: its files, and the buffers of the largest step.

    A step holds a few hidden-size rows a token (16 covers a gate-and-up matmul's output at 4 x hidden), and float32
    logits of every token where prompt log-probabilities are asked for.
    """
    files = sum(file.size for file in manifest.files.values())
    step = max_tokens * 4 * (manifest.model.vocab_size + 16 * manifest.model.hidden_size)
    return files + step
