"""onnxruntime-genai: static batches with its Generator, in process. Its continuous batching needs a GPU.

``python -m benchmarks.drivers.onnxruntime_genai MODEL_DIR``
"""

import sys
from typing import Any

import numpy as np
import onnxruntime_genai as genai

from benchmarks.drivers.loops import OnStep, run_static
from benchmarks.drivers.protocol import Request, own_output, serve

PAD = 2
"""SmolLM2's end of text, which its tokenizer also pads with; the library masks it at the left."""


class Model:
    def __init__(self, directory: str) -> None:
        self._model = genai.Model(genai.Config(directory))

    def _generator(self, batch_size: int, max_length: int, *, to_the_end: bool = True) -> Any:
        params = genai.GeneratorParams(self._model)
        min_length = max_length if to_the_end else 0
        params.set_search_options(batch_size=batch_size, max_length=max_length, min_length=min_length, do_sample=False)
        return genai.Generator(self._model, params)

    def batch(self, requests: list[Request], on_step: OnStep) -> None:
        longest = max(len(request.prompt) for request in requests)
        steps = max(request.max_tokens for request in requests)
        padded = [[PAD] * (longest - len(request.prompt)) + request.prompt for request in requests]
        generator = self._generator(len(requests), longest + steps)
        generator.append_tokens(np.array(padded, np.int32))
        for _ in range(steps):
            generator.generate_next_token()
            on_step()

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        generator = self._generator(1, len(prompt) + max_tokens, to_the_end=False)
        generator.append_tokens(np.array([prompt], np.int32))
        tokens = []
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return {"tokens": tokens}

    def logits(self, passages: list[list[int]], path: str) -> dict[str, Any]:
        """One token at a time: the library returns the logits of the last one."""
        rows = []
        for passage in passages:
            generator = self._generator(1, len(passage) + 1)
            for token in passage:
                generator.append_tokens(np.array([[token]], np.int32))
                rows.append(np.array(generator.get_logits(), np.float32).reshape(-1))
        np.save(path, np.stack(rows))
        return {"rows": len(rows)}


def main() -> None:
    channel = own_output()
    model = Model(sys.argv[1])
    serve(
        channel,
        {
            "job": lambda **message: run_static(model.batch, message),
            "generate": model.generate,
            "logits": model.logits,
        },
    )


if __name__ == "__main__":
    main()
