"""docs/performance.md, from the results of a run. Pure but for the write."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.bandwidth import LARGE_BYTES
from benchmarks.comparison import (
    GAP_LIMIT,
    METRICS,
    QUEUE_COST,
    ROOFLINE_SHARE,
    TARGETS,
    Metric,
    Spread,
    Target,
    best,
    best_peer,
    of_equal_quality,
)
from benchmarks.machine import QUIET_SHARE
from benchmarks.model import QUESTION
from benchmarks.results import Results, SystemReport
from benchmarks.systems.catalogue import CASTLINE, SPECULATIVE
from benchmarks.workloads import CELLS

OURS = (CASTLINE, SPECULATIVE)
NOT_MEASURED = "–"
WARNING = "**Not a measurement.** This is a short run that shows that the benchmark works.\n"


def write_document(results: Results, path: Path) -> None:
    path.write_text(document(results))


def document(results: Results) -> str:
    parts = [
        "# Performance\n",
        WARNING if results.quick else "",
        _introduction(results),
        "![Throughput, latency and memory of every system](performance.png)\n",
        "## castline against the best peer\n",
        _headline(results),
        _own_targets(results),
        "## Quality of the numbers\n",
        _qualities(results),
        "## Every figure\n",
        *(_cell_section(results, name) for name in _cell_order(results)),
        "## Guessing ahead\n" if SPECULATIVE in results.qualities else "",
        _speculation(results) if SPECULATIVE in results.qualities else "",
        "## Machine\n",
        _machine(results),
        "## Systems and settings\n",
        _systems(results),
        "## How it is measured\n",
        METHOD,
    ]
    return "\n".join(part for part in parts if part)


METHOD = """\
`python -m benchmarks` installs every peer into an environment of its own, converts the same weights for each
(SmolLM2-135M-Instruct, which came in Q4_1), asks each the same question, measures its logits against transformers in
fp32 on the 1,212 tokens of `builder/data/verify.txt`, and then runs the rounds.

- Every system gets the same prompts as token ids, decodes greedily, and gives answers of the same fixed length.
- In a round all systems are loaded, and a cell is run on one after the other while the others are stopped by a signal;
  each round starts fresh processes and begins with another system.
- castline, llama.cpp and vLLM are measured through their HTTP servers, with the load generator on the same cores.
  OpenVINO GenAI, onnxruntime-genai and transformers run in process, and so pay nothing for HTTP.
- A cell of a peer that the first round showed to be more than 1.5 times behind the best peer (and the best of equal
  quality) is not repeated; the number of rounds stands behind such figures.
- W8 counts anonymous memory, and once each the pages of mapped files (weights, libraries) that are resident.
- A figure is the median over the rounds, with the lowest and the highest. TTFT is the median over requests.
- Quality is equal where a peer's mean KL is at most 1.1 times castline's.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three significant digits, whole above a hundred."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread_text(spread: Spread | None, rounds: int) -> str:
    """Median, the extremes behind it, and the rounds where they are fewer than the run's."""
    if spread is None:
        return NOT_MEASURED
    if spread.rounds == 1:
        return number(spread.median) + (" (1 round)" if rounds > 1 else "")
    short = f", {spread.rounds} rounds" if spread.rounds < rounds else ""
    return f"{number(spread.median)} ({number(spread.low)}…{number(spread.high)}{short})"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _introduction(results: Results) -> str:
    left_out = [f"{report.label} ({report.unavailable})" for report in results.systems if report.unavailable]
    lines = [
        f"Measured {results.created} by `python -m benchmarks`, {_count(results.rounds, 'round')} in "
        f"{results.seconds / 60:.0f} minutes, seed {results.seed}. Ratios are castline ÷ peer: above 1 is castline's "
        "where more is better, below 1 where less is."
    ]
    if left_out:
        lines.append(f"Left out: {'; '.join(left_out)}.")
    shares = [sample.others_share for sample in results.samples if sample.seconds]
    worst = max([results.noise_before, *shares])
    if worst > QUIET_SHARE:
        busy = sum(share > QUIET_SHARE for share in shares)
        lines.append(
            f"**The machine was not quiet:** others took up to {worst:.0%} of its processors, and more than "
            f"{QUIET_SHARE:.0%} in {busy} of {len(shares)} measurements."
        )
    return "\n\n".join(lines) + "\n"


