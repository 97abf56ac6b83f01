"""Small random checkpoints as transformers writes them, made without a network."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "A draft is a guess at what the model will say, and the model reads the whole guess at once.",
    "What it would have said itself is kept; the first word it would not have said is replaced.",
    "So the text is the same text, only sooner, and nobody can tell which words were guessed.",
    "Repeat the following text exactly, then count the words in it: one, two, three, four, five.",
)


def make_checkpoint(
    folder: Path,
    *,
    family: str = "llama",
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seed: int = 0,
    **config: object,
) -> Path:
    """Write a seeded random model with its tokenizer; `config` goes to the transformers config.

    EOS is id 2. A vocabulary too small for three special tokens and 256 bytes has no tokenizer.
    Every parameter is random, biases and norms too, so that none can be left out unnoticed.
    """
    config_class, model_class = FAMILIES[family]
    options = {
        "intermediate_size": 2 * hidden_size,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(
            config_class(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=num_heads,
                num_key_value_heads=num_kv_heads,
                **options,
            )
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if vocab_size >= NUM_BYTES + len(SPECIAL_TOKENS):
        make_tokenizer(folder, vocab_size=vocab_size)
    return folder


def make_tokenizer(
    folder: Path, *, vocab_size: int = 512, corpus: tuple[str, ...] = CORPUS
) -> Path:
    """Write a byte-level BPE tokenizer of at most that many tokens: every text round-trips.

    Another corpus gives other merges, hence another vocabulary of the same size.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> Path:
    """Change fields of a checkpoint's config.json, whatever they mean."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder
