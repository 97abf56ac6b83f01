"""How much each tenant has had, so that those who wait are served by their weights.

Every tenant has an account of the rows that the target computed for it, divided by its weight. Of
those who wait, the one with the least is served next. So while two of them wait all the time, the
rows they get are as their weights, whatever they ask for and how often; and who waits alone gets
everything.

A tenant that begins to wait has at least what the one had that was served last: what it did not
use before is no credit. What it used beyond its share stays a debt until the others have come as
far, even if it is gone meanwhile.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996) whose costs are charged as they
arise, for nobody knows how long an answer will be; see also Sheng et al., Fairness in serving
large language models, 2024.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    """One tenant's rows over its weight, and how many of its sequences are here."""

    weight: float
    service: float
    num_sequences: int = 0


class Shares:
    """The accounts of one engine's tenants: of those that are here, and those in debt."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._served = 0.0  # what the tenant had that was served last; it never falls

    def __len__(self) -> int:
        return len(self._accounts)

    def begin_waiting(self, tenant: str, *, weight: float) -> None:
        """A tenant of which nothing waited does now. `weight` is its weight from now on."""
        account = self._accounts.setdefault(tenant, _Account(weight, self._served))
        account.weight = weight
        account.service = max(account.service, self._served)

    def service(self, tenant: str) -> float:
        """Rows over weight of a tenant that waits; who has the least goes first."""
        return self._accounts[tenant].service

    def serve(self, tenant: str) -> None:
        """The first in line is let in, and it is the tenant's."""
        self._served = max(self._served, self._accounts[tenant].service)

    def charge(self, tenant: str, num_rows: int) -> None:
        """The target computes rows for a sequence of the tenant."""
        account = self._accounts[tenant]
        account.service += num_rows / account.weight

    def enter(self, tenant: str) -> None:
        """A sequence of a tenant that waits has come."""
        self._accounts[tenant].num_sequences += 1

    def leave(self, tenant: str) -> None:
        """A sequence has gone for good; so have accounts that tell nothing any more."""
        self._accounts[tenant].num_sequences -= 1
        if not any(account.num_sequences for account in self._accounts.values()):
            self._accounts.clear()
            self._served = 0.0
        for idle in [
            name
            for name, account in self._accounts.items()
            if not account.num_sequences and account.service <= self._served
        ]:
            del self._accounts[idle]
