"""Small random checkpoints: those that `drafthouse drill` serves, too."""

from cluster.tools.checkpoints import edit_config, make_checkpoint, make_tokenizer

__all__ = ["edit_config", "make_checkpoint", "make_tokenizer"]
