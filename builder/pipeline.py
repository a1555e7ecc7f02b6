"""A build from end to end: the stages in order, each a function from one plain value to the next.

Everything that reaches disk is written into the bundle's draft, which becomes the bundle by one rename at the end.
The kernels are tuned on the fused graph, before the weights are quantised: a kernel decides how they are packed.
"""

import resource
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx_ir as ir

from castline import __version__
from castline.builder.autotune import TuningChoices, TuningRequest, autotune, count_cases, default_choices
from castline.builder.bench import CachedBench, OrtBench
from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.cores import physical_cores
from castline.builder.export import export_model
from castline.builder.lower import lower_cpu, save_graph
from castline.builder.options import BuildOptions
from castline.builder.passes import run_passes
from castline.builder.preflight import check_disk, check_output
from castline.builder.progress import BuildLog
from castline.builder.quantize import matmul_shapes, quantize
from castline.builder.recipes import Recipe
from castline.builder.recipes import recipe as find_recipe
from castline.builder.report import REPORT_NAME, FusionCount, ReportFacts, render_report
from castline.builder.torch_reference import torch_reference
from castline.builder.tuning_cache import TuningCache, TuningEnvironment, default_cache_dir
from castline.builder.verify import ParityReport, judge, measure, require_verified, shipped_case
from castline.engines.bundle import write_bundle
from castline.engines.capacity import kv_block_bytes
from castline.engines.host import detect_host
from castline.engines.manifest import SCHEMA_VERSION, Host, Limits, Manifest, ModelFacts, Precision
from castline.plugins.cpu.library import describe
from castline.plugins.cpu.session import CpuSession, SessionOptions

TOOLS = ("onnxruntime", "numpy", "torch", "transformers", "onnx", "onnxscript", "onnx-ir", "tokenizers", "gguf")
