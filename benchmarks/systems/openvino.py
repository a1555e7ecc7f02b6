"""OpenVINO GenAI, in process with its continuous batching; its OpenAI server is a separate product."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import Environment, run
from benchmarks.quality import Quality
from benchmarks.sessions import DriverSession
from benchmarks.settings import num_threads
from benchmarks.systems.base import PIECES, System, driver_command, thread_environment

RUNTIME = ("openvino-genai", "openvino-tokenizers")
CONVERTER = ("optimum-intel", "nncf", "openvino", "openvino-tokenizers", "torch==2.13.0")
WEIGHT_OPTIONS: dict[str, tuple[str, ...]] = {
    "fp16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"),
}
PRECISION = "bf16"
"""Fastest in prefill and level in decoding where the processor has AMX, against f32 and the default.

Where it has AVX512_BF16 and no AMX nothing was clear, on a machine that others used. By the driver's processor time f32
took 0.7 to 0.9 times as long for a prompt of 512; for eight streams 0.9 to 1.0 times with int8 weights, 1.2 times with
fp16. The default, which is bf16 there, took 0.9 to 1.15 times as long as bf16: so much was noise. f16 took twice.
"""
STEP_TOKENS = 512
"""Of the scheduler, where a variant does not name its own: 2,048 is faster on a long prompt and harder on streams."""


def scheduler(step_tokens: int) -> dict[str, Any]:
    return {
        "cache_size": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": step_tokens,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": True,
    }


@dataclass(slots=True)
class OpenVino(System):
    """``variant``: the weights, and after a colon the tokens of a step."""

    @property
    def weights(self) -> str:
        return self.variant.partition(":")[0]

    @property
    def scheduler(self) -> dict[str, Any]:
        return scheduler(int(self.variant.partition(":")[2] or STEP_TOKENS))

    @property
    def model(self) -> Path:
        return self.context.model(f"openvino-{self.weights}")

    @property
    def properties(self) -> dict[str, Any]:
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": PRECISION,
            "INFERENCE_NUM_THREADS": num_threads(),
        }

    def prepare(self) -> None:
        self.environment().install(RUNTIME, self.context.log("openvino-install"))
        if not self.model.exists():
            self._convert()
        self.settings = {
            "weights": f"{self.weights}: optimum-cli export openvino {' '.join(WEIGHT_OPTIONS[self.weights])}",
            "properties": ", ".join(f"{name}={value}" for name, value in self.properties.items()),
            "pipeline": "ContinuousBatchingPipeline in process, "
            + ", ".join(f"{k}={v}" for k, v in self.scheduler.items()),
            "KV": "the default of OpenVINO's CPU plugin (u8)",
        }

    def start(self) -> DriverSession:
        return DriverSession.start(self._command(), log=self.log("driver"), environment=thread_environment())

    def measure_quality(self) -> Quality:
        session = DriverSession.open(self._command(), log=self.log("logits"), environment=thread_environment())
        try:
            how = f"the same IR and properties through openvino.Core, {PIECES}"
            return self.quality_through_driver(session, how)
        finally:
            session.stop()

    def versions(self) -> dict[str, str]:
        return self.environment().versions(["openvino", *RUNTIME])

    def model_files(self) -> list[Path]:
        libraries = self.environment().path.glob("lib/python*/site-packages/openvino*/**/*.so*")
        return [*self.model.iterdir(), *libraries]

    def _command(self) -> list[str]:
        settings = (json.dumps(self.properties), json.dumps(self.scheduler))
        return driver_command(self.environment().python, "openvino", str(self.model), *settings)

    def _convert(self) -> None:
        """In an environment of the converter's own: it brings torch, which no served process should find."""
        converter = Environment((self.context.settings.work / "peers" / "openvino-converter").resolve())
        log = self.log("convert")
        # optimum-intel pulls in a torchvision that was built for another torch; nothing here needs it.
        converter.install(CONVERTER, log, drop=["torchvision"])
        partial = self.model.with_name(self.model.name + ".partial")
        source = ["-m", str(self.context.source.hf), "--task", "text-generation-with-past"]
        export = [converter.tool("optimum-cli"), "export", "openvino", *source, *WEIGHT_OPTIONS[self.weights]]
        run([*export, str(partial)], log, f"converting to OpenVINO {self.weights}")
        partial.rename(self.model)
