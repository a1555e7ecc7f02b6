"""How many tokens the server guessed ahead (speculation), from its Prometheus counters: castline's, or vLLM's."""

import re
from dataclasses import dataclass

from castline.server.bench.client import Client
from castline.server.bench.connection import Disconnected

COUNTERS = (
    (b"castline:spec_drafted_tokens_total", b"castline:spec_accepted_tokens_total"),
    (b"vllm:spec_decode_num_draft_tokens_total", b"vllm:spec_decode_num_accepted_tokens_total"),
)


@dataclass(frozen=True, slots=True)
class Guesses:
    """Since the server's start; a point's own are the difference of two."""

    drafted: int
    accepted: int

    def since(self, earlier: "Guesses") -> "Guesses":
        return Guesses(self.drafted - earlier.drafted, self.accepted - earlier.accepted)


async def read_guesses(client: Client) -> Guesses | None:
    """The counters now; None where the server has none, or does not show them."""
    try:
        status, body = await client.get("/metrics")
    except (TimeoutError, OSError, Disconnected):
        return None
    return parse(body) if status == 200 else None


def parse(exposition: bytes) -> Guesses | None:
    """Adds up the series of each counter, one a model."""
    for drafted, accepted in COUNTERS:
        totals = [re.findall(rb"^%s(?:\{.*\})? ([\d.e+]+)" % name, exposition, re.M) for name in (drafted, accepted)]
        if all(totals):
            return Guesses(*(int(sum(map(float, values))) for values in totals))
    return None
