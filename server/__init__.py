"""Wire formats in front of the runtime."""
