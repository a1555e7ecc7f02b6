"""Builds one plan in a process of its own: ``python -m castline.builder.tensorrt.plan_worker REQUEST ANSWER``.

TensorRT reports some failures by ending the process, and its libraries are found by the loader's path, which is read
when a process starts.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from castline.builder.tensorrt.plan_request import PlanAnswer, PlanRequest, decode_request, encode, profiles
from castline.engines.errors import EngineError
from castline.plugins.tensorrt.flavour import TensorRT, load_flavour
from castline.plugins.tensorrt.kernel_set import read_kernel_set
from castline.plugins.tensorrt.plugin import PluginHost, register_plugin


def build_plan(tensorrt: TensorRT, request: PlanRequest, log: Any) -> PlanAnswer:
    """Parses the graph, builds the plan and writes it; errors of either are in the answer, by node."""
    api, begin = tensorrt.api, time.perf_counter()
    creator = register_plugin(tensorrt, PluginHost(read_kernel_set(request.kernels), request.multiprocessors))
    builder = api.Builder(log)
    network = tensorrt.create_network(builder)
    parser = api.OnnxParser(network, log)
    if not parser.parse_from_file(str(request.graph)):
        return PlanAnswer(0.0, network.num_layers, tuple(_parser_errors(parser)), tuple(log.lines))
    config = _configure(tensorrt, builder, request)
    cache = _restore_timing_cache(tensorrt, config, request)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return PlanAnswer(0.0, network.num_layers, tuple(log.errors()), tuple(log.lines))
    request.plan.write_bytes(memoryview(plan))
    if cache is not None and request.timing_cache is not None:
        request.timing_cache.write_bytes(memoryview(config.get_timing_cache().serialize()))
    del creator
    return PlanAnswer(time.perf_counter() - begin, network.num_layers, (), tuple(log.lines))


def _configure(tensorrt: TensorRT, builder: Any, request: PlanRequest) -> Any:
    """Two profiles, aliased plugin outputs, one stream, and a log that names every layer."""
    api = tensorrt.api
    config = builder.create_builder_config()
    tensorrt.target(config, request.compute_capability)
    config.set_preview_feature(api.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.max_aux_streams = 0
    tensorrt.require_user_memory(config)
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    for shapes in profiles(request):
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            profile.set_shape(name, least, usual, most)
        if config.add_optimization_profile(profile) < 0:
            raise EngineError(f"the builder refused an optimization profile: {shapes}")
    return config


def _restore_timing_cache(tensorrt: TensorRT, config: Any, request: PlanRequest) -> Any:
    """The timings of earlier builds, where the flavour has any use for them."""
    path = request.timing_cache
    if path is None or not tensorrt.has_timing_cache:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    config.set_timing_cache(cache, False)
    return cache


def _parser_errors(parser: Any) -> Iterator[str]:
    for i in range(parser.num_errors):
        error = parser.get_error(i)
        where = f"node {error.node_name()} ({error.node_operator()}): " if error.node_name() else ""
        yield f"{where}{error.desc()}"


def _logger(tensorrt: TensorRT) -> Any:
    """Keeps every message; prints none."""
    api = tensorrt.api

    class Log(api.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self.lines.append(f"{severity.name} {message}")

        def errors(self) -> list[str]:
            """What went wrong, in the builder's words."""
            found = [line.split(" ", 1)[1] for line in self.lines if line.startswith(("ERROR ", "INTERNAL_ERROR "))]
            return found or ["the builder gave no plan and no reason"]

    return Log()


def main() -> None:
    request_path, answer_path = map(Path, sys.argv[1:3])
    request = decode_request(request_path.read_bytes())
    tensorrt = load_flavour(request.flavour)
    log = _logger(tensorrt)
    try:
        answer = build_plan(tensorrt, request, log)
    except EngineError as error:
        answer = PlanAnswer(0.0, 0, (str(error),), tuple(log.lines))
    answer_path.write_bytes(encode(answer))


if __name__ == "__main__":
    main()
