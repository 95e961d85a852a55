from tests.bench.simulator.conftest import start_publishing, start_replica

__all__ = ["start_publishing", "start_replica"]
