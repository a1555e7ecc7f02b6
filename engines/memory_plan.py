"""How an engine's memory is divided: weights, the buffers of a step, and the KV pool with what is left.

Pure arithmetic. `castline run` and `castline plan` both call `plan_memory`, so that they agree to the block.
Sizes are in bytes, lengths in tokens.
"""

from dataclasses import dataclass

from castline.engines.capacity import KvCapacity, blocks_for, plan_kv
from castline.engines.device_memory import buffer_bytes
from castline.engines.errors import EngineError
from castline.engines.manifest import DeviceMemory, Host, KvDtype, Limits, Manifest, ModelFacts
from castline.engines.sku import Sku, load_sku

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What an engine takes where the user does not say."""

    utilization: float
    """Share of the available memory for weights, a step's buffers and the KV pool."""
    tokens_per_seq: int | None = None
    """Bounds the pool: one sequence of max_model_len, and so many tokens for each of the others. None takes the whole
    share, whatever its sequences can fill."""


HOST_POLICY = MemoryPolicy(utilization=0.8, tokens_per_seq=256)
"""A host's pool is reserved whole at the start, and becomes resident as its blocks are first used; with the prefix
cache a server that is used long enough takes all of it. So the default holds what a full batch of short conversations
fills beside a long one. --kv-blocks or --memory-utilization lift the bound."""


def sku_policy(sku: Sku) -> MemoryPolicy:
    """The pool takes what is left of a device, and keeps prefixes in what no sequence fills."""
    return MemoryPolicy(utilization=sku.defaults.memory_utilization)


def memory_policy(host: Host) -> MemoryPolicy:
    """Of what an engine was built for. Raises EngineError for a SKU that this castline does not know."""
    return HOST_POLICY if host.gpu is None else sku_policy(load_sku(host.gpu.sku))


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What an engine takes whatever its pool."""

    weight_bytes: int
    scratch_bytes: int | None = None
    """What TensorRT works in, at the limits of the build; None on a host, where `host_step_bytes` has it too."""

    @classmethod
    def on_device(cls, device: DeviceMemory) -> "EngineMemory":
        return cls(device.weight_bytes, device.scratch_bytes)

    @classmethod
    def of(cls, manifest: Manifest) -> "EngineMemory":
        """On a host the weights are the bundle's files: graph and tokenizer among them, a few MiB.

        Raises EngineError for an engine for a GPU that does not say what it takes.
        """
        if manifest.host.gpu is None:
            return cls(sum(file.size for file in manifest.files.values()))
        if manifest.device is None:
            raise EngineError(
                f"engine.json: device is missing: what the engine of {manifest.model.name} takes of its GPU; "
                f"rebuild it: {manifest.rebuild_command}"
            )
        return cls.on_device(manifest.device)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user says about an engine's limits and memory; None leaves it to the engine and the policy."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    """Exactly this many, whatever the utilization."""
    memory_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All of it decided."""

    limits: Limits
    """In force."""
    weight_bytes: int
    step_bytes: int
    available_bytes: int
    utilization: float
    pool: KvCapacity

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes + self.pool.total_bytes


def plan_memory(
    model: ModelFacts,
    kv_dtype: KvDtype,
    built: Limits,
    engine: EngineMemory,
    available_bytes: int,
    asked: Asked,
    policy: MemoryPolicy = HOST_POLICY,
) -> MemoryPlan:
    """Divides *available_bytes* for an *engine* built with the limits *built*.

    Raises EngineError naming option, limit and cure where that leaves no room for one sequence of max_model_len.
    """
    limits = limits_in_force(built, asked)
    utilization = policy.utilization if asked.memory_utilization is None else asked.memory_utilization
    if not 0 < utilization <= 1:
        raise EngineError(f"--memory-utilization {utilization} is not a share: give more than 0, at most 1")
    step = step_bytes(model, limits, engine)
    budget = int(utilization * available_bytes) - engine.weight_bytes - step
    tokens_per_seq = policy.tokens_per_seq if asked.memory_utilization is None else None
    pool = _pool(model, kv_dtype, limits, budget, asked.kv_blocks, tokens_per_seq)
    plan = MemoryPlan(limits, engine.weight_bytes, step, available_bytes, utilization, pool)
    _check_pool(plan, budget, asked)
    return plan