def _headline(results: Results) -> str:
    rows = [row for target in TARGETS if (row := _target_row(results, target)) is not None]
    head = ["", "castline", "best peer", "ratio", "best peer of equal quality", "ratio", "must be", ""]
    return table(head, rows) if rows else "Nothing to compare was measured.\n"


def _target_row(results: Results, target: Target) -> list[str] | None:
    metric = _metric(target.cell, target.metric)
    spreads = results.spreads(target.cell, target.metric)
    ours = spreads.get(CASTLINE)
    if ours is None:
        return None
    peers = {name: spread for name, spread in spreads.items() if name not in OURS}
    equal = of_equal_quality(peers, results.qualities, results.qualities[CASTLINE])
    row = [f"{target.cell} {metric.label}, {metric.unit}", spread_text(ours, results.rounds)]
    judged = None
    for group in (peers, {name: peers[name] for name in equal}):
        judged = best_peer(metric, ours, group)
        if judged is None:
            row += [NOT_MEASURED, NOT_MEASURED]
        else:
            label = results.system(judged.peer).label
            row += [f"{label}: {spread_text(judged.theirs, results.rounds)}", f"**{judged.ratio:.2f}**"]
    limit = f"{'≥' if target.at_least else '≤'} {target.limit:g}"
    held = NOT_MEASURED if judged is None else "held" if target.held_by(judged.ratio) else "short"
    return [*row, limit, held]


def _own_targets(results: Results) -> str:
    """What castline is held to without a peer."""
    rows = []
    gap = results.spreads("W4", "gap_ratio").get(CASTLINE)
    if gap is not None:
        held = "held" if gap.median <= GAP_LIMIT else "short"
        rows.append(
            ["W4 a stream's worst gap ÷ its median gap", spread_text(gap, results.rounds), f"≤ {GAP_LIMIT:g}", held]
        )
    few, many = (results.spreads(f"X1@{n}", "output_tok_s").get(CASTLINE) for n in (64, 256))
    if few is not None and many is not None:
        cost = 1 - many.median / few.median
        held = "held" if cost <= QUEUE_COST else "short"
        what = f"256 waiting instead of 64: throughput lost ({number(few.median)} → {number(many.median)} tok/s)"
        rows.append([what, f"{cost:.1%}", f"≤ {QUEUE_COST:.0%}", held])
    decode = results.spreads("W1", "decode_tok_s").get(CASTLINE)
    if decode is not None and results.roofline is not None:
        for measured in results.bandwidths:
            if measured.threads != results.machine.cores:
                continue
            share = results.roofline.share(decode.median, measured)
            where = "memory" if measured.buffer_bytes >= LARGE_BYTES else "a buffer that the L3 may hold"
            what = f"W1 decode ÷ what reading {where} at {measured.gb_per_s:.1f} GB/s allows"
            rows.append(
                [what, f"{share:.0%}", f"≥ {ROOFLINE_SHARE:.0%}", "held" if share >= ROOFLINE_SHARE else "short"]
            )
    return table(["castline alone", "", "must be", ""], rows) if rows else ""


def _qualities(results: Results) -> str:
    rows = []
    for report in results.systems:
        quality = report.quality
        if report.unavailable:
            continue
        rows.append(
            [
                report.label,
                NOT_MEASURED if quality.mean_kl is None else f"{quality.mean_kl:.4f}",
                NOT_MEASURED if quality.top1 is None else f"{quality.top1:.1%}",
                NOT_MEASURED if quality.perplexity is None else f"{quality.perplexity:.3f}",
                quality.how,
                f"“{report.answer}”" if report.sane else f"**wrong:** “{report.answer}”",
            ]
        )
    head = ["", "mean KL, nats", "top-1", "perplexity", "how", QUESTION]
    return table(head, rows)


