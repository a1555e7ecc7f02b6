"""llama.cpp through llama-cpp-python, for what its server does not offer: full logits, and quantising a file.

``python -m benchmarks.drivers.llamacpp quantize SOURCE TARGET FTYPE THREADS`` or ``… serve MODEL THREADS``;
``LLAMA_CPP_LIB_PATH`` names the libraries that the server uses too.
"""

import sys
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.drivers.protocol import chunks, own_output, serve

CONTEXT = 1024
"""Tokens; more than any passage has."""


def quantize(source: str, target: str, ftype: str, threads: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype}")
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status != 0:
        sys.exit(f"llama_model_quantize returned {status}")


class Model:
    """The server's settings where they touch numbers: flash attention, an fp16 KV cache."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, CONTEXT, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def logits(self, passages: list[list[int]], path: str) -> dict[str, Any]:
        """Of every token of each passage, fed in pieces through the KV cache."""
        rows = []
        for passage in passages:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
            done = 0
            for piece in chunks(passage):
                rows.append(self._decode(piece, done))
                done += len(piece)
        stacked = np.concatenate(rows)
        np.save(path, stacked)
        return {"rows": len(stacked)}

    def _decode(self, piece: list[int], start: int) -> Any:
        batch = llama_cpp.llama_batch_init(len(piece), 0, 1)
        batch.n_tokens = len(piece)
        for index, token in enumerate(piece):
            batch.token[index], batch.pos[index], batch.logits[index] = token, start + index, 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        values = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(values, (len(piece), self._vocabulary)).copy()


def main() -> None:
    channel = own_output()
    if sys.argv[1] == "quantize":
        source, target, ftype, threads = sys.argv[2:]
        quantize(source, target, ftype, int(threads))
        return
    serve(channel, {"logits": Model(sys.argv[2], int(sys.argv[3])).logits})


if __name__ == "__main__":
    main()
