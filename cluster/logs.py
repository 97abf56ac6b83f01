"""Log lines of a process, as text or as one JSON object each, with the request they are about.

Nothing that a request or its answer says is ever logged, only ids, counts and reasons.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol, TextIO

PACKAGES = ("cluster", "deployments")
TEXT = "%(asctime)s %(levelname)s %(process_name)s %(name)s %(message)s"

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
"""The request that the running task is about; set it as soon as its id is known."""


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, process, logger, message, and what `extra` named in `fields`.

    `extra={"fields": {...}}` brings any JSON values; a request's id is there when one is known.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line. What is no JSON is written as its text."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": getattr(record, "process_name", ""),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Context(logging.Filter):
    """Adds to each record whose process wrote it, and about which request."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def filter(self, record: logging.LogRecord) -> bool:
        """Every record passes."""
        record.process_name = self._process_name
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id.get()
        return True


class LogSettings(Protocol):
    """How lines are written: the section `observability` of the configuration."""

    @property
    def log_format(self) -> str:
        """`text` or `json`."""
        ...

    @property
    def log_level(self) -> str:
        """The least severe level that is written."""
        ...


def setup_logging(
    process_name: str, settings: LogSettings, *, stream: TextIO | None = None
) -> None:
    """Write the log lines of our packages to `stream` (standard error), and nowhere else.

    Calling it again replaces what was set up before.
    """
    # Not sys.stderr: Serve puts its own logger there, which drops what is not a warning of its own.
    handler = logging.StreamHandler(stream or sys.__stderr__)
    handler.setFormatter(
        JsonFormatter() if settings.log_format == "json" else logging.Formatter(TEXT)
    )
    handler.addFilter(_Context(process_name))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(settings.log_level)
        logger.propagate = False
