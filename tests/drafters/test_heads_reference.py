"""What heads draft, against the same arithmetic written out over whole sequences, in plain torch.

The reference has no cache, no batch and no chunks: it takes the target's hidden states from
transformers, and computes every draft from the first token on.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from cluster.config import EagleDrafterConfig, MedusaDrafterConfig, TargetConfig
from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.heads.eagle import MAX_ROWS
from cluster.drafters.heads.model import HeadModel
from cluster.interfaces import DraftQuery
from cluster.local_drafter import load_head
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.models.load import load_decoder
from cluster.worker import TargetWorker
from tests.checkpoints import make_checkpoint
from tests.heads import make_eagle, make_eagle3, make_medusa

GREEDY = SamplingSpec(seed=0, temperature=0.0)
CONTEXT = 512
NUM_WANTED = 5
Reference = Callable[[list[int]], list[Tensor]]  # tokens to the logits of each draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("target"), num_layers=7, max_position_embeddings=CONTEXT
    )


@pytest.fixture(scope="module")
def model(target: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target)


@dataclass
class Plain:
    """A target as transformers has it, and a head's tensors by their published names."""

    model: LlamaForCausalLM
    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]

    def states(self, token_ids: Sequence[int], layer: int) -> Tensor:
        """What a layer is given for all tokens; -1 is the state after the final norm."""
        asked = torch.tensor([list(token_ids)])
        states: tuple[Tensor, ...] = self.model(asked, output_hidden_states=True).hidden_states
        return states[layer][0]

    def linear(self, name: str, rows: Tensor) -> Tensor:
        """A linear with its bias, if there is one."""
        return functional.linear(
            rows, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        )

    def norm(self, name: str, rows: Tensor) -> Tensor:
        """RMSNorm."""
        scale = (rows.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return rows * scale * self.tensors[f"{name}.weight"]

    def layer(self, prefix: str, rows: Tensor, residual: Tensor) -> Tensor:
        """One decoder layer over all rows, each of which sees those before it."""
        width = self.model.config.head_dim
        queries, keys, values = (
            self.linear(f"{prefix}self_attn.{part}_proj", rows).view(len(rows), -1, width)
            for part in "qkv"
        )
        group = queries.shape[1] // keys.shape[1]
        attended = functional.scaled_dot_product_attention(
            _rotated(queries).transpose(0, 1),
            _rotated(keys).repeat_interleave(group, dim=1).transpose(0, 1),
            values.repeat_interleave(group, dim=1).transpose(0, 1),
            is_causal=True,
        )
        flat = attended.transpose(0, 1).reshape(len(rows), -1)
        hidden = residual + self.linear(f"{prefix}self_attn.o_proj", flat)
        normed = self.norm(f"{prefix}post_attention_layernorm", hidden)
        gate = functional.silu(self.linear(f"{prefix}mlp.gate_proj", normed))
        inner = gate * self.linear(f"{prefix}mlp.up_proj", normed)
        return hidden + self.linear(f"{prefix}mlp.down_proj", inner)


def _rotated(heads: Tensor, theta: float = 50000.0) -> Tensor:
    """`[rows, heads, width]`, rotated by rows."""
    half = heads.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(len(heads)), frequencies)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def medusa(plain: Plain) -> Reference:
    def drafts(token_ids: list[int]) -> list[Tensor]:
        state = plain.states(token_ids, -1)[-2]
        logits = []
        for head in range(4):
            rows = state
            for block in range(2):
                rows = rows + functional.silu(plain.linear(f"{head}.{block}.linear", rows))
            logits.append(plain.linear(f"{head}.2", rows))
        return logits

    return drafts


def eagle(plain: Plain, fc: str = "fc", prefix: str = "layers.0.") -> Reference:
    embedding, head = plain.model.model.embed_tokens, plain.model.lm_head

    def drafts(token_ids: list[int]) -> list[Tensor]:
        text, states = list(token_ids), plain.states(token_ids, -1)[:-1]
        logits = []
        for _ in range(NUM_WANTED):
            embedded = embedding(torch.tensor(text[1:]))
            fused = plain.linear(fc, torch.cat([embedded, states], dim=-1))
            last = plain.layer(prefix, fused, fused)[-1:]
            logits.append(head(last[0]))
            text.append(int(logits[-1].argmax()))
            states = torch.cat([states, last])
        return logits

    return drafts


def eagle3(plain: Plain, layers: tuple[int, ...], prefix: str = "midlayer.") -> Reference:
    own = plain.tensors.get("embed_tokens.weight", plain.model.model.embed_tokens.weight)
    norms_residual = bool(plain.config.get("norm_before_residual", False))
    d2t = plain.tensors["d2t"]
    token_ids_of = torch.arange(len(d2t)) + d2t
    assert torch.equal(token_ids_of, plain.tensors["t2d"].nonzero()[:, 0])

    def drafts(token_ids: list[int]) -> list[Tensor]:
        text = list(token_ids)
        tapped = torch.cat([plain.states(token_ids, layer) for layer in layers], dim=-1)[:-1]
        states = plain.linear("fc", tapped)
        logits = []
        for _ in range(NUM_WANTED):
            embedded = functional.embedding(torch.tensor(text[1:]), own)
            normed = plain.norm(f"{prefix}hidden_norm", states)
            rows = torch.cat([plain.norm(f"{prefix}input_layernorm", embedded), normed], dim=-1)
            last = plain.layer(prefix, rows, normed if norms_residual else states)[-1:]
            whole = torch.full((plain.model.config.vocab_size,), -torch.inf)
            whole[token_ids_of] = plain.linear("lm_head", plain.norm("norm", last))[0]
            logits.append(whole)
            text.append(int(whole.argmax()))
            states = torch.cat([states, last])
        return logits

    return drafts


