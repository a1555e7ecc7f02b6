"""Build recipes: what continuous integration builds, one file each under ``engines/recipes``.

A recipe says everything of an engine but the machine: a SKU fills in the precision and the limits that it leaves open.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from castline.engines.errors import EngineError
from castline.engines.manifest import KvDtype, Target
from castline.engines.repository import MODEL_NAME_RULE, is_model_name

RECIPE_DIRECTORY = Path(__file__).parent / "recipes"

Count = Annotated[int, msgspec.Meta(ge=1)]


class BuildRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine to build. None leaves a value to the SKU, or to the build's own default."""

    summary: str
    model: str
    """As `castline build MODEL` takes it."""
    name: str
    """Under which the engine is served."""
    targets: Annotated[tuple[Target, ...], msgspec.Meta(min_length=1)]
    """That the recipe is for; a GPU's SKU takes a tensorrt one, no SKU takes cpu."""
    recipe: str | None = None
    """Of the weights."""
    kv_dtype: KvDtype | None = None
    block_size: Count | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None


def read_build_recipe(path: Path) -> BuildRecipe:
    """Reads and checks a recipe. Raises EngineError naming file, field and limit."""
    try:
        recipe = msgspec.toml.decode(path.read_bytes(), type=BuildRecipe)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        known = ", ".join(BuildRecipe.__struct_fields__)
        raise EngineError(f"{path} is no build recipe: {error}; a recipe's fields are {known}") from None
    if not is_model_name(recipe.name):
        raise EngineError(f"{path}: name {recipe.name!r} is not valid: a name takes {MODEL_NAME_RULE}")
    return recipe
