"""Ids that answers carry. Unique, and no secret: drawing them must not cost a system call."""

from random import getrandbits


def new_id(prefix: str) -> str:
    """*prefix*, a hyphen and 32 hexadecimal digits."""
    return f"{prefix}-{getrandbits(128):032x}"
