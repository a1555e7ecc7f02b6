"""The plugin as TensorRT's own Python module sees it: fields, shapes, types, aliases, and what enqueue launches."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from castline.engines.errors import EngineError
from castline.plugins.contract import DOMAIN, PAGED_ATTENTION, AttentionAttributes, KvDtypeCode, QkNorm, gpu_node_inputs
from castline.plugins.tensorrt.flavour import installed_flavours, load_flavour
from castline.plugins.tensorrt.kernel_set import KernelSet, attributes_key
from castline.plugins.tensorrt.launcher import StepShape
from castline.plugins.tensorrt.plugin import VERSION, PluginHost, register_plugin

EPS = float(np.float32(1e-6))
"""TensorRT's attributes are float32."""
A = AttentionAttributes(
    3, 8, 2, 64, 0.125, 32, int(KvDtypeCode.FP8), window=100, softcap=1.5, rotary_dim=64, norm_eps=EPS
)
NORM = AttentionAttributes(0, 8, 2, 64, 0.125, 32, int(KvDtypeCode.FP8), qk_norm=int(QkNorm.PER_HEAD), rotary_dim=64,
                           norm_eps=EPS)  # fmt: skip


@pytest.fixture(scope="module")
def rtx() -> Any:
    if "tensorrt_rtx" not in installed_flavours():
        pytest.skip("TensorRT for RTX is not installed")
    return load_flavour("tensorrt_rtx")


class Launches:
    """Stands for a launcher."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.seen: list[Any] = []
        self.failure = failure

    def attention(self, *arguments: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.seen.append(arguments)


def host(launcher: Any = None) -> PluginHost:
    return PluginHost(KernelSet("8.9", "triton", ()), 100, launcher)


def make(rtx: Any, attributes: AttentionAttributes, owner: PluginHost) -> Any:
    """Through the creator, as the parser does."""
    creator = register_plugin(rtx, owner)
    api = rtx.api
    kinds = {int: (np.int32, api.PluginFieldType.INT32), float: (np.float32, api.PluginFieldType.FLOAT32)}
    arrays = {name: np.array([value], kinds[type(value)][0]) for name, value in asdict(attributes).items()}
    made = [api.PluginField(name, arrays[name], kinds[type(value)][1]) for name, value in asdict(attributes).items()]
    return creator.create_plugin("attention.3", api.PluginFieldCollection(made), api.TensorRTPhase.BUILD)


def test_attributes_survive_creation_cloning_and_serialisation(rtx: Any) -> None:
    """A plan keeps what get_fields_to_serialize gives: a lost attribute is another model's attention after loading."""
    plugin = make(rtx, A, host())
    assert plugin.attributes == A
    assert plugin.clone().attributes == A
    assert plugin.attach_to_context(None).attributes == A
    fields = {field.name: field.data[0] for field in plugin.get_fields_to_serialize()}
    assert {name: type(value)(fields[name]) for name, value in asdict(A).items()} == asdict(A)


def test_kernels_are_found_by_what_tensorrt_hands_back(rtx: Any) -> None:
    """Kernels are compiled for the graph's numbers and looked up by those that went through float32."""
    before = AttentionAttributes(0, 9, 3, 48, 48**-0.5, 32, int(KvDtypeCode.FP8), softcap=30.1, norm_eps=1e-5)
    after = make(rtx, before, host()).attributes
    assert after != before
    assert attributes_key(after) == attributes_key(before)


def test_creator_is_found_as_the_parser_looks_for_it(rtx: Any) -> None:
    """By the node's name, its domain and version 1; a second host replaces the first."""
    register_plugin(rtx, host())
    second = register_plugin(rtx, host())
    found = rtx.api.get_plugin_registry().get_creator(PAGED_ATTENTION, VERSION, DOMAIN)
    assert found is not None
    assert found.host is second.host


