"""llama.cpp's own server, built natively from the source that llama-cpp-python's package on the index carries.

The package itself is installed without its library and pointed at the same build, to quantise and to read logits.
"""

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import run
from benchmarks.errors import Unavailable
from benchmarks.quality import Quality
from benchmarks.sessions import DriverSession, HttpSession, driver_environment
from benchmarks.settings import num_threads
from benchmarks.systems.base import PIECES, System, driver_command, thread_environment

PACKAGE = "llama-cpp-python"
F16_BYTES = 2
TARGETS = ("llama-server", "llama", "mtmd")
SLOTS = 32
SLOT_TOKENS = 4608
"""Of each slot: room for the long prompt of W4."""
KV_TEXT = (
    f"f16; all {SLOTS * SLOT_TOKENS:,} cells are reserved at the start and resident: {SLOTS} slots of {SLOT_TOKENS:,} "
    "tokens, for W4's prompt must fit any slot; without them its memory is W8's “less the KV pool”"
)
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_CURL=OFF",
)
TILE_CONFIG = "    _tile_loadconfig(&tc);"
KEPT_TILE_CONFIG = '    __asm__ volatile("" : : "r"(&tc) : "memory"); _tile_loadconfig(&tc);'
"""GCC before 14 declares _tile_loadconfig as reading 8 of the 64 bytes, and so drops the stores that fill the rest:
with AMX the program then dies of an illegal instruction. The added statement keeps them."""


@dataclass(slots=True)
class LlamaCpp(System):
    """``variant``: the weights."""

    @property
    def build(self) -> Path:
        return self.environment().path / "build"

    @property
    def gguf(self) -> Path:
        given = self.context.source.gguf
        return given if f".{self.variant}." in given.name else self.context.model(f"{self.variant}.gguf")

    def prepare(self) -> None:
        self._build()
        if not self.gguf.exists():
            source, partial = self.context.source.gguf, self.gguf.with_suffix(".partial")
            arguments = ["quantize", str(source), str(partial), self.variant, str(num_threads())]
            command = driver_command(self.environment().python, "llamacpp", *arguments)
            run(command, self.log("convert"), f"quantising to {self.variant}", driver_environment(self._libraries()))
            partial.rename(self.gguf)
        self.settings = {
            "weights": f"{self.variant}: "
            + ("the given file" if self.gguf == self.context.source.gguf else "llama_model_quantize of the given file"),
            "built with": "GGML_NATIVE=ON, Release",
            "served by": " ".join(["llama-server", *self._options()]),
            "KV": KV_TEXT,
        }

    def start(self) -> HttpSession:
        def command(port: int) -> list[str]:
            return [
                str(self.build / "bin" / "llama-server"),
                "-m",
                str(self.gguf),
                "--port",
                str(port),
                *self._options(),
            ]

        return HttpSession.start(
            command, ready_path="/health", model=self.name, log=self.log("server"), environment=thread_environment()
        )

    def measure_quality(self) -> Quality:
        arguments = ["serve", str(self.gguf), str(num_threads())]
        command = driver_command(self.environment().python, "llamacpp", *arguments)
        session = DriverSession.open(command, log=self.log("logits"), environment=self._libraries())
        try:
            return self.quality_through_driver(session, f"the same libraries, {PIECES}")
        finally:
            session.stop()

    def versions(self) -> dict[str, str]:
        return self.environment().versions([PACKAGE, "llama_cpp_python"])

    def model_files(self) -> list[Path]:
        return [self.gguf, *(self.build / "bin").glob("*.so")]

    def kv_pool_bytes(self, log: str) -> int | None:
        """Of the model's shape: all of it is cleared, and so resident, from the start."""
        config = json.loads((self.context.source.hf / "config.json").read_text())
        per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        size: int = F16_BYTES * per_token * SLOTS * SLOT_TOKENS
        return size

    def _options(self) -> list[str]:
        threads, context = str(num_threads()), str(SLOTS * SLOT_TOKENS)
        return [
            "-t",
            threads,
            "-fa",
            "on",
            "--parallel",
            str(SLOTS),
            "-c",
            context,
            "--no-kv-unified",
            "--cache-ram",
            "0",
        ]

    def _libraries(self) -> dict[str, str]:
        return {**thread_environment(), "LLAMA_CPP_LIB_PATH": str(self.build / "bin")}

    def _build(self) -> None:
        """Once: minutes on all cores."""
        environment, log = self.environment(), self.context.log("llama.cpp-install")
        marker = environment.path / "built.txt"
        if marker.exists():
            return
        environment.install(["cmake", "ninja"], log)
        archive = self._download(log)
        run(
            [environment.python, "-m", "pip", "install", str(archive)],
            log,
            "pip install llama-cpp-python",
            {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"},
        )
        source = environment.path / "source"
        with tarfile.open(archive) as package:
            package.extractall(source, filter="data")
        (vendored,) = source.glob("*/vendor/llama.cpp")
        keep_tile_config(vendored / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
        cmake = environment.tool("cmake")
        ninja = f"-DCMAKE_MAKE_PROGRAM={environment.tool('ninja')}"
        run([cmake, "-G", "Ninja", "-S", str(vendored), "-B", str(self.build), ninja, *CMAKE], log, "cmake")
        build = [cmake, "--build", str(self.build), "-j", str(num_threads()), "--target", *TARGETS]
        run(build, log, "compiling llama.cpp (minutes)")
        marker.write_text(archive.name)

    def _download(self, log: Path) -> Path:
        folder = self.environment().path / "download"
        pip = [self.environment().python, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        run([*pip, "--dest", str(folder), PACKAGE], log, "downloading llama-cpp-python's source")
        archives = sorted(folder.glob("*.tar.gz"))
        if not archives:
            raise Unavailable(f"{PACKAGE} has no source package on the index")
        return archives[-1].resolve()


def keep_tile_config(source: Path) -> None:
    """Makes AMX work under GCC before 14; leaves a source that reads otherwise as it is."""
    if source.exists():
        source.write_text(source.read_text().replace(TILE_CONFIG + "\n", KEPT_TILE_CONFIG + "\n"))
