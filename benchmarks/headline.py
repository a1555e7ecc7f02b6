"""The tables that the document begins with: castline against the best peer, and what is asked of it alone. Pure."""

from benchmarks.bandwidth import LARGE_BYTES, SMALL_BYTES, Roofline
from benchmarks.comparison import (
    GAP_LIMIT,
    METRICS,
    OUTSIDE_PERCENT,
    QUEUE_COST,
    ROOFLINE_SHARE,
    SERVING_PERCENT,
    TARGETS,
    Metric,
    Spread,
    Target,
    best_peer,
    of_equal_quality,
)
from benchmarks.results import Results
from benchmarks.systems.catalogue import CASTLINE, SPECULATIVE
from benchmarks.wording import (
    NOT_MEASURED,
    label_with_kl,
    label_with_quality,
    number,
    quality_text,
    share_text,
    spread_text,
    table,
    titled,
)
from benchmarks.workloads import CELLS

OURS = (CASTLINE, SPECULATIVE)


def against_peers(results: Results) -> str:
    rows = [row for target in TARGETS if (row := _target_row(results, target)) is not None]
    if not rows:
        return "Nothing to compare was measured.\n"
    ours = label_with_quality(results.system(CASTLINE))
    return table(["", ours, "best peer", "ratio", "best peer of equal quality", "ratio", "must be", ""], rows)


def _target_row(results: Results, target: Target) -> list[str] | None:
    metric = _metric(target.cell, target.metric)
    spreads = results.spreads(target.cell, target.metric)
    ours = spreads.get(CASTLINE)
    if ours is None:
        return None
    peers = {name: spread for name, spread in spreads.items() if name not in OURS}
    equal = of_equal_quality(peers, results.qualities, results.qualities[CASTLINE])
    row = [f"{target.cell} {titled(metric)}", spread_text(ours, results.rounds)]
    judged = None
    for group in (peers, {name: peers[name] for name in equal}):
        judged = best_peer(metric, ours, group)
        if judged is None:
            row += [NOT_MEASURED, NOT_MEASURED]
        else:
            label = label_with_kl(results.system(judged.peer))
            row += [f"{label}: {spread_text(judged.theirs, results.rounds)}", f"**{judged.ratio:.2f}**"]
    limit = f"{'≥' if target.at_least else '≤'} {target.limit:g}"
    held = NOT_MEASURED if judged is None else _held(target.held_by(judged.ratio))
    return [*row, limit, held]


def castline_alone(results: Results) -> str:
    """What castline is held to without a peer; empty where nothing of it was measured."""
    parts = (_gap_rows, _queue_rows, _serving_rows, _step_rows, _bandwidth_rows)
    rows = [row for part in parts for row in part(results)]
    if not rows:
        return ""
    quality = results.system(CASTLINE).quality
    return table([f"castline alone ({quality_text(quality)})", "", "must be", ""], rows)


def _gap_rows(results: Results) -> list[list[str]]:
    """Against both medians: a limit of so many times "its median" can be read either way."""
    what = "W4 a stream's worst gap between messages while the long prompt is computed ÷"
    meanwhile, alone = (results.spreads("W4", key).get(CASTLINE) for key in ("gap_ratio", "gap_alone_ratio"))
    rows = []
    if meanwhile is not None:
        held = _held(meanwhile.median <= GAP_LIMIT)
        rows.append([f"{what} the median gap meanwhile", _spread(results, meanwhile), f"≤ {GAP_LIMIT:g}", held])
    if alone is not None:
        shown = "shown, not judged"
        rows.append([f"{what} the median gap before and after", _spread(results, alone), NOT_MEASURED, shown])
    return rows


def _queue_rows(results: Results) -> list[list[str]]:
    few, many = (results.spreads(f"X1@{n}", "output_tok_s").get(CASTLINE) for n in (64, 256))
    if few is None or many is None:
        return []
    cost = 1 - many.median / few.median
    what = f"256 waiting instead of 64: throughput lost ({number(few.median)} → {number(many.median)} tok/s)"
    return [[what, f"{cost:.1%}", f"≤ {QUEUE_COST:.0%}", _held(cost <= QUEUE_COST)]]


def _serving_rows(results: Results) -> list[list[str]]:
    rows = []
    for door in ("HTTP", "gRPC"):
        percent = results.spreads(f"X3 {door}", "serving_percent").get(CASTLINE)
        if percent is not None:
            what = f"64 streams over {door}: CPU time of the serving process ÷ the engine's, %"
            held = _held(percent.median <= SERVING_PERCENT)
            rows.append([what, _spread(results, percent), f"≤ {SERVING_PERCENT:g}", held])
    return rows


def _step_rows(results: Results) -> list[list[str]]:
    rows = []
    for count, limit in OUTSIDE_PERCENT.items():
        for how in ("greedy", "sampled"):
            percent = results.spreads(f"X5@{count} {how}", "outside_percent").get(CASTLINE)
            if percent is not None:
                what = f"{how}, {count} at a time: time of the engine outside the executor, %"
                rows.append([what, _spread(results, percent), f"≤ {limit:g}", _held(percent.median <= limit)])
    return rows


def _bandwidth_rows(results: Results) -> list[list[str]]:
    """Each round's decode rate against what was read right before and after it."""
    roofline = results.roofline
    if roofline is None or CASTLINE not in results.spreads("W1", "decode_tok_s"):
        return []
    places = {SMALL_BYTES: "a buffer that the L3 may hold", LARGE_BYTES: "memory"}
    return [_bandwidth_row(results, roofline, size, where) for size, where in places.items()]


def _bandwidth_row(results: Results, roofline: Roofline, size: int, where: str) -> list[str]:
    pairs = [
        (sample.values["decode_tok_s"], measured)
        for sample in results.samples
        if (sample.system, sample.cell) == (CASTLINE, "W1")
        for measured in sample.bandwidths
        if measured.buffer_bytes == size
    ]
    what, limit = f"W1 decode ÷ what reading {where} right before and after it allows", f"≥ {ROOFLINE_SHARE:.0%}"
    if not pairs:
        return [f"{what}: not measured", NOT_MEASURED, limit, NOT_MEASURED]
    share = Spread.of([roofline.share(rate, measured) for rate, measured in pairs])
    low, high = (f(measured.gb_per_s for _, measured in pairs) for f in (min, max))
    rates = f"{low:.1f}…{high:.1f} GB/s" if share.rounds > 1 else f"{low:.1f} GB/s"
    return [f"{what} ({rates})", share_text(share), limit, _held(share.median >= ROOFLINE_SHARE)]


def _spread(results: Results, spread: Spread) -> str:
    return spread_text(spread, results.rounds)


def _held(held: bool) -> str:
    return "held" if held else "short"


def _metric(cell: str, key: str) -> Metric:
    workload = next(c.workload for c in CELLS if c.name == cell)
    return next(metric for metric in METRICS[workload] if metric.key == key)
