"""The section `router`."""

from pydantic import Field

from cluster.config.base import Config, Resources


class RouterConfig(Config):
    """Who tells everyone who is there. There is one; what it takes also says where it may run."""

    resources: Resources = Field(default_factory=lambda: {"CPU": 0.1})
