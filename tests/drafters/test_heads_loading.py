"""What is said of heads that cannot be used: by name, and with the numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import (
    DrafthouseConfig,
    EagleDrafterConfig,
    HeadDrafterConfig,
    MedusaDrafterConfig,
    TargetConfig,
    drafter_from_flag,
    parse_config,
)
from cluster.drafters.heads.kinds import kind_of
from cluster.drafters.heads.model import Head
from cluster.errors import ConfigurationError, NotBesideTarget, UnsupportedFeature
from cluster.local_drafter import head_size, load_head
from cluster.memory import check_memory, head_needs
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from cluster.models.spec import load_spec
from tests.checkpoints import edit_config, make_checkpoint
from tests.heads import make_eagle, make_eagle3, make_medusa

SIZES = TargetConfig(max_num_seqs=2, max_model_len=64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), hidden_size=32, num_layers=4)


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return load_decoder(target, dtype="float32")


def loaded(head: Path, decoder: Decoder) -> Head:
    kinds: dict[str, type[HeadDrafterConfig]] = {
        "medusa": MedusaDrafterConfig,
        "eagle": EagleDrafterConfig,
    }
    return load_head(kinds[kind_of(str(head))](model=str(head)), decoder, SIZES, max_draft=4)


MAKERS: dict[str, Callable[..., Path]] = {
    "medusa": make_medusa,
    "eagle": make_eagle,
    "eagle3": make_eagle3,
}


@pytest.mark.parametrize(
    ("maker", "kind", "options"),
    [
        ("medusa", "medusa", {}),
        ("medusa", "medusa", {"file": "medusa_lm_head.pt", "num_layers": 2}),
        ("eagle", "eagle", {}),
        ("eagle", "eagle", {"layout": "speculators"}),
        ("eagle3", "eagle", {}),
        ("eagle3", "eagle", {"layout": "speculators"}),
    ],
)
def test_every_layout_is_told_by_its_folder(
    target: Path,
    decoder: Decoder,
    tmp_path: Path,
    maker: str,
    kind: str,
    options: dict[str, object],
) -> None:
    """`--draft FOLDER` is enough, also beside n-grams, and the folder is loaded."""
    head = MAKERS[maker](tmp_path / "head", target, **options)
    assert kind_of(str(head)) == kind
    assert drafter_from_flag(str(head), kind_of=kind_of, placement="worker").kind == kind
    both = drafter_from_flag(f"ngram+{head}", kind_of=kind_of)
    assert both.kind == "choice"
    assert [member.kind for member in both.drafters] == ["ngram", kind]
    wanted = loaded(head, decoder).wanted
    assert len(wanted.layers) == (3 if maker == "eagle3" else 0)


def test_a_model_of_one_layer_is_no_head(tmp_path: Path) -> None:
    """An EAGLE folder's config.json is that of a small llama: what tells it is its tensors."""
    model = make_checkpoint(tmp_path / "model", num_layers=1)
    assert kind_of(str(model)) == "model"


def test_heads_are_refused_for_another_target(target: Path, tmp_path: Path) -> None:
    """Hidden states of 64 for a head of 32, and a vocabulary of 300 for one of 512."""
    wide = load_decoder(make_checkpoint(tmp_path / "wide", num_layers=4), dtype="float32")
    small = load_decoder(
        make_checkpoint(tmp_path / "small", hidden_size=32, num_layers=4, vocab_size=300),
        dtype="float32",
    )
    medusa = make_medusa(tmp_path / "medusa", target)
    with pytest.raises(ConfigurationError, match=r"0\.0\.linear\.bias is \[32\],.*\[64\]"):
        loaded(medusa, wide)
    with pytest.raises(ConfigurationError, match=r"0\.1\.weight is \[512, 32\].*\[300, 32\]"):
        loaded(medusa, small)
    eagle = make_eagle(tmp_path / "eagle", target)
    with pytest.raises(ConfigurationError, match="have 32 elements, the target's 64"):
        loaded(eagle, wide)
    with pytest.raises(ConfigurationError, match="has 512 entries, the target's 300"):
        loaded(eagle, small)
    without = make_eagle3(tmp_path / "without", target)
    with pytest.raises(ConfigurationError, match=r"no embed_tokens\.weight.*has 64.*needs 32"):
        loaded(without, wide)
    eagle3 = make_eagle3(tmp_path / "eagle3", target, layout="speculators")
    with pytest.raises(ConfigurationError, match=r"fc\.weight is \[32, 96\].*\[32, 192\]"):
        loaded(eagle3, wide)


