"""Whether a bundle may run here, decided from its manifest before anything is deserialised or allocated.

Start-up compares every file's size and hashes the small ones (graph, tokenizer, templates), which is where a wrong file
does silent harm; hashing gigabytes of weights at each start would cost seconds, so that is `verify_files`, on request.
"""

from collections.abc import Iterator
from pathlib import Path

from castline.engines.errors import EngineError, ManifestMismatch
from castline.engines.flavour import INSTALL
from castline.engines.hashing import sha256_file
from castline.engines.manifest import BundleFile, Gpu, Host, Manifest, Plugin, Target

RUNTIME_TOOLS: dict[str, str] = {"cpu": "onnxruntime", "tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}
"""The library that executes an engine of each target; its version at the build is in ``tool_versions``."""

TOOL_DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-bindings", "tensorrt-cu12", "tensorrt-cu12-bindings"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
}
"""Names that each library is published under: all of a name give the same module."""

GPU_TARGETS: tuple[Target, ...] = ("tensorrt", "tensorrt_rtx")

PLAN_SUFFIX = ".plan"
"""Of the graph_file of an engine for a GPU."""

SMALL_FILE_BYTES = 16 << 20


def check_host(
    manifest: Manifest,
    host: Host,
    plugin: Plugin | None,
    runtime_version: str | None,
    *,
    allow_unverified: bool = False,
) -> None:
    """Raises ManifestMismatch with a line for every field in which this host differs from the engine's.

    *plugin* is the library found here, None where there is none; *runtime_version* the version found here of
    RUNTIME_TOOLS[target], None where it is not installed. Raises EngineError for an engine whose parity was never
    verified, or failed, unless *allow_unverified*.
    """
    lines = [
        f"  {name}: built with {built}, found {found}"
        for name, built, found in _mismatches(manifest, host, plugin, runtime_version)
    ]
    if lines:
        raise ManifestMismatch(
            "\n".join(
                [
                    f"the engine of {manifest.model.name} was not built for this host:",
                    *lines,
                    _cure(manifest, host),
                ]
            )
        )
    if not allow_unverified and (manifest.parity is None or not manifest.parity.verified):
        found = "was not verified" if manifest.parity is None else "failed verification"
        raise EngineError(
            f"the engine of {manifest.model.name} {found} against its reference model: it may answer wrongly. "
            f"Rebuild it with verification ({manifest.rebuild_command}), or accept that with --allow-unverified"
        )


def check_complete(manifest: Manifest) -> None:
    """Raises EngineError for a bundle that was built with --kernels-only: it has everything but what executes."""
    if manifest.host.target == "cpu" or manifest.graph_file.endswith(PLAN_SUFFIX):
        return
    gpu = manifest.host.gpu
    command = manifest.rebuild_command.replace(" --kernels-only", "")
    raise EngineError(
        f"the engine of {manifest.model.name} has no plan: it was built with --kernels-only. Build it whole, on a "
        f"machine with {INSTALL[manifest.host.target]!r} and, for TensorRT, {f'a {gpu.sku}' if gpu else 'its GPU'}: "
        f"{command}"
    )


def _cure(manifest: Manifest, host: Host) -> str:
    """What to do about a mismatch. The old command names the SKU it was built for, which may not be what is here."""
    built, found, command = manifest.host.gpu, host.gpu, manifest.rebuild_command
    if built is None or (found is not None and found.sku == built.sku):
        return f"rebuild it here: {command}"
    if found is None:
        return f"serve it on a machine with a {built.sku} and its driver, or build the model with --target cpu"
    here = command.replace(f"--sku {built.sku}", f"--sku {found.sku or 'NAME'}")
    if not found.sku:
        return f"write engines/skus/NAME.toml for the {found.device_name}, and rebuild it for that: {here}"
    return f"rebuild it for {found.sku}: {here}"


def check_files(bundle: Path, manifest: Manifest) -> None:
    """The check of every start: all files are there, sizes right, hashes of small ones right. Raises EngineError."""
    _raise_damaged(bundle, manifest, SMALL_FILE_BYTES)


