"""What `tests/gpu/run.py` checks and times on a GPU. Nothing here imports torch; compiling kernels needs Triton."""
