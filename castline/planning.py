"""What an engine of a model would hold, and how fast it could be: `castline plan` without its printing.

The memory is divided by the function that the loader calls (`castline.engines.memory_plan.plan_memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from castline.builder.model_shape import CONFIG_NAME, read_shape
from castline.builder.model_source import DEMO
from castline.builder.options import AUTO_KV_DTYPE, CPU_KV_DTYPES, DEFAULT_BLOCK_SIZE, MAX_MODEL_LEN_CAP, BuildOptions
from castline.builder.preflight import engine_bytes
from castline.builder.recipes import AUTO_RECIPE, DEFAULT_RECIPE
from castline.builder.recipes import recipe as find_recipe
from castline.engines.capacity import blocks_for
from castline.engines.device_memory import device_memory
from castline.engines.errors import EngineError
from castline.engines.manifest import KvDtype, Limits, ModelFacts, read_manifest
from castline.engines.memory_plan import HOST_POLICY, Asked, EngineMemory, MemoryPlan, plan_memory, sku_policy
from castline.engines.precision import Parameters, gpu_weights
from castline.engines.repository import find_bundle
from castline.engines.resources import available_memory_bytes
from castline.engines.roofline import Estimate, Roofline
from castline.engines.sku import HOST_SKU, Sku, check_precision, load_sku
from castline.option_types import sku_defaults

DEFAULT_CONTEXT = 1024
"""Tokens of the sequences that speeds are estimated for."""
BATCHES = (1, 8, 32)
OF_THE_BUNDLE = ("recipe", "kv_dtype", "block_size")
_DEFAULTS = BuildOptions("", Path())


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, built or not yet, and the device that it is for: a SKU, or this machine's processor."""

    model: ModelFacts
    parameters: Parameters
    recipe: str
    kv_dtype: KvDtype
    built: Limits
    memory: EngineMemory
    is_built: bool
    sku: Sku | None


@dataclass(frozen=True, slots=True)
class Decode:
    batch: int
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Speeds:
    """Upper bounds, for sequences of ``context`` tokens."""

    context: int
    decode: tuple[Decode, ...]
    """The last is the most that fit."""
    prefill: Estimate
    in_l2: bool
    """The weights fit the L2 cache, which is read faster than the memory: decode may pass its bound."""


@dataclass(frozen=True, slots=True)
class Report:
    engine: Engine
    memory: MemoryPlan
    speeds: Speeds | None
    """None for this machine's processor, whose peaks no datasheet tells."""


def plan(model: str, sku: Sku | str | None, options: Mapping[str, Any], asked: Asked, context: int | None) -> Report:
    """*options* has recipe, kv_dtype and block_size where they were given, for a model that is not yet a bundle.

    *sku* is `HOST_SKU` for this machine, None where the user did not say. Raises CastlineError.
    """
    is_model = model == DEMO or Path(model).is_file() or (Path(model) / CONFIG_NAME).is_file()
    if is_model or not Path(model).is_dir():
        engine = engine_of_model(model, None if isinstance(sku, str) else sku, options, asked)
        asked = replace(asked, max_model_len=None, max_num_seqs=None, max_num_batched_tokens=None)
    else:
        engine = engine_of_bundle(find_bundle(Path(model)), sku, options)
    available = available_memory_bytes() if engine.sku is None else engine.sku.memory_bytes
    policy = HOST_POLICY if engine.sku is None else sku_policy(engine.sku)
    memory = plan_memory(engine.model, engine.kv_dtype, engine.built, engine.memory, available, asked, policy)
    return Report(engine, memory, None if engine.sku is None else _speeds(engine, engine.sku, memory, context))


