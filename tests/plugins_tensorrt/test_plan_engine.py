"""A plan deserialised: what TensorRT is told, and what becomes of its refusals. No GPU: TensorRT's own objects are
stood for by recorders, and the real module is asked whether it has every name that is used."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from castline.engines.errors import EngineError
from castline.plugins.tensorrt import plan_engine
from castline.plugins.tensorrt.engine import DECODE, MIXED, PlanTensor
from castline.plugins.tensorrt.flavour import TensorRT, installed_flavours, load_flavour
from castline.plugins.tensorrt.kernel_set import KernelSet
from castline.plugins.tensorrt.plan_engine import TensorRtPlan
from castline.plugins.tensorrt.plugin import PluginHost

ERROR, INFO = "ERROR", "INFO"


class ILogger:
    Severity = SimpleNamespace(ERROR=ERROR, INTERNAL_ERROR="INTERNAL_ERROR")


class Context:
    def __init__(self, log: Any) -> None:
        self.log, self.calls = log, []
        self.refuses: set[str] = set()
        self.on_execute: Any = lambda: None

    def _call(self, name: str, *arguments: Any) -> bool:
        self.calls.append((name, *arguments))
        if name in self.refuses:
            self.log.log(INFO, "of no interest")
            self.log.log(ERROR, f"{name} is out of range")
            return False
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self._call("set_device_memory", address, size)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return self._call("set_optimization_profile_async", profile, stream)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._call("set_input_shape", name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        return self._call("set_tensor_address", name, address)

    def execute_async_v3(self, stream: int) -> bool:
        self.on_execute()
        return self._call("execute_async_v3", stream)


class Compiled:
    """A runtime cache: what it read, and what the engine's contexts have made."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def deserialize(self, blob: bytes) -> bool:
        self.engine.compiled = blob
        return True

    def serialize(self) -> bytes:
        made: bytes = self.engine.compiled
        return made


class Engine:
    num_io_tensors = 2
    device_memory_size_v2 = 4096

    def __init__(self, log: Any) -> None:
        self.context: Context | None = Context(log)
        self.asked: Any = None
        self.caches: list[Any] = []
        self.compiled = b""

    def get_tensor_name(self, index: int) -> str:
        return ("input_ids", "logits")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "input_ids" else "out"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="INT32" if name == "input_ids" else "FLOAT")

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert profile == MIXED
        return [(1,), (64,), (64,)]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 97)

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(allocation=None, create_runtime_cache=lambda: Compiled(self))
        config.set_runtime_cache = self.caches.append
        config.set_execution_context_allocation_strategy = lambda one: setattr(config, "allocation", one)
        return config

    def create_execution_context(self, asked: Any) -> Any:
        self.asked = asked
        return self.context


def fake_api(rtx: bool = True, engine: Any = Engine) -> Any:
    """*engine* makes what a plan is deserialised to."""

    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, plan: Any) -> Any:
            assert bytes(plan) == b"the plan"
            return engine(self.log)

    strategies = {"DynamicShapesKernelSpecializationStrategy": SimpleNamespace(EAGER="eager", NONE="none")}
    if rtx:
        strategies["IRuntimeCache"] = SimpleNamespace()
    return SimpleNamespace(
        ILogger=ILogger,
        Runtime=Runtime,
        TensorIOMode=SimpleNamespace(INPUT="in"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
        **(strategies if rtx else {}),
    )


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plan_engine, "register_plugin", lambda tensorrt, host: "creator")
    (tmp_path / "model.plan").write_bytes(b"the plan")

    def make(api: Any = None, path: Path | None = None, compiled: Path | None = None) -> TensorRtPlan:
        tensorrt = TensorRT("tensorrt_rtx", api or fake_api(), "1.7.1")
        host = PluginHost(KernelSet("8.9", "triton", ()), 100)
        return TensorRtPlan(tensorrt, path or tmp_path / "model.plan", host, compiled)

    return make


def test_tensors_are_described(load: Any) -> None:
    """Pools and vocabulary are checked by them before anything is allocated."""
    plan = load()
    assert plan.tensors == {
        "input_ids": PlanTensor(True, "int32", (64,)),
        "logits": PlanTensor(False, "float", (-1, 97)),
    }
    assert plan.scratch_bytes == 4096


