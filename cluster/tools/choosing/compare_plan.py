"""What is compared, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from cluster.config import DType
from cluster.models.reference import resolve
from cluster.text.tokenizer import load_tokenizer
from cluster.tools.bench.engine import EnginePlan
from cluster.tools.bench.workloads import Prompt, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """What is compared: every draft with every K at every concurrency, on prompts by category."""

    target: str
    drafts: Sequence[str]
    prompts: Mapping[str, Sequence[Prompt]]
    num_speculative_tokens: Sequence[int] = (4,)
    concurrencies: Sequence[int] = (1, 4, 8)
    dtype: DType = "float32"
    num_prompts: int = 16
    max_tokens: int = 64
    temperature: float = 0.0
    rounds: int = 3

    @property
    def engine_plan(self) -> EnginePlan:
        """The same as `bench engine` would have it, one prompt of each category after another."""
        rounds = zip_longest(*self.prompts.values())
        prompts = [prompt for prompt in chain.from_iterable(rounds) if prompt is not None]
        return EnginePlan(
            target=self.target,
            workload=Workload("drafts", tuple(prompts)),
            concurrencies=sorted(set(self.concurrencies)),
            drafts=self.drafts,
            num_speculative_tokens=sorted(set(self.num_speculative_tokens)),
            dtypes=(self.dtype,),
            num_prompts=self.num_prompts,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            rounds=self.rounds,
        )

    @property
    def most(self) -> int:
        """The largest K."""
        return max(self.num_speculative_tokens)

    def categories(self, count: int) -> list[str]:
        """Of the first so many prompts, in their order."""
        named = ([name] * len(prompts) for name, prompts in self.prompts.items())
        ordered = [name for name in chain.from_iterable(zip_longest(*named)) if name is not None]
        return [ordered[number % len(ordered)] for number in range(count)]


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts, and what kind each is of."""

    plan: EnginePlan
    prompts: list[tuple[int, ...]]
    categories: list[str]


def asked_of(plan: ComparePlan) -> Asked:
    """Enough prompts for full waves of the largest concurrency. Raises ConfigurationError."""
    engine_plan = plan.engine_plan
    tokenizer = load_tokenizer(resolve(plan.target))
    count = max(map(engine_plan.num_asked, plan.concurrencies))
    prompts = engine_plan.workload.token_ids(tokenizer, count)
    return Asked(engine_plan, prompts, plan.categories(count))
