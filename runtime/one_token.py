"""What most steps give: one token for each of some sequences."""

from collections.abc import Iterator, Mapping


class OneToken(Mapping[int, tuple[int, ...]]):
    """*token_ids* by *seq_ids*, as a mapping to tuples of one; the mapping is made when it is asked for anything."""

    __slots__ = ("_by_id", "seq_ids", "token_ids")

    def __init__(self, seq_ids: tuple[int, ...], token_ids: list[int]) -> None:
        self.seq_ids = seq_ids
        self.token_ids = token_ids
        self._by_id: dict[int, tuple[int, ...]] | None = None

    def __getitem__(self, seq_id: int) -> tuple[int, ...]:
        if self._by_id is None:
            self._by_id = dict(zip(self.seq_ids, zip(self.token_ids), strict=True))
        return self._by_id[seq_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.seq_ids)

    def __len__(self) -> int:
        return len(self.seq_ids)