@pytest.mark.parametrize("attributes", [A, NORM])
def test_pool_comes_out_as_the_input_it_went_in(rtx: Any, attributes: AttentionAttributes) -> None:
    """An output that is no alias would be a second pool of many gigabytes, and a copy of it in every step."""
    plugin = make(rtx, attributes, host())
    inputs = gpu_node_inputs(attributes)
    assert plugin.get_aliased_input(1) == inputs.index("kv_pool")
    assert plugin.get_aliased_input(0) == -1
    types = rtx.api.DataType
    given = [types.BF16, *[types.FLOAT] * (inputs.index("kv_pool") - 1), types.INT8, *[types.INT32] * 4]
    assert plugin.get_output_data_types(given) == [types.BF16, types.INT8]


def test_one_format_and_the_contracts_types(rtx: Any) -> None:
    """Anything else would make TensorRT convert around the node, or hand it numbers of another type."""
    plugin = make(rtx, NORM, host())
    api = rtx.api
    types = api.DataType
    wanted = [types.HALF, *[types.FLOAT] * 4, types.INT8, *[types.INT32] * 4, types.HALF, types.INT8]

    def supports(position: int, kind: Any, form: Any = api.TensorFormat.LINEAR) -> bool:
        tensors = [SimpleNamespace(desc=SimpleNamespace(type=one, format=form)) for one in wanted]
        tensors[position] = SimpleNamespace(desc=SimpleNamespace(type=kind, format=form))
        return bool(plugin.supports_format_combination(position, tensors, 10))

    for position, kind in enumerate(wanted):
        assert supports(position, kind)
        assert not supports(position, types.INT64)
        assert not supports(position, kind, api.TensorFormat.CHW32)
    assert supports(0, types.BF16)
    assert not supports(0, types.FLOAT)
    assert not supports(1, types.HALF)


def descriptions(attributes: AttentionAttributes, tokens: int, sequences: int) -> list[Any]:
    dims = {
        "qkv": (tokens, 12 * 64),
        "kv_pool": (700, 4096),
        "kv_lens": (sequences,),
        "block_table": (sequences, 9),
    }
    return [SimpleNamespace(dims=dims.get(name, (tokens,))) for name in gpu_node_inputs(attributes)]


@pytest.mark.parametrize("attributes", [A, NORM])
def test_enqueue_hands_every_address_to_its_argument(rtx: Any, attributes: AttentionAttributes) -> None:
    """Addresses come by position, and positions move with the inputs that a node has: one off, and V is read as a
    table."""
    launches = Launches()
    plugin = make(rtx, attributes, host(launches))
    names = gpu_node_inputs(attributes)
    addresses = [1000 + i for i in range(len(names))]
    plugin.enqueue(descriptions(attributes, 30, 4), [], addresses, [50, addresses[names.index("kv_pool")]], 99, 7)
    [(given, shape, found, workspace, stream)] = launches.seen
    assert given == attributes
    assert shape == StepShape(30, 4, 9, 700)
    assert (found["out"], workspace, stream) == (50, 99, 7)
    renamed = {"kv_pool": "pool", "slot_mapping": "slots", "block_table": "table"}
    renamed |= {"q_norm_weight": "q_weight", "k_norm_weight": "k_weight"}
    for name, address in zip(names, addresses, strict=True):
        assert found[renamed.get(name, name)] == address


def test_first_failure_of_a_launch_is_kept_in_words(rtx: Any) -> None:
    """TensorRT turns what enqueue raises into a code of its own; the reason must reach who reports it."""
    owner = host(Launches(EngineError("cuLaunchKernel: out of resources")))
    plugin = make(rtx, A, owner)
    with pytest.raises(EngineError):
        plugin.enqueue(descriptions(A, 3, 3), [], list(range(10)), [1, 2], 0, 0)
    assert str(owner.failure) == "cuLaunchKernel: out of resources"


def test_nothing_is_launched_while_a_plan_is_built(rtx: Any) -> None:
    """The builder may run a plugin to time it, with integers that mean nothing."""
    make(rtx, A, host()).enqueue(descriptions(A, 3, 3), [], list(range(10)), [1, 2], 0, 0)
