"""`castline build --recipe FILE --sku NAME`: who wins, and what the build is asked for."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from castline.builder import options as options_module
from castline.builder.options import BuildOptions
from castline.commands import build as build_module
from castline.commands.build import resolve_options
from castline.engines.build_recipe import BuildRecipe
from castline.engines.errors import BuildError
from castline.engines.sku import load_sku

RECIPE = BuildRecipe("s", "demo", "served", ("cpu", "tensorrt"), kv_dtype="fp8", max_num_seqs=5, block_size=16)


class Asked(Exception):
    """Carries the options that a build would have started with."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """BuildOptions for any target, kept instead of checked."""

    def keep(**options: Any) -> BuildOptions:
        raise Asked(options)

    monkeypatch.setattr(build_module, "BuildOptions", keep)


def asked(recipe: str | BuildRecipe | None = None, sku: str | None = None, **given: Any) -> dict[str, Any]:
    with pytest.raises(Asked) as caught:
        resolve_options(recipe, load_sku(sku) if sku else None, given)
    return caught.value.options


@pytest.mark.usefixtures("built")
def test_options_win_over_recipe_and_recipe_over_sku() -> None:
    """Whoever types an option means it; a recipe is written for a model, a SKU's defaults for any."""
    options = asked(RECIPE, "l4", max_num_seqs=7, block_size="32")
    assert options["max_num_seqs"] == 7
    assert options["block_size"] == 32
    assert options["max_num_batched_tokens"] == load_sku("l4").defaults.max_num_batched_tokens
    assert options["recipe"] == "fp8"
    assert asked(RECIPE, "l4")["max_num_seqs"] == 5
    assert asked(RECIPE, "a10")["kv_dtype"] == "fp8"
    assert asked(None, "a10", model="m")["kv_dtype"] == load_sku("a10").defaults.kv_dtype
    assert asked("int4", "l4", model="m")["recipe"] == "int4"


@pytest.mark.usefixtures("built")
def test_a_sku_means_tensorrt_and_none_means_cpu() -> None:
    """The command of the workflow names no target."""
    options = asked(RECIPE, "l4")
    assert (options["model"], options["name"], options["target"], options["sku"]) == (
        "demo", "served", "tensorrt", "l4",
    )  # fmt: skip
    assert options["output"] == Path("models/l4")
    assert asked(RECIPE)["target"] == "cpu"
    assert asked(RECIPE)["output"] == Path("models")
    assert "sku" not in asked(RECIPE)
    assert asked(RECIPE, "l4", output=Path("x"))["output"] == Path("x")
    with pytest.raises(BuildError, match="is for cpu, tensorrt, and not for tensorrt_rtx: give another recipe"):
        resolve_options(RECIPE, load_sku("l4"), {"target": "tensorrt_rtx"})
    only_gpu = BuildRecipe("s", "demo", "served", ("tensorrt",))
    with pytest.raises(BuildError, match="is for tensorrt, and not for cpu: give a --sku"):
        resolve_options(only_gpu, None, {})


def test_a_model_is_needed() -> None:
    """Without a recipe's file nobody says what to build."""
    with pytest.raises(BuildError, match=r"MODEL is missing: name a model, or a build recipe with --recipe FILE\.toml"):
        resolve_options(None, None, {})


def test_a_cpu_recipe_builds_with_the_defaults(tmp_path: Path) -> None:
    """A recipe that leaves all open is the plain build."""
    options = resolve_options(BuildRecipe("s", "demo", "served", ("cpu",)), None, {"output": tmp_path})
    assert options == BuildOptions("demo", tmp_path, name="served")


def test_the_rebuild_command_says_what_a_sku_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sequences on a SKU whose default is 256: left out, the command would build another engine."""
    monkeypatch.setattr(BuildOptions, "_check_gpu", lambda self: None)
    monkeypatch.setattr(options_module.BuildOptions, "__post_init__", lambda self: None)
    options = BuildOptions(
        "demo", Path("e"), "tensorrt", sku="h200", kernels_only=True, recipe="fp8", kv_dtype="fp8", max_num_seqs=64
    )
    assert options.rebuild_command() == (
        "castline build demo --target tensorrt --output e --sku h200 --recipe fp8 --kv-dtype fp8 --max-num-seqs 64 "
        "--max-num-batched-tokens 512 --kernels-only"
    )


def test_a_wrong_recipe_file_stops_the_command(tmp_path: Path) -> None:
    """Named by file and field, before anything is loaded."""
    (tmp_path / "r.toml").write_text("modle = 'x'\n")
    result = CliRunner().invoke(build_module.command, ["--recipe", str(tmp_path / "r.toml")])
    assert "r.toml is no build recipe" in str(result.exception)
    result = CliRunner().invoke(build_module.command, ["--recipe", "none.toml"])
    assert "none.toml cannot be read" in str(result.exception)
    result = CliRunner().invoke(build_module.command, ["demo", "--sku", "l5"])
    assert result.exit_code == 2
    assert "'l5' is unknown; known are a10" in result.output
