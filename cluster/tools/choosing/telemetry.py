"""From what a cluster has counted to what is known of it: pages of metrics, over some time."""

import http.client
import ssl
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

from cluster.config.security import is_loopback
from cluster.errors import ConfigurationError, Unavailable
from cluster.tools.bench.progress import Report
from cluster.tools.choosing.facts import DrafterFacts, Facts, Place, StepCosts
from cluster.tools.connection import Access
from cluster.tools.page import Page

TIMEOUT_SECONDS = 10.0
LEAST_ROWS = 16.0  # to which the line through the steps is drawn at least
FREE = "ngram"  # drafts without a model
OK = 200


def parse_page(text: str, *, seconds: float) -> Page:
    """A page in the text format of Prometheus. Raises ConfigurationError for anything else."""
    try:
        return Page(text, seconds=seconds)
    except ValueError as error:
        raise ConfigurationError(f"not a page of metrics: {error}") from error


def watch(address: str, *, access: Access, seconds: float, report: Report) -> list[Page]:
    """A page about every second for so long, and at least two.

    `address` is HOST:PORT of the server's HTTP. Raises Unavailable and ConfigurationError.
    """
    pages = [_fetched(address, access)]
    end = pages[0].seconds + seconds
    while len(pages) == 1 or time.monotonic() < end:
        report("watching", min(int(time.monotonic() - end + seconds), int(seconds)), int(seconds))
        time.sleep(max(min(1.0, end - time.monotonic()), 0.0))
        pages.append(_fetched(address, access))
    report("watching", int(seconds), int(seconds))
    return pages


def _fetched(address: str, access: Access) -> Page:
    host = address.rpartition(":")[0].strip("[]")
    secure = access.tls or access.tls_ca is not None
    if access.api_key is not None and not secure and not is_loopback(host):
        raise ConfigurationError(
            f"--api-key: it is not sent to {address} in plaintext: --tls, or --tls-ca FILE"
        )
    connection = _connection(address, access, secure=secure)
    try:
        connection.request("GET", "/metrics", headers=dict(access.metadata))
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no server answers HTTP at {address}: {error}") from error
    finally:
        connection.close()
    if response.status != OK:
        raise Unavailable(f"{address}/metrics answers {response.status} {response.reason}")
    return parse_page(text, seconds=time.monotonic())


def _connection(address: str, access: Access, *, secure: bool) -> http.client.HTTPConnection:
    try:
        if not secure:
            return http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
        context = ssl.create_default_context(cafile=access.tls_ca)
        if access.client_certificate is not None:
            context.load_cert_chain(access.client_certificate, access.client_key)
        return http.client.HTTPSConnection(address, timeout=TIMEOUT_SECONDS, context=context)
    except (OSError, http.client.InvalidURL) as error:
        raise ConfigurationError(f"{address}: {error}") from error


def facts_of(pages: Sequence[Page]) -> Facts:
    """What the pages say, oldest first: counts from the first to the last, gauges on average.

    Where no step was made meanwhile, what was counted since the start has to do. Raises
    ConfigurationError for pages without an engine.
    """
    last = pages[-1]
    models = sorted(last.said("drafthouse_sequences", "model"))
    if not models:
        raise ConfigurationError("the page of metrics tells of no engine")
    return _Watched(pages, models[0]).facts()


