"""The paged-attention operator for the cpu target: a native kernel behind an ONNX Runtime custom operator."""
