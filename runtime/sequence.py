"""One continuation of a request, and the request with all its continuations, as the scheduler keeps them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, cast

import msgspec

from castline.runtime.events import Finish, FinishReason, TokenLogprobs
from castline.runtime.lanes import Lane
from castline.runtime.prefix_cache import CachedBlock
from castline.runtime.request import Request

if TYPE_CHECKING:
    from castline.runtime.speculation import TextDrafts


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request while any of its continuations lives. The first computes the prompt; the others then fork from it."""

    request: Request
    stop_token_ids: frozenset[int]
    """Tokens that end the text: the model's EOS unless ignored, and the request's own."""
    members: dict[int, "Sequence"] = field(default_factory=dict)
    """Live continuations by index."""
    pending: list["Sequence"] = field(default_factory=list)
    """Members that wait for the prompt to be computed, in order of index."""
    cached_tokens: int | None = None
    """Prompt tokens read from the prefix cache when the request was first admitted; None before."""
    first_scheduled: float | None = None
    """When it was first admitted, on the core's clock."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token computed so far, where asked for; the first is None."""
    prompt_computed: bool = False

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt log-probabilities are still to be computed, so no prompt token may come from the cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt_token_ids)

    def fork_source(self, seq: "Sequence") -> "Sequence | None":
        """A running continuation whose blocks hold the prompt, if *seq* has generated nothing itself."""
        if len(self.members) == 1 or seq.num_tokens > seq.num_prompt:
            return None
        return next((s for s in self.members.values() if s.running and s.num_computed >= s.num_prompt), None)


@dataclass(slots=True, eq=False)
class Sequence:
    """``num_computed`` tokens have their KV in ``block_ids``; a step makes it catch up with ``num_tokens``.

    ``seq_id`` grows with arrival: the scheduler's order of age. ``max_len`` counts tokens, prompt included; the last of
    them is never computed.
    """

    seq_id: int
    index: int
    group: SequenceGroup
    token_ids: list[int]
    """Until it first runs these are the request's own, which nobody changes: see `own_tokens`."""
    max_len: int
    # What every step touches lies side by side.
    num_computed: int = 0
    started: bool = False
    """An event has been sent."""
    num_unreported: int = 0
    """The last of token_ids, which no event has had."""
    request_id: str = ""
    patience: float = 0.0
    """Report intervals that its tokens may wait; see `patience_of`."""
    block_ids: tuple[int, ...] = ()
    """Replaced, never changed, so that plans share it: a step costs nothing for each block."""
    prefix_keys: list[int] = field(default_factory=list)
    """Hash of each full block of token_ids, as far as computed."""
    cached_blocks: list[CachedBlock] = field(default_factory=list)
    """The prefix cache's view of the first blocks of block_ids."""
    cacheable: bool = True
    """False once a hash collision has cut the chain of cached blocks."""
    lane: Lane = Lane.SHORT
    running: bool = False
    in_sampler: bool = False
    drafts: "TextDrafts | None" = None
    """From its first chance to guess on; kept over preemptions."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.group.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def own_tokens(self) -> None:
        """It runs from now on, so its tokens become a list of its own: those that wait share the prompt."""
        if not isinstance(self.token_ids, list):
            self.token_ids = list(self.token_ids)

    def take_unreported(self, num_new: int = 0) -> tuple[int, ...]:
        """The tokens that no event has had, *num_new* of this step among them, for the next event."""
        count, self.num_unreported = self.num_unreported + num_new, 0
        return tuple(self.token_ids[len(self.token_ids) - count :])

    def append(self, sampled: Iterable[int]) -> tuple[tuple[int, ...], Finish | None]:
        """Appends tokens up to the one that ends the sequence. Returns those appended."""
        token_ids, stop_token_ids = self.token_ids, self.group.stop_token_ids
        taken = tuple(sampled)
        for count, token in enumerate(taken, 1):
            token_ids.append(token)
            if token in stop_token_ids and self._may_stop():
                return taken[:count], Finish(FinishReason.STOP, stop_token_id=token)
            if len(token_ids) >= self.max_len:
                return taken[:count], Finish(FinishReason.LENGTH)
        return taken, None

    def _may_stop(self) -> bool:
        return self.num_tokens - self.num_prompt >= self.group.request.params.min_tokens


class Progress(msgspec.Struct, frozen=True, gc=False):
    """What a step brought one sequence. A sequence with ``finish`` has left the scheduler."""

    seq: Sequence
    token_ids: tuple[int, ...]
    finish: Finish | None


def patience_of(request: Request) -> float:
    """How many report intervals its tokens may wait: none where each may be the last, or has more to it than an id."""
    if request.params.stop or request.params.logprobs is not None:
        return 0.0
    return 1.0 if request.streams else inf


def new_group(request: Request, stop_token_ids: frozenset[int], max_len: int, first_seq_id: int) -> SequenceGroup:
    """A request that has just come, with its n continuations; their ids count from *first_seq_id*."""
    prompt, wants_logprobs = cast("list[int]", request.prompt_token_ids), request.params.prompt_logprobs is not None
    group = SequenceGroup(request, stop_token_ids, prompt_logprobs=[None] if wants_logprobs else None)
    for index in range(request.params.n):
        seq = Sequence(first_seq_id + index, index, group, prompt, max_len)
        seq.request_id, seq.patience = request.request_id, patience_of(request)
        group.members[index] = seq
    return group
