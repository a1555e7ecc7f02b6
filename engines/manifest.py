"""The manifest of an engine bundle, ``engine.json``: everything a loader must know before it reads a weight.

Every field is written by the builder and checked or used by the loader; nothing is decoration.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from castline.engines.errors import EngineError, ManifestMismatch
from castline.engines.repository import MANIFEST_NAME

SCHEMA_VERSION = 1

Target = Literal["cpu", "tensorrt", "tensorrt_rtx"]
KvDtype = Literal["fp32", "bf16", "int8", "fp8", "fp16"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
"""Checked when a manifest is read: sizes are divided by."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the runtime needs of the model. Sizes are in elements, lengths in tokens."""

    name: str
    architecture: str
    source: str
    num_layers: Positive
    hidden_size: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    max_position: Positive
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    windows: tuple[int, ...] = ()
    """Sliding window of each layer in tokens, 0 for full attention; empty when every layer is full."""
    num_lookup_parameters: int = 0
    """Of an embedding that is only looked up; 0 where it serves as the head too."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Recipe of the weights and dtype of the KV blocks."""

    recipe: str
    kv_dtype: KvDtype
    logits_dtype: str = "fp32"


@dataclass(frozen=True, slots=True)
class Limits:
    """Defaults that `run` may lower; a bundle is valid for any value up to them."""

    max_model_len: Positive
    block_size: Positive
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 512


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that an engine was built for."""

    sku: str
    """Name of the file under engines/skus."""
    device_name: str
    """As the driver says it; empty where the engine was built with no such GPU present."""
    compute_capability: str
    """``8.9``"""


@dataclass(frozen=True, slots=True)
class Host:
    """The hardware and software that an engine was built for. ``isa`` is what the kernels were packed for."""

    target: Target
    machine: str
    cpu: str
    isa: tuple[str, ...]
    cores: int
    gpu: Gpu | None = None
    """None for the cpu target."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What an engine takes of its GPU beside KV blocks and a step's buffers (`castline.engines.device_memory`)."""

    weight_bytes: Positive
    scratch_bytes: Positive
    """Bound of what TensorRT works in, at the limits of the build."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuner's choices. ``measured`` is False where documented defaults were taken (`--no-tune`)."""

    measured: bool
    num_threads: int
    matmul: dict[str, str] = field(default_factory=dict)
    """For each matmul shape ``KxN``: the kernel chosen."""
    attention: dict[str, int] = field(default_factory=dict)
    """Attention attributes chosen: ``query_tile``, ``kv_split``."""
    timings_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each thing tuned: microseconds of every candidate, by name."""
    wide_rows: dict[str, int] = field(default_factory=dict)
    """For each matmul shape that a Linear node computes: rows of a step from which its wide kernels are used; 0 leaves
    it to the operator, -1 means never."""


@dataclass(frozen=True, slots=True)
class StepParity:
    """Distance of steps of one kind to the reference."""

    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Parity:
    """Distance to the transformers model in fp32, teacher-forced on the shipped text. Divergences are in nats."""

    verified: bool
    num_tokens: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    tolerance_mean_kl: float
    tolerance_top1: float
    greedy_match: float
    """Share of greedily continued tokens that equal the reference's, over the fixed prompts."""
    by_step: dict[str, StepParity] = field(default_factory=dict)
    """The figures of steps of many tokens (``prefill``) and of few (``decode``) apart, for they run different kernels;
    the fields above are those of the worse."""
    subject: Literal["engine", "graph"] = "engine"
    """What was run: the engine itself, or the graph that it was built from, by ONNX Runtime, where no such GPU was."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """The native library that the graph's attention nodes need."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file of a bundle: its size tells a truncated copy at once, its hash any change."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One engine bundle. ``files`` has every file but engine.json, by its path inside the bundle with forward slashes;
    `castline.engines.bundle.write_bundle` fills it."""

    schema_version: int
    castline_version: str
    created: str
    rebuild_command: str
    model: ModelFacts
    precision: Precision
    limits: Limits
    host: Host
    tuning: Tuning
    parity: Parity | None
    plugin: Plugin
    graph_file: str
    tool_versions: dict[str, str]
    files: dict[str, BundleFile]
    inputs_sha256: str = ""
    """Of everything that a TensorRT plan was built from. Two builds of one input give plans of different bytes."""
    device: DeviceMemory | None = None
    """None for the cpu target, whose files are its weights."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes ``engine.json`` into *directory*."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (directory / MANIFEST_NAME).write_bytes(encoded + b"\n")


def read_manifest(directory: Path) -> Manifest:
    """Reads and validates ``engine.json``. Raises EngineError naming the field that is wrong.

    Another schema raises ManifestMismatch with the rebuild command that the manifest carries.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EngineError(
            f"{directory} is not an engine bundle: cannot read {MANIFEST_NAME} ({error.strerror})"
        ) from None
    try:
        fields = msgspec.json.decode(raw, type=dict)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(f"{path} is not a manifest: {error}") from None
    version = fields.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ManifestMismatch(
            f"{path}: schema_version: built with {version!r}, this castline reads {SCHEMA_VERSION}; "
            f"rebuild the engine: {fields.get('rebuild_command') or 'castline build'}"
        )
    try:
        return msgspec.json.decode(raw, type=Manifest)
    except msgspec.ValidationError as error:
        raise EngineError(f"{path} is damaged: {error}; rebuild the engine") from None
