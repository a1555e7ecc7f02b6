"""A build from end to end: the stages in order, each a function from one plain value to the next.

Everything that reaches disk is written into the bundle's draft, which becomes the bundle by one rename at the end.
Kernels are tuned on the fused graph, before the weights are quantised: the kernel decides how they are packed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from castline.builder.autotune import TuningChoices, TuningRequest, autotune, count_cases, default_choices
from castline.builder.bench import CachedBench, OrtBench
from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.cores import physical_cores
from castline.builder.export import export_model
from castline.builder.graph_facts import attention_attributes, count_operators, weight_sizes
from castline.builder.grid import resolve_recipe, symmetric_shapes
from castline.builder.linear_sites import surroundings
from castline.builder.lower import lower_cpu, save_graph
from castline.builder.options import DEFAULT_BLOCK_SIZE, BuildOptions
from castline.builder.passes.pipeline import PassReport, run_passes
from castline.builder.passes.walk import ours
from castline.builder.plan import Plan, make_manifest, make_plan
from castline.builder.preflight import check_disk, check_output
from castline.builder.progress import BuildLog
from castline.builder.quantize import matmul_shapes, quantize
from castline.builder.recipes import AUTO_RECIPE, LINEAR_W4DM, Recipe
from castline.builder.report import REPORT_NAME, ReportFacts, render_report
from castline.builder.tensorrt.recipes import gpu_recipe
from castline.builder.tool_versions import tool_versions
from castline.builder.torch_reference import torch_reference
from castline.builder.tuning_cache import TuningCache, TuningEnvironment, default_cache_dir
from castline.builder.verify import ParityReport, judge, measure, require_verified, shipped_case
from castline.engines.bundle import write_bundle
from castline.engines.manifest import Manifest, ModelFacts
from castline.plugins.cpu.library import active_isa, describe
from castline.plugins.cpu.selftest import run_self_test
from castline.plugins.cpu.session import CpuSession, SessionOptions, native_options
from castline.plugins.linear import LINEAR

WIDE_ISA = "amx"
"""The instruction set with Linear's wide kernels."""


