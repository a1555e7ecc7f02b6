"""`castline tune-kernels`: chooses the shapes of the GPU kernels for a SKU."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from castline.engines.errors import BuildError
from castline.engines.gpu import detect_gpu
from castline.engines.kernel_choices import (
    CHOICES_DIRECTORY,
    NOTHING_KNOWN,
    KernelChoices,
    read_kernel_choices,
    write_kernel_choices,
)
from castline.engines.sku import Sku, sku_of_device
from castline.option_types import SkuChoice

if TYPE_CHECKING:  # help needs no array library
    from castline.plugins.tensorrt.candidates import Tuned

HEAD_DIMS = (64, 128, 256)
KV_DTYPES = ("fp8", "fp16")
KERNELS = ("decode", "decode_split", "prefill", "greedy", "sample")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--sku", type=SkuChoice(), metavar="NAME", help="GPU by its file under engines/skus.  [default: this machine's]"
)
@click.option("--kernel", "kernels", type=click.Choice(KERNELS), multiple=True, help="May be repeated.  [default: all]")
@click.option(
    "--head-dim", "head_dims", type=click.Choice([str(size) for size in HEAD_DIMS]), multiple=True,
    default=("64", "128"), show_default=True, help="Of the models to serve, up to the power of two; may be repeated.",
)  # fmt: skip
@click.option(
    "--kv-dtype", "kv_dtypes", type=click.Choice(KV_DTYPES), multiple=True, default=KV_DTYPES, show_default=True,
    help="fp16 is taken for bf16 too; may be repeated.",
)  # fmt: skip
@click.option("--no-time", is_flag=True, help="Choose by the compiled kernels alone, though the GPU is here.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="What is known already is read from it, and stays where it is not tuned.  [default: engines/kernels/SKU.toml]",
)  # fmt: skip
def command(
    sku: Sku | None,
    kernels: tuple[str, ...],
    head_dims: tuple[str, ...],
    kv_dtypes: tuple[str, ...],
    no_time: bool,
    output: Path | None,
) -> None:
    """Choose the shapes of the GPU kernels for a SKU, and remember them for builds.

    Candidates are compiled, and those that spill registers or do not fit shared memory are left out. Where the GPU is
    in this machine the others are timed; elsewhere an estimate orders them, and what a GPU has timed is kept. A build
    takes what is known for its SKU, with no GPU.

    \b
    castline tune-kernels --sku rtx4090
    castline tune-kernels --head-dim 128 --kv-dtype fp8
    """
    gpu = detect_gpu()
    here = sku_of_device(gpu.device_name) if gpu is not None else None
    sku = sku if sku is not None else here
    if sku is None:
        found = f"{gpu.device_name} is not among engines/skus" if gpu is not None else "there is no GPU here"
        raise BuildError(f"--sku is missing, and {found}: name the GPU that kernels are tuned for")
    output = output if output is not None else CHOICES_DIRECTORY / f"{sku.name}.toml"
    known = read_kernel_choices(output) if output.is_file() else NOTHING_KNOWN
    # Here, so that help needs no compiler.
    from castline.builder.tensorrt.kernels import require_compiler
    from castline.builder.tensorrt.tune_kernels import KernelTuner, everything

    require_compiler()
    tuned = [one for one in everything(tuple(map(int, head_dims)), kv_dtypes) if not kernels or one.kernel in kernels]
    if here != sku or no_time:
        why = "--no-time was given" if here == sku else f"this machine has no {sku.title}"
        click.echo(f"{sku.name}: {len(tuned)} kernels, pruned and not timed: {why}")
        done = KernelTuner(sku).tune(tuned, known, click.echo)
    else:
        done = _timed(sku, tuned, known)
    write_kernel_choices(output, done)
    click.echo(f"wrote {output}")


def _timed(sku: Sku, tuned: "Sequence[Tuned]", known: KernelChoices) -> KernelChoices:
    from castline.builder.tensorrt.tune_kernels import KernelTuner
    from castline.plugins.tensorrt.cuda_driver import CudaDriver
    from castline.plugins.tensorrt.kernel_bench import KernelClock, Stopwatch

    driver = CudaDriver()
    try:
        click.echo(f"{sku.name}: {len(tuned)} kernels, timed on {driver.device_name}")
        watch = Stopwatch(driver, driver.l2_bytes)
        clock = KernelClock(driver, watch, driver.device_name, driver.multiprocessors)
        try:
            return KernelTuner(sku, clock, datetime.now(UTC).date().isoformat()).tune(tuned, known, click.echo)
        finally:
            watch.close()
    finally:
        driver.close()
