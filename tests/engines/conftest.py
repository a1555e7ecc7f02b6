"""A manifest with every field set, to be varied with dataclasses.replace."""

import pytest

from castline.engines.manifest import (
    SCHEMA_VERSION,
    Host,
    Limits,
    Manifest,
    ModelFacts,
    Parity,
    Plugin,
    Precision,
    Tuning,
)


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        castline_version="0.1.0",
        created="2026-01-01T00:00:00Z",
        rebuild_command="castline build smol --target cpu --output models",
        model=ModelFacts("smol", "LlamaForCausalLM", "smol.gguf", 2, 64, 4, 2, 16, 256, 512, 100_000, (2,), 1),
        precision=Precision("int8", "int8"),
        limits=Limits(max_model_len=512, block_size=16),
        host=Host("cpu", "x86_64", "Some CPU", ("avx2", "avx512f"), 2),
        tuning=Tuning(measured=False, num_threads=2),
        parity=Parity(True, 512, 0.01, 0.1, 0.97, 20.0, 19.9, 0.02, 0.94, 1.0),
        plugin=Plugin("castline_cpu", "1", "ab" * 32),
        graph_file="model.onnx",
        tool_versions={"onnxruntime": "1.32.0"},
        files={},
    )
