"""The acceptance rule, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """How many drafts are kept, and the target's own token that follows them."""

    num_accepted: int
    next_token_id: int


def verify(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> VerifyResult:
    """Keep drafts while they are what the target itself drew; its own token follows.

    `target_token_ids` holds the target's k + 1 own draws: row i was drawn after the first i
    drafts. The next token is the recovered one after a rejection, the bonus one otherwise.

    This is speculative decoding by coupled sampling: target and drafter draw with shared Gumbel
    noise (the Gumbel-max coupling; Daliri, Musco and Suresh, "Coupling without communication and
    drafter-invariant speculative decoding", 2024), so a good drafter mostly draws the same token.
    It is exact because every emitted token is the target's own draw after exactly the tokens
    emitted before it: an accepted draft equals that draw, and rows after a rejection are thrown
    away. What the drafter proposes decides how far one step gets, never what comes out.
    """
    if len(target_token_ids) != len(draft_token_ids) + 1:
        message = f"{len(draft_token_ids)} drafts need one more target token than that, "
        raise ValueError(message + f"not {len(target_token_ids)}")
    num_accepted = 0
    for draft_token_id, target_token_id in zip(draft_token_ids, target_token_ids, strict=False):
        if draft_token_id != target_token_id:
            break
        num_accepted += 1
    return VerifyResult(num_accepted, target_token_ids[num_accepted])
