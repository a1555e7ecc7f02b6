"""The paged-attention operator: one contract, one reference, one implementation a target."""
