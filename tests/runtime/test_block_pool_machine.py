"""C17: random add, append, fork, abort, evict and failed steps over blocks of sequences; invariants after each."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from castline.runtime.kv_manager import KvManager
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.sequence import Sequence, SequenceGroup

NUM_BLOCKS, BS = 12, 4


class Blocks:
    """A KvManager with a fake memory: every write goes where the tables say, every read must give the tokens back."""

    def __init__(self, hash_fn=hash) -> None:
        self.kv = KvManager(NUM_BLOCKS, BS, hash_fn=hash_fn)
        self.memory = [-1] * (NUM_BLOCKS * BS)
        self.live: list[Sequence] = []
        self.num_added = 0

    def add(self, tokens: list[int], salt: str | None = None) -> None:
        group = SequenceGroup(Request("r", tuple(tokens), SamplingParams(), cache_salt=salt), frozenset())
        seq = Sequence(self.num_added, 0, group, list(tokens), max_len=10**6)
        self.num_added += 1
        found = self.kv.lookup(seq)
        assert len(found) <= (len(tokens) - 1) // BS
        if self.kv.cost(seq, found) <= self.kv.pool.num_free:
            self.kv.attach(seq, found)
            self.live.append(seq)
            self.compute(seq, seq.num_uncomputed)

    def append(self, seq: Sequence, token: int) -> None:
        seq.token_ids.append(token)
        if not self.compute(seq, 1):
            seq.token_ids.pop()

    def fork(self, source: Sequence, num_tokens: int, token: int) -> None:
        """A branch after *num_tokens*, which writes at once where the source goes on."""
        num_tokens = min(num_tokens, source.num_computed)
        seq = Sequence(self.num_added, 0, source.group, [*source.token_ids[:num_tokens], token], max_len=10**6)
        self.num_added += 1
        self.kv.fork(source, seq, num_tokens)
        self.live.append(seq)
        if not self.compute(seq, 1):
            self.abort(seq)

    def abort(self, seq: Sequence) -> None:
        self.kv.release(seq)
        self.live.remove(seq)

    def evict(self) -> None:
        if self.kv.pool._evictable:
            self.kv.pool.evict()

    def compute(self, seq: Sequence, count: int, *, fails: bool = False) -> bool:
        if self.kv.missing(seq, count) > self.kv.pool.num_free:
            return False
        self.kv.reserve(seq, count)
        for source, destination in self.kv.block_copies:
            self.memory[destination * BS : (destination + 1) * BS] = self.memory[source * BS : (source + 1) * BS]
        for position in range(seq.num_computed, seq.num_computed + count):
            block = seq.block_ids[position // BS]
            holders = [other for other in self.live if block in other.block_ids]
            assert holders == [seq], "a shared block is written"
            assert self.kv.pool.is_writable(block), "a findable block is written"
            self.memory[block * BS + position % BS] = seq.token_ids[position]
        if fails:
            self.kv.undo_copies()
            self.kv.trim(seq)
            return False
        self.kv.commit_copies()
        seq.num_computed += count
        self.kv.publish(seq)
        return True

    def fail(self, seq: Sequence, token: int) -> None:
        seq.token_ids.append(token)
        self.compute(seq, 1, fails=True)
        seq.token_ids.pop()

    def check(self) -> None:
        self.kv.check(self.live)
        for seq in self.live:
            slots = [seq.block_ids[p // BS] * BS + p % BS for p in range(seq.num_computed)]
            assert [self.memory[slot] for slot in slots] == seq.token_ids[: seq.num_computed]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class BlocksMachine(RuleBasedStateMachine):
    """Few distinct tokens, so that prefixes are shared all the time."""

    hash_fn = staticmethod(hash)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(self.hash_fn)

    def pick(self, data) -> Sequence:
        return data.draw(st.sampled_from(self.blocks.live))

    @rule(tokens=TOKENS, salt=st.sampled_from([None, "s"]))
    def add(self, tokens, salt):
        self.blocks.add(tokens, salt)

    @precondition(lambda self: self.blocks.live)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data, tokens):
        seq = self.pick(data)
        for token in tokens:
            self.blocks.append(seq, token)

    @precondition(lambda self: self.blocks.live)
    @rule(data=st.data(), num_tokens=st.integers(0, 20), token=st.integers(0, 1))
    def fork(self, data, num_tokens, token):
        self.blocks.fork(self.pick(data), num_tokens, token)

    @precondition(lambda self: self.blocks.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fail(self, data, token):
        self.blocks.fail(self.pick(data), token)

    @precondition(lambda self: self.blocks.live)
    @rule(data=st.data())
    def abort(self, data):
        self.blocks.abort(self.pick(data))

    @rule()
    def evict(self):
        self.blocks.evict()

    @invariant()
    def consistent(self):
        self.blocks.check()


class CollidingMachine(BlocksMachine):
    """As above with a hash that collides nearly always: costs hits, never a wrong token."""

    hash_fn = staticmethod(lambda value: hash(value) % 3)


MACHINE_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = MACHINE_SETTINGS
TestColliding = CollidingMachine.TestCase
TestColliding.settings = MACHINE_SETTINGS


def test_ten_thousand_random_steps():
    """C17: a leak of one block in a thousand steps shows only in a long run."""
    rng = random.Random(17)
    blocks = Blocks()
    for _ in range(10_000):
        seq = rng.choice(blocks.live) if blocks.live else None
        action = rng.choices(["add", "append", "fork", "abort", "evict", "fail"], [3, 10, 3, 2, 1, 2])[0]
        if action == "add" or seq is None:
            blocks.add([rng.randint(0, 1) for _ in range(rng.randint(1, 20))], rng.choice([None, "s"]))
        elif action == "append":
            blocks.append(seq, rng.randint(0, 1))
        elif action == "fork":
            blocks.fork(seq, rng.randint(0, 20), rng.randint(0, 1))
        elif action == "abort":
            blocks.abort(seq)
        elif action == "evict":
            blocks.evict()
        else:
            blocks.fail(seq, rng.randint(0, 1))
        blocks.check()
    for seq in list(blocks.live):
        blocks.abort(seq)
    blocks.check()
    assert blocks.kv.pool.num_free == NUM_BLOCKS