@pytest.mark.parametrize(
    ("maker", "name", "shape"),
    [
        ("eagle", "fc.weight", (32, 32)),
        ("eagle", "fc.bias", (64,)),
        ("eagle", "layers.0.mlp.down_proj.weight", (64, 32)),
        ("eagle3", "midlayer.self_attn.q_proj.weight", (32, 32)),
        ("eagle3", "midlayer.hidden_norm.weight", (64,)),
        ("eagle3", "lm_head.weight", (170, 32)),
        ("eagle3", "d2t", (172,)),
    ],
)
def test_a_wrong_shape_is_named(
    target: Path, decoder: Decoder, tmp_path: Path, maker: str, name: str, shape: tuple[int, ...]
) -> None:
    """Each tensor has one shape that fits config.json and target."""
    head = MAKERS[maker](tmp_path / "head", target, changes={name: torch.ones(shape)})
    plain = name.replace("midlayer.", "layers.0.").replace(".", r"\.")
    numbers = ", ".join(str(number) for number in shape)
    with pytest.raises(ConfigurationError, match=rf"{plain} is \[{numbers}\], and"):
        loaded(head, decoder)


def test_what_is_missing_is_named(target: Path, decoder: Decoder, tmp_path: Path) -> None:
    """A tensor, the file, a number in config.json, the map of a smaller vocabulary."""
    medusa = make_medusa(tmp_path / "medusa", target, num_heads=2)
    edit_config(medusa, medusa_num_heads=3)
    with pytest.raises(ConfigurationError, match=r"no weight '2\.0\.linear\.weight'"):
        loaded(medusa, decoder)
    edit_config(medusa, medusa_num_heads=0)
    with pytest.raises(ConfigurationError, match="medusa_num_heads is 0, not 1 or more"):
        loaded(medusa, decoder)
    (medusa / "medusa_lm_head.safetensors").unlink()
    edit_config(medusa, medusa_num_heads=2)
    with pytest.raises(ConfigurationError, match=r"none of medusa_lm_head\.safetensors"):
        loaded(medusa, decoder)
    eagle3 = make_eagle3(tmp_path / "eagle3", target, layout="speculators")
    tensors = load_file(eagle3 / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, eagle3 / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"171 entries of the target's 512.* no d2t"):
        loaded(eagle3, decoder)


def test_a_map_that_leads_astray_is_refused(target: Path, decoder: Decoder, tmp_path: Path) -> None:
    """d2t past the target's vocabulary, or two entries for one token."""
    past = make_eagle3(tmp_path / "past", target, changes={"d2t": torch.full((171,), 400)})
    with pytest.raises(ConfigurationError, match="from 400 to 570, of the target's 512"):
        loaded(past, decoder)
    twice = -torch.arange(171)
    head = make_eagle3(tmp_path / "twice", target, changes={"d2t": twice})
    with pytest.raises(ConfigurationError, match="1 different ids for 171 entries"):
        loaded(head, decoder)


