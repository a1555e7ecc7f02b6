"""MessageStream over a call whose writes end when the test says so."""

import asyncio
from typing import Any, cast

import pytest
from grpc.aio import ServicerContext

from castline.server.grpc_stream import MessageStream


class Call:
    """As much of a ServicerContext as a MessageStream uses."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.left: list[asyncio.Future[None]] = []

    async def write(self, message: str) -> None:
        self.begun.append(message)
        self.left.append(asyncio.get_running_loop().create_future())
        await self.left[-1]


def stream_over(call: Call) -> MessageStream:
    return MessageStream(cast(ServicerContext, call))


async def settle() -> None:
    """Until every task and callback has had its turns."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_message_at_a_time_in_the_order_of_the_calls() -> None:
    """Prevents two writes at once, which grpc.aio does not allow, and tokens that overtake each other."""

    async def scenario() -> None:
        call = Call()
        stream = stream_over(call)
        assert stream.can_send
        stream.send_now("a")
        assert call.begun == ["a"], "no task and no turn of the loop before it"
        assert not stream.can_send
        following = asyncio.create_task(cast(Any, stream.send("b")))
        await settle()
        assert call.begun == ["a"]
        call.left[0].set_result(None)
        await settle()
        assert call.begun == ["a", "b"]
        assert not following.done()
        call.left[1].set_result(None)
        await following
        assert stream.can_send
        stream.send_now("c")
        call.left[2].set_result(None)
        await stream.flush()
        assert stream.can_send

    asyncio.run(scenario())


def test_a_write_that_fails_is_told_to_the_task_that_answers() -> None:
    """Prevents a call that goes on, or ends well, though one of its messages was lost."""

    async def scenario() -> None:
        call = Call()
        stream = stream_over(call)
        stream.send_now("a")
        call.left[0].set_exception(ConnectionError("gone"))
        await settle()
        assert not stream.can_send
        with pytest.raises(ConnectionError):
            await stream.send("b")
        with pytest.raises(ConnectionError):
            await stream.flush()
        assert call.begun == ["a"]

    asyncio.run(scenario())


def test_the_end_of_a_call_that_waits_does_not_end_the_write() -> None:
    """Prevents an exception out of the event loop when a cancelled call's last message leaves after all."""

    async def scenario() -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        call = Call()
        stream = stream_over(call)
        stream.send_now("a")
        waiting = asyncio.create_task(cast(Any, stream.flush()))
        await settle()
        waiting.cancel()
        await settle()
        call.left[0].set_result(None)
        await settle()
        assert stream.can_send
        return faults

    assert asyncio.run(scenario()) == []
