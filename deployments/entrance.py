"""Who gets into a gateway and how, from its configuration."""

from cluster.config import GatewayConfig
from cluster.metrics import GatewayMetrics
from deployments.auth import Authenticator
from deployments.fair_use import FairUse
from deployments.keys import KeyRing
from deployments.tls import server_credentials


class Entrance:
    """Keys, certificates and limits of one gateway. Raises ConfigurationError."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        config.check_exposure()
        self._keys = None if config.keys is None else KeyRing(config.keys)
        self.authenticator = Authenticator(self._keys, refused=metrics.key_refused)
        self.credentials = None if config.tls is None else server_credentials(config.tls)
        self.fair_use = FairUse(num_gateways=config.num_replicas)

    async def watch(self) -> None:
        """Take up changes of the keys' file; never ends by itself."""
        if self._keys is not None:
            await self._keys.file.watch()
