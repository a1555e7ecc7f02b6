"""Build recipes: those that are shipped, and what is refused of others."""

from pathlib import Path

import pytest

from castline.engines.build_recipe import RECIPE_DIRECTORY, read_build_recipe
from castline.engines.errors import EngineError

RECIPES = sorted(RECIPE_DIRECTORY.glob("*.toml"))
GOOD = 'summary = "s"\nmodel = "demo"\nname = "m"\ntargets = ["cpu"]\n'


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_whole(path: Path) -> None:
    """Each says what it is for; a recipe with no summary is one nobody dares to remove."""
    recipe = read_build_recipe(path)
    assert recipe.summary.strip()
    assert len(set(recipe.targets)) == len(recipe.targets)


def test_a_recipe_is_read_whole(tmp_path: Path) -> None:
    """Every field that is given arrives; those left out are left to the SKU."""
    (tmp_path / "r.toml").write_text(GOOD + 'recipe = "fp8"\nkv_dtype = "fp8"\nblock_size = 16\nmax_model_len = 99\n')
    recipe = read_build_recipe(tmp_path / "r.toml")
    assert (recipe.model, recipe.name, recipe.targets) == ("demo", "m", ("cpu",))
    assert (recipe.recipe, recipe.kv_dtype, recipe.block_size, recipe.max_model_len) == ("fp8", "fp8", 16, 99)
    assert recipe.max_num_seqs is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "max_num_seq = 3\n", r"unknown field `max_num_seq`; a recipe's fields are summary, model"),
        (GOOD + "max_num_seqs = 0\n", r">= 1 - at `\$.max_num_seqs`"),
        (GOOD + "max_model_len = 1\n", r">= 2 - at `\$.max_model_len`"),
        (GOOD + 'block_size = "16"\n', r"got `str` - at `\$.block_size`"),
        (GOOD + 'kv_dtype = "fp4"\n', r"at `\$.kv_dtype`"),
        (GOOD.replace('model = "demo"\n', ""), "missing required field `model`"),
        (GOOD.replace('["cpu"]', "[]"), r"length >= 1 - at `\$.targets`"),
        (GOOD.replace('["cpu"]', '["tpu"]'), r"at `\$.targets"),
        (GOOD.replace('"m"', '"a/b"'), "name 'a/b' is not valid: a name takes"),
        ("summary", "no build recipe"),
    ],
)
def test_a_wrong_recipe_names_file_field_and_limit(tmp_path: Path, text: str, message: str) -> None:
    """A misspelt limit that is passed over would build another engine than the one that was meant."""
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(EngineError, match=message) as caught:
        read_build_recipe(tmp_path / "r.toml")
    assert "r.toml" in str(caught.value)


def test_a_missing_recipe_is_a_typed_error(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(EngineError, match=r"none\.toml cannot be read: No such file"):
        read_build_recipe(tmp_path / "none.toml")
