"""docs/performance.md, from the results of a run. Pure but for the write."""

from pathlib import Path

from benchmarks.comparison import METRICS, Metric, Spread, best
from benchmarks.headline import against_peers, castline_alone
from benchmarks.machine import ABILITIES, QUIET_SHARE, Machine
from benchmarks.model import QUESTION
from benchmarks.results import Results, SystemReport
from benchmarks.systems.catalogue import CASTLINE, SPECULATIVE
from benchmarks.wording import (
    NOT_MEASURED,
    count,
    label_with_kl,
    label_with_quality,
    over_rounds,
    spread_text,
    table,
    titled,
)
from benchmarks.workloads import CELLS

HUGE_PAGES = {
    "always": ", for every process",
    "madvise": ", for those who ask, as castline does",
    "never": ", for nobody",
}
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
        against_peers(results),
        castline_alone(results),
        "## Quality of the numbers\n",
        _qualities(results),
        "## Every figure\n",
        *(_cell_section(results, name) for name in _cell_order(results)),
        _speculation(results),
        "## Machine\n",
        _machine(results),
        "## Systems and settings\n",
        _systems(results),
        "## How it is measured\n",
        METHOD,
    ]
    return "\n".join(part for part in parts if part)


METHOD = """\
`python -m benchmarks` installs every peer that it runs into an environment of its own, converts the same weights for
each (SmolLM2-135M-Instruct, which came in Q4_1), asks each the same question, measures its logits against transformers
in fp32 on the 1,212 tokens of `builder/data/verify.txt`, and then runs the rounds.

- Every system gets the same prompts as token ids, decodes greedily, and gives answers of the same fixed length.
- In a round all systems are loaded, and a cell is run on one after the other while the others are stopped by a signal;
  each round starts fresh processes and begins with another system.
- castline, llama.cpp and vLLM are measured through their HTTP servers, with the load generator on the same cores.
  OpenVINO GenAI, onnxruntime-genai and transformers run in process, and so pay nothing for HTTP.
- A cell of a peer that the first round showed to be more than 1.5 times behind the best peer (and the best of equal
  quality) is not repeated; the number of rounds stands behind such figures.
- W8 counts anonymous memory, and once each the pages of mapped files (weights, libraries) that are resident.
- TTFT is the median over requests. Bold is the best of a column among the systems that do not guess ahead.
- W4's gaps are between the messages of a stream, which may carry several tokens. "Meanwhile" is from the start of the
  long request to its first token; a gap that reaches into that time counts there. "Before and after" is all other gaps.
- Memory bandwidth is read right before and after castline's W1 in every round, with all threads, each time the fastest
  of several passes; the faster of the two is what that round's rate is held against.
- X3 and X4 read the processor time of castline's serving process and of its engine process, which the system counts in
  hundredths of a second. The load comes from another process, over 64 connections (HTTP) or one (gRPC).
- X5 reads `/metrics` before and after: the time in which the engine had work, and that of its forward passes. Sampled
  is with temperature 0.8 and top-p 0.95; prompts are English text, the same ones greedily.
- Quality is equal where a peer's mean KL is at most 1.1 times castline's; of a peer that gives no logits, where its
  perplexity is at most 1.002 times castline's.
"""


