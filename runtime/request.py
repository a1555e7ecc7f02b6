"""A request as the engine core takes it: token ids in, no text."""

from dataclasses import dataclass, field
from time import monotonic

from castline.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """Already validated and resolved: ``params.max_tokens`` is a number, the prompt fits the pool and the model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float = field(default_factory=monotonic)
    """Seconds on the monotonic clock."""
    deadline: float | None = None
    """Monotonic time after which the request is ended with DEADLINE_EXCEEDED."""
    cache_salt: str | None = None
    """Requests share prefix blocks only with requests of the same salt."""
    streams: bool = True
    """Tokens are wanted as they come. False: the first, and then all others with the end."""
