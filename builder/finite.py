"""Whether a checkpoint's weights are numbers, asked before anything is computed with them."""

import torch
from transformers import PreTrainedModel

from castline.engines.errors import BuildError


def require_finite(model: PreTrainedModel) -> None:
    """Raises BuildError naming the first parameter of *model* that holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        low, high = torch.aminmax(parameter)  # both are NaN where one element is; no copy is made
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise BuildError(
                f"load: {name} holds weights that are not finite (NaN or infinity): the file is damaged, or its "
                "training or conversion went wrong; fetch or convert the checkpoint again"
            )
