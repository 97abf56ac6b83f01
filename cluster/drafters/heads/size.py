"""What a head will take, counted before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

from cluster.drafters.heads import eagle, eagle_load, medusa
from cluster.drafters.heads.checkpoint import stored_sizes
from cluster.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSize:
    """In elements: weights, keys and values of one position, and the hidden states kept of one.

    Each sequence has keys and values of `context` positions and hidden states of `num_rows`; a pass
    works with `pass_width` elements for each of up to `max_rows` rows of a sequence. Weights are of
    `dtype`, the target's if there is none.
    """

    num_weights: int
    kv_width: int
    context: int
    row_width: int
    num_rows: int
    pass_width: int
    max_rows: int
    dtype: str | None = None


def medusa_size(folder: Path, target: ModelSpec) -> HeadSize:
    """Of Medusa heads. Raises ConfigurationError."""
    return HeadSize(
        num_weights=sum(stored_sizes(folder, medusa.FILES).values()),
        kv_width=0,
        context=0,
        row_width=target.hidden_size,
        num_rows=1,
        pass_width=2 * target.hidden_size,
        max_rows=1,
    )


def eagle_size(folder: Path, target: ModelSpec, *, max_model_len: int) -> HeadSize:
    """Of an EAGLE head. Raises ConfigurationError."""
    spec = eagle_load.load_eagle_spec(folder, target)
    layer, context = spec.layer, spec.context(max_model_len)
    row_width = target.hidden_size * max(len(spec.layers), 1)
    heads = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return HeadSize(
        num_weights=sum(stored_sizes(folder, eagle_load.FILES).values()),
        kv_width=2 * layer.num_kv_heads * layer.head_dim,
        context=context,
        row_width=row_width,
        num_rows=context,
        pass_width=row_width
        + 6 * layer.hidden_size
        + 3 * heads
        + 3 * layer.intermediate_size
        + layer.num_heads * context,
        max_rows=eagle.MAX_ROWS,
    )
