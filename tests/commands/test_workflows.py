"""The workflows, read as GitHub would: every engine of the matrix exists, and every command line is one of ours."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from castline.cli import cli
from castline.commands.build import resolve_options
from castline.engines.build_recipe import RECIPE_DIRECTORY, read_build_recipe
from castline.engines.sku import HOST_SKU, all_skus, load_sku

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
ENGINES: dict[str, Any] = yaml.safe_load((WORKFLOWS / "engines.yml").read_text())
MATRIX: list[dict[str, str]] = ENGINES["jobs"]["build"]["strategy"]["matrix"]["include"]
GPU_JOB: dict[str, Any] = ENGINES["jobs"]["verify"]
VERIFIED = [
    {"recipe": recipe, "sku": sku.name} for recipe in GPU_JOB["strategy"]["matrix"]["recipe"] for sku in all_skus()
]
"""Every SKU that a repository may have a runner for."""


def commands(job: str, row: dict[str, str]) -> Iterator[list[str]]:
    """The castline command lines of a job for one row of its matrix, split as the shell does, pipes cut off."""
    for step in ENGINES["jobs"][job]["steps"]:
        for line in step.get("run", "").splitlines():
            if line.strip().startswith("castline "):
                filled = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: row.get(match[1], ""), line)
                assert "${{" not in filled, filled
                yield shlex.split(filled.split("|")[0])[1:]


def parse(words: list[str]) -> click.Context:
    """Parses a command line as click does, and runs nothing."""
    with cli.make_context("castline", words, resilient_parsing=False) as parent:
        name, command, rest = cli.resolve_command(parent, words)
        assert command is not None
        return command.make_context(name, rest, parent=parent)


def name(row: dict[str, str]) -> str:
    return f"{row['recipe']}-{row['sku']}"


def test_every_sku_and_every_recipe_is_built() -> None:
    """A SKU that no run builds for rots; so does a recipe."""
    assert {row["sku"] for row in MATRIX} == {sku.name for sku in all_skus()} | {HOST_SKU}
    assert {row["recipe"] for row in MATRIX} == {path.stem for path in RECIPE_DIRECTORY.glob("*.toml")}
    assert len({name(row) for row in MATRIX}) == len(MATRIX), "artifacts of one name overwrite each other"


@pytest.mark.parametrize("row", MATRIX, ids=name)
def test_only_what_rtx_cannot_build_is_kernels_only(row: dict[str, str]) -> None:
    """On a runner with no GPU a whole plan is built wherever it can be."""
    expected = (
        "--kernels-only" if row["sku"] != HOST_SKU and "tensorrt_rtx" not in load_sku(row["sku"]).flavours else None
    )
    assert row.get("options") == expected
    assert set(row) <= {"recipe", "sku", "options"}


@pytest.mark.parametrize(
    ("job", "row"),
    [*(("build", row) for row in MATRIX), *(("verify", row) for row in VERIFIED)],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_command_lines_parse_and_build(job: str, row: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An option renamed in the command breaks the workflow, which nobody sees before it runs."""
    monkeypatch.chdir(ROOT)
    seen = []
    for words in commands(job, row):
        context = parse(words)
        seen.append(context.info_name)
        if context.info_name == "build":
            check_build(context.params)
    assert "build" in seen
    assert "inspect" in seen


def check_build(params: dict[str, Any]) -> None:
    """The options agree with each other, with the recipe and with the SKU."""
    given = {key: value for key, value in params.items() if key not in ("recipe", "sku", "verbose")}
    given |= {"tune": not given.pop("no_tune"), "verify": not given.pop("no_verify")}
    assert resolve_options(params["recipe"], params["sku"], given).name == params["recipe"].name


def test_builds_for_gpus_have_their_compilers() -> None:
    """Without Triton and TensorRT for RTX a build for a GPU stops at its kernels or before."""
    runs = [step["run"] for step in ENGINES["jobs"]["build"]["steps"] if "pip install" in step.get("run", "")]
    assert "${{ matrix.sku == 'cpu' && 'build' || 'build-gpu' }}" in "".join(runs)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(one.startswith("triton") for one in extras["build-gpu"])
    assert any("build,rtx" in one for one in extras["build-gpu"])


def test_the_chip_runs_its_own_checks() -> None:
    """On a runner with a GPU the kernels are tuned before the build that takes their shapes, then checked; a script
    that has moved would fail there alone."""
    runs = [step.get("run", "") for step in GPU_JOB["steps"]]
    tuned, built, checked = (
        next(i for i, text in enumerate(runs) if word in text)
        for word in ("castline tune-kernels", "castline build", "tests/gpu/run.py")
    )
    assert tuned < built < checked
    for path in re.findall(r"python (tests/\S+)", "\n".join(runs)):
        assert (ROOT / path).is_file(), path


def test_a_runner_is_chosen_by_its_gpu() -> None:
    """A job for an L4 on a runner with another GPU would verify nothing; with no runners it must not wait for ever."""
    assert "${{ matrix.sku }}" in GPU_JOB["runs-on"]
    assert {"self-hosted", "gpu"} <= set(GPU_JOB["runs-on"])
    assert GPU_JOB["if"] == "vars.CASTLINE_GPU_SKUS != ''"
    assert "vars.CASTLINE_GPU_SKUS" in GPU_JOB["strategy"]["matrix"]["sku"]


@pytest.mark.parametrize("job", ["build", "verify"])
def test_caches_are_saved_as_they_are_restored(job: str) -> None:
    """A cache saved under a key that no restore begins with is never found again; TensorRT's is of version and SKU."""
    steps = {step["uses"].split("@")[0]: step.get("with") for step in ENGINES["jobs"][job]["steps"] if "uses" in step}
    restore, save = steps["actions/cache/restore"], steps["actions/cache/save"]
    assert restore["path"] == save["path"] == "${{ env.CACHE }}"
    assert restore["key"] == save["key"]
    for prefix in restore["restore-keys"].splitlines():
        assert save["key"].startswith(prefix.strip())
        assert "${{ matrix.sku }}" in prefix
        assert job == "build" or "${{ steps.tensorrt.outputs.version }}" in prefix
    assert steps["actions/upload-artifact"]["if-no-files-found"] == "error"


@pytest.mark.parametrize("row", MATRIX, ids=name)
def test_recipes_fit_their_targets(row: dict[str, str]) -> None:
    """A recipe for GPUs only is never asked of a cpu."""
    targets = read_build_recipe(RECIPE_DIRECTORY / f"{row['recipe']}.toml").targets
    assert ("cpu" if row["sku"] == HOST_SKU else "tensorrt") in targets


def test_the_ordinary_workflow_runs_the_readmes_command() -> None:
    """What CI runs is what a contributor is told to run."""
    ci = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())
    runs = [step["run"] for job in ci["jobs"].values() for step in job["steps"] if "run" in step]
    assert runs == ["./dev test"]
    assert "./dev test" in (ROOT / "README.md").read_text()
