"""Decodes by columns: most parts of most steps compute one token and sample, and as objects each would cost more to
make and to read than all that a step does with it.
"""

from collections.abc import Iterable, Sequence
from typing import overload

from castline.runtime.plan import ScheduledSequence


class Decodes(Sequence[ScheduledSequence]):
    """Parts of a plan that compute one token each and sample, column by column; item i is made when it is asked for."""

    __slots__ = ("seq_ids", "slots", "starts", "tables", "token_ids")

    def __init__(
        self,
        seq_ids: tuple[int, ...],
        token_ids: list[int],
        starts: list[int],
        slots: list[int],
        tables: list[tuple[int, ...]],
    ) -> None:
        """*slots* are where the tokens' K and V go: block x block size + offset. Once planned, nothing changes."""
        self.seq_ids = seq_ids
        """The same object as long as the sequences stay the same."""
        self.token_ids = token_ids
        self.starts = starts
        self.slots = slots
        self.tables = tables

    @classmethod
    def of(cls, parts: Iterable[ScheduledSequence], block_size: int) -> "Decodes | None":
        """*parts* by columns; None where one of them is no decode, or more than one."""
        if isinstance(parts, cls):
            return parts
        seq_ids: list[int] = []
        tokens: list[int] = []
        starts: list[int] = []
        slots: list[int] = []
        tables: list[tuple[int, ...]] = []
        for part in parts:
            token_ids, start, table = part.token_ids, part.start, part.block_ids
            if len(token_ids) != 1 or not part.samples or part.all_logits:
                return None
            seq_ids.append(part.seq_id)
            tokens.append(token_ids[0])
            starts.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)
            tables.append(table)
        return cls(tuple(seq_ids), tokens, starts, slots, tables)

    def __len__(self) -> int:
        return len(self.seq_ids)

    @overload
    def __getitem__(self, place: int) -> ScheduledSequence: ...

    @overload
    def __getitem__(self, place: slice) -> list[ScheduledSequence]: ...

    def __getitem__(self, place: int | slice) -> ScheduledSequence | list[ScheduledSequence]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return ScheduledSequence(
            self.seq_ids[place], (self.token_ids[place],), self.starts[place], self.tables[place], samples=True
        )
