"""A build for an NVIDIA GPU from end to end: the stages in order. `castline.builder.pipeline.build` calls it.

Nothing here runs on a GPU. The graph is proved by ONNX Runtime, the kernels are compiled for the SKU, and the plan is
built by TensorRT for RTX, which needs no GPU, or by TensorRT where it is installed and the GPU is in this machine.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from castline import __version__
from castline.builder import pipeline as stages
from castline.builder.checkpoint import Checkpoint
from castline.builder.graph_facts import count_operators, weight_sizes
from castline.builder.lower import save_graph
from castline.builder.options import DEFAULT_BLOCK_SIZE, BuildOptions
from castline.builder.plan import Plan
from castline.builder.preflight import check_output
from castline.builder.progress import BuildLog
from castline.builder.report import ReportFacts
from castline.builder.tensorrt.calibrate import calibrate
from castline.builder.tensorrt.footprint import footprint
from castline.builder.tensorrt.kernels import KernelTarget, compile_kernels, node_attributes, require_compiler
from castline.builder.tensorrt.lower import lower_tensorrt
from castline.builder.tensorrt.matmuls import e4m3_matmuls, layer_matmuls
from castline.builder.tensorrt.plan_compiler import CompiledPlan, compile_plan
from castline.builder.tensorrt.plan_request import PlanRequest
from castline.builder.tensorrt.proof import proof_graph, proof_kv_dtype
from castline.builder.tensorrt.recipes import activations_of
from castline.builder.tensorrt.target import GpuTarget, choose_target
from castline.builder.tensorrt.weights import quantize_fp8, quantize_int4
from castline.builder.tool_versions import tool_versions
from castline.builder.torch_reference import torch_reference
from castline.builder.tuning_cache import default_cache_dir
from castline.builder.verify import Encode, ParityReport, judge, measure, require_verified, shipped_case
from castline.engines.bundle import write_bundle
from castline.engines.capacity import kv_block_bytes
from castline.engines.hashing import sha256_file
from castline.engines.manifest import SCHEMA_VERSION, DeviceMemory, Manifest, Tuning
from castline.plugins.contract import PAGED_ATTENTION
from castline.plugins.cpu.selftest import run_self_test
from castline.plugins.cpu.session import CpuSession, SessionOptions
from castline.plugins.tensorrt.engine import PLAN_NAME
from castline.plugins.tensorrt.flavour import flavour_version
from castline.plugins.tensorrt.kernel_set import KERNELS_DIRECTORY, KernelSet
from castline.plugins.tensorrt.library import describe

PROOF_CONFIG = {"session.disable_quant_qdq": "1"}
"""Weights are dequantised once, when the session is made, and not in every step."""
GRAPH_DIRECTORY = ".graph"
"""Of a draft, while the plan is built from what lies there."""


@dataclass(frozen=True, slots=True)
class GpuBuild:
    """What is to be built."""

    plan: Plan
    target: GpuTarget

    @property
    def block_size(self) -> int:
        return self.plan.options.block_size or DEFAULT_BLOCK_SIZE

    @property
    def block_bytes(self) -> int:
        """Of one KV block of one layer."""
        return self.plan.block_bytes(self.block_size)


def build_for_gpu(options: BuildOptions, log: BuildLog) -> Path:
    """Builds a bundle; returns its directory. Raises BuildError or EngineError, and then nothing is left behind."""
    check_output(options.output, options.name, options.version)
    target = choose_target(options)
    require_compiler()
    run_self_test()
    checkpoint, plan = stages.read_checkpoint(options, log)
    wanted = GpuBuild(replace(plan, host=target.host()), target)
    with write_bundle(options.output, plan.facts.name, options.version) as draft:
        fused = stages.export_and_fuse(checkpoint, plan.max_model_len, log)
        e4m3 = quantize(wanted, checkpoint, fused.model, log)
        lower(wanted, fused.model, log)
        operators, sizes = count_operators(fused.model), weight_sizes(fused.model)
        kernels = build_kernels(wanted, fused.model, draft.directory, log)
        graph_directory = draft.directory / GRAPH_DIRECTORY
        graph_directory.mkdir()
        graph = save_graph(fused.model, graph_directory)
        inputs = hash_inputs(wanted, graph_directory, kernels)
        graph_file = build_plan(wanted, fused.model, graph, draft.directory, e4m3, log)
        report = verify_graph(wanted, checkpoint, fused.model, graph_directory, log)
        shutil.rmtree(graph_directory)
        checkpoint.save_tokenizer(draft.directory)
        device = footprint(fused.model, options.model, plan.recipe.name, plan.limits(wanted.block_size))
        manifest = make_manifest(wanted, report, graph_file, inputs, device)
        facts = ReportFacts(
            stages=tuple(log.stages),
            fusions=fused.passes,
            operators=stages.pairs(fused.exported_operators, operators),
            sizes=stages.pairs(fused.fp32_sizes, sizes),
            kl=report.kl if report else (),
        )
        with log.stage("bundle") as stage:
            stage.summary = f"{stages.write_report(draft.directory, manifest, facts)}; built, not executed"
            draft.seal(manifest)
    assert draft.path is not None
    return draft.path


def quantize(wanted: GpuBuild, checkpoint: Checkpoint, model: ir.Model, log: BuildLog) -> list[str]:
    """Stages calibrate and quantize, in place; names of the matmuls that multiply e4m3."""
    recipe = wanted.plan.recipe.name
    if recipe == "fp8":
        with log.stage("calibrate") as stage:
            passages = shipped_case(
                _encode(checkpoint), wanted.plan.facts.vocab_size, wanted.plan.max_model_len
            ).passages
            with log.bar("measuring activations", len(passages)) as advance:
                absmax = calibrate(model, passages, advance)
            stage.summary = (
                f"{len(absmax)} matmul inputs over {sum(map(len, passages)):,} tokens, "
                f"largest {max(absmax.values()):.3g}"
            )
    with log.stage("quantize") as stage:
        matmuls = len(layer_matmuls(model))
        e4m3 = [str(node.name) for node in e4m3_matmuls(model)] if recipe == "fp8" else []
        if recipe == "fp8":
            done = quantize_fp8(model, absmax, activations_of(recipe))
        else:
            done = quantize_int4(model, activations_of(recipe)) if recipe == "int4" else 0
        stage.summary = f"recipe {recipe}: {done} of {matmuls} matmuls in the layers below 16 bits"
    return e4m3


def lower(wanted: GpuBuild, model: ir.Model, log: BuildLog) -> None:
    """Stage lower, in place."""
    kv_dtype, activations = wanted.plan.precision.kv_dtype, activations_of(wanted.plan.recipe.name)
    with log.stage("lower") as stage:
        before = len(model.graph)
        lower_tensorrt(model, activations=activations, kv_dtype=kv_dtype, block_size=wanted.block_size)
        over_layers = wanted.block_bytes * wanted.plan.facts.num_layers
        stage.summary = (
            f"{activations}, {before:,} → {len(model.graph):,} nodes; {kv_dtype} KV blocks of {wanted.block_size} "
            f"tokens, {over_layers:,} bytes over all layers"
        )


def build_kernels(wanted: GpuBuild, model: ir.Model, directory: Path, log: BuildLog) -> KernelSet:
    """Stage kernels."""
    target = KernelTarget(
        compute_capability=wanted.target.sku.compute_capability,
        activations=activations_of(wanted.plan.recipe.name),
        vocab_size=wanted.plan.facts.vocab_size,
        block_size=wanted.block_size,
        sku=wanted.target.sku.name,
    )
    with log.stage("kernels") as stage:
        kernels = compile_kernels(target, node_attributes(model), directory)
        most = max(kernel.registers for kernel in kernels.kernels)
        stage.summary = (
            f"{len(kernels.kernels)} for compute capability {kernels.compute_capability} by {kernels.compiler}, "
            f"at most {most} registers, no spills"
        )
        for kernel in kernels.kernels:
            log.detail(f"{kernel.cubin}: {kernel.registers} registers, {kernel.shared_bytes:,} bytes of shared memory; "
                       f"shape: {kernel.chosen}")  # fmt: skip
    return kernels


def build_plan(
    wanted: GpuBuild, model: ir.Model, graph: Path, directory: Path, e4m3: Sequence[str], log: BuildLog
) -> str:
    """Stage plan; the bundle's graph file: the plan, or with --kernels-only the graph that one is built from."""
    if not wanted.target.has_plan:
        for path in graph.parent.iterdir():
            shutil.copy(path, directory / path.name)
        log.warn(f"no plan (--kernels-only): `castline run` refuses this engine. {wanted.target.lacking}".rstrip())
        return graph.name
    attention = [str(node.name) for node in model.graph if node.op_type == PAGED_ATTENTION]
    with log.stage("plan") as stage:
        request = plan_request(wanted, model, graph, directory)
        compiled = compile_plan(request, attention, e4m3)
        stage.summary = _describe_plan(wanted, compiled)
        log.detail(f"{len(compiled.log):,} messages of the builder, {len(compiled.layers)} layers")
    return compiled.path.name


