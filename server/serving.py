"""What both transports share: the engine once it has loaded, the name it is served under, and its health.

Live: the process is worth keeping; only an engine that has failed for good is not. Ready: a request sent now would be
answered. The engine says when it is stalled; a server that starts or drains is not ready whatever the engine says.
"""

import hashlib
import time
from dataclasses import dataclass

import msgspec

from castline.engines.errors import ErrorCode, RequestError
from castline.engines.manifest import Manifest
from castline.runtime.client import EngineClient, Health, Phase
from castline.server.errors import ServerCode, ServerError
from castline.server.metered import MeteredEngine
from castline.server.metrics import Metrics
from castline.server.openai_logprobs import TokenTexts

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Most bytes of an HTTP body and of a gRPC message."""


def fingerprint(manifest: Manifest) -> str:
    """OpenAI's system_fingerprint: the same while the engine and castline are the same."""
    identity = msgspec.json.encode((manifest.castline_version, manifest.files), order="sorted")
    return "fp_" + hashlib.sha256(identity).hexdigest()[:12]


@dataclass(frozen=True)
class ServedModel:
    """One engine as it is served."""

    name: str
    created: int
    """Unix time at which it was loaded."""
    fingerprint: str
    engine: MeteredEngine
    metrics: Metrics
    token_texts: TokenTexts

    def check_name(self, asked: str | None, *, field: str = "model") -> None:
        """Raises RequestError with MODEL_NOT_FOUND unless *asked* is the served name or left out."""
        if asked is not None and asked != self.name:
            raise RequestError(
                f"the model {asked!r} is not served here; {self.name!r} is", field=field, code=ErrorCode.MODEL_NOT_FOUND
            )


class Serving:
    """Filled once by ``open``; until then every request is told that the server is not ready."""

    def __init__(self) -> None:
        self._model: ServedModel | None = None
        self._draining = False

    def open(self, engine: EngineClient, model_name: str | None) -> ServedModel:
        """The engine has loaded. It is served as *model_name*, or under the name in its manifest."""
        name = model_name or engine.manifest.model.name
        metrics = Metrics(engine.stats, engine.stream_interval, name)
        metered = MeteredEngine(engine, metrics)
        self._model = ServedModel(
            name=name,
            created=int(time.time()),
            fingerprint=fingerprint(engine.manifest),
            engine=metered,
            metrics=metrics,
            token_texts=TokenTexts(engine.tokenizer),
        )
        return self._model

    def begin_drain(self) -> None:
        """Not ready from now on."""
        self._draining = True

    @property
    def is_open(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        """Raises ServerError with NOT_READY before the engine has loaded."""
        if self._model is None:
            raise ServerError(ServerCode.NOT_READY, self.ready().reason)
        return self._model

    def live(self) -> Health:
        if self._model is None:
            return Health(Phase.STARTING, "starting: the engine is loading")
        return self._model.engine.health()

    def ready(self) -> Health:
        live = self.live()
        if self._draining and live.phase is not Phase.FAILED:
            return Health(Phase.DRAINING, "draining: running requests finish, new ones are refused")
        return live
