"""A CUDA driver in memory, which checks all that it is told, and a plan whose layers are kernels of it."""
