"""Which replica keeps a stored response, or another object."""

from __future__ import annotations

import redis

from coordinator.pool import object_owners
from coordinator.pool.pool import Pool
from tests.polling import wait_until
from tests.redis_server import RedisServer


async def test_a_response_is_on_its_way_to_redis_before_its_client_can_hear_of_it(
    redis_server: RedisServer, pool: Pool
) -> None:
    """The client's next request may reach another gateway before this gateway's event loop has had another turn."""
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as another_gateway:
        another_gateway.ping()
        written = object_owners.remember(pool, "resp_1", "r0", "life1", "a-tenant")
        wait_until(lambda: another_gateway.get(pool.keys.response("resp_1")) == "r0 life1 a-tenant")
        await written
        assert await object_owners.find(pool, "resp_1", "a-tenant") == ("r0", "life1", True)
        assert await object_owners.find(pool, "resp_1", "another-tenant") == ("r0", "life1", False)
        assert await object_owners.find(pool, "resp_2", "a-tenant") is None