def test_a_pickle_that_runs_code_is_refused(target: Path, decoder: Decoder, tmp_path: Path) -> None:
    """Only tensors are read of a .pt: anything else in it is an error and never called."""
    head = make_medusa(tmp_path / "head", target, file="medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Path}, head / "medusa_lm_head.pt")
    with pytest.raises(ConfigurationError, match=r"medusa_lm_head\.pt"):
        loaded(head, decoder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "mlp"}, "'mlp' is not supported; supported: eagle, eagle3"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"layernorms": True}, "layernorms"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_other_arithmetic_is_refused(
    target: Path, decoder: Decoder, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    """What would draft, only worse, for no reason that anybody would find."""
    head = make_eagle3(tmp_path / "head", target, layout="speculators")
    edit_config(head, **changes)
    with pytest.raises(UnsupportedFeature, match=named):
        loaded(head, decoder)


def test_layers_that_a_target_does_not_have_are_refused(
    target: Path, decoder: Decoder, tmp_path: Path
) -> None:
    """By default 2, the middle one and the third from the end; or those of config.json."""
    head = make_eagle3(tmp_path / "head", target, layers=(1, 2, 9))
    with pytest.raises(ConfigurationError, match=r"\[1, 2, 9\], and the target has 4 layers"):
        loaded(head, decoder)
    flat = make_checkpoint(tmp_path / "flat", hidden_size=32, num_layers=2)
    default = make_eagle3(tmp_path / "default", flat)
    with pytest.raises(
        ConfigurationError, match="layers 2, 1 and -1 are read of a target that has 2"
    ):
        loaded(default, load_decoder(flat, dtype="float32"))


def test_ranks_have_not_beside_target() -> None:
    """Refused when the configuration is read, before anything starts; the error is typed."""
    drafter = {"kind": "medusa", "model": "m", "name": "heads"}
    with pytest.raises(NotBesideTarget, match=r"'heads'.*tensor_parallel_size is 2"):
        parse_config({"target": {"tensor_parallel_size": 2}, "drafter": drafter})
    members = [{"kind": "ngram"}, {"kind": "eagle", "model": "e"}]
    with pytest.raises(NotBesideTarget, match="'e'"):
        parse_config(
            {
                "target": {"tensor_parallel_size": 2},
                "drafter": {"kind": "choice", "drafters": members},
            }
        )
    assert isinstance(parse_config({"drafter": drafter}), DrafthouseConfig)


def test_heads_are_told_apart_by_name() -> None:
    """Two members of a choice with one name would share their grades and metrics."""
    members = [{"kind": "eagle", "model": "e"}, {"kind": "model", "model": "e"}]
    with pytest.raises(ConfigurationError, match="several are named 'e'"):
        parse_config({"drafter": {"kind": "choice", "drafters": members}})


@pytest.mark.parametrize("maker", MAKERS)
def test_memory_is_counted(target: Path, tmp_path: Path, maker: str) -> None:
    """Weights as the files have them, hidden states and KV memory of every sequence."""
    head = MAKERS[maker](tmp_path / "head", target)
    kinds: dict[str, type[HeadDrafterConfig]] = {"medusa": MedusaDrafterConfig}
    config = kinds.get(maker, EagleDrafterConfig)(model=str(head))
    spec = load_spec(target)
    size = head_size(config, spec, max_model_len=64)
    needs = {need.what: need.num_bytes for need in head_needs(SIZES, spec, size)}
    kept = {"medusa": 1, "eagle": 64, "eagle3": 3 * 64}[maker]
    assert needs["hidden states"] == 2 * kept * 32 * 4
    assert needs["head KV memory"] == (0 if maker == "medusa" else 2 * 64 * 2 * 2 * 8 * 4)
    assert needs["head weights"] >= (3 * 512 * 32 if maker == "medusa" else 6 * 32 * 32) * 4
    whole = DrafthouseConfig(target=SIZES)
    check_memory(whole, spec, [], [size])
    with pytest.raises(ConfigurationError, match="head weights"):
        check_memory(whole, spec, [], [replace(size, num_weights=10**15)])


def test_a_config_that_is_no_json_is_refused(
    target: Path, decoder: Decoder, tmp_path: Path
) -> None:
    """The folder is named."""
    head = make_medusa(tmp_path / "head", target)
    (head / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigurationError, match="is no object"):
        load_head(MedusaDrafterConfig(model=str(head)), decoder, SIZES, max_draft=4)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_may_have_another_number_format_on_the_same_states(
    target: Path, decoder: Decoder, tmp_path: Path, kind: str
) -> None:
    folder = MAKERS[kind](tmp_path / "head", target)
    config = MedusaDrafterConfig if kind == "medusa" else EagleDrafterConfig
    spec = load_spec(target)
    own, coarse, other = (
        config.model_validate({"model": str(folder), "dtype": dtype})
        for dtype in (None, "int8", "bfloat16")
    )
    load_head(coarse, decoder, SIZES, max_draft=4)
    sizes = [
        head_needs(SIZES, spec, head_size(each, spec, max_model_len=64)) for each in (own, coarse)
    ]
    [weights, coarse_weights] = [
        need.num_bytes for needs in sizes for need in needs if need.what == "head weights"
    ]
    assert weights == 4 * coarse_weights
    with pytest.raises(ConfigurationError, match="dtype bfloat16 beside a target of float32"):
        load_head(other, decoder, SIZES, max_draft=4)