@dataclass(frozen=True, slots=True)
class Fused:
    """The graph after the passes, and what the report says of the one before."""

    model: ir.Model
    passes: tuple[PassReport, ...]
    exported_operators: Mapping[str, int]
    fp32_sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The engine on disk."""

    graph: Path
    operators: Mapping[str, int]
    sizes: Mapping[str, int]


def build(options: BuildOptions, log: BuildLog) -> Path:
    """Builds a bundle; returns its directory. Raises BuildError, and then nothing is left in the output."""
    if options.target != "cpu":
        from castline.builder.tensorrt.pipeline import build_for_gpu  # it calls the stages below

        return build_for_gpu(options, log)
    check_output(options.output, options.name, options.version)
    run_self_test()  # a library that is missing, wrong, or told to use kernels this host lacks: before anything long
    checkpoint, plan = read_checkpoint(options, log)
    with write_bundle(options.output, plan.facts.name, options.version) as draft:
        fused = export_and_fuse(checkpoint, plan.max_model_len, log)
        choices = choose_kernels(plan, fused.model, log)
        placed = lower(plan, choices, fused.model, log)
        compiled = compile_engine(checkpoint, fused, draft.directory, log)
        report = verify_engine(plan, choices, checkpoint, compiled.graph, log)
        manifest = make_manifest(plan, choices, report.parity if report else None, compiled.graph.name)
        facts = ReportFacts(
            stages=tuple(log.stages),
            fusions=(*fused.passes, *placed),
            operators=pairs(fused.exported_operators, compiled.operators),
            sizes=pairs(fused.fp32_sizes, compiled.sizes),
            kl=report.kl if report else (),
        )
        with log.stage("bundle") as stage:
            stage.summary = write_report(draft.directory, manifest, facts)
            draft.seal(manifest)
    assert draft.path is not None
    return draft.path


def read_checkpoint(options: BuildOptions, log: BuildLog) -> tuple[Checkpoint, Plan]:
    """Stage checkpoint; refuses what the model or the disk cannot give."""
    with log.stage("checkpoint") as stage:
        checkpoint = load_checkpoint(options.model)
        plan = make_plan(options, checkpoint.facts, _recipe(options, checkpoint))
        check_disk(options.output, plan.facts, plan.recipe)
        stage.summary = _describe_model(plan.facts)
        if options.recipe == AUTO_RECIPE:
            stage.summary += f", recipe {plan.recipe.name}"
    for warning in _warnings(checkpoint, plan):
        log.warn(warning)
    return checkpoint, plan


def _recipe(options: BuildOptions, checkpoint: Checkpoint) -> Recipe:
    if options.target == "cpu":
        return resolve_recipe(options.recipe, checkpoint.model)
    return gpu_recipe(options.recipe)


def _warnings(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """What will be built all the same, and what its users will meet."""
    name, threads = plan.facts.name, plan.options.threads
    if checkpoint.tokenizer.chat_template is None:
        yield f"{name} has no chat template: its engine will refuse chat requests and serve completions"
    highest = max(checkpoint.tokenizer.backend_tokenizer.get_vocab(True).values(), default=-1)
    if highest >= plan.facts.vocab_size:
        yield (
            f"the tokenizer of {name} has token ids up to {highest:,}, and the model only {plan.facts.vocab_size:,} "
            "embeddings: its engine will refuse requests that use the others"
        )
    if threads is not None and threads > plan.host.cores:
        yield f"--threads {threads} is over the {plan.host.cores} cores that this process may use: they will take turns"


def export_and_fuse(checkpoint: Checkpoint, max_model_len: int, log: BuildLog) -> Fused:
    """Stages export and fuse, for sequences of up to *max_model_len* tokens."""
    with log.stage("export") as stage:
        model = export_model(checkpoint)
        operators = count_operators(model)
        nodes = len(model.graph)
        stage.summary = f"{nodes:,} nodes, one attention node in each of {checkpoint.facts.num_layers} layers"
    with log.stage("fuse") as stage:
        passes = run_passes(model, max_model_len)
        _detail(passes, log)
        stage.summary = f"{nodes:,} → {len(model.graph):,} nodes in {len(passes)} passes"
    return Fused(model, passes, operators, weight_sizes(model))


def choose_kernels(plan: Plan, model: ir.Model, log: BuildLog) -> TuningChoices:
    """Stage autotune, on a fused graph."""
    with log.stage("autotune") as stage:
        request = tuning_request(plan, model)
        if not plan.options.tune:
            choices = default_choices(request)
            stage.summary = f"skipped, defaults: {_describe_choices(choices)}"
        else:
            environment = TuningEnvironment(plan.host, tool_versions()["onnxruntime"], describe().sha256, active_isa())
            cache = TuningCache(plan.options.cache_dir or default_cache_dir(), environment)
            bench = OrtBench(lambda threads: native_options(SessionOptions(num_threads=threads)))
            with log.bar("timing kernels", count_cases(request)) as advance:
                choices = autotune(request, CachedBench(bench, cache), advance)
            stage.summary = f"{cache.misses} timed, {cache.hits} remembered: {_describe_choices(choices)}"
        for (k, n), kernel in choices.kernels.items():
            log.detail(f"matmul {k} x {n}: {kernel.name}")
    return choices


def tuning_request(plan: Plan, model: ir.Model) -> TuningRequest:
    """What there is to tune in a fused graph."""
    shapes = matmul_shapes(model)
    options = plan.options
    layer_shapes = tuple(shape for shape, is_head in shapes.items() if not is_head)
    has_4_bits = LINEAR_W4DM in plan.recipe.layer_kernels
    return TuningRequest(
        recipe=plan.recipe,
        layer_shapes=layer_shapes,
        head_shapes=tuple(shape for shape, is_head in shapes.items() if is_head),
        attention=attention_attributes(model, plan.precision.kv_dtype, DEFAULT_BLOCK_SIZE),
        surroundings=surroundings(model),
        symmetric_shapes=symmetric_shapes(model, layer_shapes) if has_4_bits else frozenset(),
        has_wide=active_isa() == WIDE_ISA,
        cores=physical_cores(),
        max_model_len=plan.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        threads=options.threads,
        block_size=options.block_size,
    )


def lower(plan: Plan, choices: TuningChoices, model: ir.Model, log: BuildLog) -> tuple[PassReport, ...]:
    """Stages quantize and lower, in place; what each step of the first did."""
    with log.stage("quantize") as stage:
        before = len(model.graph)
        placed = quantize(model, choices.kernels, plan.recipe.embedding_kernel)
        _detail(placed, log)
        linears = len(ours(model, LINEAR))
        stage.summary = (
            f"recipe {plan.recipe.name}: {before:,} → {len(model.graph):,} nodes, {linears:,} of them Linear"
        )
    with log.stage("lower") as stage:
        lower_cpu(
            model,
            kv_dtype=plan.precision.kv_dtype,
            block_size=choices.block_size,
            query_tile=choices.query_tile,
            kv_split=choices.kv_split,
        )
        block_bytes = plan.block_bytes(choices.block_size) * plan.facts.num_layers
        stage.summary = (
            f"{plan.precision.kv_dtype} KV blocks of {choices.block_size} tokens, {block_bytes:,} bytes over all layers"
        )
    return placed


def _detail(passes: Iterable[PassReport], log: BuildLog) -> None:
    for report in passes:
        log.detail(f"{report.name}: {report.matched:,} matched, {report.before:,} → {report.after:,} nodes")


def compile_engine(checkpoint: Checkpoint, fused: Fused, directory: Path, log: BuildLog) -> Compiled:
    """Stage compile: graph, weights and tokenizer into *directory*.

    ONNX Runtime could store its pre-packed weights too. Measured on the demo engine that saves no start-up time (0.2 s
    either way), doubles the bundle, stores the shared embedding twice, and ties it to one release of ONNX Runtime.
    """
    with log.stage("compile") as stage:
        graph = save_graph(fused.model, directory)
        checkpoint.save_tokenizer(directory)
        sizes = weight_sizes(fused.model)
        before, after = sum(fused.fp32_sizes.values()), sum(sizes.values())
        stage.summary = f"weights {before / 2**20:,.1f} → {after / 2**20:,.1f} MiB"
    return Compiled(graph, count_operators(fused.model), sizes)


def verify_engine(
    plan: Plan, choices: TuningChoices, checkpoint: Checkpoint, graph: Path, log: BuildLog
) -> ParityReport | None:
    """Stage verify. Raises BuildError over the tolerance, unless the options allow an unverified engine."""
    options, limits = plan.options, plan.limits(choices.block_size)
    if not options.verify:
        log.warn("not verified (--no-verify): `castline run` will refuse this engine unless told")
        return None
    with log.stage("verify") as stage:
        encode = checkpoint.tokenizer.backend_tokenizer.encode
        case = shipped_case(lambda text: encode(text).ids, plan.facts.vocab_size, limits.max_model_len)
        with (
            CpuSession(
                graph,
                num_blocks=case.num_blocks(limits.block_size),
                block_size=limits.block_size,
                block_bytes=plan.block_bytes(limits.block_size),
                options=SessionOptions(num_threads=choices.num_threads),
            ) as engine,
            log.bar("comparing with the reference", len(case.passages) + len(case.prompts)) as advance,
        ):
            measured = measure(case, engine, torch_reference(checkpoint.model), limits=limits, advance=advance)
        report = judge(measured, plan.recipe.tolerance_for(plan.precision.kv_dtype))
        stage.summary = describe_parity(report)
        if not options.allow_unverified:
            require_verified(report.parity, plan.recipe.name, plan.precision.kv_dtype)
    if not report.parity.verified:
        log.warn("over its tolerance and marked unverified: `castline run` will refuse this engine unless told")
    return report


def write_report(directory: Path, manifest: Manifest, facts: ReportFacts) -> str:
    """Writes report.html; returns what the bundle holds."""
    (directory / REPORT_NAME).write_text(render_report(manifest, facts), encoding="utf-8")
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return f"{sum(sizes) / 2**20:,.1f} MiB in {len(sizes) + 1} files"


def _describe_model(facts: ModelFacts) -> str:
    heads = f"{facts.num_heads} heads over {facts.num_kv_heads} KV heads"
    return f"{facts.name}: {facts.architecture}, {facts.num_parameters / 1e6:,.1f} M parameters, {heads}"


def _describe_choices(choices: TuningChoices) -> str:
    threads = f"{choices.num_threads} thread{'' if choices.num_threads == 1 else 's'}"
    kernels = ", ".join(sorted({kernel.name for kernel in choices.kernels.values()}))
    return f"{threads}, blocks of {choices.block_size}, {kernels}"


def describe_parity(report: ParityReport) -> str:
    p = report.parity
    return (
        f"mean KL {p.mean_kl:.3g} (at most {p.tolerance_mean_kl:g}), max {p.max_kl:.3g}, top-1 {p.top1_agreement:.1%} "
        f"(at least {p.tolerance_top1:.0%}), perplexity {p.perplexity:.3f} (reference {p.reference_perplexity:.3f}) "
        f"over {p.num_tokens} tokens; greedy {p.greedy_match:.0%}; "
        + ", ".join(f"{kind} {step.mean_kl:.3g} {step.top1_agreement:.1%}" for kind, step in p.by_step.items())
    )


def pairs(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(before, after) of every name of either."""
    return {name: (before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys((*before, *after))}
