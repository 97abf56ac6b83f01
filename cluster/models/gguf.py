"""A GGUF file turned into what transformers would have saved."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.errors import ConfigurationError


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights into the folder.

    Raises ConfigurationError for a file transformers cannot read.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigurationError(f"model {str(gguf)!r}: {error}") from error
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The weights are plain float32 from here on; the note would make transformers look for a GGUF.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
