"""A closed loop over castline's gRPC door, in a process of its own.

``python -m benchmarks.grpc_client ADDRESS``: a job of `benchmarks.drivers.protocol` on standard input, its tracks on
standard output. All streams share one connection, as those of one user's process do.
"""

import asyncio
import json
import sys
import time
from typing import Any

import grpc

from benchmarks.drivers.protocol import Job, Request, Track, encode_tracks
from castline.server.proto.castline_pb2 import GenerateRequest, SamplingParams, TokenIds
from castline.server.proto.castline_pb2_grpc import InferenceStub


async def run(address: str, job: Job) -> dict[str, Any]:
    """Raises grpc.RpcError where a request fails, TimeoutError where the job takes too long."""
    tracks: dict[int, Track] = {}
    waiting = iter(enumerate(job.requests))
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(job.limit_s):
        await channel.channel_ready()
        stub = InferenceStub(channel)  # type: ignore[no-untyped-call]

        async def work() -> None:
            for index, request in waiting:
                tracks[index] = await _stream(stub, request)

        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(job.concurrency):
                group.create_task(work())
    return encode_tracks(begun, [tracks[index] for index in sorted(tracks)], None)


async def _stream(stub: Any, request: Request) -> Track:
    params = SamplingParams(max_tokens=request.max_tokens, temperature=0, ignore_eos=True)
    now = time.monotonic()
    track = Track(due=now, started=now)
    async for message in stub.Generate(GenerateRequest(token_ids=TokenIds(ids=request.prompt), params=params)):
        if message.token_ids:
            track.add(time.monotonic(), len(message.token_ids))
    return track


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], Job.decode(json.load(sys.stdin))))))
