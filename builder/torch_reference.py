"""The model itself as the reference of the parity gate: transformers in fp32, its ordinary attention, no cache."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from castline.builder.verify import Reference


def torch_reference(model: PreTrainedModel) -> Reference:
    """Logits [tokens, vocabulary] of one sequence in one pass."""

    def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        rows: NDArray[np.float32] = out.logits[0].float().numpy()
        return rows

    return logits
