"""castline: compile a Hugging Face causal language model into a static engine, and serve it.

``LLM`` and ``SamplingParams`` are imported on first use, so that ``import castline`` costs nothing.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castline.llm import LLM
    from castline.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"

# From 1.29 on ONNX Runtime writes an identifier and a log of what runs to disk, and sends them to its maker, unless
# this is set when it is imported, which no module of castline does before. Who wants it so sets 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {"LLM": "castline.llm", "SamplingParams": "castline.runtime.sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'castline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
