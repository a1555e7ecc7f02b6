"""Checkpoint to bundle."""
