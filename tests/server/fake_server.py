"""A process that serves the fake engine with ``serve``, for tests of signals. SIGUSR1 lets held streams go on.

Prints "listening HTTP GRPC", then "ready". Options are a JSON object in the only argument.
"""

import asyncio
import json
import logging
import signal
import sys

from conftest import FakeEngine  # beside this file, which is run as a script

from castline.engines.errors import EngineError
from castline.runtime.client import EngineClient, Phase
from castline.server.app import serve
from castline.server.event_loop import run
from castline.server.options import ServerOptions


async def main(options: dict[str, object]) -> None:
    engine = FakeEngine()
    engine.hold_after = options.get("hold_after")  # type: ignore[assignment]
    engine.hangs_in_drain = bool(options.get("hangs_in_drain"))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, engine.gate.set)

    async def open_engine() -> EngineClient:
        if options.get("never_opens"):
            await asyncio.Event().wait()
        if options.get("does_not_load"):
            raise EngineError("the bundle is damaged")
        return engine

    def fail() -> None:
        engine.phase = Phase.FAILED

    loop.add_signal_handler(signal.SIGUSR2, fail)
    await serve(
        open_engine,
        ServerOptions(http_port=0, grpc_port=0, drain_timeout_s=float(str(options.get("drain_timeout_s", 60)))),
        on_listening=lambda endpoints: print("listening", endpoints.http, endpoints.grpc, flush=True),
        on_ready=lambda model, endpoints: print("ready", flush=True),
    )


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    try:
        run(main(json.loads(sys.argv[1])))
    except EngineError as error:
        sys.exit(f"castline: {error}")
