"""onnxruntime-genai, in process, in static batches."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import Environment, run
from benchmarks.quality import Quality
from benchmarks.sessions import DriverSession
from benchmarks.systems.base import System, driver_command, thread_environment

RUNTIME = ("onnxruntime-genai", "numpy")
CONVERTER = ("onnxruntime-genai", "torch==2.13.0", "transformers>=5", "onnx", "onnx_ir")
OPTIONS: dict[str, tuple[str, ...]] = {
    "int4": (
        "block_size=32",
        "algo_config=k_quant_last",
        "is_symmetric=false",
        "accuracy_level=4",
        "prune_lm_head=true",
    ),
    "int8": ("block_size=128", "accuracy_level=4", "prune_lm_head=true"),
}


@dataclass(slots=True)
class OnnxRuntimeGenai(System):
    """``variant``: the weights."""

    @property
    def model(self) -> Path:
        return self.context.model(f"onnxruntime-genai-{self.variant}")

    def prepare(self) -> None:
        self.environment().install(RUNTIME, self.context.log("onnxruntime-genai-install"))
        if not self.model.exists():
            self._convert()
        self.settings = {
            "weights": f"onnxruntime_genai.models.builder -p {self.variant} -e cpu, {', '.join(OPTIONS[self.variant])}",
            "run by": "Generator in process, static batches: it batches continuously on GPUs only",
            "KV": "f32, dense",
        }

    def start(self) -> DriverSession:
        return DriverSession.start(self._command(), log=self.log("driver"), environment=thread_environment())

    def measure_quality(self) -> Quality:
        session = DriverSession.open(self._command(), log=self.log("logits"), environment=thread_environment())
        try:
            return self.quality_through_driver(session, "Generator.get_logits, a token at a time")
        finally:
            session.stop()

    def versions(self) -> dict[str, str]:
        return self.environment().versions(["onnxruntime-genai", "onnxruntime"])

    def model_files(self) -> list[Path]:
        libraries = self.environment().path.glob("lib/python*/site-packages/onnxruntime*/**/*.so*")
        return [*self.model.iterdir(), *libraries]

    def _command(self) -> list[str]:
        return driver_command(self.environment().python, "onnxruntime_genai", str(self.model))

    def _convert(self) -> None:
        converter = Environment((self.context.settings.work / "peers" / "onnxruntime-genai-converter").resolve())
        log = self.log("convert")
        converter.install(CONVERTER, log)
        partial = self.model.with_name(self.model.name + ".partial")
        builder = [converter.python, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", self.variant]
        paths = ["-i", str(self.context.source.hf), "-o", str(partial), "-c", str(self.context.model("cache"))]
        run([*builder, *paths, "--extra_options", *OPTIONS[self.variant]], log, f"converting to ONNX {self.variant}")
        partial.rename(self.model)