def verify_files(bundle: Path, manifest: Manifest) -> None:
    """The full check: every byte of every file. Reads about 1 GB a second. Raises EngineError."""
    _raise_damaged(bundle, manifest, None)


def _mismatches(
    manifest: Manifest, host: Host, plugin: Plugin | None, runtime_version: str | None
) -> Iterator[tuple[str, str, str]]:
    """(field, built with, found) for each field that differs."""
    built = manifest.host
    if built.target != host.target:
        yield "host.target", built.target, host.target
    if built.machine != host.machine:
        yield "host.machine", built.machine, host.machine
    yield from _gpu_mismatches(built.gpu, host.gpu)
    lacking = [name for name in built.isa if name not in host.isa]
    if lacking:
        yield "host.isa", " ".join(built.isa), f"{' '.join(host.isa) or 'none'} (lacks {' '.join(lacking)})"
    if plugin is None:
        yield "plugin", f"{manifest.plugin.name} {manifest.plugin.version}", "no such library"
    else:
        for name in ("name", "version", "sha256"):
            wanted, found = getattr(manifest.plugin, name), getattr(plugin, name)
            if wanted != found:
                yield f"plugin.{name}", wanted, found
    yield from _runtime_mismatch(manifest, runtime_version)


def _gpu_mismatches(built: Gpu | None, found: Gpu | None) -> Iterator[tuple[str, str, str]]:
    """A plan and its kernels run on the very chip they were compiled for; tuning and memory are the SKU's."""
    if built is None:
        return
    if found is None:
        yield "host.gpu", _describe_gpu(built), "no NVIDIA driver or no GPU"
        return
    if built.compute_capability != found.compute_capability:
        yield "host.gpu.compute_capability", built.compute_capability, _of_device(found, found.compute_capability)
    if built.sku != found.sku:
        yield "host.gpu.sku", built.sku, _of_device(found, found.sku or "a GPU with no file under engines/skus")
    elif built.device_name and built.device_name != found.device_name:
        yield "host.gpu.device_name", built.device_name, found.device_name


def _describe_gpu(gpu: Gpu) -> str:
    return f"{gpu.sku} (compute capability {gpu.compute_capability})"


def _of_device(gpu: Gpu, value: str) -> str:
    return f"{value} ({gpu.device_name})"


def _runtime_mismatch(manifest: Manifest, runtime_version: str | None) -> Iterator[tuple[str, str, str]]:
    """ONNX Runtime reads what older releases wrote; a TensorRT plan runs on the very release that wrote it."""
    tool = RUNTIME_TOOLS[manifest.host.target]
    wanted = manifest.tool_versions.get(tool)
    if runtime_version is None:
        yield f"tool_versions.{tool}", wanted or "it", "not installed"
    elif wanted is None:
        yield f"tool_versions.{tool}", "an unknown version", runtime_version
    elif tool == "onnxruntime":
        if _release(runtime_version) < _release(wanted):
            yield f"tool_versions.{tool}", wanted, f"{runtime_version} (older)"
    elif runtime_version != wanted:
        yield f"tool_versions.{tool}", wanted, runtime_version


def _release(version: str) -> tuple[int, ...]:
    """(major, minor)."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


def _raise_damaged(bundle: Path, manifest: Manifest, hash_up_to: int | None) -> None:
    damaged = [
        f"  {name}: {fault}"
        for name, wanted in manifest.files.items()
        if (fault := _fault(bundle / name, wanted, hash_up_to)) is not None
    ]
    if damaged:
        raise EngineError(
            "\n".join([f"{bundle} is damaged:", *damaged, f"copy it again, or rebuild it: {manifest.rebuild_command}"])
        )


def _fault(path: Path, wanted: BundleFile, hash_up_to: int | None) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted.size:
            return f"{size} bytes, built with {wanted.size}"
        if (hash_up_to is None or size <= hash_up_to) and (found := sha256_file(path)) != wanted.sha256:
            return f"sha256 {found}, built with {wanted.sha256}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None
