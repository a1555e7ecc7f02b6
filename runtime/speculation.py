"""Decides which guesses are worth computing. Plain Python: fed with what steps cost and what became of guesses.

A guess of k tokens adds k tokens to a step and gives, besides the token that the step gives anyway, as many as the
model would have chosen itself. With r the chance that one more token is right, the j-th counts with r^j. Tokens are
added while each brings at least as many tokens a second as the step has without it. So a lone sequence, for which more
tokens are almost free, guesses at every chance, and in a batch whose cost is its tokens only near-certain guesses pay.

r is learned by the length of the match, for all texts and, on top of that, for each. A guess that is not worth trying
fades what is known against it, so that it is tried again some time: a text may have begun to repeat itself.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Parts
from dataclasses import dataclass, field

from msgspec import structs

from castline.runtime.client import EffectiveLimits
from castline.runtime.decodes import Decodes
from castline.runtime.kv_manager import KvManager
from castline.runtime.plan import ScheduledSequence
from castline.runtime.prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH, PromptLookup
from castline.runtime.sequence import Sequence
from castline.runtime.step_costs import StepCosts

_FIRST_RATES = (0.6, 0.7, 0.75, 0.8, 0.8, 0.8, 0.95)
"""By length of the match, from SHORTEST_MATCH: chat, summaries, code and stories of a small chat model."""
_HOPELESS = 0.97
"""No guess is held to be better than this."""
_TEXT_WEIGHT, _TEXT_FADE = 4.0, 0.9
"""What all texts have shown counts as so many tries of one text; a text's own tries fade by this at each."""
_ALL_WEIGHT, _ALL_FADE = 16.0, 0.99
"""The same of _FIRST_RATES and the tries of all texts."""
_PROBE_STEPS = 256
"""One step of so many takes every guess, so that the cost of the tokens is known when it has changed."""

assert len(_FIRST_RATES) == LONGEST_MATCH - SHORTEST_MATCH + 1


class AcceptanceRates:
    """How many of the guessed tokens that were put to the model were right, by length of the match, fading."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = [0.0] * len(_FIRST_RATES)
        self._tried = [0.0] * len(_FIRST_RATES)

    def rate(self, match: int, prior: float, weight: float) -> float:
        place = match - SHORTEST_MATCH
        return (self._right[place] + weight * prior) / (self._tried[place] + weight)

    def add(self, match: int, right: int, wrong: int, fade: float) -> None:
        place = match - SHORTEST_MATCH
        self._right[place] = self._right[place] * fade + right
        self._tried[place] = self._tried[place] * fade + right + wrong


@dataclass(slots=True, eq=False)
class TextDrafts:
    """What speculation keeps of one text."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    match: int = SHORTEST_MATCH
    """Of the latest guess."""


def max_step_drafts(limits: EffectiveLimits) -> int:
    """Guessed tokens of one step, all sequences together: it bounds the rows of logits."""
    return max(limits.max_num_seqs, limits.max_drafts) if limits.max_drafts else 0


class Speculation:
    """One an engine. Guesses for each sequence at most ``limits.max_drafts`` tokens a step."""

    def __init__(self, limits: EffectiveLimits, step_seconds: Mapping[int, float] | None = None) -> None:
        self.costs = StepCosts()
        """To be told what steps take. *step_seconds* is what is known before the first: seconds by number of tokens."""
        for num_tokens, seconds in (step_seconds or {}).items():
            self.costs.observe(num_tokens, seconds)
        self._max_drafts = limits.max_drafts
        self._max_step_drafts = max_step_drafts(limits)
        self._rates = AcceptanceRates()
        self._num_steps = 0
        self._slope = 0.0
        """Cost of one more token in this step, as a share of the step."""
        self._num_decodes = 1

    def extend(
        self, plan: Parts[ScheduledSequence], sequences: Mapping[int, Sequence], kv: KvManager, budget: int
    ) -> Parts[ScheduledSequence]:
        """*plan* with guesses for those that decode, while *budget* tokens and the free blocks last; itself without.

        Each step begins with another sequence, so that all get their turn where not all can.
        """
        budget = min(budget, self._max_step_drafts)
        if budget == 0 or not self._can_pay(plan):
            return plan
        extended: dict[int, ScheduledSequence] = {}
        for offset in range(len(plan)):
            place = (self._num_steps + offset) % len(plan)
            part = plan[place]
            if not part.samples or len(part.token_ids) > 1:
                continue
            seq = sequences[part.seq_id]
            # The step samples one token besides the guesses, and the last token of a sequence is never computed.
            drafts = self.propose(seq, min(budget, seq.max_len - seq.num_tokens - 1))
            if drafts and (drafts := drafts[: kv.reserve_more(seq, 1, len(drafts))]):
                tokens = part.token_ids + drafts
                extended[place] = structs.replace(
                    part, token_ids=tokens, block_ids=seq.block_ids, num_drafts=len(drafts)
                )
                budget -= len(drafts)
                if budget == 0:
                    break
        return tuple(extended.get(place, part) for place, part in enumerate(plan)) if extended else plan

    def propose(self, seq: Sequence, limit: int) -> tuple[int, ...]:
        """Up to *limit* tokens to guess after *seq* in this step; none of them would end it."""
        if limit <= 0:
            return ()
        if seq.drafts is None:
            seq.drafts = TextDrafts()
        drafts = seq.drafts
        guess = drafts.lookup.guess(seq.token_ids, min(limit, self._max_drafts))
        if guess is None:
            return ()
        drafts.match = guess.match
        general = self._rates.rate(guess.match, _FIRST_RATES[guess.match - SHORTEST_MATCH], _ALL_WEIGHT)
        count = self._worth(drafts.rates.rate(guess.match, general, _TEXT_WEIGHT))
        if count == 0:
            drafts.rates.add(guess.match, 0, 0, _TEXT_FADE)
            self._rates.add(guess.match, 0, 0, _ALL_FADE)
            return ()
        tokens = guess.token_ids[:count]
        stops = seq.group.stop_token_ids
        return tokens[: next((place for place, token in enumerate(tokens) if token in stops), count)]

    def record(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What became of the latest guess for *seq*."""
        assert seq.drafts is not None, "only a sequence that guesses has guesses"
        wrong = int(num_accepted < num_drafts)
        seq.drafts.rates.add(seq.drafts.match, num_accepted, wrong, _TEXT_FADE)
        self._rates.add(seq.drafts.match, num_accepted, wrong, _ALL_FADE)

    def _can_pay(self, plan: Parts[ScheduledSequence]) -> bool:
        """Whether a guess in this step can be worth it at all."""
        self._num_steps += 1
        num_tokens = self._num_decodes = len(plan)
        if not isinstance(plan, Decodes):
            num_tokens = sum(len(part.token_ids) for part in plan)
            self._num_decodes = sum(part.samples for part in plan)
        # Over as many tokens again, for the difference of two near sizes would be mostly noise.
        self._slope = self.costs.relative_slope(num_tokens, num_tokens + self._max_drafts)
        if self._num_steps % _PROBE_STEPS == 0:
            self._slope = 0.0
        return self._slope * self._num_decodes < _HOPELESS

    def _worth(self, rate: float) -> int:
        """Tokens to guess where each is right with chance *rate* if those before it are."""
        expected, chance, count = float(self._num_decodes), rate, 0
        while count < self._max_drafts and chance * (1 + self._slope * count) >= self._slope * expected:
            expected += chance
            chance *= rate
            count += 1
        return count
