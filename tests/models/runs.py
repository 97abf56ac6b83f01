"""Ways to compute the same positions: what every one of them must agree on."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache


def make_cache(decoder: Decoder, *, num_blocks: int = 4, block_size: int = 1024) -> KVCache:
    """A cache of the decoder's own dtype."""
    return KVCache.of(decoder, num_blocks=num_blocks, block_size=block_size)


def random_ids(decoder: Decoder, num_tokens: int, *, seed: int = 0) -> Tensor:
    """Seeded token ids, `[num_tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, decoder.spec.vocab_size, (num_tokens,), generator=generator)


def prefill(decoder: Decoder, token_ids: Tensor, cache: KVCache | None = None) -> Tensor:
    """Logits of all positions, `[num_tokens, vocab]`, computed at once and alone."""
    table = tuple(range(4))
    segment = Segment(table, 0, len(token_ids))
    hidden = decoder.forward(token_ids, [segment], cache or make_cache(decoder))
    return decoder.logits(hidden)


def in_chunks(decoder: Decoder, token_ids: Tensor, sizes: Sequence[int], cache: KVCache) -> Tensor:
    """Logits of all positions, computed in chunks of the sizes, which repeat."""
    table = tuple(range(cache.num_blocks))
    parts, start = [], 0
    while start < len(token_ids):
        size = min(sizes[len(parts) % len(sizes)], len(token_ids) - start)
        rows = token_ids[start : start + size]
        parts.append(decoder.logits(decoder.forward(rows, [Segment(table, start, size)], cache)))
        start += size
    return torch.cat(parts)


def in_company(
    decoder: Decoder, sequences: Sequence[Tensor], cache: KVCache, *, seed: int, max_rows: int
) -> list[Tensor]:
    """Logits of all positions of all sequences, decoded together as an engine would.

    Each step takes a random number of rows of a random subset of the sequences, in random order;
    wrong drafts ride along and are overwritten by a later step. Blocks are dealt at random.
    """
    rng = random.Random(seed)
    tables = deal_blocks(sequences, cache, rng)
    done: list[list[Tensor]] = [[] for _ in sequences]
    computed = [0] * len(sequences)
    while unfinished := [i for i, ids in enumerate(sequences) if computed[i] < len(ids)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        rows, segments, kept = [], [], []
        for i in chosen:
            start, length = computed[i], len(sequences[i])
            num_kept = min(rng.randint(1, max_rows), length - start)
            num_wrong = min(rng.randint(0, 3), length - start - num_kept)
            rows += [sequences[i][start : start + num_kept], random_ids(decoder, num_wrong)]
            segments.append(Segment(tables[i], start, num_kept + num_wrong))
            kept.append(num_kept)
        logits = decoder.logits(decoder.forward(torch.cat(rows), segments, cache))
        for i, segment, num_kept, part in zip(
            chosen, segments, kept, logits.split([s.num_rows for s in segments]), strict=True
        ):
            assert len(part) == segment.num_rows
            done[i].append(part[:num_kept])
            computed[i] += num_kept
    return [torch.cat(parts) for parts in done]


def deal_blocks(
    sequences: Sequence[Tensor], cache: KVCache, rng: random.Random
) -> list[tuple[int, ...]]:
    """Block tables that hold the sequences, from a shuffled deck."""
    deck = list(range(cache.num_blocks))
    rng.shuffle(deck)
    return [tuple(deck.pop() for _ in range(-(-len(ids) // cache.block_size))) for ids in sequences]


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: Tensor) -> Tensor:
    """What transformers' own float32 model says, `[num_tokens, vocab]`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits
