"""Requests over time: made from a rate, or read from a file.

`poisson:rate=20`, `bursty:rate=20,burst=8,period=60` or `diurnal:rate=20,depth=0.8,period=86400`,
each with `requests=N` and, if the usual lengths will not do, `prompt=N`, `output=N`,
`acceptance=P`. Or a file of JSON lines:
`{"arrival": seconds, "prompt": tokens, "output": tokens, "acceptance": chance}`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigurationError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

REQUESTS = 10_000
RATE = 10.0
DEPTH = 0.8
BURST = 5.0
PERIODS: dict[str, float] = {"bursty": 60.0, "diurnal": 86_400.0}
PROMPT_TOKENS, OUTPUT_TOKENS = 300.0, 200.0
SPREAD = 0.6  # of the logarithm of a length
TASKS = {0.5: 0.5, 0.75: 0.3, 0.9: 0.2}  # chance that a draft token is kept: how many are such
FIELDS = ("arrival", "prompt", "output", "acceptance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests in the order of their arrival, in seconds from the first moment."""

    name: str
    arrivals: FloatArray
    prompts: IntArray  # tokens
    outputs: IntArray  # tokens
    acceptances: FloatArray  # chance that a draft position is kept, once those before it were

    def __len__(self) -> int:
        return len(self.arrivals)


def read_traffic(trace: str, *, seed: int = 0) -> Traffic:
    """What a trace's name or file says. Raises ConfigurationError naming what is wrong."""
    kind, _, fields = trace.partition(":")
    if kind in RATES:
        return _made(kind, _options(trace, fields), trace=trace, seed=seed)
    path = Path(trace.removeprefix("jsonl:"))
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"trace: {trace}: {error}") from error
    return _read(lines, name=path.name)


def _poisson(moments: FloatArray, options: dict[str, float]) -> FloatArray:
    return np.full(len(moments), options["rate"])


def _bursty(moments: FloatArray, options: dict[str, float]) -> FloatArray:
    """A square wave: for a `burst`th of the period all of it, else a tenth of the mean."""
    burst = options["burst"]
    high = moments % options["period"] < options["period"] / burst
    quiet = 0.1 * options["rate"]
    return np.where(high, burst * (options["rate"] - quiet * (1 - 1 / burst)), quiet)


def _diurnal(moments: FloatArray, options: dict[str, float]) -> FloatArray:
    """A sine that begins where it is lowest."""
    wave = -np.cos(2 * math.pi * moments / options["period"])
    return np.asarray(options["rate"] * (1 + options["depth"] * wave))


RATES: dict[str, Callable[[FloatArray, dict[str, float]], FloatArray]] = {
    "poisson": _poisson,
    "bursty": _bursty,
    "diurnal": _diurnal,
}


def _options(trace: str, fields: str) -> dict[str, float]:
    usual = {
        "rate": RATE,
        "requests": REQUESTS,
        "period": PERIODS.get(trace.partition(":")[0], 60.0),
        "depth": DEPTH,
        "burst": BURST,
        "prompt": PROMPT_TOKENS,
        "output": OUTPUT_TOKENS,
        "acceptance": math.nan,
    }
    for field in filter(None, fields.split(",")):
        name, _, value = field.partition("=")
        if name not in usual:
            raise ConfigurationError(f"trace: {name}: none of {', '.join(usual)}")
        try:
            usual[name] = float(value)
        except ValueError as error:
            raise ConfigurationError(f"trace: {name}: {error}") from error
    positive = ("rate", "requests", "period", "burst", "prompt", "output")
    for name in positive:
        if not usual[name] > 0:
            raise ConfigurationError(f"trace: {name}: {usual[name]:g} is not above 0")
    if usual["burst"] < 1:
        raise ConfigurationError(f"trace: burst: {usual['burst']:g} is less than 1")
    for name in ("depth", "acceptance"):
        if usual[name] < 0 or usual[name] > 1:  # not a number: not said
            raise ConfigurationError(f"trace: {name}: {usual[name]:g} is not from 0 to 1")
    return usual


def _made(kind: str, options: dict[str, float], *, trace: str, seed: int) -> Traffic:
    random = np.random.default_rng(seed)
    count = int(options["requests"])
    arrivals = _arrivals(RATES[kind], options, count, random)
    chances, parts = list(TASKS), list(TASKS.values())
    acceptances = random.choice(chances, size=count, p=parts)
    if not math.isnan(options["acceptance"]):
        acceptances = np.full(count, options["acceptance"])
    return Traffic(
        name=trace,
        arrivals=arrivals,
        prompts=_lengths(options["prompt"], count, random),
        outputs=_lengths(options["output"], count, random),
        acceptances=acceptances,
    )


def _arrivals(
    rate_of: Callable[[FloatArray, dict[str, float]], FloatArray],
    options: dict[str, float],
    count: int,
    random: np.random.Generator,
) -> FloatArray:
    """A Poisson process of that rate: unit steps through the integral of the rate, undone."""
    steps = np.cumsum(random.exponential(size=count))
    seconds = steps[-1] / options["rate"] + 2 * options["period"]
    moments = np.linspace(0.0, seconds, 200_001)
    rates = rate_of(moments, options)
    integral = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(moments))])
    return np.interp(steps, integral, moments)


def _lengths(mean: float, count: int, random: np.random.Generator) -> IntArray:
    lengths = mean * np.exp(random.normal(-(SPREAD**2) / 2, SPREAD, size=count))
    return np.maximum(lengths.astype(np.int64), 1)


def _read(lines: list[Any], *, name: str) -> Traffic:
    if not lines:
        raise ConfigurationError(f"trace: {name} holds no request")
    for number, line in enumerate(lines, start=1):
        _check(line, where=f"trace: {name}, line {number}")
    lines.sort(key=lambda line: float(line["arrival"]))
    return Traffic(
        name=name,
        arrivals=np.array([float(line["arrival"]) for line in lines]),
        prompts=np.array([int(line["prompt"]) for line in lines]),
        outputs=np.array([int(line["output"]) for line in lines]),
        acceptances=np.array([float(line.get("acceptance", 0.0)) for line in lines]),
    )


def _check(line: object, *, where: str) -> None:
    """Raises ConfigurationError naming the field that cannot be."""
    if not isinstance(line, dict):
        raise ConfigurationError(f"{where}: no JSON object")
    for field, value in line.items():
        if field not in FIELDS:
            raise ConfigurationError(f"{where}: {field}: none of {', '.join(FIELDS)}")
        least = 1 if field in {"prompt", "output"} else 0
        most = 1.0 if field == "acceptance" else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(f"{where}: {field}: {value!r} is no number")
        if not least <= value <= most or math.isinf(value):
            raise ConfigurationError(f"{where}: {field}: {value} is out of bounds")
    for field in FIELDS[:3]:
        if field not in line:
            raise ConfigurationError(f"{where}: {field} is missing")
