"""The next token of each row of logits, on the device.

`castline.runtime.draw` is the reference: truncation by top-k, then top-p of what is left, then min-p, each keeping a
prefix of the tokens in the order (logit descending, id ascending); one uniform number a row inverts the cumulative
weights. Nothing is sorted: what a prefix of that order weighs is the sum over the tokens above a logit, so its end is
found by bisection over the 32 bits of a float.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)
"""Key of minus infinity: every logit is at or above it."""


@triton.jit
def greedy(
    logits,  # float32 [R, vocab]
    tokens,  # int32 [R]
    finite,  # int32 [R]: 0 where a row has a NaN or no finite maximum
    vocab: tl.constexpr,
    chunk: tl.constexpr,
):
    """Grid (R,). The lowest id among equal logits."""
    row = tl.program_id(0).to(tl.int64)
    _best, at, bad = _peak(logits + row * vocab, vocab, chunk)
    tl.store(tokens + row, at)
    tl.store(finite + row, tl.where(bad, 0, 1))


@triton.jit
def _peak(row, vocab: tl.constexpr, chunk: tl.constexpr):
    """Largest logit, its first id, and whether the row is broken."""
    best, at, bad = float("-inf"), 0, False
    for start in range(0, vocab, chunk):
        ids = start + tl.arange(0, chunk)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        bad = bad | (tl.max((x != x).to(tl.int32)) > 0)
        highest = tl.max(x)
        first = start + tl.argmax(x, 0)
        at = tl.where(highest > best, first, at)
        best = tl.maximum(best, highest)
    bad = bad | (best == float("-inf")) | (best == float("inf"))
    return best, at, bad


@triton.jit
def _key(x):
    """Integers in the order of floats; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(row, bound, peak, inverse, vocab: tl.constexpr, chunk: tl.constexpr):
    """How many logits have a key from *bound* up, and their weight."""
    count, weight = 0, 0.0
    for start in range(0, vocab, chunk):
        ids = start + tl.arange(0, chunk)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        taken = (ids < vocab) & (_key(x) >= bound)
        count += tl.sum(taken.to(tl.int32))
        weight += tl.sum(tl.where(taken, tl.exp((x - peak) * inverse), 0.0))
    return count, weight


