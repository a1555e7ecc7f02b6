"""castline::PagedAttention as a TensorRT plugin (IPluginV3): shapes, types, the pool as an aliased output, launches.

The node, its attributes and its inputs are those of `castline.plugins.contract.AttentionAttributes`. One format, one
tactic: which kernel shape is fastest is castline's own tuner's to say, on block tables that mean something.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    DOMAIN,
    KV_LENS,
    PAGED_ATTENTION,
    SLOT_MAPPING,
    AttentionAttributes,
    gpu_node_inputs,
)
from castline.plugins.tensorrt.flavour import TensorRT
from castline.plugins.tensorrt.kernel_set import KernelSet
from castline.plugins.tensorrt.launcher import Launcher, StepShape, workspace_bytes

VERSION: Final = "1"
"""Of the node, as plugin registries count."""
POOL: Final = "kv_pool"
_KERNEL_ARGUMENTS: Final = {
    "qkv": "qkv",
    "cos": "cos",
    "sin": "sin",
    "q_norm_weight": "q_weight",
    "k_norm_weight": "k_weight",
    POOL: "pool",
    SLOT_MAPPING: "slots",
    CU_QUERY_LENS: "cu_query_lens",
    KV_LENS: "kv_lens",
    BLOCK_TABLE: "table",
}
"""Input of the node → argument of the kernels."""


class PluginHost:
    """What the plugins of an engine share: its kernels, and the first error of a launch.

    While a plan is built there are kernels but no launcher: nothing runs.
    """

    def __init__(self, kernels: KernelSet, multiprocessors: int, launcher: Launcher | None = None) -> None:
        self.kernels = kernels
        self.multiprocessors = multiprocessors
        self.launcher = launcher
        self.failure: BaseException | None = None


def register_plugin(tensorrt: TensorRT, host: PluginHost) -> Any:
    """Makes the node known to *tensorrt*; the creator, which the caller keeps for as long as its engines live.

    A plan must be parsed, built or deserialised after this. A second call replaces the host of the first.
    """
    registry = tensorrt.api.get_plugin_registry()
    creator_type = _types(tensorrt.api)[0]
    known = registry.get_creator(PAGED_ATTENTION, VERSION, DOMAIN)
    if known is not None:
        registry.deregister_creator(known)
    creator = creator_type(host)
    if not registry.register_creator(creator, DOMAIN):
        raise EngineError(f"{tensorrt.flavour} refused to register the plugin {DOMAIN}::{PAGED_ATTENTION}")
    return creator


class _Plugin:
    """The behaviour of the plugin; TensorRT's own base classes come with `_types`."""

    api: Any

    def __init__(self, attributes: AttentionAttributes, host: PluginHost) -> None:
        for base in self._bases():
            base.__init__(self)
        self.attributes = attributes
        self.host = host
        self.inputs = gpu_node_inputs(attributes)
        self.num_outputs = 2
        self.plugin_name = PAGED_ATTENTION
        self.plugin_namespace = DOMAIN
        self.plugin_version = VERSION
        self.timing_cache_id = ""  # of no use with one tactic

    def _bases(self) -> Sequence[Any]:
        api = self.api
        return api.IPluginV3, api.IPluginV3OneCore, api.IPluginV3OneBuildV2, api.IPluginV3OneRuntime

    # IPluginV3

    def clone(self) -> "_Plugin":
        return type(self)(self.attributes, self.host)

    def get_capability_interface(self, kind: Any) -> "_Plugin":
        return self

    # Build

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [input_types[0], input_types[self.inputs.index(POOL)]]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Any, expressions: Any) -> list[Any]:
        out = self.api.DimsExprs(2)
        out[0] = inputs[0][0]
        out[1] = expressions.constant(self.attributes.num_heads * self.attributes.head_dim)
        return [out, self.api.DimsExprs(inputs[self.inputs.index(POOL)])]

    def get_aliased_input(self, output: int) -> int:
        """The pool that comes out is the one that went in; -1: a tensor of its own."""
        return self.inputs.index(POOL) if output == 1 else -1

    def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
        described = tensors[position].desc
        return described.format == self.api.TensorFormat.LINEAR and described.type in self._types_at(position)

    def _types_at(self, position: int) -> tuple[Any, ...]:
        types = self.api.DataType
        names = [*self.inputs, "out", POOL]
        activations = (types.HALF, types.BF16)
        kinds = {"qkv": activations, "out": activations, POOL: (types.INT8,)}
        floats = ("cos", "sin", "q_norm_weight", "k_norm_weight")
        return kinds.get(names[position], (types.FLOAT,) if names[position] in floats else (types.INT32,))

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        pass

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        largest = self._step_shape([tensor.max for tensor in inputs])
        return workspace_bytes(self.host.kernels, self.attributes, largest, self.host.multiprocessors)

    # Runtime

    def set_tactic(self, tactic: int) -> None:
        pass

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        pass

    def attach_to_context(self, context: Any) -> "_Plugin":
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        self.serialized = _FieldCollection(self.api, self.attributes)  # TensorRT reads it after the call
        return self.serialized.collection

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Queues the kernels: no allocation, no waiting, so that a step can be captured in a CUDA graph."""
        launcher = self.host.launcher
        if launcher is None:  # while a plan is built: with one tactic there is nothing to time
            return
        try:
            addresses = {_KERNEL_ARGUMENTS[name]: inputs[i] for i, name in enumerate(self.inputs)}
            addresses["out"] = outputs[0]
            shape = self._step_shape([tensor.dims for tensor in input_desc])
            launcher.attention(self.attributes, shape, addresses, workspace, stream)
        except BaseException as error:
            self.host.failure = self.host.failure or error
            raise

    def _step_shape(self, dims: Sequence[Any]) -> StepShape:
        pool, lens, table = (self.inputs.index(name) for name in (POOL, KV_LENS, BLOCK_TABLE))
        return StepShape(int(dims[0][0]), int(dims[lens][0]), int(dims[table][1]), int(dims[pool][0]))


class _Creator:
    """Makes plugins for the parser, and for a plan that is deserialised."""

    api: Any
    plugin_type: type[_Plugin]

    def __init__(self, host: PluginHost) -> None:
        self.api.IPluginCreatorV3One.__init__(self)
        self.host = host
        self.name = PAGED_ATTENTION
        self.plugin_namespace = DOMAIN
        self.plugin_version = VERSION
        self.known = _FieldCollection(self.api, None)
        self.field_names = self.known.collection

    def create_plugin(self, name: str, collection: Any, phase: Any) -> _Plugin:
        given = {field.name: field.data[0] for field in collection}
        attributes = AttentionAttributes(
            **{f.name: (float if f.type is float else int)(given[f.name]) for f in fields(AttentionAttributes)}  # type: ignore[arg-type]
        )
        return self.plugin_type(attributes, self.host)


@cache
def _types(api: Any) -> tuple[type[_Creator], type[_Plugin]]:
    """The classes with TensorRT's own as their bases."""
    bases = (api.IPluginV3, api.IPluginV3OneCore, api.IPluginV3OneBuildV2, api.IPluginV3OneRuntime)
    plugin = type("PagedAttentionPlugin", (_Plugin, *bases), {"api": api})
    made = {"api": api, "plugin_type": plugin}
    return type("PagedAttentionCreator", (_Creator, api.IPluginCreatorV3One), made), plugin


class _FieldCollection:
    """The node's attributes as TensorRT's fields: INT32 and FLOAT32. Without values they are a creator's list.

    A field holds the address of its array and not the array: this object keeps them.
    """

    def __init__(self, api: Any, attributes: AttentionAttributes | None) -> None:
        kinds = {int: (np.int32, api.PluginFieldType.INT32), float: (np.float32, api.PluginFieldType.FLOAT32)}
        self.arrays: list[NDArray[Any]] = []
        made = []
        for one in fields(AttentionAttributes):
            element, kind = kinds[one.type]  # type: ignore[index]
            self.arrays.append(np.array([] if attributes is None else [getattr(attributes, one.name)], element))
            made.append(api.PluginField(one.name, self.arrays[-1], kind))
        self.collection = api.PluginFieldCollection(made)