def plan_request(wanted: GpuBuild, model: ir.Model, graph: Path, directory: Path) -> PlanRequest:
    sku, plan = wanted.target.sku, wanted.plan
    kv_dtype, size = plan.precision.kv_dtype, wanted.block_size
    pools = tuple(kv_block_bytes(a.num_kv_heads, a.head_dim, size, kv_dtype) for a in node_attributes(model))
    cache = plan.options.cache_dir or default_cache_dir()
    flavour = wanted.target.flavour
    return PlanRequest(
        flavour=flavour,
        compute_capability=sku.compute_capability,
        multiprocessors=sku.sm_count,
        graph=graph,
        kernels=directory / KERNELS_DIRECTORY,
        plan=directory / PLAN_NAME,
        pool_bytes=pools,
        max_blocks=sku.memory_bytes // sum(pools) + 1,
        limits=plan.limits(size),
        timing_cache=cache / f"{flavour}-{flavour_version(flavour)}-{sku.name}.timing",
    )


def verify_graph(
    wanted: GpuBuild, checkpoint: Checkpoint, model: ir.Model, directory: Path, log: BuildLog
) -> ParityReport | None:
    """Stage verify: the lowered graph, executed by ONNX Runtime (`castline.builder.tensorrt.proof`).

    Raises BuildError over the tolerance, unless the options allow an unverified engine.
    """
    plan, options = wanted.plan, wanted.plan.options
    if not options.verify:
        log.warn("not verified (--no-verify): `castline run` will refuse this engine unless told")
        return None
    limits, kv_dtype = plan.limits(wanted.block_size), plan.precision.kv_dtype
    with log.stage("verify") as stage:
        case = shipped_case(_encode(checkpoint), plan.facts.vocab_size, limits.max_model_len)
        home = directory / "proof"
        home.mkdir()
        stand_in = proof_kv_dtype(kv_dtype)
        block_bytes = kv_block_bytes(plan.facts.num_kv_heads, plan.facts.head_dim, wanted.block_size, stand_in)
        with (
            CpuSession(
                save_graph(proof_graph(model, kv_dtype), home),
                num_blocks=case.num_blocks(limits.block_size),
                block_size=limits.block_size,
                block_bytes=block_bytes,
                options=SessionOptions(config=PROOF_CONFIG),
            ) as engine,
            log.bar("comparing with the reference", len(case.passages) + len(case.prompts)) as advance,
        ):
            measured = measure(case, engine, torch_reference(checkpoint.model), limits=limits, advance=advance)
        report = judge(measured, plan.recipe.tolerance_for(kv_dtype))
        report = replace(report, parity=replace(report.parity, subject="graph"))
        stage.summary = f"the graph, by ONNX Runtime: {stages.describe_parity(report)}"
        if not options.allow_unverified:
            require_verified(report.parity, plan.recipe.name, kv_dtype)
    if not report.parity.verified:
        log.warn("over its tolerance and marked unverified: `castline run` will refuse this engine unless told")
    return report


