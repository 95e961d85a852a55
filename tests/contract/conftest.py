from tests.gateway.simulator.conftest import start_publishing, start_replica

__all__ = ["start_publishing", "start_replica"]
