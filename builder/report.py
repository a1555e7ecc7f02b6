"""``report.html``: what a person looks at after a build. One file, no external resources, light and dark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2

from castline.builder import plots
from castline.builder.passes.pipeline import PassReport
from castline.builder.plots import TimingRow
from castline.builder.progress import StageRecord
from castline.engines.capacity import kv_block_bytes, plan_kv
from castline.engines.manifest import Manifest

REPORT_NAME = "report.html"
POOL_SIZES_GIB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """What the report shows beyond the manifest."""

    stages: Sequence[StageRecord]
    fusions: Sequence[PassReport]
    operators: Mapping[str, tuple[int, int]]
    """Operator → nodes of it in the exported graph, and in the lowered one."""
    sizes: Mapping[str, tuple[int, int]]
    """Part of the model → bytes in fp32, and in the engine."""
    kl: Sequence[float] = ()
    """Divergence of each verified position, in nats."""


def render_report(manifest: Manifest, facts: ReportFacts) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["mib"] = lambda size: f"{size / 2**20:,.1f}"
    template = (files("castline.builder") / "data" / "report.html.j2").read_text(encoding="utf-8")
    timings = timing_rows(manifest)
    return environment.from_string(template).render(
        manifest=manifest,
        facts=facts,
        operators=_operators(facts.operators),
        memory=_memory_rows(manifest),
        block_bytes=_block_bytes(manifest),
        timings=timings,
        plots=_plots(manifest, facts, timings),
    )


def timing_rows(manifest: Manifest) -> list[TimingRow]:
    """The tuner's timings, each with the candidate that was chosen."""
    rows: list[TimingRow] = []
    for name, times in manifest.tuning.timings_us.items():
        thing, _, step = name.partition(", ")
        chosen = _choice(manifest, thing, step)
        rows.append((thing, step, [(candidate, us, candidate == chosen) for candidate, us in times.items()]))
    return rows


def _choice(manifest: Manifest, thing: str, step: str) -> str:
    tuning = manifest.tuning
    kind, _, what = thing.rpartition(" ")
    if kind == "matmul":
        return tuning.matmul[what]
    if kind == "wide rows":
        first = tuning.wide_rows.get(what, -1)
        return "wide" if 0 < first <= int(step) else "narrow"
    return str(tuning.attention[what]) if kind == "attention" else str(tuning.num_threads)


def _operators(operators: Mapping[str, tuple[int, int]]) -> list[tuple[str, int, int]]:
    """Most frequent first."""
    rows = [(name, before, after) for name, (before, after) in operators.items()]
    return sorted(rows, key=lambda row: (-max(row[1], row[2]), row[0]))


def _block_bytes(manifest: Manifest) -> int:
    """Bytes of one KV block over all layers."""
    model, block_size = manifest.model, manifest.limits.block_size
    per_layer = kv_block_bytes(model.num_kv_heads, model.head_dim, block_size, manifest.precision.kv_dtype)
    return per_layer * model.num_layers


def _memory_rows(manifest: Manifest) -> list[tuple[float, int, int, float]]:
    """(pool in GiB, blocks, tokens, sequences of max_model_len at once) for a few pool sizes."""
    limits, rows = manifest.limits, []
    for gib in POOL_SIZES_GIB:
        available = int(gib * 2**30)
        plan = plan_kv(manifest.model, manifest.precision.kv_dtype, limits.block_size, limits.max_model_len, available)
        rows.append((gib, plan.num_blocks, plan.num_tokens, plan.max_concurrency))
    return rows


def _plots(manifest: Manifest, facts: ReportFacts, timings: Sequence[TimingRow]) -> dict[str, str]:
    drawn = {"sizes": plots.draw_sizes(facts.sizes), "stages": plots.draw_stages(facts.stages)}
    if facts.fusions:
        matched = [fusion for fusion in facts.fusions if fusion.matched]
        nodes = [facts.fusions[0].before, *(fusion.after for fusion in matched)]
        drawn["fusions"] = plots.draw_fusions([fusion.name for fusion in matched], nodes)
    if timings:
        drawn["tuning"] = plots.draw_tuning(timings)
    if facts.kl and manifest.parity is not None:
        tolerance = manifest.parity.tolerance_mean_kl
        drawn["kl_positions"] = plots.draw_kl_positions(facts.kl, tolerance, manifest.parity.mean_kl)
        drawn["kl_distribution"] = plots.draw_kl_distribution(facts.kl, tolerance)
    return drawn