def make_manifest(
    wanted: GpuBuild, report: ParityReport | None, graph_file: str, inputs: str, device: DeviceMemory
) -> Manifest:
    plan = wanted.plan
    return Manifest(
        schema_version=SCHEMA_VERSION,
        castline_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        rebuild_command=plan.options.rebuild_command(),
        model=plan.facts,
        precision=plan.precision,
        limits=plan.limits(wanted.block_size),
        host=plan.host,
        tuning=Tuning(measured=False, num_threads=1, attention={"block_size": wanted.block_size}),
        parity=report.parity if report else None,
        plugin=describe(),
        graph_file=graph_file,
        tool_versions=dict(_tool_versions(wanted.target)),
        files={},
        inputs_sha256=inputs,
        device=device,
    )


def hash_inputs(wanted: GpuBuild, graph_directory: Path, kernels: KernelSet) -> str:
    """Over the graph, its weights, the limits, the SKU, the plugin and the tools: what decides a plan but for its own
    builder's moods."""
    digest = hashlib.sha256()
    for path in sorted(graph_directory.iterdir()):
        digest.update(sha256_file(path).encode())
    decisive = (wanted.plan.limits(wanted.block_size), wanted.target.sku, describe(), kernels, wanted.target.flavour)
    digest.update(repr((decisive, flavour_version(wanted.target.flavour))).encode())
    return digest.hexdigest()


def _tool_versions(target: GpuTarget) -> Mapping[str, str]:
    found = {**tool_versions(), "triton": version("triton")}
    installed = flavour_version(target.flavour)
    return {**found, target.flavour: installed} if target.has_plan and installed else found


def _encode(checkpoint: Checkpoint) -> Encode:
    encode = checkpoint.tokenizer.backend_tokenizer.encode
    return lambda text: encode(text).ids


def _describe_plan(wanted: GpuBuild, compiled: CompiledPlan) -> str:
    size = compiled.path.stat().st_size / 2**20
    fp8 = sum(layer.types.count("FP8") >= 2 for layer in compiled.layers)
    plugins = sum(layer.kind == "PluginV3" for layer in compiled.layers)
    return (
        f"{wanted.target.flavour} {flavour_version(wanted.target.flavour)} for {wanted.target.sku.name}: "
        f"{size:,.1f} MiB, {len(compiled.layers)} layers in two profiles, {plugins} of attention, {fp8} of e4m3, "
        "no copies of the KV pools"
    )
