"""The checks of `checks.py` on the CUDA device, where there is one."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.gpu.checks import CHECKS, Check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_holds_on_cuda(check: Check, tmp_path: Path) -> None:
    """Code that runs on CPUs runs on CUDA unchanged, to the same tokens."""
    check(
        make_checkpoint(tmp_path / "model", vocab_size=700, hidden_size=128, num_layers=3), "cuda"
    )
