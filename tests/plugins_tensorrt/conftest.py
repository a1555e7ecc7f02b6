"""Runs the GPU kernels in Triton's interpreter, on tensors of the CPU."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from castline.plugins.attention_case import AttentionCase
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.reference import AttentionInputs

torch.set_num_threads(1)


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


@dataclass
class Case:
    """Steps of some sequences over one pool: the reference and the kernels side by side."""

    attributes: AttentionAttributes
    num_blocks: int = 30
    table_width: int = 6
    kind: int | None = None
    """Of `elements`: None takes the hardware's for fp8."""
    queries: int = 8
    tile: int = 32
    seed: int = 0
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        a = self.attributes
        self.made = AttentionCase(a, self.num_blocks, self.table_width, self.lengths, self.seed)
        bits = torch.from_numpy(self.made.pool())
        self.pool = bits.view(torch.bfloat16) if a.kv_dtype == KvDtypeCode.BF16 else bits
        if self.kind is None:
            self.kind = 1 if a.kv_dtype == KvDtypeCode.FP8 else 0

    def step(self, query_lens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(expected, found) outputs [T, heads * dim] of a step that adds *query_lens* tokens to the sequences."""
        inputs = self._inputs(query_lens)
        return self.made.expected(inputs), self._run(inputs)

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """(expected, found) contents of the pool, [2, slots, kv_heads, dim] as floats."""
        reference = self.made.reference
        bits = self.pool.view(torch.uint16) if self.pool.dtype == torch.bfloat16 else self.pool
        return np.stack([reference.k, reference.v]), self.made.slots_of(bits.numpy())

    def _inputs(self, query_lens: list[int]) -> AttentionInputs:
        return self.made.inputs(query_lens)

    def _run(self, inputs: AttentionInputs) -> np.ndarray:
        from castline.plugins.tensorrt.kernels.decode import decode, decode_merge, decode_split
        from castline.plugins.tensorrt.kernels.prefill import prefill
        from castline.plugins.tensorrt.kernels.rope_append import rope_append

        a = self.attributes
        t, b = len(inputs.qkv), len(inputs.kv_lens)
        padded, group = power_of_two(a.head_dim, 16), a.num_heads // a.num_kv_heads
        tensor = torch.from_numpy
        absent = torch.zeros(1)
        q = torch.full((t, a.num_heads * a.head_dim), float("nan"), dtype=torch.float16)
        out = torch.full((t, a.num_heads * a.head_dim), float("nan"), dtype=torch.float16)
        cu, lens, table = tensor(inputs.cu_query_lens), tensor(inputs.kv_lens), tensor(inputs.block_table.copy())
        if t:
            rope_append[(t, a.num_heads + 2 * a.num_kv_heads)](
                tensor(inputs.qkv).half(),
                absent if inputs.cos is None else tensor(inputs.cos),
                absent if inputs.sin is None else tensor(inputs.sin),
                absent if inputs.q_norm_weight is None else tensor(inputs.q_norm_weight),
                absent if inputs.k_norm_weight is None else tensor(inputs.k_norm_weight),
                self.pool,
                tensor(inputs.slot_mapping),
                q,
                self.num_blocks,
                heads=a.num_heads,
                kv_heads=a.num_kv_heads,
                dim=a.head_dim,
                padded=padded,
                block_size=a.block_size,
                rotary=a.rotary_dim,
                interleaved=a.rope_interleaved,
                norm=a.qk_norm,
                padded_all=power_of_two(a.num_heads * a.head_dim),
                eps=a.norm_eps,
                kind=self.kind,
            )
        shared = {
            "heads": a.num_heads,
            "kv_heads": a.num_kv_heads,
            "dim": a.head_dim,
            "padded": padded,
            "block_size": a.block_size,
            "tile": self.tile,
            "scale": a.scale,
            "window": a.window,
            "softcap": a.softcap,
            "kind": self.kind,
        }
        prefill[(t // self.queries + b, a.num_kv_heads)](
            q, self.pool, table, lens, cu, out, b, self.table_width, self.num_blocks,
            queries=self.queries, group_rows=power_of_two(group), **shared,
        )  # fmt: skip
        rows = power_of_two(group, 16)
        before = out.clone()
        decode[(b, a.num_kv_heads)](
            q, self.pool, table, lens, cu, out, self.table_width, self.num_blocks, rows=rows, **shared
        )
        splits = 3
        partial = torch.full((b, a.num_heads, splits, padded + 2), float("nan"))
        decode_split[(b, a.num_kv_heads, splits)](
            q, self.pool, table, lens, cu, partial, self.table_width, self.num_blocks, splits, rows=rows, **shared
        )
        decode_merge[(b, a.num_heads)](
            partial, cu, before, splits, heads=a.num_heads, dim=a.head_dim, padded=padded, max_splits=4
        )
        np.testing.assert_allclose(before.float().numpy(), out.float().numpy(), atol=2e-3, err_msg="split-K")
        return out.float().numpy()


@pytest.fixture
def kernels() -> SimpleNamespace:
    def attributes(**changes: float) -> AttentionAttributes:
        fields = {
            "layer": 0,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "scale": 32**-0.5,
            "block_size": 16,
            "kv_dtype": int(KvDtypeCode.FP16),
            "rotary_dim": 32,
        }
        return AttentionAttributes(**(fields | changes))  # type: ignore[arg-type]

    return SimpleNamespace(Case=Case, attributes=attributes)
