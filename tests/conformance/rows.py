"""The slow reference: a decoder one row at a time, without any engine."""

import torch
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.request import Request
from cluster.sampling.draw import sample
from cluster.sampling.logprobs import token_log_probs


class OneRow:
    """A decoder that computes one row at a time, for a single text of up to 256 tokens."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache = KVCache.of(decoder, num_blocks=1, block_size=256)

    def logits(self, token_id: int, position: int) -> Tensor:
        """`[1, vocab]`, after a token at a position; what stood there before is overwritten."""
        row = torch.tensor([token_id])
        return self._decoder.logits(
            self._decoder.forward(row, [Segment((0,), position, 1)], self._cache)
        )


def row_by_row(
    decoder: Decoder, request: Request, num_tokens: int
) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of plain decoding, each position computed alone; no engine."""
    sampling = request.sampling
    spec = SamplingSpec(seed=sampling.seed, temperature=sampling.temperature)
    rows = OneRow(decoder)
    token_ids = list(request.prompt_token_ids)
    logprobs: list[float] = []
    for position in range(len(token_ids) + num_tokens - 1):
        logits = rows.logits(token_ids[position], position)
        if position == len(token_ids) - 1:
            token_ids += sample(logits, [spec], [position + 1])
            logprobs += token_log_probs(logits, token_ids[-1:])
    return token_ids[len(request.prompt_token_ids) :], logprobs
