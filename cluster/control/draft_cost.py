"""What drafts cost: the seconds a step waits for them, learned as they come."""

import math

DECAY = 0.98  # of what was seen, with every observed exchange
SWEEPS = 3
STIFFNESS = 0.02  # observations of nothing that every term begins with
SUDDEN_FACTOR = 4.0  # beyond it, and this many seconds, a wait counts as that much only
SUDDEN_SECONDS = 0.01


class DraftCost:
    """Seconds of a drafter by sequences and tokens: fixed, per sequence, per token and per depth.

    The last is what a model drafts with: one forward pass for the next token of all. Each term is
    at least 0. Where drafts are made ahead, the seconds are those left to wait.
    """

    def __init__(self) -> None:
        self._products = [[STIFFNESS * (row == column) for column in range(4)] for row in range(4)]
        self._wanted = [0.0] * 4
        self._terms = [0.0] * 4

    @property
    def fixed(self) -> float:
        """Seconds of asking at all."""
        return self._terms[0]

    @property
    def per_sequence(self) -> float:
        """Seconds of asking for one sequence more."""
        return self._terms[1]

    def per_token(self, num_sequences: int) -> float:
        """Seconds of one token more of one of so many sequences."""
        return self._terms[2] + self._terms[3] / max(num_sequences, 1)

    def seconds(self, num_sequences: int, num_tokens: int) -> float:
        """Of drafts of so many tokens in all; nothing when nobody is asked."""
        if num_sequences == 0:
            return 0.0
        features = _features(num_sequences, num_tokens)
        return sum(term * feature for term, feature in zip(self._terms, features, strict=True))

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Learn from an exchange that asked for so much. What is not a time is ignored."""
        if num_sequences == 0 or not 0 <= seconds < math.inf:
            return
        features = _features(num_sequences, num_tokens)
        most = SUDDEN_FACTOR * self.seconds(num_sequences, num_tokens) + SUDDEN_SECONDS
        seconds = min(seconds, most)
        for row, feature in enumerate(features):
            self._wanted[row] = DECAY * self._wanted[row] + feature * seconds
            self._products[row] = [
                DECAY * product + feature * other
                for product, other in zip(self._products[row], features, strict=True)
            ]
            self._products[row][row] += (1 - DECAY) * STIFFNESS
        self._solve()

    def _solve(self) -> None:
        """Some sweeps of coordinate descent towards the best terms of which none is negative."""
        terms = self._terms
        for _ in range(SWEEPS):
            for row, products in enumerate(self._products):
                rest = sum(p * term for p, term in zip(products, terms, strict=True))
                step = (self._wanted[row] - rest) / products[row]
                terms[row] = max(terms[row] + step, 0.0)


def _features(num_sequences: int, num_tokens: int) -> tuple[float, float, float, float]:
    return 1.0, float(num_sequences), float(num_tokens), num_tokens / num_sequences
