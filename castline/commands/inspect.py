"""`castline inspect`: what is inside an engine bundle. Needs no torch and loads no weights."""

from collections.abc import Iterator
from pathlib import Path

import click

from castline.engines.capacity import kv_block_bytes
from castline.engines.check import verify_files
from castline.engines.manifest import Manifest, Parity, read_manifest
from castline.engines.repository import MANIFEST_NAME, find_bundle

Section = tuple[str, list[tuple[str, str]]]
"""(title, [(label, value)])."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--model", help="Which model, where PATH is a repository with several.")
@click.option("--version", type=click.IntRange(min=1), help="Which version of the model; the latest without it.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as it is stored.")
@click.option("--verify-files", "verify", is_flag=True, help="Read every file again and compare its sha256.")
def command(path: Path, model: str | None, version: int | None, as_json: bool, verify: bool) -> None:
    """Print what is inside an engine bundle.

    PATH is a bundle, a model's directory, or a repository (the --output of `castline build`).
    """
    bundle = find_bundle(path, model, version)
    manifest = read_manifest(bundle)
    if verify:
        verify_files(bundle, manifest)
    if as_json:
        click.echo((bundle / MANIFEST_NAME).read_text(encoding="utf-8"), nl=False)
        return
    click.echo(str(bundle))
    for title, rows in sections(manifest):
        click.echo(f"\n{title}")
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            click.echo(f"  {label:<{width}}  {value}")
    if verify:
        click.echo(f"\nall {len(manifest.files)} files are as they were built")


def sections(manifest: Manifest) -> Iterator[Section]:
    """The manifest in the order a reader asks for it."""
    yield "model", _model_rows(manifest)
    yield "engine", _engine_rows(manifest)
    yield "limits", _limit_rows(manifest)
    yield "parity", _parity_rows(manifest.parity)
    yield "tuning", _tuning_rows(manifest)
    yield "built for", _host_rows(manifest)
    yield "files", [(name, f"{_size(file.size):>10}  {file.sha256[:16]}") for name, file in manifest.files.items()]
    yield (
        "built",
        [
            ("when", f"{manifest.created} by castline {manifest.castline_version}"),
            ("tools", ", ".join(f"{tool} {version}" for tool, version in manifest.tool_versions.items())),
            ("again", manifest.rebuild_command),
        ],
    )


def _model_rows(manifest: Manifest) -> list[tuple[str, str]]:
    model = manifest.model
    grouping = f"{model.num_heads} heads over {model.num_kv_heads} KV heads of {model.head_dim}"
    rows = [
        ("name", model.name),
        ("architecture", f"{model.architecture}, {model.num_parameters / 1e6:,.1f} M parameters"),
        ("source", model.source),
        ("layers", f"{model.num_layers}, hidden {model.hidden_size}, {grouping}"),
        ("vocabulary", f"{model.vocab_size:,} tokens; ends at {', '.join(map(str, model.eos_token_ids)) or 'none'}"),
    ]
    if any(model.windows):
        windowed = [window for window in model.windows if window]
        rows.append(("sliding window", f"{max(windowed):,} tokens in {len(windowed)} of {model.num_layers} layers"))
    return rows


def _engine_rows(manifest: Manifest) -> list[tuple[str, str]]:
    model, precision = manifest.model, manifest.precision
    block_size = manifest.limits.block_size
    per_layer = kv_block_bytes(model.num_kv_heads, model.head_dim, block_size, precision.kv_dtype)
    return [
        ("weights", precision.recipe),
        ("KV blocks", f"{precision.kv_dtype}, {block_size} tokens in {per_layer * model.num_layers:,} bytes"),
        ("logits", precision.logits_dtype),
        ("graph", manifest.graph_file),
        ("size", _size(sum(file.size for file in manifest.files.values()))),
    ]


def _limit_rows(manifest: Manifest) -> list[tuple[str, str]]:
    limits = manifest.limits
    return [
        (
            "max_model_len",
            f"{limits.max_model_len:,} tokens a sequence (the model has {manifest.model.max_position:,})",
        ),
        ("max_num_seqs", f"{limits.max_num_seqs} sequences a step"),
        ("max_num_batched_tokens", f"{limits.max_num_batched_tokens} tokens a step"),
    ]


def _parity_rows(parity: Parity | None) -> list[tuple[str, str]]:
    if parity is None:
        return [("verified", "no: built with --no-verify")]
    return [
        ("verified", f"{'yes' if parity.verified else 'NO'}, over {parity.num_tokens:,} tokens"),
        ("KL divergence", f"mean {parity.mean_kl:.3g} (at most {parity.tolerance_mean_kl:g}), max {parity.max_kl:.3g}"),
        ("top-1 agreement", f"{parity.top1_agreement:.2%} (at least {parity.tolerance_top1:.0%})"),
        ("perplexity", f"{parity.perplexity:.3f} (reference {parity.reference_perplexity:.3f})"),
        ("greedy match", f"{parity.greedy_match:.1%}"),
    ]


def _tuning_rows(manifest: Manifest) -> list[tuple[str, str]]:
    tuning = manifest.tuning
    rows = [
        ("measured", "on the host below" if tuning.measured else "no: defaults"),
        ("threads", str(tuning.num_threads)),
    ]
    rows += [(f"attention {name}", str(value) if value else "auto") for name, value in tuning.attention.items()]
    return rows + [(f"matmul {shape}", kernel) for shape, kernel in tuning.matmul.items()]


def _host_rows(manifest: Manifest) -> list[tuple[str, str]]:
    host, plugin = manifest.host, manifest.plugin
    gpu = host.gpu
    device = f", {gpu.device_name}" if gpu and gpu.device_name else ", built with no such GPU present"
    return [
        ("target", host.target),
        *([("gpu", f"{gpu.sku}, compute capability {gpu.compute_capability}{device}")] if gpu else []),
        ("cpu", f"{host.cpu}, {host.cores} cores, {host.machine}"),
        ("isa", " ".join(host.isa) or "baseline"),
        ("plugin", f"{plugin.name} {plugin.version}, sha256 {plugin.sha256[:16]}"),
    ]


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
