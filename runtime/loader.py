"""From a repository to a plan of what to serve: which bundle, under which limits, with how large a pool.

Planning reads the manifest and the host, and no weight: it takes milliseconds, imports no inference library, and every
refusal comes before anything is deserialised or allocated.
"""

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from castline.engines.capacity import KvCapacity
from castline.engines.check import (
    GPU_TARGETS,
    RUNTIME_TOOLS,
    TOOL_DISTRIBUTIONS,
    check_complete,
    check_files,
    check_host,
    verify_files,
)
from castline.engines.errors import EngineError
from castline.engines.gpu import FoundGpu, detect_gpu
from castline.engines.host import detect_host
from castline.engines.manifest import Host, Manifest, Plugin, Target, read_manifest
from castline.engines.memory_plan import Asked, EngineMemory, memory_policy, plan_memory
from castline.engines.repository import MANIFEST_NAME, find_bundle
from castline.engines.resources import available_memory_bytes
from castline.plugins.cpu.library import describe as cpu_plugin
from castline.plugins.tensorrt.library import describe as gpu_plugin
from castline.runtime.client import EffectiveLimits
from castline.runtime.huge_heap import wanted
from castline.runtime.load_options import DEFAULT_DRAFTS, HUGE_PAGES_MODES, MOST_DRAFTS, SPECULATION_MODES, LoadOptions


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What will be loaded, all of it decided."""

    bundle: Path
    manifest: Manifest
    limits: EffectiveLimits
    pool: KvCapacity
    num_threads: int
    huge_pages: bool = False
    """Whether what steps read moves into them: a cpu engine, on a system that gives them."""


def plan_engine(repository: Path | str, options: LoadOptions | None = None) -> EnginePlan:
    """As `plan_bundle`, for the bundle that *options* name in *repository*."""
    options = options or LoadOptions()
    return plan_bundle(find_bundle(Path(repository), options.model, options.version), options)


def plan_bundle(bundle: Path, options: LoadOptions) -> EnginePlan:
    """Checks a bundle against this host, and reconciles the limits.

    Raises EngineError (ManifestMismatch where the bundle was built for another host), naming field, limit and cure.
    """
    manifest = read_manifest(bundle)
    gpu = None if manifest.host.target == "cpu" else detect_gpu()
    host = _host_for(manifest, gpu)
    check_host(
        manifest,
        host,
        installed_plugin(manifest.host.target),
        installed_version(RUNTIME_TOOLS[manifest.host.target]),
        allow_unverified=options.allow_unverified,
    )
    check_complete(manifest)
    _check_graph_file(bundle, manifest)
    check_files(bundle, manifest)
    if options.verify_files:
        verify_files(bundle, manifest)
    limits, pool = reconcile_limits(manifest, options, gpu.free_bytes if gpu else available_memory_bytes())
    num_threads = _threads(manifest, options, host.cores)
    return EnginePlan(bundle, manifest, limits, pool, num_threads, _huge_pages(manifest, options))


def installed_version(tool: str) -> str | None:
    """Version of an installed inference library, without importing it, under any of the names it is published by."""
    for distribution in TOOL_DISTRIBUTIONS[tool]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def reconcile_limits(
    manifest: Manifest, options: LoadOptions, available_bytes: int
) -> tuple[EffectiveLimits, KvCapacity]:
    """The limits in force and the pool, for a device with *available_bytes* of memory. Raises EngineError."""
    if options.max_waiting < 0:
        raise EngineError(f"--max-waiting {options.max_waiting} is negative: give 0 or more")
    plan = plan_memory(
        manifest.model,
        manifest.precision.kv_dtype,
        manifest.limits,
        EngineMemory.of(manifest),
        available_bytes,
        Asked(
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_blocks=options.kv_blocks,
            memory_utilization=options.memory_utilization,
        ),
        memory_policy(manifest.host),
    )
    limits = EffectiveLimits(
        max_model_len=plan.limits.max_model_len,
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        block_size=plan.limits.block_size,
        num_blocks=plan.pool.num_blocks,
        max_concurrency=plan.pool.max_concurrency,
        max_waiting=options.max_waiting,
        max_drafts=_max_drafts(options, manifest.host.target),
    )
    return limits, plan.pool


def _host_for(manifest: Manifest, gpu: FoundGpu | None) -> Host:
    """This host as the engine would use it: with its GPU for an engine of one, and the flavour that is installed."""
    wanted = manifest.host.target
    if gpu is None:
        return detect_host("cpu")
    installed = [flavour for flavour in GPU_TARGETS if installed_version(RUNTIME_TOOLS[flavour]) is not None]
    target = wanted if wanted in installed or not installed else installed[0]
    return replace(detect_host(target), gpu=gpu.manifest())


def _max_drafts(options: LoadOptions, target: Target) -> int:
    asked = options.max_drafts
    if options.speculation not in SPECULATION_MODES:
        raise EngineError(f"--speculation {options.speculation!r} is unknown: give {' or '.join(SPECULATION_MODES)}")
    if options.speculation == "off":
        if asked is not None:
            raise EngineError(f"--max-drafts {asked} means nothing with --speculation off: leave one of them out")
        return 0
    if target != "cpu":
        if asked is not None:
            raise EngineError(
                f"--max-drafts {asked}: an engine for {target} takes no guesses, because its tokens are chosen on the "
                "GPU, a step ahead; leave --max-drafts out"
            )
        return 0
    if asked is None:
        return DEFAULT_DRAFTS
    if not 1 <= asked <= MOST_DRAFTS:
        raise EngineError(f"--max-drafts {asked} is out of range: give 1 to {MOST_DRAFTS}, or --speculation off")
    return asked


def _huge_pages(manifest: Manifest, options: LoadOptions) -> bool:
    if options.huge_pages not in HUGE_PAGES_MODES:
        raise EngineError(f"--huge-pages {options.huge_pages!r} is unknown: give {' or '.join(HUGE_PAGES_MODES)}")
    return wanted(options.huge_pages, manifest.host.target)


def installed_plugin(target: Target) -> Plugin | None:
    """The attention plugin of this installation for *target*, or None where there is none."""
    try:
        return cpu_plugin() if target == "cpu" else gpu_plugin()
    except EngineError:
        return None


def _check_graph_file(bundle: Path, manifest: Manifest) -> None:
    if manifest.graph_file not in manifest.files:
        raise EngineError(
            f"{bundle / MANIFEST_NAME}: graph_file {manifest.graph_file!r} is not among the bundle's files; "
            f"rebuild it: {manifest.rebuild_command}"
        )


def _threads(manifest: Manifest, options: LoadOptions, cores: int) -> int:
    """The tuner's choice, cut to the cores of this host; more threads than cores only wait for each other."""
    if options.threads is not None and manifest.host.target != "cpu":
        raise EngineError(
            f"--threads {options.threads}: an engine for {manifest.host.target} computes on the GPU; "
            "leave --threads out"
        )
    if options.threads is None:
        return max(1, min(manifest.tuning.num_threads, cores))
    if not 1 <= options.threads <= cores:
        raise EngineError(f"--threads {options.threads} does not fit this host: give 1 to {cores}, its usable cores")
    return options.threads