def engine_of_bundle(bundle: Path, sku: Sku | str | None, options: Mapping[str, Any]) -> Engine:
    """A bundle is for the SKU that it was built for, in the precision that it has. Raises EngineError."""
    manifest = read_manifest(bundle)
    if given := [name for name in OF_THE_BUNDLE if name in options]:
        raise EngineError(
            f"--{given[0].replace('_', '-')} is settled in {bundle}, which is built; leave it out, or plan the model"
        )
    built_for = HOST_SKU if manifest.host.gpu is None else manifest.host.gpu.sku
    asked_for = sku.name if isinstance(sku, Sku) else sku
    if asked_for not in (None, built_for):
        raise EngineError(
            f"--sku {asked_for}: {bundle} was built for {built_for}; leave --sku out, or plan the model itself"
        )
    return Engine(
        model=manifest.model,
        parameters=Parameters.of(manifest.model),
        recipe=manifest.precision.recipe,
        kv_dtype=manifest.precision.kv_dtype,
        built=manifest.limits,
        memory=EngineMemory.of(manifest),
        is_built=True,
        sku=None if built_for == HOST_SKU else load_sku(built_for),
    )


def engine_of_model(model: str, sku: Sku | None, options: Mapping[str, Any], asked: Asked) -> Engine:
    """As `castline build` would make it with the same options. Raises BuildError or EngineError."""
    shape = read_shape(model)
    defaults: Mapping[str, Any] = {"recipe": DEFAULT_RECIPE, "kv_dtype": AUTO_KV_DTYPE}
    values = {**(defaults if sku is None else sku_defaults(sku)), **options}
    if values["kv_dtype"] == "auto":
        values["kv_dtype"] = AUTO_KV_DTYPE if sku is None else sku.defaults.kv_dtype
    recipe, kv_dtype = values["recipe"], values["kv_dtype"]
    if sku is None:
        if kv_dtype not in CPU_KV_DTYPES:
            raise EngineError(f"--kv-dtype {kv_dtype} is for GPUs; on a cpu choose {', '.join(CPU_KV_DTYPES)}")
        if recipe == AUTO_RECIPE:  # which it is, the weights say; int8 is the larger
            recipe = "int8"
    else:
        check_precision(sku, recipe, kv_dtype)
    limits = _limits(shape.facts, values, asked)
    if sku is None:
        memory = EngineMemory(engine_bytes(shape.facts, find_recipe(recipe)))
    else:
        memory = EngineMemory.on_device(device_memory(shape.weights, gpu_weights(recipe), limits))
    return Engine(shape.facts, shape.parameters, recipe, kv_dtype, limits, memory, False, sku)


def _limits(facts: ModelFacts, values: Mapping[str, Any], asked: Asked) -> Limits:
    longest = asked.max_model_len or min(facts.max_position, MAX_MODEL_LEN_CAP)
    if not 2 <= longest <= facts.max_position:
        raise EngineError(f"--max-model-len {longest} is outside 2 to {facts.max_position}, the model's positions")
    return Limits(
        max_model_len=longest,
        block_size=int(values.get("block_size", DEFAULT_BLOCK_SIZE)),
        max_num_seqs=asked.max_num_seqs or values.get("max_num_seqs", _DEFAULTS.max_num_seqs),
        max_num_batched_tokens=asked.max_num_batched_tokens
        or values.get("max_num_batched_tokens", _DEFAULTS.max_num_batched_tokens),
    )


def _speeds(engine: Engine, sku: Sku, memory: MemoryPlan, context: int | None) -> Speeds:
    longest = memory.limits.max_model_len
    context = min(DEFAULT_CONTEXT, longest) if context is None else context
    if not 1 <= context <= longest:
        raise EngineError(f"--context {context} is outside 1 to {longest}, the longest sequence (--max-model-len)")
    roofline = Roofline(engine.model, engine.parameters, gpu_weights(engine.recipe), engine.kv_dtype, sku)
    fitting = memory.pool.num_blocks // blocks_for(context, memory.limits.block_size)
    most = min(memory.limits.max_num_seqs, fitting)
    batches = [*(batch for batch in BATCHES if batch < most), most]
    return Speeds(
        context=context,
        decode=tuple(Decode(batch, roofline.decode(batch, context)) for batch in batches),
        prefill=roofline.prefill(context, memory.limits.max_num_batched_tokens),
        in_l2=engine.memory.weight_bytes <= sku.l2_mib << 20,
    )
