"""Every system by name, and which of them a run takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.systems.base import Context, System
from benchmarks.systems.castline import Castline
from benchmarks.systems.llamacpp import LlamaCpp
from benchmarks.systems.onnxruntime_genai import OnnxRuntimeGenai
from benchmarks.systems.openvino import OpenVino
from benchmarks.systems.transformers import Transformers
from benchmarks.systems.vllm import Vllm
from benchmarks.workloads import Need

CASTLINE = "castline"
SPECULATIVE = "castline-speculation"
PEERS = ("llama.cpp", "openvino", "onnxruntime-genai", "transformers", "vllm")
DEFAULT_PEERS = PEERS[:-1]

STATIC: frozenset[Need] = frozenset()
FULL: frozenset[Need] = frozenset({"batching", "prefix_cache"})
OURS: frozenset[Need] = FULL | {"castline"}


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    family: str
    label: str
    kind: type[System]
    variant: str
    can: frozenset[Need]
    by_default: bool = True
    """Of its family's systems, those that a run takes unless it names its systems."""

    def make(self, context: Context) -> System:
        return self.kind(self.name, self.family, self.label, self.variant, context, self.can)


ENTRIES = (
    Entry(CASTLINE, CASTLINE, "castline", Castline, "off", OURS),
    Entry(SPECULATIVE, CASTLINE, "castline, guessing ahead", Castline, "auto", OURS),
    Entry("llama.cpp-q4_1", "llama.cpp", "llama.cpp Q4_1", LlamaCpp, "Q4_1", FULL),
    Entry("llama.cpp-q4_0", "llama.cpp", "llama.cpp Q4_0", LlamaCpp, "Q4_0", FULL),
    Entry("llama.cpp-q8_0", "llama.cpp", "llama.cpp Q8_0", LlamaCpp, "Q8_0", FULL, by_default=False),
    Entry("openvino-int8", "openvino", "OpenVINO GenAI int8", OpenVino, "int8", FULL),
    Entry("openvino-int8-2048", "openvino", "OpenVINO GenAI int8, steps of 2,048", OpenVino, "int8:2048", FULL),
    Entry("openvino-fp16", "openvino", "OpenVINO GenAI fp16, steps of 2,048", OpenVino, "fp16:2048", FULL),
    Entry("openvino-int4", "openvino", "OpenVINO GenAI int4", OpenVino, "int4", FULL, by_default=False),
    Entry("onnxruntime-genai-int4", "onnxruntime-genai", "onnxruntime-genai int4", OnnxRuntimeGenai, "int4", STATIC),
    Entry(
        "onnxruntime-genai-int8", "onnxruntime-genai", "onnxruntime-genai int8", OnnxRuntimeGenai, "int8", STATIC, False
    ),
    Entry("transformers-bf16", "transformers", "transformers bf16", Transformers, "bf16", STATIC),
    Entry("transformers-fp32", "transformers", "transformers fp32", Transformers, "fp32", STATIC, by_default=False),
    Entry("vllm-bf16", "vllm", "vLLM bf16", Vllm, "bf16", FULL),
)
NAMES = tuple(entry.name for entry in ENTRIES)


def systems_of_peers(peers: Sequence[str]) -> tuple[str, ...]:
    """castline and what each of *peers* runs by default."""
    return tuple(entry.name for entry in ENTRIES if entry.by_default and entry.family in (CASTLINE, *peers))


def entries_of(names: Sequence[str]) -> list[Entry]:
    """In the catalogue's order. Raises KeyError for a name it does not have."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise KeyError(unknown[0])
    return [entry for entry in ENTRIES if entry.name in names]