class _Watched:
    """Differences and means over the pages, of one model."""

    def __init__(self, pages: Sequence[Page], model: str) -> None:
        self._pages = pages
        self._model = model
        self._lasting = pages[-1].seconds - pages[0].seconds
        self._first: Page | None = pages[0]
        self.num_steps = self.grown("drafthouse_step_seconds_count", phase="target")
        if not self.num_steps:
            self._first = None
            self.num_steps = self.grown("drafthouse_step_seconds_count", phase="target")

    def grown(self, name: str, **labels: str) -> float:
        """By how much counters have grown."""
        before = 0.0 if self._first is None else self._first.total(name, **labels)
        return max(self._pages[-1].total(name, **labels) - before, 0.0)

    def mean(self, name: str, **labels: str) -> float:
        """Of gauges, added over the processes, over time."""
        return sum(page.total(name, **labels) for page in self._pages) / len(self._pages)

    def facts(self) -> Facts:
        """Everything."""
        engines = max(self._pages[-1].count("drafthouse_kv_usage_ratio", model=self._model), 1)
        seconds = self.grown("drafthouse_step_seconds_sum", phase="target")
        ended = self.grown("drafthouse_requests_total") - self.grown(
            "drafthouse_requests_total", outcome="refused"
        )
        computed = self.grown("drafthouse_prompt_tokens_total") - self.grown(
            "drafthouse_cached_prompt_tokens_total"
        )
        begun = self.grown("drafthouse_queue_seconds_count")
        answers = self.grown("drafthouse_generation_tokens_total")
        live = self._first is not None and self._lasting > 0
        return Facts(
            model=self._model,
            num_engines=engines,
            max_num_seqs=max(round(self.mean("drafthouse_max_sequences") / engines), 1),
            most_depth=max(len(self._positions()), 1),
            running=self.mean("drafthouse_sequences", state="running") / engines,
            waiting=self.mean("drafthouse_sequences", state="waiting") / engines,
            queue_seconds=_ratio(self.grown("drafthouse_queue_seconds_sum"), begun),
            utilisation=min(seconds / self._lasting / engines, 1.0) if live else None,
            step_seconds=_ratio(seconds, self.num_steps),
            costs=self._costs(engines),
            prompt_tokens=_ratio(max(computed, 0.0), ended),
            answer_tokens=_ratio(answers, ended),
            kv_usage=self.mean("drafthouse_kv_usage_ratio") / engines,
            preemptions_per_request=_ratio(self.grown("drafthouse_preemptions_total"), begun),
            drafters=tuple(self._drafters()),
        )

    def _costs(self, engines: int) -> StepCosts | None:
        """The line that the engines see through their steps, where they saw any."""
        base = self.mean("drafthouse_step_base_seconds") / engines
        row = self.mean("drafthouse_step_row_seconds") / engines
        if base + row <= 0:
            return None
        return StepCosts.of([(1.0, base + row), (LEAST_ROWS, base + LEAST_ROWS * row)])

    def _positions(self) -> list[str]:
        name = "drafthouse_spec_decode_num_accepted_tokens_per_pos_total"
        return sorted(self._pages[-1].said(name, "position"), key=int)

    def _drafters(self) -> Iterator[DrafterFacts]:
        """One by one; what steps waited for drafts is for those that have to be waited for."""
        names = self._pages[-1].said("drafthouse_spec_decode_num_drafts_total", "drafter")
        tokens = self.grown("drafthouse_engine_tokens_total")
        accepted = self.grown("drafthouse_spec_decode_num_accepted_tokens_total")
        asked = self.grown("drafthouse_step_seconds_count", phase="draft")
        asked_sequences = (tokens - accepted) * _part(asked, self.num_steps)
        wait = _part(self.grown("drafthouse_step_seconds_sum", phase="draft"), asked)
        drafts = self.grown("drafthouse_spec_decode_num_drafts_total")
        depth = _part(self.grown("drafthouse_spec_decode_num_draft_tokens_total"), drafts)
        late = _part(self.grown("drafthouse_drafts_late_total"), asked_sequences)
        slow = [name for name in names if name not in {FREE, ""}]
        for name in sorted(names - {""}):
            number = self.grown("drafthouse_spec_decode_num_drafts_total", drafter=name)
            pooled = "drafthouse_draft_exchange_seconds_count"
            workers = self._pages[-1].count(pooled, pool=name)
            waited = wait if name in slow else 0.0
            yield DrafterFacts(
                name=name,
                survival=self._survival(name),
                coverage=min(_part(number, asked_sequences), 1.0) if number else 1.0,
                wait_seconds=waited if workers else 0.0,
                token_seconds=0.0 if workers else waited / max(depth, 1.0),
                place=Place.WORKERS if workers else Place.IN_PROCESS,
                exchange_seconds=_part(
                    self.grown("drafthouse_draft_exchange_seconds_sum", pool=name),
                    self.grown(pooled, pool=name),
                ),
                late_ratio=min(late, 1.0) if name in slow else 0.0,
                num_workers=workers,
            )

    def _survival(self, drafter: str) -> tuple[float, ...]:
        """By position, as far as any was verified there."""
        prefix = "drafthouse_spec_decode_num"
        chances = []
        for position in self._positions():
            labels = {"drafter": drafter, "position": position}
            drafted = self.grown(f"{prefix}_draft_tokens_per_pos_total", **labels)
            if not drafted:
                break
            accepted = self.grown(f"{prefix}_accepted_tokens_per_pos_total", **labels)
            chances.append(min(accepted / drafted, 1.0))
        return tuple(accumulate(chances, min))


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _part(above: float, below: float) -> float:
    return above / below if below else 0.0
