"""Checks castline's GPU kernels on the GPU of this machine, times them, runs the demo, and prints one table.

python tests/gpu/run.py [--quick] [--output FILE.md] [--kernels DIR]

Works from a checkout with castline installed (`pip install '.[build-gpu]'`; `[tensorrt]` beside it for data-centre
GPUs). Meant to take less than 8 minutes, and never timed on a GPU. Exit code 1: something failed; 2: there is no GPU to
check.

Where Triton cannot be installed beside the GPU, compile on another machine and bring the folder:

python tests/gpu/run.py --compile-only --sku h200 --kernels DIR
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from castline.engines.errors import CastlineError
from castline.engines.sku import load_sku
from gpu_checks import attention, end_to_end, sampling
from gpu_checks.cases import kernel_cases, timed_attributes
from gpu_checks.machine import GpuDriver, Machine
from gpu_checks.store import KernelStore, NotRun
from gpu_checks.table import Row, render

NO_GPU = 2
MOST_JOBS = 12
"""Processes that compile: each wants half a gigabyte."""


def checks(machine: Machine, store: KernelStore, quick: bool) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """(title, what runs it), the cheap and telling ones first."""
    for case in kernel_cases(quick):
        yield case.name, lambda case=case: attention.check(machine, store, case)
    yield "sampling", lambda: sampling.check(machine, store)
    yield "CUDA graph", lambda: attention.check_graph(machine, store)
    yield "attention kernels, timed", lambda: attention.time_kernels(machine, store)
    yield "demo, end to end", lambda: end_to_end.check(machine.sku, quick)


def run(
    driver: GpuDriver, home: Path, quick: bool, say: Callable[[str], None] = print, jobs: int = 1, **sizes: int
) -> tuple[str, bool]:
    """(the table, whether there were checks and all passed). One that breaks failed, and the others still run."""
    machine = Machine(driver, quick, **sizes)
    facts = machine.facts()  # now: after an illegal access the driver answers nothing
    rows: list[Row] = []
    store = KernelStore(home, driver.compute_capability, machine.sku)
    compile_ahead(store, jobs, quick, say)
    for title, check in checks(machine, store, quick):
        began = time.monotonic()
        found = guarded(title, check)
        rows += found
        bad = [row for row in found if row.failed]
        verdict = "FAIL" if bad else f"not run: {found[0].not_run}" if found and found[0].not_run else "ok"
        say(f"{time.monotonic() - began:6.1f} s  {title}: {verdict}")
    rows += guarded("device", lambda: closed(machine))
    passed = any(row.error is not None for row in rows) and not any(row.failed for row in rows)
    return render(facts, rows, machine.copy_gb_per_s), passed


def closed(machine: Machine) -> list[Row]:
    machine.close()
    return []


def guarded(title: str, check: Callable[[], list[Row]]) -> list[Row]:
    try:
        return check()
    except NotRun as reason:
        return [Row(title, "", not_run=str(reason))]
    except Exception as error:
        traceback.print_exc()
        return [Row(title, f"{type(error).__name__}: {error}", float("nan"), 0.0)]


def compile_ahead(store: KernelStore, jobs: int, quick: bool, say: Callable[[str], None]) -> None:
    """Every kernel of a run, in processes side by side; what fails fails again where it is checked."""
    began = time.monotonic()
    wanted = [(case.attributes, case.activations) for case in kernel_cases(quick)]
    wanted += [(a, "fp16") for a in timed_attributes(quick)]
    failures = store.compile_ahead(wanted, sampling.BLOCK_SIZE, jobs)
    say(f"{time.monotonic() - began:6.1f} s  kernels compiled in {jobs} processes, {len(failures)} failures")
    for failure in failures:
        say(f"          {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases: a minute")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="where the table goes besides the screen")
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="compiled kernels: read, and what is missing added")
    parser.add_argument("--compile-only", action="store_true", help="fill --kernels for --sku, and run nothing")
    parser.add_argument("--sku", help="of --compile-only")
    parser.add_argument("--device", type=int, default=0, help="which GPU")
    given = parser.parse_args()
    jobs = min(os.cpu_count() or 1, MOST_JOBS)
    if given.compile_only:
        if given.sku is None or given.kernels is None:
            parser.error("--compile-only needs --sku and --kernels")
        sku = load_sku(given.sku)
        major, minor = map(int, sku.compute_capability.split("."))
        compile_ahead(KernelStore(given.kernels, (major, minor), sku.name), jobs, given.quick, print)
        return 0
    from castline.plugins.tensorrt.cuda_driver import CudaDriver

    try:
        driver = CudaDriver(given.device)
    except CastlineError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return NO_GPU
    with tempfile.TemporaryDirectory() as made:
        table, passed = run(driver, given.kernels or Path(made), given.quick, jobs=jobs)
    print(table)
    if given.output is not None:
        given.output.write_text(table, encoding="utf-8")
    driver.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
