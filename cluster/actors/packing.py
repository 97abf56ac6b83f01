"""The items of an engine's stream as bytes, which Ray passes as they are.

What its own serializer makes of objects takes several times as long, on the event loops of the
engine and of the gateway, at every step.
"""

import pickle
from dataclasses import fields
from operator import attrgetter

from cluster.messages import OutputBatch, TokenDelta

NAMES = tuple(field.name for field in fields(TokenDelta))
_values_of = attrgetter(*NAMES)


def pack_outputs(batch: OutputBatch) -> bytes:
    """The batch, its deltas as bare values."""
    deltas = [_values_of(delta) for delta in batch.deltas]
    return pickle.dumps((batch.engine_id, deltas, batch.load))


def unpack_outputs(packed: bytes) -> OutputBatch:
    """The batch that was packed."""
    engine_id, deltas, load = pickle.loads(packed)  # noqa: S301 - an engine's, by Ray
    told = tuple(TokenDelta(**dict(zip(NAMES, values, strict=True))) for values in deltas)
    return OutputBatch(engine_id, told, load)
