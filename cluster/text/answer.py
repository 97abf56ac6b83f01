"""A whole answer and the account of how it came about."""

from dataclasses import dataclass, field

from cluster.request import FinishReason
from cluster.text.stream import TextDelta


@dataclass(slots=True, kw_only=True)
class Answer:
    """Collects the text deltas of one request."""

    num_prompt_tokens: int
    seed: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_steps: int = 0  # target steps that gave tokens
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    def add(self, delta: TextDelta) -> None:
        """Take in what came next."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.num_steps += bool(delta.token_ids)
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        self.finish_reason = delta.finish_reason

    def as_json(self) -> dict[str, object]:
        """The fields every `--json` prints, by their names on the wire."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": len(self.token_ids),
                "total_tokens": self.num_prompt_tokens + len(self.token_ids),
            },
            "seed": self.seed,
            "speculation": {
                "steps": self.num_steps,
                "drafted": self.num_drafted,
                "accepted": self.num_accepted,
            },
        }
