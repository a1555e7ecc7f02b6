"""How far a system's numbers are from transformers in fp32, on the text and by the measures of castline's own gate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import JobFailed
from castline.builder.parity import Comparison

SAME_KL = 1.1
"""Two mean divergences within a tenth of each other are called equal."""
SAME_PERPLEXITY = 1.002


@dataclass(frozen=True, slots=True)
class Quality:
    """Divergence in nats. ``mean_kl`` is None where the system's API gives no logits."""

    mean_kl: float | None = None
    top1: float | None = None
    perplexity: float | None = None
    num_tokens: int = 0
    how: str = "not measured"


def compare(logits_path: Path, reference_path: Path, passages: list[list[int]], how: str) -> Quality:
    """From the logits of every token of the passages. Raises JobFailed where there are not as many rows as tokens."""
    logits: NDArray[np.float32] = np.load(logits_path, mmap_mode="r")
    reference: NDArray[np.float32] = np.load(reference_path, mmap_mode="r")
    if logits.shape != reference.shape:
        raise JobFailed(f"logits of shape {logits.shape}, the reference has {reference.shape}")
    comparison, first = Comparison(), 0
    for passage in passages:
        rows = slice(first, first + len(passage))
        targets = np.array([*passage[1:], -1], np.int64)
        comparison.add(reference[rows], logits[rows], targets)
        first += len(passage)
    return Quality(comparison.mean_kl, comparison.top1_agreement, comparison.perplexity, comparison.num_tokens, how)


def of_logprobs(passages: Sequence[Sequence[float]], how: str) -> Quality:
    """Perplexity alone: from the log-probability, in nats, of each token of each passage but its first."""
    each = [logprob for passage in passages for logprob in passage]
    return Quality(perplexity=math.exp(-sum(each) / len(each)), num_tokens=len(each) + len(passages), how=how)


def equal_or_better(peer: Quality, ours: Quality) -> bool:
    """Whether the peer's numbers are as good as ours: by divergence, or by perplexity where it gives no logits."""
    if peer.mean_kl is not None and ours.mean_kl is not None:
        return peer.mean_kl <= ours.mean_kl * SAME_KL
    if peer.perplexity is not None and ours.perplexity is not None:
        return peer.perplexity <= ours.perplexity * SAME_PERPLEXITY
    return False
