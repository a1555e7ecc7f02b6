"""Checkpoints whose weights no recipe can keep: a plain refusal that names the tensor, from the command itself."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from castline.builder.recipes import RECIPE_CHOICES
from castline.commands.build import command
from castline.engines.errors import BuildError

Spoil = Callable[[str, float], Path]


@pytest.fixture
def spoil(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Spoil:
    """``spoil(tensor, value)``: a checkpoint with one element of *tensor* replaced, the last."""

    def make(tensor: str, value: float) -> Path:
        source, directory = tiny_checkpoint("qwen2"), tmp_path / "spoilt"
        directory.mkdir()
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
        (directory / "config.json").write_bytes((source / "config.json").read_bytes())
        tensors = load_file(source / "model.safetensors")
        tensors[tensor].view(-1)[-1] = value
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


def refusal(checkpoint: Path, recipe: str, output: Path) -> str:
    arguments = [str(checkpoint), "--recipe", recipe, "--no-tune", "--no-verify", "--output", str(output)]
    with pytest.raises(BuildError) as refused:
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert not list(output.rglob("*"))
    return str(refused.value)


@pytest.mark.parametrize("recipe", RECIPE_CHOICES)
def test_weights_that_are_no_numbers_are_refused(recipe: str, spoil: Spoil, tmp_path: Path) -> None:
    """They came out in a traceback after minutes, or as codes that mean nothing; fp32 would serve them."""
    name = "model.layers.1.mlp.down_proj.weight"
    message = refusal(spoil(name, math.nan), recipe, tmp_path / "engines")
    assert message.startswith(f"load: {name} holds weights that are not finite")
    assert "fetch or convert the checkpoint again" in message


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_infinite_weights_are_refused_wherever_they_are(name: str, value: float, spoil: Spoil, tmp_path: Path) -> None:
    """An embedding's row may be met by no text that a build reads, and a bias is not packed."""
    assert name in refusal(spoil(name, value), "int8", tmp_path / "engines")


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        ("int4", "model.layers.1.mlp.down_proj.weight", 1e6),
        ("int8", "model.layers.1.mlp.down_proj.weight", 1e9),
        ("auto", "model.embed_tokens.weight", 1e9),
    ],
)
def test_weights_beyond_float16s_scales_are_refused(
    recipe: str, name: str, value: float, spoil: Spoil, tmp_path: Path
) -> None:
    """The scale of a group is a half: an infinite one would make NaN of every token."""
    message = refusal(spoil(name, value), recipe, tmp_path / "engines")
    assert message.startswith(f"compile: {name}: weights are too large")
    assert "--recipe fp32" in message