def limits_in_force(built: Limits, asked: Asked) -> Limits:
    """The limits that the user asked for, within those of the engine. Raises EngineError."""
    max_model_len = _at_most("--max-model-len", asked.max_model_len, built.max_model_len, least=2)
    max_num_seqs = _at_most("--max-num-seqs", asked.max_num_seqs, built.max_num_seqs, least=1)
    max_tokens = _at_most(
        "--max-num-batched-tokens", asked.max_num_batched_tokens, built.max_num_batched_tokens, least=1
    )
    if max_tokens < max_num_seqs:
        raise EngineError(
            f"--max-num-batched-tokens {max_tokens} is under --max-num-seqs {max_num_seqs}, and every running sequence "
            f"takes a token of each step: lower --max-num-seqs to {max_tokens}, or raise --max-num-batched-tokens"
        )
    if asked.kv_blocks is not None and asked.kv_blocks < 1:
        raise EngineError(f"--kv-blocks {asked.kv_blocks} is too small: give at least 1")
    return Limits(max_model_len, built.block_size, max_num_seqs, max_tokens)


def step_bytes(model: ModelFacts, limits: Limits, engine: EngineMemory) -> int:
    """Upper bound of what the largest step needs. Lower limits make a device's buffers smaller, and not its scratch
    memory, which TensorRT asks for as the plan was built."""
    if engine.scratch_bytes is None:
        return host_step_bytes(model, limits.max_num_batched_tokens)
    return buffer_bytes(model.vocab_size, limits) + engine.scratch_bytes


def host_step_bytes(model: ModelFacts, max_tokens: int) -> int:
    """Upper bound of the buffers of the largest step.

    A step holds a few hidden-size rows a token (16 covers a gate-and-up matmul's output at 4 x hidden), and float32
    logits of every token where prompt log-probabilities are asked for.
    """
    return max_tokens * 4 * (model.vocab_size + 16 * model.hidden_size)


def _pool(
    model: ModelFacts, kv_dtype: KvDtype, limits: Limits, budget: int, blocks: int | None, tokens_per_seq: int | None
) -> KvCapacity:
    """Exactly *blocks*, or what fits the budget and the bound."""
    longest, block_size = limits.max_model_len, limits.block_size
    fitting = plan_kv(model, kv_dtype, block_size, longest, budget)
    if blocks is None and tokens_per_seq is not None:
        others = (limits.max_num_seqs - 1) * blocks_for(min(tokens_per_seq, longest), block_size)
        blocks = min(fitting.num_blocks, blocks_for(longest, block_size) + others)
    return plan_kv(model, kv_dtype, block_size, longest, budget, blocks)


def _check_pool(plan: MemoryPlan, budget: int, asked: Asked) -> None:
    pool, available = plan.pool, plan.available_bytes
    engine_bytes = plan.weight_bytes + plan.step_bytes
    needed = blocks_for(pool.max_model_len, pool.block_size)
    if pool.num_blocks < needed:
        holds = pool.num_tokens
        cure = f"raise --kv-blocks to {needed}" if asked.kv_blocks is not None else "raise --memory-utilization"
        if holds >= 2:
            cure += f", or lower --max-model-len to {holds}"
        raise EngineError(
            f"the pool would have {pool.num_blocks} KV blocks of {pool.block_size} tokens, and one sequence of "
            f"max_model_len {pool.max_model_len} needs {needed} ({needed * pool.bytes_per_block / MIB:.0f} MiB; there "
            f"are {max(0, budget) / MIB:.0f} MiB: {plan.utilization:.0%} of {available / MIB:.0f} MiB available, less "
            f"{engine_bytes / MIB:.0f} MiB for weights and a step): {cure}"
        )
    if pool.total_bytes > available - engine_bytes:
        raise EngineError(
            f"--kv-blocks {pool.num_blocks} takes {pool.total_bytes / MIB:.0f} MiB, and "
            f"{available / MIB:.0f} MiB are available, less {engine_bytes / MIB:.0f} MiB for weights and a step: "
            f"lower it to {max(0, available - engine_bytes) // pool.bytes_per_block}"
        )


def _at_most(option: str, asked: int | None, built: int, *, least: int) -> int:
    if asked is None:
        return built
    if asked < least:
        raise EngineError(f"{option} {asked} is too small: give at least {least}")
    if asked > built:
        raise EngineError(
            f"{option} {asked} is over the engine's {built}: lower it, or rebuild the engine with {option} {asked}"
        )
    return asked
