"""A whole answer and the account of how it came about."""

from dataclasses import dataclass, field

from cluster.messages import TopLogprobs
from cluster.request import FinishReason
from cluster.text.stream import TextDelta


@dataclass(slots=True, kw_only=True)
class Answer:
    """Collects the text deltas of one sequence."""

    num_prompt_tokens: int
    seed: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    num_cached_tokens: int = 0  # of the prompt
    num_steps: int = 0  # target steps that gave tokens
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    def add(self, delta: TextDelta) -> None:
        """Take in what came next.

        What is told of the prompt comes with the first tokens; an engine that continues the answer
        of another may tell it again, of more than the prompt.
        """
        if not self.token_ids:
            self.prompt_logprobs = delta.prompt_logprobs
            self.num_cached_tokens = delta.num_cached_tokens
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.top_logprobs.extend(delta.top_logprobs)
        self.num_steps += delta.num_steps
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
                "cached_tokens": self.num_cached_tokens,
            },
            "seed": self.seed,
            "speculation": {
                "steps": self.num_steps,
                "drafted": self.num_drafted,
                "accepted": self.num_accepted,
            },
        }
