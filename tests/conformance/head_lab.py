"""A lab whose drafters are beside the target: heads, and the target without some layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config import (
    EagleDrafterConfig,
    HeadDrafterConfig,
    MedusaDrafterConfig,
    TargetConfig,
)
from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.heads.kinds import kind_of
from cluster.drafters.heads.model import BesideTarget, HeadModel
from cluster.drafters.model import ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.interfaces import Drafter
from cluster.local_drafter import load_head
from tests.conformance.lab import Lab, Place

CONFIGS: dict[str, Callable[..., HeadDrafterConfig]] = {
    "medusa": MedusaDrafterConfig,
    "eagle": EagleDrafterConfig,
}


@dataclass
class HeadLab(Lab):
    """A target and heads for it, by name; "all" is a choice of them, of "skip" and of n-grams."""

    heads: Mapping[str, Path] = field(default_factory=dict, kw_only=True)

    def drafter(self, name: str, place: Place) -> Drafter:
        """As the other's, and heads."""
        if name == "all":
            paid = [self.drafter(each, place) for each in (*self.heads, "skip")]
            return ChoiceDrafter(free=[NgramDrafter()], paid=paid, patience_seconds=5.0)
        if name in self.heads:
            return self._head(name, place)
        return super().drafter(name, place)

    def _head(self, name: str, place: Place) -> ModelDrafter:
        reference, limits = str(self.heads[name]), place.limits
        head = load_head(
            CONFIGS[kind_of(reference)](model=reference),
            place.worker.decoder,
            TargetConfig(max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len),
            max_draft=place.k,
        )
        model = HeadModel(head, place.worker.keep_hidden(head.wanted), name=name)
        return ModelDrafter(
            model, name=name, rule=place.rule, thread=BesideTarget(model, place.target)
        )
