"""A draft model as an actor: one exchange at a time, in the order they come, and ahead of them."""

import logging
import os
import pickle
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Thread
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from ray.actor import exit_actor

from cluster.config import DrafthouseConfig, ModelDrafterConfig
from cluster.drafters.ahead import DraftThread
from cluster.garbage import freeze_loaded
from cluster.logs import setup_logging
from cluster.messages import Draft, DraftLoad, ExchangeInput, ExchangeOutput
from cluster.metrics import Family, ModelSeries, collect
from cluster.models.reference import resolve

if TYPE_CHECKING:
    from cluster.drafters.model import DraftModel
    from cluster.models.stored import StoredWeights

logger = logging.getLogger(__name__)

BUSY_SECONDS = 1.0  # of which the busy part is told


class DraftWorker:
    """Owns one draft model, for any number of engines, and drafts ahead while none asks.

    An exchange that fails leaves behind a state that nobody knows: the worker then ends, and its
    supervisor starts another. It begins with the configured weights, version 0; others are loaded
    beside the exchanges, which takes the memory of both for a while.
    """

    def __init__(self, config: DrafthouseConfig, drafter: ModelDrafterConfig) -> None:
        setup_logging(f"draft-worker-{os.getpid()}", config.observability)
        # In a thread that ends: of those that compute only the draft thread is to live on.
        with ThreadPoolExecutor(max_workers=1) as loading:
            self._model = loading.submit(self.make_model, config, drafter).result()
        self._drafter = drafter
        self._thread = DraftThread(self._model, run_ahead=drafter.drafts_ahead)
        self._busy = _BusyPart()
        self._told_version = 0
        self._loading = Lock()
        self._registry = CollectorRegistry()
        self._metrics = _DraftMetrics(self._registry, model=config.name, pool=drafter.pool)
        freeze_loaded()

    def make_model(self, config: DrafthouseConfig, drafter: ModelDrafterConfig) -> "DraftModel":
        """Load what the configuration names."""
        # Supervisors know this class too, and have no use for torch: only a worker loads it.
        from cluster.local import use_threads  # noqa: PLC0415
        from cluster.local_drafter import build_draft_model  # noqa: PLC0415
        from cluster.models.load import load_spec  # noqa: PLC0415

        use_threads(drafter.num_threads)
        vocab_size = load_spec(resolve(config.target.model)).vocab_size
        return build_draft_model(drafter, vocab_size=vocab_size)

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Take in what was committed, give back what may follow."""
        try:
            with self._metrics.seconds.time():
                answer = self._thread.exchange(message).result()
        except Exception:
            logger.exception("exchange %d of engine %s failed", message.step_id, message.engine_id)
            exit_actor()
            raise
        self._metrics.count(answer)
        return answer

    def exchange_packed(self, packed: bytes) -> bytes:
        """As `exchange`, of a pickled message, pickled.

        Bytes pass Ray as they are; what it makes of other objects takes longer than many a draft.
        """
        return pickle.dumps(self.exchange(pickle.loads(packed)))  # noqa: S301 - an engine's, by Ray

    def adopt(self, version: int, stored: "StoredWeights | None" = None) -> None:
        """Begin to load other weights, those configured if there are none; `load` tells when.

        They are in use from between two exchanges on; if they cannot be, the present ones are.
        Of several versions that are told one after another the last one stays.
        """
        self._told_version = version
        Thread(target=self._adopt, args=(version, stored), daemon=True).start()

    def load(self) -> DraftLoad:
        """How busy it is and with what it drafts, once every exchange before is answered."""
        load = self._thread.submit(self._load).result()
        self._metrics.version.set(load.version)
        self._metrics.sequences.set(load.num_sequences)
        return load

    def reference(self) -> str:
        """The configured model."""
        return self._drafter.model

    def ping(self) -> int:
        """The process id, once every exchange before this call is answered."""
        return os.getpid()

    def metrics(self) -> tuple[Family, ...]:
        """Everything this process has counted."""
        return collect(self._registry)

    def _load(self) -> DraftLoad:
        """In the draft thread, whose model this is."""
        self._model.drop_stale()
        return DraftLoad(
            num_sequences=self._model.num_sequences,
            busy_ratio=self._busy.ratio(self._thread.busy_seconds),
            version=self._model.version,
            grades=self._model.grades,
        )

    def _adopt(self, version: int, stored: "StoredWeights | None") -> None:
        """In a thread that ends with it."""
        from cluster.models.load import load_decoder, load_spec  # noqa: PLC0415
        from cluster.models.stored import load_stored  # noqa: PLC0415

        drafter = self._drafter
        with self._loading:
            if version != self._told_version:
                return
            try:
                folder, dtype, device = resolve(drafter.model), drafter.dtype, drafter.device
                if stored is None:
                    decoder = load_decoder(folder, dtype=dtype, device=device)
                else:
                    decoder = load_stored(stored, load_spec(folder), dtype=dtype, device=device)
                swap = self._thread.change(lambda: self._model.swap(decoder, version=version))
                swap.result()
            except Exception:
                logger.exception("version %d of %s cannot be loaded", version, drafter.pool)
            else:
                logger.info("%s drafts with version %d", drafter.pool, version)


class _BusyPart:
    """The busy part of about the last BUSY_SECONDS, of a sum that is looked at now and then."""

    def __init__(self) -> None:
        self._marks = deque([(time.monotonic(), 0.0)])

    def ratio(self, busy_seconds: float) -> float:
        """The sum is `busy_seconds` now."""
        now = time.monotonic()
        self._marks.append((now, busy_seconds))
        while len(self._marks) > 2 and self._marks[1][0] <= now - BUSY_SECONDS:  # noqa: PLR2004
            self._marks.popleft()
        begin, before = self._marks[0]
        return min((busy_seconds - before) / max(now - begin, 1e-9), 1.0)


class _DraftMetrics:
    """What a draft worker counts."""

    def __init__(self, registry: CollectorRegistry, *, model: str, pool: str) -> None:
        series = ModelSeries(registry, model=model, pool=pool)
        self.version = series.gauge("drafthouse_draft_version", "Of the weights it drafts with.")
        self.sequences = series.gauge(
            "drafthouse_draft_sequences", "Sequences whose context it holds."
        )
        self._exchanges = series.counter("drafthouse_draft_exchanges", "Exchanges answered.")
        self._tokens = series.counter("drafthouse_draft_tokens", "Draft tokens proposed.")
        self._resyncs = series.counter("drafthouse_draft_resyncs", "Contexts asked for again.")
        self.seconds = series.seconds(
            "drafthouse_draft_exchange_seconds", "Seconds of an exchange."
        )

    def count(self, answer: ExchangeOutput) -> None:
        """Count an answer."""
        self._exchanges.inc()
        for draft in answer.drafts.values():
            match draft:
                case Draft(token_ids):
                    self._tokens.inc(len(token_ids))
                case _:
                    self._resyncs.inc()
