"""Who asks: what a caller may use, and how much of it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may use; None is no limit.

    `tokens_per_minute` counts rows that a target computes: the prompt without what was cached,
    every token of the answer, and every draft, kept or not.
    """

    concurrent_requests: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whoever a key belongs to.

    `models` are those that may be asked, empty for all. `priority` is added to that of its
    requests, which may name up to `highest_priority` themselves. Within one priority tenants that
    wait are served in proportion to `weight`.
    """

    name: str
    models: tuple[str, ...] = ()
    limits: TenantLimits = field(default_factory=TenantLimits)
    priority: int = 0
    highest_priority: int = 0
    weight: float = 1.0

    def may_ask(self, model: str) -> bool:
        """Whether the model is among those that are served to it."""
        return not self.models or model in self.models


ANYONE = Tenant(name="", highest_priority=100)  # where no keys are asked for
