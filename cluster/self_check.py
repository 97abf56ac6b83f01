"""Whether this machine computes a row to the same bits, whatever else is in the step."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KEY_CHUNK, KVCache, round_up
from cluster.sampling.draw import distribution, sample
from cluster.sampling.logprobs import token_log_probs, top_log_probs

NUM_SEQUENCES = 3
NEAR, FAR = KEY_CHUNK, 6 * KEY_CHUNK  # numbers of keys after which one more chunk is attended to


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows that are looked at, some on each side of a chunk of keys: positions tail..stop-1."""

    tail: int
    stop: int


class SelfCheck:
    """Computes a few rows of one sequence by several schedules and compares bits.

    Of `NUM_SEQUENCES`, number 0 is looked at: once where its keys are few, computed by itself,
    and, in models of enough context, once where they are many. Those before the rows are noise
    then: computing them would cost seconds.
    """

    def __init__(self, decoder: Decoder, *, block_size: int) -> None:
        self._decoder = decoder
        context = decoder.spec.max_position_embeddings
        self._near = _span(NEAR, context)
        self._far = _span(FAR, context) if context > FAR else None
        stop = (self._far or self._near).stop
        block_size = min(block_size, round_up(stop, KEY_CHUNK))
        self._num_blocks = -(-stop // block_size)
        self._cache = KVCache.of(
            decoder, num_blocks=NUM_SEQUENCES * self._num_blocks, block_size=block_size
        )

    @torch.inference_mode()
    def failures(self) -> tuple[str, ...]:
        """The names of what differs from a plain prefill, or from one chunk of rows far behind."""
        expected = self._logits((0, 0, self._near.stop))[self._near.tail :]
        schedules = {
            "single rows": self._single_rows,
            "prompt chunks": self._prompt_chunks,
            "rows beside other sequences": self._beside_others,
            "rows after a truncate": self._after_truncate,
        }
        failures = [
            name
            for name, logits in schedules.items()
            if not torch.equal(logits(self._near), expected)
        ]
        if self._far is not None:
            del schedules["prompt chunks"]
            self._fill(self._far)
            many_keys = self._logits((0, self._far.tail, self._far.stop))
            failures += [
                name
                for name, logits in schedules.items()
                if not torch.equal(logits(self._far), many_keys)
            ]
        if not _samples_row_by_row(expected):
            failures.append("sampling")
        return tuple(dict.fromkeys(failures))

    def _single_rows(self, span: _Span) -> Tensor:
        rows = range(span.tail, span.stop)
        return torch.cat([self._logits((0, row, row + 1)) for row in rows])

    def _prompt_chunks(self, span: _Span) -> Tensor:
        third = span.tail // 3
        bounds = {0, third, third + 1, max(span.tail - 5, 0), span.tail + 3, span.stop}
        chunks = [self._logits((1, *chunk)) for chunk in pairwise(sorted(bounds))]
        return torch.cat(chunks)[span.tail :]

    def _beside_others(self, span: _Span) -> Tensor:
        others = ((1, span.tail, span.tail + 3), (2, 0, 1))
        return self._logits(others[0], (0, span.tail, span.stop), others[1])[3:-1]

    def _after_truncate(self, span: _Span) -> Tensor:
        self._logits((0, span.tail, span.stop), shift=1)
        middle = span.tail + 2
        return torch.cat(
            [
                self._logits((2, 0, 5), (0, span.tail, middle))[5:],
                self._logits((0, middle, span.stop), (2, 5, 6))[:-1],
            ]
        )

    def _fill(self, span: _Span) -> None:
        """Noise for keys and values of sequence 0 before the span, the same in every layer."""
        self._cache.write_noise(range(self._num_blocks), span.tail)

    def _logits(self, *parts: tuple[int, int, int], shift: int = 0) -> Tensor:
        """Logits of the rows (sequence, start, stop), all sequences being of the same tokens.

        Another `shift` makes them other tokens.
        """
        segments, token_ids = [], []
        for sequence, start, stop in parts:
            first_block = sequence * self._num_blocks
            block_table = tuple(range(first_block, first_block + self._num_blocks))
            segments.append(Segment(block_table, start, stop - start))
            size = self._decoder.spec.vocab_size
            token_ids += [_token_id(position + shift, size) for position in range(start, stop)]
        tensor = torch.tensor(token_ids, dtype=torch.int64, device=self._decoder.device)
        return self._decoder.logits(self._decoder.forward(tensor, segments, self._cache))


def _span(num_keys: int, context: int) -> _Span:
    """Seven rows around that many keys, or the last half of a shorter context."""
    stop = min(num_keys + 4, context)
    return _Span(stop - min(7, stop // 2), stop)


def _token_id(position: int, vocab_size: int) -> int:
    return (7919 * position + 13) % vocab_size


def _samples_row_by_row(logits: Tensor) -> bool:
    """Whether tokens, logprobs and distributions of rows together are those of each row alone."""
    penalised = SamplingSpec(
        seed=5,
        temperature=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        logit_bias=((1, 2.0),),
        banned_token_ids=(2,),
        num_prompt_tokens=8,
    )
    kinds = (
        SamplingSpec(seed=1, temperature=0.0),
        SamplingSpec(seed=2, temperature=0.8, top_p=0.95),
        penalised,
        penalised,
        SamplingSpec(seed=3, temperature=1.5),
        SamplingSpec(seed=4, temperature=1.0, top_k=50, min_p=0.01),
    )
    specs = [kinds[row % len(kinds)] for row in range(len(logits))]
    positions = [20 + row for row in range(len(logits))]
    vocab_size = logits.shape[-1]
    text = tuple(_token_id(position, vocab_size) for position in range(positions[-1]))
    histories = [text[:position] for position in positions]
    together = sample(logits, specs, positions, histories=histories)
    probs = distribution(logits, specs, positions, histories=histories)
    log_probs = token_log_probs(logits, together)
    top = top_log_probs(logits, 5)
    for row, token_id in enumerate(together):
        alone = logits[row : row + 1].clone()
        asked = ([specs[row]], [positions[row]])
        same = (
            sample(alone, *asked, histories=[histories[row]]) == [token_id]
            and torch.equal(distribution(alone, *asked, histories=[histories[row]])[0], probs[row])
            and token_log_probs(alone, [token_id]) == [log_probs[row]]
            and top_log_probs(alone, 5) == [top[row]]
        )
        if not same:
            return False
    return True
