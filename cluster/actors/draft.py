"""A draft model as an actor: one exchange at a time, in the order they come."""

import logging
import os

from prometheus_client import CollectorRegistry, Counter, Histogram
from ray.actor import exit_actor

from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.messages import Draft, ExchangeInput, ExchangeOutput
from cluster.metrics import LATENCY_BUCKETS, Family, collect
from cluster.models.reference import resolve

logger = logging.getLogger(__name__)


class DraftWorker:
    """Owns one draft model, for any number of engines.

    An exchange that fails leaves behind a state that nobody knows: the worker then ends, and its
    supervisor starts another.
    """

    def __init__(self, config: DrafthouseConfig, drafter: ModelDrafterConfig) -> None:
        # Supervisors know this class too, and have no use for torch: only a worker loads it.
        from cluster.local import build_draft_model, use_threads  # noqa: PLC0415
        from cluster.models.load import load_spec  # noqa: PLC0415

        use_threads(drafter.num_threads)
        vocab_size = load_spec(resolve(config.target.model)).vocab_size
        self._model = build_draft_model(drafter, vocab_size=vocab_size)
        self._registry = CollectorRegistry()
        self._metrics = _DraftMetrics(self._registry, model=config.name)

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Take in what was committed, give back what may follow."""
        try:
            with self._metrics.seconds.time():
                answer = self._model.exchange(message)
        except Exception:
            logger.exception("exchange %d of engine %s failed", message.step_id, message.engine_id)
            exit_actor()
            raise
        self._metrics.count(answer)
        return answer

    def ping(self) -> int:
        """The process id, once every exchange before this call is answered."""
        return os.getpid()

    def metrics(self) -> tuple[Family, ...]:
        """Everything this process has counted."""
        return collect(self._registry)


class _DraftMetrics:
    """What a draft worker counts."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model",), registry=registry).labels(model=model)

        self._exchanges = counter("drafthouse_draft_exchanges", "Exchanges answered.")
        self._tokens = counter("drafthouse_draft_tokens", "Draft tokens proposed.")
        self._resyncs = counter("drafthouse_draft_resyncs", "Contexts asked for again.")
        self.seconds: Histogram = Histogram(
            "drafthouse_draft_exchange_seconds",
            "Seconds of an exchange.",
            ("model",),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        ).labels(model=model)

    def count(self, answer: ExchangeOutput) -> None:
        """Count an answer."""
        self._exchanges.inc()
        for draft in answer.drafts.values():
            match draft:
                case Draft(token_ids):
                    self._tokens.inc(len(token_ids))
                case _:
                    self._resyncs.inc()
