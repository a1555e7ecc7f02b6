"""What a manifest records of this plugin: name, version, and a hash of everything its results depend on."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from castline.engines.manifest import Plugin

PLUGIN_NAME: Final = "castline_tensorrt"
PLUGIN_VERSION: Final = "1"
"""Of the node's contract on GPUs and of the block layout."""
_HERE: Final = Path(__file__).parent
_SOURCES: Final = ("plugin.py", "launcher.py", "kernel_set.py")


@cache
def describe() -> Plugin:
    """The plugin of this installation. The hash is over the node, its launches and the kernels' sources: an engine
    whose kernels were compiled from others is rebuilt."""
    digest = hashlib.sha256()
    for path in [*(_HERE / name for name in _SOURCES), *sorted((_HERE / "kernels").glob("*.py"))]:
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode())
        digest.update(text)
    return Plugin(PLUGIN_NAME, PLUGIN_VERSION, digest.hexdigest())
