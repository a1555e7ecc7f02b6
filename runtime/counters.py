"""What the engine core has counted since start; see castline.runtime.client.Stats."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    spec_drafted_tokens: int = 0
    spec_accepted_tokens: int = 0
    executor_s: float = 0.0
