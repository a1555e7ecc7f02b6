"""What the tuner times: one kernel at one size that serving meets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from castline.builder.linear_sites import NO_SURROUNDINGS, Surroundings
from castline.builder.recipes import MatmulKernel
from castline.plugins.contract import AttentionAttributes

Shape = tuple[int, int]
"""(K, N) of a matmul with constant weights."""


@dataclass(frozen=True, slots=True)
class MatmulCase:
    """``x [rows, k] @ W [k, n]`` by one kernel on *threads* threads, with what surrounds it in the model: inside a
    Linear node, or as nodes of their own around another kernel."""

    k: int
    n: int
    kernel: MatmulKernel
    rows: int
    threads: int
    around: Surroundings = NO_SURROUNDINGS

    def describe(self) -> Mapping[str, str | int | float]:
        kernel = {name: value for name, value in asdict(self.kernel).items() if value is not None}
        size = {"k": self.k, "n": self.n, "rows": self.rows, "threads": self.threads}
        return {**size, **kernel, **asdict(self.around)}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of the attention operator: *batch* sequences, each *query_len* new tokens of *kv_len* in all."""

    attributes: AttentionAttributes
    batch: int
    query_len: int
    kv_len: int
    threads: int

    def describe(self) -> Mapping[str, str | int | float]:
        attributes = asdict(self.attributes)
        del attributes["layer"]
        step = {"batch": self.batch, "query_len": self.query_len, "kv_len": self.kv_len, "threads": self.threads}
        return {**attributes, **step}


class Bench(Protocol):
    """Times a case in microseconds."""

    def matmul(self, case: MatmulCase) -> float: ...

    def attention(self, case: AttentionCase) -> float: ...
