"""`castline build` from the outside: its options, what it refuses, and how fast it says so."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from castline.builder.options import BuildOptions
from castline.builder.preflight import check_disk, check_output, engine_bytes
from castline.builder.recipes import RECIPES
from castline.commands import build as build_module
from castline.engines.errors import BuildError
from castline.engines.manifest import ModelFacts

FACTS = ModelFacts("huge", "llama", "x", 80, 8192, 64, 8, 128, 128256, 8192, 10**15, (2,), 1)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_module.command, [str(a) for a in arguments], catch_exceptions=False)


def test_help_names_every_option_and_its_default() -> None:
    """An option nobody can find is an option nobody has."""
    text = invoke("--help").output
    for option in (
        "--output", "--target", "--sku", "--kernels-only", "--name", "--version", "--recipe", "--kv-dtype",
        "--block-size", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--threads", "--no-tune",
        "--no-verify", "--allow-unverified", "--cache-dir", "--verbose",
    ):  # fmt: skip
        assert option in text
    assert "[default: 64, or" in text


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["inspect", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Help that imports torch takes seconds: the modules are counted, since a clock would flake."""
    code = (
        "import sys\nfrom castline.cli import cli\n"
        f"try: cli.main({arguments!r}, standalone_mode=True)\nexcept SystemExit: pass\n"
        "print('loaded', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "click" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "numpy", "rich", "matplotlib", "jinja2"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "tensorrt_rtx"], ["--target tensorrt_rtx needs a --sku", "known are a10, a100-40"]),
        (["--target", "tensorrt_rtx", "--sku", "h200"], ["h200 has 9.0; use --target tensorrt"]),
        (["--target", "cpu", "--sku", "l4"], ["--sku l4 is a GPU", "leave --sku out"]),
        (["--kernels-only"], ["--kernels-only is for GPUs"]),
        (["--kv-dtype", "fp16"], ["--kv-dtype fp16 is for GPUs", "fp32, bf16, int8, fp8"]),
        (["--recipe", "fp8"], ["--recipe 'fp8' is unknown", "auto, fp32, int8, q4_1, int4"]),
        (["--sku", "a10", "--recipe", "fp8"], ["--sku a10, --recipe fp8", "cannot multiply fp8", "fp16, bf16, int4"]),
        (["--sku", "l4", "--recipe", "int8"], ["recipe 'int8' is not for GPUs", "fp16, bf16, fp8, int4"]),
        (["--sku", "l4", "--kv-dtype", "fp32"], ["KV blocks of fp32 are not for GPUs"]),
        (["--sku", "l4", "--block-size", "128"], ["--block-size 128 must be one of 16, 32, 64 on GPUs"]),
        (["--sku", "l4", "--threads", "2"], ["--threads 2 is of the cpu target"]),
        (["--max-model-len", "0"], ["--max-model-len 0", "at least 1"]),
        (["--threads", "-1"], ["--threads -1", "at least 1"]),
        (["--version", "0"], ["--version 0", "at least 1"]),
        (
            ["--max-num-seqs", "100", "--max-num-batched-tokens", "50"],
            ["--max-num-batched-tokens 50", "--max-num-seqs"],
        ),
        (["--max-model-len", "1"], ["--max-model-len 1", "at least 2"]),
        (["--version", "1000000000"], ["--version 1000000000", "at most 999999999"]),
        (["--name", "a/b"], ["--name 'a/b'"]),
        (["--name", "a b"], ["--name 'a b'", "letters, digits"]),
        (["--name", "é"], ["--name 'é'"]),
    ],
)
def test_bad_options_are_refused_in_plain_words(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    """Each refusal names the option, the limit and the cure, before anything is loaded."""
    with pytest.raises(BuildError) as refused:
        invoke("demo", "--output", tmp_path / "engines", *arguments)
    for word in words:
        assert word in str(refused.value)
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("arguments", [["--recipe", "int3"], ["--kv-dtype", "fp4"], ["--block-size", "33"]])
def test_unknown_choices_list_the_known_ones(tmp_path: Path, arguments: list[str]) -> None:
    """click refuses with the list."""
    result = invoke("demo", "--output", tmp_path, *arguments)
    assert result.exit_code == 2
    assert arguments[1] in result.output
    assert "is not one of" in result.output


def test_missing_build_extra_names_the_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain install serves but does not build: the message is the command, not an ImportError."""
    monkeypatch.setattr(build_module, "_NEEDED", ("torch", "no_such_module_of_ours"))
    with pytest.raises(BuildError, match=r"no_such_module_of_ours.*pip install 'castline\[build\]'"):
        invoke("demo", "--output", tmp_path)


def test_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """The build would fail at its very end, minutes later."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match="is a file, not a directory"):
        check_output(tmp_path / "file" / "engines", None, None)


def test_existing_version_is_refused(tmp_path: Path) -> None:
    """A served engine must never be overwritten, and the refusal must not cost a build."""
    (tmp_path / "tiny" / "3").mkdir(parents=True)
    with pytest.raises(BuildError, match=r"tiny/3 exists and is never overwritten"):
        check_output(tmp_path, "tiny", 3)
    check_output(tmp_path, "tiny", 4)
    check_output(tmp_path, "tiny", None)


def test_full_disk_is_refused_with_the_estimate(tmp_path: Path) -> None:
    """A petabyte of parameters fits no disk: said before the export, with both numbers."""
    with pytest.raises(BuildError, match=r"takes about [\d.]+ GiB, and .* has [\d.]+ GiB free"):
        check_disk(tmp_path / "not" / "there", FACTS, RECIPES["int8"])


def test_engine_estimate_follows_the_recipe() -> None:
    """An estimate at 4 bytes a weight would refuse int8 engines that fit."""
    sizes = [engine_bytes(FACTS, RECIPES[name]) / FACTS.num_parameters for name in ("fp32", "int8", "q4_1", "int4")]
    assert sizes[0] == pytest.approx(4, rel=0.01)
    assert sizes[1] == pytest.approx(1.125, rel=0.05)
    assert sizes[1] >= sizes[2] >= sizes[3]


def test_engine_estimate_knows_how_embeddings_are_stored() -> None:
    """One that no matmul reads has 8 bits beside 4-bit layers: half of a small model with a large vocabulary."""
    half = replace(FACTS, num_lookup_parameters=FACTS.num_parameters // 2)
    sizes = {name: engine_bytes(half, RECIPES[name]) / FACTS.num_parameters for name in ("fp32", "int8")}
    assert sizes == pytest.approx({"fp32": 4, "int8": (1.0625 + 1.125) / 2}, rel=0.01)


def test_rebuild_command_says_what_was_asked() -> None:
    """The command in the manifest builds the same engine on another host: every option that matters, quoted."""
    options = BuildOptions(
        "my model", Path("out dir"), name="m", recipe="fp32", kv_dtype="bf16", block_size=16, max_model_len=99,
        max_num_seqs=8, max_num_batched_tokens=77, threads=3, tune=False, verify=False, allow_unverified=True,
    )  # fmt: skip
    assert options.rebuild_command() == (
        "castline build 'my model' --target cpu --output 'out dir' --name m --recipe fp32 --kv-dtype bf16 "
        "--block-size 16 --max-model-len 99 --max-num-seqs 8 --max-num-batched-tokens 77 --threads 3 "
        "--no-tune --no-verify --allow-unverified"
    )
    assert BuildOptions("demo", Path("e"), recipe="int8").rebuild_command().endswith("--recipe int8")
    assert BuildOptions("demo", Path("e")).rebuild_command() == "castline build demo --target cpu --output e"


def test_auto_kv_dtype_and_lengths() -> None:
    """auto means int8 on a CPU; no length past the model's positions; long models are capped unless asked."""
    options = BuildOptions("demo", Path("e"))
    assert options.resolved_kv_dtype == "int8"
    assert BuildOptions("demo", Path("e"), kv_dtype="fp8").resolved_kv_dtype == "fp8"
    assert options.resolve_max_model_len(8192) == 8192
    assert options.resolve_max_model_len(1_000_000) == 32768
    assert BuildOptions("demo", Path("e"), max_model_len=100_000).resolve_max_model_len(1_000_000) == 100_000
    with pytest.raises(BuildError, match=r"--max-model-len 9000 is over the model's 8192 positions; use at most 8192"):
        BuildOptions("demo", Path("e"), max_model_len=9000).resolve_max_model_len(8192)
