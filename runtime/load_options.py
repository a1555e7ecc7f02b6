"""What the user may choose at start-up. Imports nothing heavy: the command line shows these defaults."""

from dataclasses import dataclass

SPECULATION_MODES = ("auto", "off")
HUGE_PAGES_MODES = ("auto", "off")
DEFAULT_DRAFTS = 7
"""With the token before them they fill the 8 rows that kernels take at a time."""
MOST_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """None: the bundle's or the host's own value."""

    model: str | None = None
    version: int | None = None
    memory_utilization: float | None = None
    """Share of the available memory for weights, a step's buffers and the KV pool, 0..1."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    """Exactly this many KV blocks, whatever the memory utilization."""
    threads: int | None = None
    speculation: str = "auto"
    """Whether to guess tokens ahead by prompt lookup: "auto", where it pays, or "off". It changes no token,
    but for near ties where steps of many tokens run wide kernels (matrix units), as larger batches do.

    It never pays on a GPU: the logits of every guess would have to cross the bus, and nothing could run ahead."""
    max_drafts: int | None = None
    """Tokens guessed ahead at most, for one sequence in a step. None: DEFAULT_DRAFTS, on a GPU none."""
    huge_pages: str = "auto"
    """"auto": put huge pages under what steps read, where the system has them (`castline.runtime.huge_pages`). "off":
    weights stay in the mapped file, which several servers of one engine share. A GPU's engine has no use for them."""
    max_waiting: int = 4096
    allow_unverified: bool = False
    """Serve an engine whose parity with its reference was not shown."""
    verify_files: bool = False
    """Hash every file of the bundle before loading, large ones too."""
