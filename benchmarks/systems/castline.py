"""castline itself: a tuned bundle of the recipe's defaults, served by ``castline run``."""

import compileall
import functools
import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.doors import CastlineSession
from benchmarks.environments import run
from benchmarks.errors import Unavailable
from benchmarks.quality import Quality
from benchmarks.settings import ROOT
from benchmarks.systems.base import System
from castline.engines.manifest import Manifest, read_manifest
from castline.engines.repository import MANIFEST_NAME
from castline.runtime.huge_heap import available
from castline.runtime.stream_interval import FEW_REQUESTS, INTERVALS, MAX_SHARE

CASTLINE = [sys.executable, "-m", "castline"]
MODEL = "smollm2"
BUILT_FROM = ("builder", "engines", "plugins")
SERVED_FROM = ("castline", "engines", "plugins", "runtime", "server")
SOURCES = (".py", ".cpp", ".h", ".so", ".txt")
SPECULATION = "--speculation"


@dataclass(slots=True)
class Castline(System):
    """``variant``: the value of `castline run --speculation`."""

    @property
    def repository(self) -> Path:
        return self.context.model("castline")

    @property
    def bundle(self) -> Path:
        return max(self.repository.glob(f"*/*/{MANIFEST_NAME}"), key=lambda path: path.stat().st_mtime).parent

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.bundle)

    def prepare(self) -> None:
        """Builds again when the sources that make a bundle have changed."""
        if self.variant != "off" and not has_speculation():
            raise Unavailable(f"castline run has no {SPECULATION}")
        marker, digest = self.repository / "built-from", sources_digest()
        if not (marker.exists() and marker.read_text() == digest):
            shutil.rmtree(self.repository, ignore_errors=True)
            command = [*CASTLINE, "build", "demo", "--name", MODEL, "--output", str(self.repository)]
            run(command, self.log("build"), "castline build demo")
            marker.write_text(digest)
        compile_sources()
        manifest = self.manifest
        self.settings = {
            "recipe": manifest.precision.recipe,
            "KV": manifest.precision.kv_dtype,
            "built by": f"castline build demo (tuned: {'yes' if manifest.tuning.measured else 'no'})",
            "served by": " ".join(["castline run", *self._options()]),
            "threads": str(manifest.tuning.num_threads),
            **serving(self.variant),
        }

    def start(self) -> CastlineSession:
        def command(port: int) -> list[str]:
            ports = ["--http-port", str(port), "--grpc-port", "0"]
            return [*CASTLINE, "run", str(self.repository), *ports, *self._options()]

        return CastlineSession.start(
            command, ready_path="/health/ready", model=MODEL, log=self.log("server"), environment={}
        )

    def measure_quality(self) -> Quality:
        """Of the bundle's own manifest: the build measured it through the paged pool, on the same text."""
        parity = self.manifest.parity
        if parity is None:
            raise Unavailable("the bundle was built without its parity check")
        how = "castline build's own parity check"
        return Quality(parity.mean_kl, parity.top1_agreement, parity.perplexity, parity.num_tokens, how)

    def versions(self) -> dict[str, str]:
        return {"castline": self.manifest.castline_version, "source": source_revision(), **self.manifest.tool_versions}

    def model_files(self) -> list[Path]:
        return [path for path in self.bundle.iterdir() if path.is_file()]

    def _options(self) -> list[str]:
        return [SPECULATION, self.variant] if has_speculation() else []


def serving(speculation: str) -> dict[str, str]:
    """What of `castline run` the figures follow from, options that are left at their defaults among it."""
    return {
        "speculation": "off" if speculation == "off" else f"on ({speculation}: where it pays)",
        "stream interval": f"auto: a token a message until serving more than {FEW_REQUESTS} requests takes "
        f"{MAX_SHARE * 100:g} % of the CPU time, then up to {INTERVALS[-1]}; gaps and message counts follow from it",
        "huge pages": f"auto: {'weights and heap move into them while it serves' if available() else 'none here'}",
    }


@functools.cache
def has_speculation() -> bool:
    """Whether `castline run` has the option that turns guesses on and off."""
    done = subprocess.run([*CASTLINE, "run", "--help"], capture_output=True, text=True, check=False)
    return SPECULATION in done.stdout


def sources_digest() -> str:
    """Of everything in the tree that can change a bundle."""
    digest = hashlib.sha256()
    files = (path for folder in BUILT_FROM for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCES)
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_sources() -> None:
    """As pip compiles what it installs, the peers among it: a source tree may lie where nothing else ever does."""
    for folder in SERVED_FROM:
        compileall.compile_dir(ROOT / folder, quiet=2)


def source_revision() -> str:
    """The commit, with ``+`` where the tree has changes; ``unknown`` outside a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
