"""Which part of a model each rank of a tensor-parallel group holds.

Whole heads, whole inner elements of the feed-forward part and whole entries of the vocabulary are
dealt out, as evenly as they can be: three key heads on two ranks are two and one.
"""

from dataclasses import dataclass, replace
from typing import Self

from cluster.errors import ConfigurationError
from cluster.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part. `spec` is what the rank computes by itself: its heads, its inner elements.

    Query heads sit where their key head is; with fewer key heads than ranks, several ranks hold
    the same one and share its query heads. `vocabulary_size` entries, the same number on every
    rank, begin at `first_token_id`; those past the end of the vocabulary are padding.
    """

    rank: int
    num_ranks: int
    spec: ModelSpec
    heads: range
    kv_heads: range
    inner: range
    first_token_id: int
    vocabulary_size: int

    @classmethod
    def of(cls, spec: ModelSpec, rank: int = 0, num_ranks: int = 1) -> Self:
        """The part of a rank. Raises ConfigurationError for a model that cannot be split so."""
        check_split(spec, num_ranks)
        heads, kv_heads = _heads_of(spec, rank, num_ranks)
        inner = _part(spec.intermediate_size, rank, num_ranks)
        vocabulary_size = -(-spec.vocab_size // num_ranks)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            spec=replace(
                spec,
                num_heads=len(heads),
                num_kv_heads=len(kv_heads),
                intermediate_size=len(inner),
            ),
            heads=heads,
            kv_heads=kv_heads,
            inner=inner,
            first_token_id=rank * vocabulary_size,
            vocabulary_size=vocabulary_size,
        )

    @property
    def token_ids(self) -> range:
        """The entries of the vocabulary that are no padding."""
        size = self.spec.vocab_size
        stop = self.first_token_id + self.vocabulary_size
        return range(min(self.first_token_id, size), min(stop, size))


def check_split(spec: ModelSpec, num_ranks: int) -> None:
    """Raises ConfigurationError, with the numbers, unless every rank gets some of everything."""
    group = spec.num_heads // spec.num_kv_heads
    sharers = -(-num_ranks // spec.num_kv_heads)
    if sharers > group:
        raise ConfigurationError(
            f"target.tensor_parallel_size: {num_ranks} ranks cannot split {spec.num_heads} "
            f"attention heads on {spec.num_kv_heads} key heads: {sharers} ranks would share a key "
            f"head that has {group} query heads"
        )
    for what, size in (
        ("intermediate_size", spec.intermediate_size),
        ("vocab_size", spec.vocab_size),
    ):
        if size < num_ranks:
            raise ConfigurationError(
                f"target.tensor_parallel_size: {num_ranks} ranks cannot split {what} {size}"
            )


def _heads_of(spec: ModelSpec, rank: int, num_ranks: int) -> tuple[range, range]:
    """A rank's query heads and key heads."""
    group = spec.num_heads // spec.num_kv_heads
    if num_ranks <= spec.num_kv_heads:
        kv_heads = _part(spec.num_kv_heads, rank, num_ranks)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    for kv_head in range(spec.num_kv_heads):
        sharers = _part(num_ranks, kv_head, spec.num_kv_heads)
        if rank in sharers:
            own = _part(group, sharers.index(rank), len(sharers))
            first = kv_head * group
            return range(first + own.start, first + own.stop), range(kv_head, kv_head + 1)
    raise AssertionError


def _part(size: int, number: int, num_parts: int) -> range:
    """Part `number` of `size` things; the first parts are one larger where it does not come out."""
    least, larger = divmod(size, num_parts)
    start = number * least + min(number, larger)
    return range(start, start + least + (number < larger))