@pytest.mark.parametrize(("fixed", "strategy"), [(True, "eager"), (False, "none")])
def test_contexts_have_no_memory_of_their_own_and_compile_nothing_later(load: Any, fixed: bool, strategy: str) -> None:
    """Allocation and compilation in the middle of serving; graphs of kernels that were to be replaced."""
    plan = load()
    plan.create_context(DECODE, 0x7000, 5, fixed_shapes=fixed)
    asked, context = plan._engine.asked, plan._engine.context
    assert asked.allocation == "user"
    assert asked.dynamic_shapes_kernel_specialization_strategy == strategy
    assert context.calls == [("set_device_memory", 0x7000, 4096), ("set_optimization_profile_async", DECODE, 5)]


def test_tensorrt_itself_is_asked_for_the_allocation_alone(load: Any) -> None:
    """It has no such strategies: its kernels were chosen when the plan was built."""
    plan = load(fake_api(rtx=False))
    plan.create_context(MIXED, 0x7000, 5, fixed_shapes=False)
    assert plan._engine.asked == "user"


def test_what_was_compiled_is_kept_for_the_next_start(load: Any, tmp_path: Path) -> None:
    """TensorRT for RTX compiles for every context: a server that starts again would wait for it again. Contexts share
    one cache; a file is written where there is something new, and whole."""
    file = tmp_path / "cache" / "engine.runtime"
    first = load(compiled=file)
    for profile in (MIXED, DECODE):
        first.create_context(profile, 0x7000, 5, fixed_shapes=profile == DECODE)
    engine = first._engine
    assert len(engine.caches) == 2
    assert engine.caches[0] is engine.caches[1]
    engine.compiled = b"kernels"
    first.keep_compiled()
    assert file.read_bytes() == b"kernels"
    assert list(file.parent.iterdir()) == [file]
    second = load(compiled=file)
    assert second._engine.compiled == b"kernels"
    file.unlink()
    second.keep_compiled()
    assert not file.exists(), "nothing new was compiled"


@pytest.mark.parametrize("rtx", [True, False])
def test_a_cache_that_cannot_be_had_stops_nothing(load: Any, tmp_path: Path, rtx: bool) -> None:
    """A home that is a file, or a flavour that compiles nothing."""
    (tmp_path / "file").write_bytes(b"")
    for compiled in (tmp_path / "file" / "engine.runtime", None):
        plan = load(fake_api(rtx=rtx), compiled=compiled)
        plan.create_context(MIXED, 0x7000, 5, fixed_shapes=False)
        plan._engine.compiled = b"kernels"
        plan.keep_compiled()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".runtime"] == []


def test_shapes_and_addresses_are_bound(load: Any) -> None:
    plan = load()
    context = plan.create_context(MIXED, 0x7000, 5, fixed_shapes=False)
    seen = plan._engine.context.calls
    seen.clear()
    context.bind("input_ids", 0x100, (7,))
    context.bind("logits", 0x200)
    context.enqueue(5)
    assert seen == [
        ("set_input_shape", "input_ids", (7,)),
        ("set_tensor_address", "input_ids", 0x100),
        ("set_tensor_address", "logits", 0x200),
        ("execute_async_v3", 5),
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("set_input_shape", r"does not take input_ids of shape \[7\]: set_input_shape is out of range"),
        ("set_tensor_address", "does not take input_ids at 0x100: set_tensor_address is out of range"),
        ("execute_async_v3", "could not queue a step: execute_async_v3 is out of range"),
    ],
)
def test_refusals_have_tensorrts_words(load: Any, call: str, words: str) -> None:
    """It returns False and says why to its log: without that, an error names nothing."""
    plan = load()
    context = plan.create_context(MIXED, 0x7000, 5, fixed_shapes=False)
    plan._engine.context.refuses.add(call)

    def step() -> None:
        context.bind("input_ids", 0x100, (7,))
        context.enqueue(5)

    with pytest.raises(EngineError, match=words):
        step()


