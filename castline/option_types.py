"""Options of several commands: a GPU by name, a recipe by name or by file, and which of them wins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from castline.builder.recipes import RECIPE_CHOICES
from castline.engines.build_recipe import BuildRecipe, read_build_recipe
from castline.engines.errors import EngineError
from castline.engines.precision import GPU_WEIGHTS
from castline.engines.sku import HOST_SKU, Sku, load_sku

WEIGHT_RECIPES = (*RECIPE_CHOICES, *(name for name in GPU_WEIGHTS if name not in RECIPE_CHOICES))
"""For the cpu target, then for GPUs."""


class SkuChoice(click.ParamType):  # type: ignore[type-arg]
    """A file under engines/skus, or `cpu` for this machine's processor, which gives None."""

    name = "sku"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sku | None:
        if value is None or isinstance(value, Sku) or value == HOST_SKU:
            return value if isinstance(value, Sku) else None
        try:
            return load_sku(value)
        except EngineError as error:
            message = f"{error}, and {HOST_SKU} for this machine's processor"
            raise click.BadParameter(message, ctx, param) from None


class RecipeChoice(click.ParamType):  # type: ignore[type-arg]
    """The name of a weight recipe, or the path of a build recipe's TOML file."""

    name = "recipe"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | BuildRecipe:
        if isinstance(value, BuildRecipe) or value in WEIGHT_RECIPES:
            return value  # type: ignore[no-any-return]
        if value.endswith(".toml") or Path(value).is_file():
            return read_build_recipe(Path(value))
        known = ", ".join(WEIGHT_RECIPES)
        raise click.BadParameter(f"{value!r} is not one of {known}, and no build recipe's file", ctx, param)


def merge(recipe: str | BuildRecipe | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given (not None) over what a build recipe says, by the names of BuildOptions."""
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(recipe, BuildRecipe):
        said = msgspec.structs.asdict(recipe)
        beside = {name for name, value in said.items() if value is None} | {"summary", "targets"}
        return {**{name: value for name, value in said.items() if name not in beside}, **options}
    return options if recipe is None else {**options, "recipe": recipe}


def sku_defaults(sku: Sku) -> dict[str, Any]:
    """What a SKU fills in, by the names of BuildOptions."""
    values = msgspec.structs.asdict(sku.defaults)
    return {name: value for name, value in values.items() if name != "memory_utilization"}
