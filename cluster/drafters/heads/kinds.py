"""What kind of draft a model reference is, from what is in its folder."""

from pathlib import Path

from cluster.models.reference import read_json, resolve

HEAD_FILES = ("*.pt", "*.bin")  # beside what whole models are made of


def resolve_head(ref: str) -> Path:
    """The folder of a head, as `resolve` finds a model's. Raises ConfigurationError."""
    return resolve(ref, more_files=HEAD_FILES)


def kind_of(ref: str) -> str:
    """model, medusa or eagle: as config.json says, or else the names of the tensors.

    Raises ConfigurationError.
    """
    folder = resolve(ref)
    config = read_json(folder / "config.json")
    if "medusa_num_heads" in config:
        return "medusa"
    architectures = config.get("architectures") or ()
    if "speculators_model_type" in config or any("eagle" in str(a).lower() for a in architectures):
        return "eagle"
    if config.get("num_hidden_layers") != 1:  # an EAGLE head's config is that of its one layer
        return "model"
    # Needs torch, and only for what says nothing of itself.
    from cluster.drafters.heads.checkpoint import stored_names  # noqa: PLC0415
    from cluster.drafters.heads.eagle_load import FILES  # noqa: PLC0415

    folder = resolve_head(ref)
    if not any((folder / name).is_file() for name in FILES):
        return "model"  # of several files
    return "eagle" if "fc.weight" in stored_names(folder, FILES) else "model"
