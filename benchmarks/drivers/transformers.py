"""transformers' own ``generate`` in static batches, in process.

``python -m benchmarks.drivers.transformers MODEL_DIR DTYPE THREADS``
"""

import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.drivers.loops import OnStep, run_static
from benchmarks.drivers.protocol import Request, chunks, own_output, serve


class Steps(BaseStreamer):
    """Tells of each step of a batch; the prompt, which comes first, is no step."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._seen_prompt = False

    def put(self, value: Any) -> None:
        if self._seen_prompt:
            self._on_step()
        self._seen_prompt = True

    def end(self) -> None:
        pass


class Model:
    def __init__(self, directory: str, dtype: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model = model.eval()
        self._pad = self._model.generation_config.pad_token_id

    @torch.inference_mode()
    def batch(self, requests: list[Request], on_step: OnStep) -> None:
        longest = max(len(request.prompt) for request in requests)
        steps = max(request.max_tokens for request in requests)
        ids = torch.full((len(requests), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            streamer=Steps(on_step),
        )

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        ids = torch.tensor([prompt])
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        return {"tokens": out[0, len(prompt) :].tolist()}

    @torch.inference_mode()
    def logits(self, passages: list[list[int]], path: str) -> dict[str, Any]:
        """Fed in pieces through the KV cache."""
        rows = []
        for passage in passages:
            cache = None
            for piece in chunks(passage):
                out = self._model(input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                rows.append(out.logits[0].float().numpy())
        stacked = np.concatenate(rows)
        np.save(path, stacked)
        return {"rows": len(stacked)}


def main() -> None:
    channel = own_output()
    torch.set_num_threads(int(sys.argv[3]))
    model = Model(sys.argv[1], sys.argv[2])
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