def _introduction(results: Results) -> str:
    by = f"by `{results.command}`" if results.command else "by `python -m benchmarks`, its options are not known,"
    lines = [
        f"Measured {results.created} {by} in {results.seconds / 60:.0f} minutes, seed {results.seed}. Each figure is "
        f"{over_rounds(results.rounds)}. Ratios are castline ÷ peer: above 1 is castline's where more is better, below "
        "1 where less is. KL is the mean divergence from transformers in fp32, in nats."
    ]
    not_run: dict[str, list[str]] = {}
    for report in results.systems:
        if report.unavailable:
            not_run.setdefault(report.unavailable, []).append(report.label)
    if not_run:
        reasons = [f"- {'; '.join(labels)}: {reason}" for reason, labels in not_run.items()]
        lines.append("\n".join(["Known to the benchmark and not run:\n", *reasons]))
    shares = [sample.others_share for sample in results.samples if sample.seconds]
    worst = max([results.noise_before, *shares])
    if worst > QUIET_SHARE:
        busy = sum(share > QUIET_SHARE for share in shares)
        lines.append(
            f"**The machine was not quiet:** others took up to {worst:.0%} of its processors, and more than "
            f"{QUIET_SHARE:.0%} in {busy} of {len(shares)} measurements."
        )
    return "\n\n".join(lines) + "\n"


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
    leaders = {metric.key: best(metric, _without_guessing(spreads[metric.key])) for metric in metrics}
    rows = []
    for report in results.systems:
        failure = results.failure(name, report.name)
        if failure is not None:
            rows.append([label_with_quality(report), failure, *[""] * (len(metrics) - 1)])
            continue
        texts = [_figure(results, report, metric, spreads, leaders) for metric in metrics]
        if any(text != NOT_MEASURED for text in texts):
            rows.append([label_with_quality(report), *texts])
    head = [titled(metric) for metric in metrics] or [""]
    return f"### {name}: {cell.title}\n\n" + table(["", *head], rows)


def _without_guessing(spreads: dict[str, Spread]) -> dict[str, Spread]:
    return {name: spread for name, spread in spreads.items() if name != SPECULATIVE}


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
    """Both ways beside each other; empty where they were not measured."""
    rows = []
    for name in _cell_order(results):
        metric = METRICS[name[:2]][0]
        spreads = results.spreads(name, metric.key)
        raw, guessing = spreads.get(CASTLINE), spreads.get(SPECULATIVE)
        if raw is not None and guessing is not None:
            texts = [spread_text(spread, results.rounds) for spread in (raw, guessing)]
            rows.append([f"{name} {titled(metric)}", *texts, f"{guessing.median / raw.median:.2f}"])
    if not rows:
        return ""
    without, guessing_ahead = results.system(CASTLINE), results.system(SPECULATIVE)
    return (
        "## Guessing ahead\n\n"
        "Prompt-lookup speculation changes no answer. In the tables above it is on only in the rows of "
        f"“{guessing_ahead.label}”, which are held against no limit and never marked as the best; everything else that "
        "is said of castline is without it. The prompts of W1 and W3 are random words, X2's are English text.\n\n"
        + table(["", label_with_kl(without), label_with_kl(guessing_ahead), "ratio"], rows)
    )


def _machine(results: Results) -> str:
    machine = results.machine
    caches = ", ".join(f"{name} {size}" for name, size in machine.caches.items())
    lines = [
        f"- {machine.cpu}, {machine.cores} cores: {', '.join(machine.features)}",
        f"- {_abilities(machine)}",
        f"- caches: {caches}; {machine.memory_gib:.0f} GiB of memory",
        f"- {machine.system}, Python {machine.python}",
    ]
    if machine.huge_pages is not None:
        given = HUGE_PAGES.get(machine.huge_pages, "")
        lines.append(f"- transparent huge pages: {machine.huge_pages}{given}")
    for measured in results.bandwidths:
        size = f"{measured.buffer_bytes / 2**20:,.0f} MiB"
        threads = count(measured.threads, "thread")
        lines.append(f"- read bandwidth before the rounds, a buffer of {size}, {threads}: {measured.gb_per_s:.1f} GB/s")
    if results.roofline is not None:
        roofline = results.roofline
        lines.append(
            f"- a decode step of castline reads {roofline.weight_bytes / 1e6:.1f} MB of weights (of another "
            f"{roofline.unread_bytes / 1e6:.1f} MB it looks rows up) and {roofline.kv_bytes / 1e6:.2f} MB of KV "
            "at the mean context of W1"
        )
    return "\n".join(lines) + "\n"


def _abilities(machine: Machine) -> str:
    has, lacks = ([name for name in ABILITIES if machine.has(name) is there] for there in (True, False))
    return "; ".join(f"{word} {', '.join(names)}" for word, names in (("has", has), ("has no", lacks)) if names)


def _systems(results: Results) -> str:
    lines = []
    for report in results.systems:
        if report.unavailable:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        settings = "; ".join(f"{name}: {value}" for name, value in report.settings.items())
        lines.append(f"- **{report.label}**: {versions}. {settings}")
    return "\n".join(lines) + "\n"
