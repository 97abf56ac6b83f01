"""What timed parts could bring at most, in closed form.

A target step takes T for the rows it has, a token of a drafter d, a message there and back r.
With K drafts, each right with probability a, a sequence gains E = (1 - a^(K+1)) / (1 - a) tokens
a step (Leviathan et al. 2023, equation 1), and S sequences gain S times that in

    synchronous     r + K d + T
    drafting ahead  r + T + (1 - h) K d + h max((K + 1) d - T, 0),      h = a^((K+1) S)

h is the chance that all drafts of all sequences and their next tokens were foreseen: then the
next drafts were made while the target verified, which takes K + 1 tokens, and only what that
takes beyond T is waited for. Otherwise they are made anew after it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a forward pass: `base` while memory-bound, then `per_row` more for each row."""

    base: float
    per_row: float = 0.0
    ridge: int = 0  # rows up to here are free

    def seconds(self, num_rows: int) -> float:
        """Of so many rows."""
        return self.base + self.per_row * max(num_rows - self.ridge, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """S sequences at once with K drafts each, of constant acceptance."""

    num_sequences: int
    num_speculative_tokens: int
    acceptance: float
    target: Roofline
    draft: Roofline
    round_trip: float = 0.0

    @property
    def tokens_a_step(self) -> float:
        """What one sequence gains, on average."""
        k, rate = self.num_speculative_tokens, self.acceptance
        return float(k + 1) if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)

    @property
    def target_seconds(self) -> float:
        """Of a step with all drafts."""
        return self.target.seconds(self.num_sequences * (self.num_speculative_tokens + 1))

    @property
    def draft_seconds(self) -> float:
        """Of one token of all sequences."""
        return self.draft.seconds(self.num_sequences)

    @property
    def synchronous_rate(self) -> float:
        """Tokens per second when the target waits for every draft."""
        return self.rate(self.synchronous_seconds)

    @property
    def synchronous_seconds(self) -> float:
        """Of a step of that."""
        drafting = self.num_speculative_tokens * self.draft_seconds
        return self.round_trip + drafting + self.target_seconds

    @property
    def overlapped_rate(self) -> float:
        """Tokens per second when the drafter goes on while the target verifies."""
        return self.rate(self.overlapped_seconds)

    @property
    def overlapped_seconds(self) -> float:
        """Of a step of that, on average."""
        k = self.num_speculative_tokens
        foreseen = self.acceptance ** ((k + 1) * self.num_sequences)
        beyond = max((k + 1) * self.draft_seconds - self.target_seconds, 0.0)
        waiting = (1 - foreseen) * k * self.draft_seconds + foreseen * beyond
        return self.round_trip + self.target_seconds + waiting

    def rate(self, step_seconds: float) -> float:
        """Tokens per second of steps that take so long."""
        return self.num_sequences * self.tokens_a_step / step_seconds
