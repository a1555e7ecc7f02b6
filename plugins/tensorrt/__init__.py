"""The paged-attention plugin for TensorRT and TensorRT for RTX: its kernels, the node around them, their launches."""
