"""Ids that answers carry. Unique, and no secret: drawing them must not cost a system call."""

from random import Random

_random = Random()


def new_id(prefix: str) -> str:
    """*prefix*, a hyphen and 32 hexadecimal digits."""
    return f"{prefix}-{_random.getrandbits(128):032x}"