@triton.jit
def _boundary(row, wanted_count, wanted_weight, by_count, strict, peak, inverse, vocab: tl.constexpr,
              chunk: tl.constexpr):  # fmt: skip
    """The largest key from which up there are *wanted_count* tokens, or at least (strict: more than) *wanted_weight*.

    With it, count and weight of what lies above it.
    """
    low = tl.full([], LOWEST, tl.int64)
    high = _key(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count, weight = _above(row, middle.to(tl.int32), peak, inverse, vocab, chunk)
        enough = tl.where(strict, weight > wanted_weight, weight >= wanted_weight)
        enough = tl.where(by_count, count >= wanted_count, enough)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    key = low.to(tl.int32)
    count, weight = _above(row, key + 1, peak, inverse, vocab, chunk)
    return key, count, weight


@triton.jit
def _nth_equal(row, key, n, vocab: tl.constexpr, chunk: tl.constexpr):
    """Id of the n-th (from 0) token whose logit has that key."""
    seen, token = 0, 0
    for start in range(0, vocab, chunk):
        ids = start + tl.arange(0, chunk)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        equal = ((ids < vocab) & (_key(x) == key)).to(tl.int32)
        order = seen + tl.cumsum(equal, 0) - 1
        token += tl.sum(tl.where((equal == 1) & (order == n), ids, 0))
        seen += tl.sum(equal)
    return token


@triton.jit
def _draw_truncated(row, peak, inverse, top_k, top_p, min_p, uniform, vocab: tl.constexpr, chunk: tl.constexpr):
    # What is kept: every token above the key `edge`, and the first `ties` of those at it.
    edge, ties = tl.full([], LOWEST, tl.int32), tl.full([], vocab, tl.int32)
    if top_k > 0:
        edge, above, kept = _boundary(row, tl.minimum(top_k, vocab), 0.0, True, False, peak, inverse, vocab, chunk)
        ties = tl.minimum(top_k, vocab) - above
        kept += ties * tl.exp((_from_key(edge) - peak) * inverse)
    else:
        _count, kept = _above(row, edge, peak, inverse, vocab, chunk)
    if top_p < 1.0:
        line = top_p * kept
        p_edge, above, before = _boundary(row, 0, line, False, False, peak, inverse, vocab, chunk)
        each = tl.exp((_from_key(p_edge) - peak) * inverse)
        p_ties = tl.maximum(tl.ceil((line - before) / tl.maximum(each, 1e-38)).to(tl.int32), 1)
        if p_edge > edge:
            edge, ties = p_edge, p_ties
            count, _weight = _above(row, p_edge, peak, inverse, vocab, chunk)
            ties = tl.minimum(ties, count - above)
        elif p_edge == edge:
            ties = tl.minimum(ties, p_ties)
    # min-p may end earlier: then every token that weighs enough is kept.
    if tl.exp((_from_key(edge) - peak) * inverse) < min_p:
        edge, ties = _lightest(row, min_p, peak, inverse, vocab, chunk), tl.full([], vocab, tl.int32)
    count, over = _above(row, edge + 1, peak, inverse, vocab, chunk)
    all_count, _all_weight = _above(row, edge, peak, inverse, vocab, chunk)
    ties = tl.minimum(ties, all_count - count)
    each = tl.exp((_from_key(edge) - peak) * inverse)
    target = uniform * (over + ties * each)
    key, above, before = _boundary(row, 0, target, False, True, peak, inverse, vocab, chunk)
    if key < edge:  # only by rounding
        key, before = edge, over
    each = tl.exp((_from_key(key) - peak) * inverse)
    equal, _weight = _above(row, key, peak, inverse, vocab, chunk)
    equal -= above
    last = tl.where(key == edge, ties, equal) - 1
    nth = tl.minimum(((target - before) / tl.maximum(each, 1e-38)).to(tl.int32), last)
    return _nth_equal(row, key, tl.maximum(nth, 0), vocab, chunk)


@triton.jit
def _lightest(row, min_p, peak, inverse, vocab: tl.constexpr, chunk: tl.constexpr):
    """The lowest key whose token weighs *min_p* or more."""
    lowest = tl.full([], 2147483647, tl.int32)
    for start in range(0, vocab, chunk):
        ids = start + tl.arange(0, chunk)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        enough = (ids < vocab) & (tl.exp((x - peak) * inverse) >= min_p)
        lowest = tl.minimum(lowest, tl.min(tl.where(enough, _key(x), 2147483647)))
    return lowest


@triton.jit
def _draw_full(row, peak, inverse, uniform, vocab: tl.constexpr, chunk: tl.constexpr):
    """In the order of ids: no prefix by likelihood is needed where nothing is cut off."""
    _count, kept = _above(row, LOWEST, peak, inverse, vocab, chunk)
    target = uniform * kept
    running, token, found = 0.0, 0, False
    for start in range(0, vocab, chunk):
        ids = start + tl.arange(0, chunk)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        weight = tl.where(ids < vocab, tl.exp((x - peak) * inverse), 0.0)
        cumulative = running + tl.cumsum(weight, 0)
        # The last token with any weight is the answer where rounding leaves the target above every sum.
        passed = (cumulative > target) & (weight > 0)
        first = tl.min(tl.where(passed, ids, vocab))
        last_weighty = tl.max(tl.where(weight > 0, ids, -1))
        here = first < vocab
        token = tl.where(found, token, tl.where(here, first, tl.where(last_weighty >= 0, last_weighty, token)))
        found = found | here
        running += tl.sum(weight)
    return token


@triton.jit
def sample(
    logits,  # float32 [R, vocab]
    tokens,  # int32 [R]
    finite,  # int32 [R]
    temperature,  # float32 [R]; 0: greedy
    top_k,  # int32 [R]; 0: off
    top_p,  # float32 [R]
    min_p,  # float32 [R]
    uniform,  # float32 [R] in [0, 1)
    vocab: tl.constexpr,
    chunk: tl.constexpr,
):
    """Grid (R,)."""
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * vocab
    peak, token, bad = _peak(row, vocab, chunk)
    heat = tl.load(temperature + at)
    if (heat > 0) & (not bad):
        inverse = 1.0 / heat
        k, p, least, u = tl.load(top_k + at), tl.load(top_p + at), tl.load(min_p + at), tl.load(uniform + at)
        if (k > 0) | (p < 1.0) | (least > 0):
            token = _draw_truncated(row, peak, inverse, k, p, least, u, vocab, chunk)
        else:
            token = _draw_full(row, peak, inverse, u, vocab, chunk)
    tl.store(tokens + at, token)
    tl.store(finite + at, tl.where(bad, 0, 1))
