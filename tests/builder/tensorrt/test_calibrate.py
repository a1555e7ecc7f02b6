"""Calibration: the figures are those of the model itself, over all tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from castline.builder.tensorrt.calibrate import calibrate
from castline.engines.errors import BuildError


def test_magnitudes_are_those_of_the_model(fused: Callable[..., Any]) -> None:
    """Every token counts, in the last layer too, whose rows the graph drops but for the wanted ones: a scale from a few
    rows would saturate the others."""
    built = fused("llama")
    random = np.random.default_rng(2)
    passages = [random.integers(3, 272, length).tolist() for length in (37, 5)]
    found = calibrate(built.model, passages)
    wanted: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            wanted[name] = max(wanted.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in built.checkpoint.model.named_modules()
        if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj"))
    ]
    with torch.inference_mode():
        for passage in passages:
            built.checkpoint.model(input_ids=torch.tensor([passage]), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(found) == len(wanted) == 8
    merged = {"q_proj": "qkv", "gate_proj": "gate_up"}
    for name, value in wanted.items():
        path, _, last = name.rpartition(".")
        assert found[f"{path}.{merged.get(last, last)}.weight.T"] == pytest.approx(value, rel=1e-4)


def test_activations_that_fp16_cannot_hold_are_refused(
    fused: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be infinite in the engine, and its answers noise."""
    monkeypatch.setattr("castline.builder.tensorrt.calibrate.FP16_MAX", 0.5)
    with pytest.raises(BuildError, match=r"calibrate: the input of .* reaches .* take bf16"):
        calibrate(fused("llama").model, [[3, 4, 5]])
