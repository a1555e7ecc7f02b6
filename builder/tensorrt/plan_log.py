"""What a builder's log says of the plan: its layers, what each reads and writes, and what a build must not contain."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from castline.engines.errors import BuildError
from castline.plugins.tensorrt.engine import DECODE, MIXED

_LAYER = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+), (?P<rest>.*)")
_COPY = "Inserting copy"
"""Of a pool that goes in and out of a plugin: every step would move all of it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the plan; those of the second profile have ``[profile 1]`` in their names."""

    name: str
    kind: str
    types: tuple[str, ...]
    """Of its inputs, constants and outputs, in order."""
    nodes: tuple[str, ...]
    """Of the graph, that it computes."""


def read_layers(log: Sequence[str]) -> tuple[Layer, ...]:
    """Every layer of the listing that detailed verbosity ends with."""
    return tuple(_layers(log))


def _layers(log: Sequence[str]) -> Iterator[Layer]:
    listings = (message for message in log if message.split(" ", 1)[-1].startswith("Layers:"))
    for line in (line for listing in listings for line in listing.splitlines()):
        found = _LAYER.match(line)
        if found is not None:
            rest = found["rest"]
            nodes = re.findall(r"\[ONNX Layer: ([^\]]*)\]", rest)
            yield Layer(found["name"], found["kind"], tuple(re.findall(r"Datatype: (\w+)", rest)), tuple(nodes))


def check_plan(log: Sequence[str], attention: Collection[str], e4m3: Collection[str]) -> tuple[Layer, ...]:
    """The layers of a plan that is what was asked for.

    *attention* and *e4m3* are names of nodes: each of the first is a plugin in both profiles, each of the second
    multiplies e4m3 by e4m3. Raises BuildError naming what is not so, and where pools are copied.
    """
    copies = [message for message in log if _COPY in message]
    if copies:
        raise BuildError(f"plan: TensorRT copies KV pools in every step: {copies[0]}")
    layers = read_layers(log)
    plugins = {layer.name for layer in layers if layer.kind == "PluginV3"}
    wanted = {name for node in attention for name in (_in_profile(node, MIXED), _in_profile(node, DECODE))}
    if plugins != wanted:
        different = ", ".join(sorted(plugins ^ wanted)[:4])
        raise BuildError(f"plan: {len(plugins)} attention layers, {len(wanted)} expected; these differ: {different}")
    multiplied = {node for layer in layers if layer.types.count("FP8") >= 2 for node in layer.nodes}
    if lacking := sorted(set(e4m3) - multiplied):
        raise BuildError(f"plan: {len(lacking)} matmuls do not multiply e4m3, {lacking[0]} among them")
    return layers


def _in_profile(node: str, profile: int) -> str:
    return f"{node} [profile {profile}]" if profile else node
