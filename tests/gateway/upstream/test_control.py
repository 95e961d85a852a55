"""What gateways ask replicas for themselves, and what comes of answers that are wrong."""

from __future__ import annotations

import pytest

from gateway.upstream import Upstream, UpstreamError


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "cannot connect to 127.0.0.1:1 (connection refused)"),
        ("http://nobody.invalid:1", "cannot connect to nobody.invalid:1 ("),
    ],
)
async def test_a_question_that_reaches_nobody_says_why_in_plain_words(upstream: Upstream, url: str, why: str) -> None:
    with pytest.raises(UpstreamError) as failure:
        await upstream.fetch(url, 5)
    assert failure.value.reason == "refused"
    assert failure.value.detail.startswith(why)
    assert "ssl" not in failure.value.detail
