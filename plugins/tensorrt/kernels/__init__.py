"""The GPU kernels, in Triton. Sources only: compiled when an engine is built, run through the driver afterwards.

Importing a module of this folder needs Triton; nothing that serves an engine imports one.

The KV pool of a layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``: K, then V. Its elements are fp16,
bf16 or e4m3 bytes: ``kind`` says which (see `castline.plugins.tensorrt.kernels.elements`). Block ids and lengths are
clamped to the pool: what TensorRT passes while it times tactics means nothing.

Arguments come first, in launch order; constants (``tl.constexpr``) are fixed when a kernel is compiled.
"""