def test_a_profile_that_is_not_there(load: Any) -> None:
    plan = load()
    plan._engine.context.refuses.add("set_optimization_profile_async")
    with pytest.raises(EngineError, match=r"no profile 1; rebuild the engine: .*out of range"):
        plan.create_context(DECODE, 0x7000, 5, fixed_shapes=True)


def test_a_context_that_cannot_be_made(load: Any) -> None:
    plan = load()
    plan._engine.context = None
    with pytest.raises(EngineError, match=r"an execution context cannot be made: TensorRT gave no reason"):
        plan.create_context(DECODE, 0x7000, 5, fixed_shapes=True)


def test_failures_of_the_plugin_come_through(load: Any) -> None:
    """TensorRT swallows a Python exception in enqueue, and may even say that all went well; one of an earlier step is
    not this step's."""
    plan = load()
    context = plan.create_context(MIXED, 0x7000, 5, fixed_shapes=False)
    plan._host.failure = EngineError("of a step before")
    context.enqueue(5)
    cause = EngineError("invalid device function")
    plan._engine.context.on_execute = lambda: setattr(plan._host, "failure", cause)
    with pytest.raises(EngineError, match="the attention plugin failed: invalid device function") as caught:
        context.enqueue(5)
    assert caught.value.__cause__ is cause


def test_plans_that_cannot_be_read(load: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for path in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(EngineError, match=rf"cannot read {path} .*rebuild"):
            load(path=path)


def test_closing_drops_contexts_first_and_twice_does_nothing(load: Any) -> None:
    """TensorRT complains, or crashes, where an engine goes before its contexts."""
    plan = load()
    context = plan.create_context(MIXED, 0x7000, 5, fixed_shapes=False)
    plan.close()
    assert context._context is None
    assert plan._engine is None
    plan.close()


# The real module


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    if "tensorrt_rtx" not in installed_flavours():
        pytest.skip("TensorRT for RTX is not installed")
    return load_flavour("tensorrt_rtx")


def test_the_real_module_has_every_name(rtx: TensorRT) -> None:
    """What the recorders above have and TensorRT has not would fail on the first GPU."""
    api = rtx.api
    used = {
        api.ICudaEngine: [name for name in vars(Engine) if not name.startswith("_")],
        api.IExecutionContext: [name for name in vars(Context) if not name.startswith("_")],
        api.IRuntimeConfig: [
            "set_execution_context_allocation_strategy",
            "dynamic_shapes_kernel_specialization_strategy",
            "create_runtime_cache",
            "set_runtime_cache",
        ],
        api.IRuntimeCache: ["serialize", "deserialize"],
        api.DynamicShapesKernelSpecializationStrategy: ["EAGER", "NONE"],
        api.ExecutionContextAllocationStrategy: ["USER_MANAGED"],
        api.BuilderFlag: ["REQUIRE_USER_ALLOCATION"],
        api.TensorIOMode: ["INPUT"],
        api.ILogger.Severity: ["ERROR", "INTERNAL_ERROR"],
    }
    missing = [
        f"{owner.__name__}.{name}" for owner, names in used.items() for name in names if not hasattr(owner, name)
    ]
    assert not missing


def test_the_real_runtime_says_why(rtx: TensorRT, tmp_path: Path) -> None:
    """Its message, not only that there is none; the plan is read through a map of its file."""
    path = tmp_path / "model.plan"
    path.write_bytes(b"no plan at all" * 300)
    host = PluginHost(KernelSet("8.9", "triton", ()), 100)
    with pytest.raises(EngineError, match=r"tensorrt_rtx cannot deserialise .*Serialization assertion"):
        TensorRtPlan(rtx, path, host)


def test_plans_take_their_memory_from_the_runtime_alone(rtx: TensorRT) -> None:
    """TensorRT for RTX needs the flag for a stream to be captured; a flavour without it has nothing to set."""
    flags: list[Any] = []
    config = SimpleNamespace(set_flag=flags.append)
    rtx.require_user_memory(config)
    assert flags == [rtx.api.BuilderFlag.REQUIRE_USER_ALLOCATION]
    TensorRT("tensorrt", SimpleNamespace(BuilderFlag=SimpleNamespace()), "11.4").require_user_memory(config)
    assert len(flags) == 1
