"""OpenVINO GenAI: its ContinuousBatchingPipeline, in process; logits through OpenVINO's own runtime.

``python -m benchmarks.drivers.openvino MODEL_DIR PROPERTIES_JSON SCHEDULER_JSON``
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.drivers.loops import run_continuous
from benchmarks.drivers.protocol import Request, chunks, own_output, serve


class Pipeline:
    """The pipeline as an engine whose steps we take ourselves."""

    def __init__(self, model: Path, properties: dict[str, Any], scheduler: dict[str, Any]) -> None:
        config = genai.SchedulerConfig()
        for name, value in scheduler.items():
            setattr(config, name, value)
        self._pipeline = genai.ContinuousBatchingPipeline(str(model), config, "CPU", properties)
        self._handles: dict[int, Any] = {}

    def add(self, key: int, request: Request, *, to_the_end: bool = True) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.do_sample = False
        if to_the_end:
            config.min_new_tokens = request.max_tokens
            config.ignore_eos = True
        else:
            config.eos_token_id = self._pipeline.get_tokenizer().get_eos_token_id()
        prompt = openvino.Tensor(np.array([request.prompt], np.int64))
        self._handles[key] = self._pipeline.add_request(key, prompt, config)

    def step(self) -> Iterator[tuple[int, int, bool]]:
        self._pipeline.step()
        for key, handle in list(self._handles.items()):
            new_tokens = len(self._read(handle))
            ended = handle.get_status() != genai.GenerationStatus.RUNNING
            if ended:
                del self._handles[key]
            if new_tokens or ended:
                yield key, new_tokens, ended

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        self.add(0, Request(prompt, max_tokens), to_the_end=False)
        handle, tokens = self._handles.pop(0), []
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            self._pipeline.step()
            tokens += self._read(handle)
        return {"tokens": tokens}

    @staticmethod
    def _read(handle: Any) -> list[int]:
        if not handle.can_read():
            return []
        return [token for output in handle.read().values() for token in output.generated_ids]


def logits(model: Path, properties: dict[str, Any], passages: list[list[int]], path: str) -> dict[str, Any]:
    """Of every token of each passage, fed in pieces through the model's own KV state."""
    compiled = openvino.Core().compile_model(str(model / "openvino_model.xml"), "CPU", properties)
    infer = compiled.create_infer_request()
    names = {name for port in compiled.inputs for name in port.get_names()}
    rows = []
    for passage in passages:
        infer.reset_state()
        done = 0
        for piece in chunks(passage):
            feeds = {
                "input_ids": np.array([piece], np.int64),
                "attention_mask": np.ones((1, done + len(piece)), np.int64),
                "position_ids": np.arange(done, done + len(piece), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            infer.infer({name: value for name, value in feeds.items() if name in names})
            rows.append(np.array(infer.get_tensor("logits").data[0], np.float32))
            done += len(piece)
    stacked = np.concatenate(rows)
    np.save(path, stacked)
    return {"rows": len(stacked)}


def main() -> None:
    channel = own_output()
    model, properties, scheduler = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    pipeline = Pipeline(model, properties, scheduler)
    serve(
        channel,
        {
            "job": lambda **message: run_continuous(pipeline, message),
            "generate": pipeline.generate,
            "logits": lambda passages, path: logits(model, properties, passages, path),
        },
    )


if __name__ == "__main__":
    main()
