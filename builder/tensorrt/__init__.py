"""From the fused graph to an engine for an NVIDIA GPU: precision, lowering, kernels, plan, proof."""
