"""Which recipe a checkpoint gets: by whether its weights are on a 4-bit grid as they come."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from click.testing import CliRunner

from castline.builder.grid import off_grid, resolve_recipe
from castline.builder.recipes import RECIPES
from castline.commands.build import command
from castline.engines.errors import BuildError
from castline.engines.manifest import read_manifest
from castline.plugins.linear import LinearFormat

SIZES: dict[str, Any] = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


def on_q4_1(rows: np.ndarray) -> np.ndarray:
    """W [N, K] as llama.cpp's Q4_1 would give it back."""
    groups = rows.reshape(len(rows), -1, 32)
    m = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    d = ((groups.max(-1, keepdims=True) - m) / 15).astype(np.float16).astype(np.float32)
    return np.asarray((np.clip(np.rint((groups - m) / d), 0, 15) * d + m).reshape(rows.shape), np.float32)


def on_q4_0(rows: np.ndarray) -> np.ndarray:
    """W [N, K] as llama.cpp's Q4_0 would give it back."""
    groups = rows.reshape(len(rows), -1, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    d = (largest / -8).astype(np.float16).astype(np.float32)
    return np.asarray((np.clip(np.rint(groups / d), -8, 7) * d).reshape(rows.shape), np.float32)


def put_on_grid(model: Any, grid: Any) -> None:
    head = model.get_output_embeddings()
    for module in model.modules():
        if module is head or not hasattr(module, "weight") or isinstance(module, torch.nn.Embedding):
            continue
        weight = module.weight.data
        if weight.ndim == 2:
            turned = not isinstance(module, torch.nn.Linear)  # gpt2 stores [K, N]
            rows = grid((weight.T if turned else weight).numpy())
            module.weight.data = torch.tensor(rows.T.copy() if turned else rows)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("grid", [on_q4_1, on_q4_0])
def test_weights_on_a_grid_keep_it(make: Any, grid: Any) -> None:
    """The head and the embedding have 8 bits, and may be off it."""
    model = make()
    put_on_grid(model, grid)
    assert off_grid(model) is None
    assert resolve_recipe("auto", model) is RECIPES["q4_1"]
    assert resolve_recipe("q4_1", model) is RECIPES["q4_1"]
    assert resolve_recipe("int8", model) is RECIPES["int8"]


@pytest.mark.parametrize("make", [llama, gpt2])
def test_other_weights_are_not_put_on_one(make: Any) -> None:
    """A bf16 checkpoint on a 4-bit grid is another model: it must be asked for by its own name."""
    model = make()
    assert resolve_recipe("auto", model) is RECIPES["int8"]
    with pytest.raises(BuildError, match=r"recipe q4_1: .*not on a 4-bit grid .*%.*--recipe int8"):
        resolve_recipe("q4_1", model)


def test_one_matrix_off_the_grid_is_named() -> None:
    """A file of mixed types (Q4_K_M, or a layer kept in 6 bits) is not on the grid as a whole."""
    model = llama()
    put_on_grid(model, on_q4_1)
    torch.nn.init.normal_(model.model.layers[1].mlp.down_proj.weight, 0.0, 0.1)
    off = off_grid(model)
    assert off is not None
    assert off[0] == "model.layers.1.mlp.down_proj.weight"
    assert off[1] > 0.05
    assert resolve_recipe("auto", model) is RECIPES["int8"]


def test_weights_that_no_grid_can_hold_are_off_it() -> None:
    """A minimum beyond float16: 8 bits still hold such weights, so that auto must not fail on them."""
    model = llama()
    put_on_grid(model, on_q4_1)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = 1e6
    assert off_grid(model) == ("model.layers.1.mlp.down_proj.weight", np.inf)
    assert resolve_recipe("auto", model) is RECIPES["int8"]


Q4_0 = {"linear-w4-g32"}
Q4_1 = {"linear-w4dm-g32"}


@pytest.mark.parametrize(
    ("grids", "down", "others"),
    [
        ({"": on_q4_0}, Q4_0, Q4_0),
        ({"": on_q4_1}, Q4_1, Q4_1),
        ({"": on_q4_0, "layers.1.mlp.down_proj": on_q4_1}, Q4_1, Q4_0),
    ],
    ids=["Q4_0", "Q4_1", "one layer's down in Q4_1"],
)
def test_engines_store_no_minimum_for_a_symmetric_grid(
    grids: dict[str, Any], down: set[str], others: set[str], tiny_checkpoint: Any, tmp_path: Path
) -> None:
    """2 bytes of 20 of every group, and an addition, for a minimum that follows from the step. One kernel serves all
    matmuls of a shape, so that all must be on the symmetric grid; verify compares the engine with transformers."""
    save_sharp(tiny_checkpoint("llama", tie_word_embeddings=False), tmp_path / "tiny", grids)
    arguments = [str(tmp_path / "tiny"), "--no-tune", "--threads", "1", "--output", str(tmp_path / "engines")]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    bundle = Path(done.stdout.splitlines()[-1])
    manifest = read_manifest(bundle)
    assert manifest.precision.recipe == "q4_1"
    assert manifest.parity is not None
    assert manifest.parity.verified
    kernels = dict(manifest.tuning.matmul)
    assert kernels.pop("64x272") == "linear-w8-g32"
    assert {kernels.pop("96x64")} == down
    assert set(kernels.values()) == others
    graph = ir.load(bundle / manifest.graph_file).graph
    formats = {int(n.attributes["format"].as_int()) for n in graph if n.op_type == "Linear"}
    wanted = {"linear-w4-g32": LinearFormat.W4, "linear-w4dm-g32": LinearFormat.W4_DM}
    assert formats == {LinearFormat.W8, *(wanted[name] for name in down | others)}
    assert "model.embed_tokens.weight.w8-g32" in graph.initializers  # untied: packed by itself


def save_sharp(source: Path, directory: Path, grids: dict[str, Any]) -> None:
    """The checkpoint with layers that add little to a token's own embedding, which the head knows again: rounding swaps
    the best two answers of a random model. The last of *grids* whose name is in a matrix's name holds for it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            scale = 0.03 if name.endswith(("o_proj", "down_proj")) else 1.0
            grid = [grid for part, grid in grids.items() if part in name][-1]
            module.weight.data = torch.tensor(grid(scale * module.weight.data.numpy()))
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(directory)


def test_unknown_recipes_list_the_known_ones() -> None:
    """A name that is mistyped must not build something else."""
    with pytest.raises(BuildError, match="'q4' is unknown; choose one of auto, fp32"):
        resolve_recipe("q4", llama())
