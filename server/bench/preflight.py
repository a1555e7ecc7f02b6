"""Before anything is measured: which model, which fields the server takes, and how long its tokens are."""

import asyncio
from dataclasses import dataclass, replace
from random import Random

import msgspec

from castline.server.bench.client import Client, RequestRecord, connect_error, is_own_timeout
from castline.server.bench.connection import Disconnected
from castline.server.bench.errors import BenchError
from castline.server.bench.prompts import Calibration, calibrate, words
from castline.server.bench.protocol import BodyOptions, ModelList, RequestSpec, error_text
from castline.server.bench.settings import Settings

PROBE_WORDS = (16, 128)
PROBE_OUTPUT_TOKENS = 4
_REFUSED = ("http 400", "http 422")


@dataclass(frozen=True, slots=True)
class Prepared:
    options: BodyOptions
    calibration: Calibration


async def prepare(client: Client, settings: Settings) -> Prepared:
    """Raises BenchError, with the cure, where the server cannot be measured as asked."""
    model = settings.model or await first_model(client)
    options = BodyOptions(model, settings.endpoint, settings.temperature, ignore_eos=settings.ignore_eos)
    options, short = await _negotiate(client, options, settings.seed)
    if settings.dataset is not None or short.prompt_tokens is None:
        return Prepared(options, Calibration())
    long = await _probe(client, options, PROBE_WORDS[1], settings.seed)
    if long.failure is not None or long.prompt_tokens is None:
        return Prepared(options, Calibration())
    measured = calibrate((PROBE_WORDS[0], short.prompt_tokens), (PROBE_WORDS[1], long.prompt_tokens))
    return Prepared(options, measured)


async def first_model(client: Client) -> str:
    """The first id of /v1/models."""
    try:
        status, body = await client.get("/v1/models")
    except OSError as error:
        if is_own_timeout(error):
            raise BenchError(f"{client.address.authority} did not answer within {client.timeout_s:g} s") from None
        raise BenchError(f"{connect_error(error, client.address)}; start the server, or give its --url") from None
    except Disconnected as error:
        raise BenchError(f"{client.address.authority}: {error}; is --url the address of an HTTP server?") from None
    if status in (401, 403):
        raise BenchError(f"the server wants a key (http {status}: {error_text(body)}); give it with --api-key")
    if status != 200:
        raise BenchError(f"/v1/models answers http {status}: {error_text(body)}; name the model with --model")
    try:
        models = msgspec.json.decode(body, type=ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"/v1/models is not a list of models ({error}); name the model with --model") from None
    if not models:
        raise BenchError("/v1/models lists no model; name one with --model")
    return models[0].id


async def _negotiate(client: Client, options: BodyOptions, seed: int) -> tuple[BodyOptions, RequestRecord]:
    """The options the server takes, and the probe that shows it. A refused field is found by leaving it out."""
    record = await _probe(client, options, PROBE_WORDS[0], seed)
    if record.failure is None:
        return options, record
    if record.failure.kind in _REFUSED:
        without_usage = replace(options, include_usage=False)
        retried = await _probe(client, without_usage, PROBE_WORDS[0], seed)
        if retried.failure is None:
            return without_usage, retried
        for include_usage in (True, False):
            without_eos = replace(options, ignore_eos=False, include_usage=include_usage)
            if options.ignore_eos and (await _probe(client, without_eos, PROBE_WORDS[0], seed)).failure is None:
                raise BenchError(
                    f"the server refuses the field ignore_eos ({record.failure.message}); "
                    "leave it out with --no-ignore-eos: answers then end where the model ends them"
                )
    raise BenchError(
        f"the first request failed ({record.failure.kind}): {record.failure.message}{_cure(record, options)}"
    )


def _cure(record: RequestRecord, options: BodyOptions) -> str:
    assert record.failure is not None
    other = "chat" if options.endpoint == "completions" else "completions"
    cures = {
        "connect": "; start the server, or give its --url",
        "http 401": "; give the key with --api-key",
        "http 403": "; give the key with --api-key",
        "http 404": f"; check --model (asked for {options.model!r}), or try --endpoint {other}",
    }
    return cures.get(record.failure.kind, "")


async def _probe(client: Client, options: BodyOptions, num_words: int, seed: int) -> RequestRecord:
    prompt = words(num_words, Random(f"castline bench {seed} probe {num_words}"))
    now = asyncio.get_running_loop().time()
    return await client.send(0, RequestSpec(PROBE_OUTPUT_TOKENS, prompt), options, now)
