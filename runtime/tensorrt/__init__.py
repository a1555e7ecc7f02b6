"""The executor of engines for NVIDIA GPUs. `castline.runtime.tensorrt.executor` begins the reading."""
