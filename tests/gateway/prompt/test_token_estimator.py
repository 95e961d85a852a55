"""Token estimates never decrease along a chain, and converge to the engine's counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import ImageSize, Prompt, TokenEstimator

SMALL, LARGE = ImageSize(512, 512), ImageSize(1024, 1024)


def prompt(text_bytes: list[int], images: list[ImageSize | None], image_counts: list[int] | None = None) -> Prompt:
    counts = image_counts or [len(images)] * len(text_bytes)
    keys = [f"{number:032x}" for number in range(len(text_bytes))]
    return Prompt("m", keys, text_bytes, counts, images, bytes(16), body_changed=False)


def test_nothing_seen_yet_means_four_bytes_a_token_and_6500_tokens_a_megapixel() -> None:
    estimator = TokenEstimator()
    assert estimator.estimate(prompt([400, 800], [])) == [100, 200]
    assert estimator.estimate(prompt([0, 400, 400], [LARGE, None], [0, 1, 2])) == [0, 6600, 7600]


def test_a_first_long_answer_tells_almost_all() -> None:
    estimator = TokenEstimator()
    estimator.observe(prompt([30_000], []), 10_000)
    assert estimator.bytes_per_token == pytest.approx(3.0, rel=0.02)
    estimator.observe(prompt([0], [LARGE]), 400)
    assert estimator.image_tokens(LARGE) == pytest.approx(400)
    assert estimator.image_tokens(SMALL) == pytest.approx(100, rel=0.2)


def test_bytes_per_token_are_learned_from_text() -> None:
    estimator = TokenEstimator()
    for _ in range(100):
        estimator.observe(prompt([3000], []), 1000)
    assert estimator.bytes_per_token == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize(("tokens", "bound"), [(1, 16.0), (10**9, 0.5)])
def test_bytes_per_token_stay_within_bounds(tokens: int, bound: float) -> None:
    estimator = TokenEstimator()
    for _ in range(200):
        estimator.observe(prompt([64], []), tokens)
    assert estimator.bytes_per_token == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize(
    ("observed", "tokens"),
    [(prompt([63], []), 1), (prompt([100], []), 0), (prompt([100], []), -5), (prompt([], []), 10)],
)
def test_what_says_nothing_about_text_teaches_nothing(observed: Prompt, tokens: int) -> None:
    estimator = TokenEstimator()
    estimator.observe(observed, tokens)
    assert estimator.bytes_per_token == 4.0


def test_tokens_of_an_image_are_learned_by_size_and_carried_over_by_pixels() -> None:
    estimator = TokenEstimator()
    for _ in range(100):
        estimator.observe(prompt([400], [SMALL]), 100 + 256)
    assert estimator.image_tokens(SMALL) == pytest.approx(256, rel=0.01)
    assert estimator.image_tokens(LARGE) == pytest.approx(1024, rel=0.01)
    assert estimator.image_tokens(None) == pytest.approx(256, rel=0.01)


sizes = st.none() | st.builds(ImageSize, st.integers(0, 9000), st.integers(0, 9000))


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5)), min_size=1, max_size=10),
    st.lists(sizes, max_size=5),
    st.lists(st.tuples(st.integers(0, 10**6), st.lists(sizes, max_size=3), st.integers(-5, 10**7)), max_size=10),
)
def test_estimates_never_fall_along_a_chain_whatever_was_observed(
    steps: list[tuple[int, int]],
    images: list[ImageSize | None],
    observations: list[tuple[int, list[ImageSize | None], int]],
) -> None:
    estimator = TokenEstimator()
    for text_bytes, seen, tokens in observations:
        estimator.observe(prompt([text_bytes], seen), tokens)
    text = sorted(step for step, _ in steps)
    counts = sorted(min(count, len(images)) for _, count in steps)
    estimates = estimator.estimate(prompt(text, images, counts))
    assert all(isinstance(tokens, int) and tokens >= 0 for tokens in estimates)
    assert all(before <= after for before, after in pairwise(estimates))
