"""Versions of the libraries that made an engine, for its manifest."""

from importlib.metadata import PackageNotFoundError, version

TOOLS = ("onnxruntime", "numpy", "torch", "transformers", "onnx", "onnxscript", "onnx-ir", "tokenizers", "gguf")


def tool_versions() -> dict[str, str]:
    """Distribution → version, of those installed."""
    found: dict[str, str] = {}
    for tool in TOOLS:
        try:
            found[tool] = version(tool)
        except PackageNotFoundError:
            continue
    return found