def _cell_order(results: Results) -> list[str]:
    measured = set(results.cells)
    cells = sorted(CELLS, key=lambda cell: cell.workload)
    return [cell.name for cell in cells if cell.name in measured]


def _cell_section(results: Results, name: str) -> str:
    cell = next(cell for cell in CELLS if cell.name == name)
    metrics = [metric for metric in METRICS[cell.workload] if results.spreads(name, metric.key)]
    spreads = {metric.key: results.spreads(name, metric.key) for metric in metrics}
    leaders = {metric.key: best(metric, spreads[metric.key]) for metric in metrics}
    rows = []
    for report in results.systems:
        failure = results.failure(name, report.name)
        if failure is not None:
            rows.append([report.label, failure, *[""] * (len(metrics) - 1)])
            continue
        texts = [_figure(results, report, metric, spreads, leaders) for metric in metrics]
        if any(text != NOT_MEASURED for text in texts):
            rows.append([report.label, *texts])
    head = [f"{metric.label}, {metric.unit}" if metric.unit else metric.label for metric in metrics] or [""]
    return f"### {name}: {cell.title}\n\n" + table(["", *head], rows)


def _figure(
    results: Results,
    report: SystemReport,
    metric: Metric,
    spreads: dict[str, dict[str, Spread]],
    leaders: dict[str, str | None],
) -> str:
    text = spread_text(spreads[metric.key].get(report.name), results.rounds)
    return f"**{text}**" if leaders[metric.key] == report.name else text


def _speculation(results: Results) -> str:
    rows = []
    for name in _cell_order(results):
        metric = METRICS[name[:2]][0]
        spreads = results.spreads(name, metric.key)
        raw, guessing = spreads.get(CASTLINE), spreads.get(SPECULATIVE)
        if raw is not None and guessing is not None:
            ratio = f"{guessing.median / raw.median:.2f}"
            rows.append(
                [
                    f"{name} {metric.label}, {metric.unit}",
                    *(spread_text(s, results.rounds) for s in (raw, guessing)),
                    ratio,
                ]
            )
    return (
        "Prompt-lookup speculation changes no answer. All figures above are without it; here beside them, with it. The "
        "prompts of W1 and W3 are random words, X2's are English text.\n\n"
        + table(["", "without", "with", "ratio"], rows)
    )


def _machine(results: Results) -> str:
    machine = results.machine
    caches = ", ".join(f"{name} {size}" for name, size in machine.caches.items())
    lines = [
        f"- {machine.cpu}, {machine.cores} cores: {', '.join(machine.features)}",
        f"- caches: {caches}; {machine.memory_gib:.0f} GiB of memory",
        f"- {machine.system}, Python {machine.python}",
    ]
    for measured in results.bandwidths:
        size = f"{measured.buffer_bytes / 2**20:,.0f} MiB"
        threads = _count(measured.threads, "thread")
        lines.append(f"- read bandwidth, a buffer of {size}, {threads}: {measured.gb_per_s:.1f} GB/s")
    if results.roofline is not None:
        roofline = results.roofline
        lines.append(
            f"- a decode step of castline reads {roofline.weight_bytes / 1e6:.1f} MB of weights (of another "
            f"{roofline.unread_bytes / 1e6:.1f} MB it looks rows up) and {roofline.kv_bytes / 1e6:.2f} MB of KV "
            "at the mean context of W1"
        )
    return "\n".join(lines) + "\n"


def _systems(results: Results) -> str:
    lines = []
    for report in results.systems:
        if report.unavailable:
            lines.append(f"- **{report.label}**: left out: {report.unavailable}")
            continue
        versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        settings = "; ".join(f"{name}: {value}" for name, value in report.settings.items())
        lines.append(f"- **{report.label}**: {versions}. {settings}")
    return "\n".join(lines) + "\n"


def _metric(cell: str, key: str) -> Metric:
    workload = next(c.workload for c in CELLS if c.name == cell)
    return next(metric for metric in METRICS[workload] if metric.key == key)