def make_case(
    name: str, folder: Path, target: Path, model: LlamaForCausalLM
) -> tuple[Path, Reference]:
    """A head's folder and its reference."""
    if name == "medusa":
        head = make_medusa(
            folder / name, target, num_heads=4, num_layers=2, file="medusa_lm_head.pt"
        )
    elif name.startswith("eagle3"):
        layout = "speculators" if "speculators" in name else "published"
        layers = (1, 3, 6) if "layers" in name else None
        head = make_eagle3(folder / name, target, layout=layout, layers=layers)
    else:
        layout = "speculators" if "speculators" in name else "published"
        head = make_eagle(folder / name, target, layout=layout)
    [file] = [path for path in head.iterdir() if path.name != "config.json"]
    tensors = (
        load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    )
    plain = Plain(model, tensors, json.loads((head / "config.json").read_text()))
    references = {
        "medusa": lambda: medusa(plain),
        "eagle": lambda: eagle(plain),
        "eagle, speculators": lambda: eagle(plain, "fusion_fc", "transformer."),
        "eagle3": lambda: eagle3(plain, (2, 3, 4)),
        "eagle3, layers": lambda: eagle3(plain, (1, 3, 6)),
        "eagle3, speculators": lambda: eagle3(plain, (2, 3, 4), "layers.0."),
    }
    return head, references[name]()


class Table:
    """A target and a head, driven without an engine: rows in any chunks, drafts right or wrong."""

    def __init__(self, target: Path, head: Path) -> None:
        decoder = load_decoder(target, dtype="float32")
        self._worker = TargetWorker(decoder, num_blocks=4, block_size=CONTEXT)
        kind = MedusaDrafterConfig if (head / "medusa_lm_head.pt").is_file() else EagleDrafterConfig
        loaded = load_head(
            kind(model=str(head)),
            decoder,
            TargetConfig(max_num_seqs=4, max_model_len=CONTEXT),
            max_draft=NUM_WANTED,
        )
        self.logits: list[Tensor] = []
        heard = loaded.logits

        def listened(state: Tensor, depth: int) -> Tensor:
            self.logits.append(heard(state, depth))
            return self.logits[-1]

        loaded.logits = listened  # type: ignore[method-assign]
        self._model = HeadModel(loaded, self._worker.keep_hidden(loaded.wanted))
        self._client = ExchangeClient("test")

    def step(self, *parts: tuple[int, Sequence[int], int, Sequence[int]]) -> dict[int, int]:
        """Compute (sequence, tokens, first uncomputed one, drafts): how many drafts were kept."""
        sequences = tuple(
            SequenceRows(
                seq_id=seq_id,
                block_table=(seq_id,),
                start=start,
                token_ids=(*token_ids[start:], *drafts),
                num_drafts=len(drafts),
                sampling=GREEDY,
            )
            for seq_id, token_ids, start, drafts in parts
        )
        output = self._worker.step(StepInput(1, sequences))
        return {answer.seq_id: answer.num_accepted for answer in output.sequences}

    def drafts(self, texts: Mapping[int, list[int]]) -> dict[int, tuple[int, ...]]:
        """What is drafted after each text; `logits` has what was drawn from, by depth."""
        self.logits.clear()
        queries = [
            DraftQuery(seq_id=seq_id, token_ids=text, num_wanted=NUM_WANTED, sampling=GREEDY)
            for seq_id, text in texts.items()
        ]
        answer = self._model.exchange(self._client.message(queries))
        drafts = self._client.digest(answer)
        return {seq_id: draft.token_ids for seq_id, draft in drafts.items()}


@pytest.mark.parametrize(
    "name",
    [
        "medusa",
        "eagle",
        "eagle, speculators",
        "eagle3",
        "eagle3, layers",
        "eagle3, speculators",
    ],
)
@torch.inference_mode()
def test_logits_and_drafts_are_the_reference_s(
    target: Path, model: LlamaForCausalLM, tmp_path: Path, name: str
) -> None:
    """Three sequences, a long one in chunks, drafts half right: at every depth, at every step."""
    head, reference = make_case(name, tmp_path, target, model)
    table, rng = Table(target, head), random.Random(4)
    texts = {
        i: rng.choices(range(512), k=length) for i, length in enumerate((2, 37, MAX_ROWS + 40))
    }
    chunk = 250  # of the last one, beside the others' prompts
    table.step((0, texts[0][:-1], 0, ()), (1, texts[1][:-1], 0, ()), (2, texts[2][:chunk], 0, ()))
    table.step((2, texts[2][:-1], chunk, ()))
    for _ in range(4):
        drafts = table.drafts(texts)
        expected = {seq_id: reference(text) for seq_id, text in texts.items()}
        for row, (seq_id, logits) in enumerate(expected.items()):
            assert drafts[seq_id] == tuple(int(each.argmax()) for each in logits)
            for depth, own in enumerate(logits):
                off = 1e-4 * float(own[own.isfinite()].abs().max())
                torch.testing.assert_close(table.logits[depth][row], own, rtol=0, atol=off)
        parts = []
        for seq_id, text in texts.items():  # what the target would say, and then something else
            right = _greedy(model, text, rng.randint(0, 3))
            parts.append((seq_id, text, len(text) - 1, (*right, rng.randrange(512), 1)))
        kept = table.step(*parts)
        for seq_id, text, _, proposed in parts:
            texts[seq_id] = [*text, *proposed[: kept[seq_id]], rng.randrange(512)]


def _greedy(model: LlamaForCausalLM, token_ids: Sequence[int], number: int) -> list[int]:
    """What the target says next."""
    text = list(token_ids)
    for _ in range(number):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(token_ids) :]
