"""Where the kernels come from: compiled for the GPU when they are asked for, or compiled before, elsewhere."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from castline.engines.kernel_choices import kernel_choices
from castline.plugins.contract import AttentionAttributes
from castline.plugins.tensorrt.compile import Compiled, KernelCompiler, kernel_set
from castline.plugins.tensorrt.kernel_set import (
    KERNELS_INDEX,
    KernelSet,
    attributes_key,
    read_kernel_set,
    write_kernel_set,
)

VOCAB_SIZE = 49_152
"""Of the sampler's kernels: the demo's."""


class NotRun(Exception):
    """A check that this machine lacks something for."""


class KernelStore:
    """Folders of kernels under *home*, one for each set of attributes."""

    def __init__(self, home: Path, compute_capability: tuple[int, int], sku: str = "") -> None:
        self._home, self._capability = home, compute_capability
        self._choices = kernel_choices(sku)

    def attention(self, a: AttentionAttributes, activations: str) -> tuple[Path, KernelSet]:
        from castline.builder.tensorrt.kernel_shapes import attention_kernels

        directory = self._home / f"{activations}-{attributes_key(a)}"
        return self._get(
            directory, lambda: attention_kernels(KernelCompiler(self._capability, activations), self._choices, a)
        )

    def sampling(self, block_size: int, vocab_size: int = VOCAB_SIZE) -> tuple[Path, KernelSet]:
        from castline.builder.tensorrt.kernel_shapes import sampling_kernels

        directory = self._home / f"sampling-{vocab_size}-{block_size}"
        compiler = KernelCompiler(self._capability, "fp16")
        return self._get(directory, lambda: sampling_kernels(compiler, self._choices, vocab_size, block_size))

    def compile_ahead(
        self, attention: Sequence[tuple[AttentionAttributes, str]], block_size: int, jobs: int
    ) -> list[str]:
        """Fills the store in *jobs* processes, where there is a compiler; what failed, in words."""
        if find_spec("triton") is None:
            return []
        spawn = get_context("spawn")  # a forked child would share the parent's context on the GPU
        with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            made = [pool.submit(self.attention, a, activations) for a, activations in dict.fromkeys(attention)]
            made.append(pool.submit(self.sampling, block_size))
            return [str(error) for one in made if (error := one.exception()) is not None]

    def _get(self, directory: Path, make: Callable[[], list[Compiled]]) -> tuple[Path, KernelSet]:
        if not (directory / KERNELS_INDEX).is_file():
            self._write(directory, make)
        kernels = read_kernel_set(directory)
        wanted = "{}.{}".format(*self._capability)
        if kernels.compute_capability != wanted:
            raise NotRun(f"kernels of {directory} are for {kernels.compute_capability}, this GPU has {wanted}")
        return directory, kernels

    def _write(self, directory: Path, make: Callable[[], list[Compiled]]) -> None:
        if find_spec("triton") is None:
            raise NotRun(f"Triton is not installed, and there is no {directory.name} in --kernels {self._home}")
        compiled = make()
        directory.mkdir(parents=True, exist_ok=True)
        for one in compiled:
            (directory / one.spec.cubin).write_bytes(one.cubin)
        write_kernel_set(directory, kernel_set(self._capability, compiled))
