"""Compiles the CPU plugin: one shared library, each instruction set in a translation unit of its own.

A source named *_amx.cpp, *_avx512fp16.cpp, *_avx512.cpp, *_avxvnni.cpp or *_avx2.cpp is compiled for that instruction
set and is called only where the host has it; every other source is compiled for the baseline, so that one library runs
on any host of the architecture.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("plugins/cpu/native")
COMMON = [
    "-std=c++17",
    "-g0",
    "-O3",
    "-ffp-contract=off",  # fused only where the code says so: the same bits whatever the surrounding template
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC 12's own avx512fintrin.h trips them
AVX512FP16 = [*AVX512, "-mavx512fp16"]
AMX = [*AVX512FP16, "-mavx512bf16", "-mgfni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
ISA_FLAGS = {
    "_avx2": AVX2,
    "_avxvnni": [*AVX2, "-mavxvnni"],
    "_avx512": AVX512,
    "_avx512fp16": AVX512FP16,
    "_amx": AMX,
}


def sources() -> list[str]:
    """Every source that this architecture can compile."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    paths = sorted(NATIVE.glob("*.cpp"))
    return [str(p) for p in paths if is_x86 or not any(p.stem.endswith(isa) for isa in ISA_FLAGS)]


class BuildPlugin(build_ext):
    """Builds a plain shared library (ONNX Runtime loads it, Python never imports it)."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / f"lib{fullname.split('.')[-1]}.so")

    def build_extension(self, ext: Extension) -> None:
        objects: list[str] = []
        for source in ext.sources:
            isa = next((flags for suffix, flags in ISA_FLAGS.items() if Path(source).stem.endswith(suffix)), [])
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, depends=ext.depends, extra_postargs=COMMON + isa
            )
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, target_lang="c++", extra_postargs=["-pthread"])


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform only: the library knows nothing of Python, so one wheel serves every version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "castline.plugins.cpu.castline_cpu",
            sources=sources(),
            depends=[str(p) for p in sorted(NATIVE.glob("*.h"))],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildPlugin, "bdist_wheel": PlatformWheel},
)
