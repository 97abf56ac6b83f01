"""What would change a checkpoint's arithmetic is computed or refused by name, never ignored."""

from pathlib import Path

import pytest

from cluster.errors import ConfigurationError, UnsupportedArchitecture, UnsupportedFeature
from cluster.models.load import load_decoder, load_spec
from tests.checkpoints import edit_config, make_checkpoint


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    """The error names what was asked for and everything that could have been."""
    folder = edit_config(make_checkpoint(tmp_path), model_type="gpt2")
    with pytest.raises(UnsupportedArchitecture, match=r"'gpt2'.*llama, mistral, qwen2, qwen3"):
        load_spec(folder)


@pytest.mark.parametrize("model_type", ["mamba", "no-such-thing"])
def test_a_state_that_cannot_roll_back_is_refused(tmp_path: Path, model_type: str) -> None:
    """X02: a recurrent model could not undo a rejected draft; it is refused at start."""
    folder = edit_config(make_checkpoint(tmp_path), model_type=model_type)
    with pytest.raises(UnsupportedArchitecture, match=model_type):
        load_decoder(folder, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type.*'dynamic'.*default, linear, llama3",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type.*'yarn'",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor",
        ),
    ],
)
def test_other_arithmetic_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    """An option the decoder does not compute is an error that names it."""
    folder = edit_config(make_checkpoint(tmp_path), **changes)
    with pytest.raises(UnsupportedFeature, match=named):
        load_spec(folder)


def test_layers_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    """Attention that is neither full nor windowed is not taken for full."""
    folder = make_checkpoint(tmp_path, family="qwen2")
    edit_config(folder, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UnsupportedFeature, match="linear_attention"):
        load_spec(folder)


def test_the_older_way_to_write_rope_is_read(tmp_path: Path) -> None:
    """Checkpoints in the wild say rope_theta and rope_scaling at the top level."""
    folder = make_checkpoint(tmp_path)
    edit_config(
        folder,
        rope_parameters=None,
        rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    spec = load_spec(folder)
    assert (spec.rope_theta, spec.rope_linear_factor) == (5e5, 4.0)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    """A checkpoint with too few layers is refused, not filled up."""
    folder = edit_config(make_checkpoint(tmp_path), num_hidden_layers=3)
    with pytest.raises(ConfigurationError, match=r"model\.layers\.2\."):
        load_decoder(folder, dtype="float32")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """A folder without safetensors says so."""
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"no model\.safetensors"):
        load_decoder(folder, dtype="float32")


def test_a_dtype_the_device_lacks_is_refused(tmp_path: Path) -> None:
    """int8 is a CPU format here; the error lists what there is."""
    folder = make_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'int8' on 'cuda'.*float32 on cpu"):
        load_decoder(folder, dtype="int8", device="cuda")
