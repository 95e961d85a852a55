"""The text length of tokens, learned from an engine's detokenizer. It locates bytes of a text among its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.agent.token_sizes import TokenPlaces, TokenSizes

VOCABULARY = {1: "the", 2: " cat", 3: "\n", 4: "東", 5: "the", 6: "\ufffd", 7: "", 8: " the", 9: "def"}


class Detokenizer:
    """An engine's detokenizer that counts its calls."""

    def __init__(self, vocabulary: dict[int, str] | None = None) -> None:
        self.vocabulary = VOCABULARY if vocabulary is None else vocabulary
        self.calls = 0

    async def __call__(self, tokens: Sequence[int]) -> str | None:
        self.calls += 1
        return "".join(self.vocabulary[token] for token in tokens) if self.vocabulary else None


async def test_sizes_are_asked_for_once_and_many_at_a_time() -> None:
    sizes, engine = TokenSizes(), Detokenizer({n: f"<{n}>" if n else "def" for n in range(500)})
    weight = sizes.measure(range(500))
    await sizes.learn(engine)
    assert engine.calls == 2  # one call to find a separator, one for all the others
    assert sizes.total(weight) == sum(len(text) for text in engine.vocabulary.values())
    assert sizes.measure(range(500)) == (sizes.total(weight), ())
    await sizes.learn(engine)
    assert engine.calls == 2


async def test_a_text_that_looks_like_the_separator_costs_a_few_calls_and_its_neighbours_a_guess() -> None:
    sizes, engine = TokenSizes(), Detokenizer({0: "def", 40: "undefined", **{n: "x" * n for n in range(1, 40)}})
    weights = {token: sizes.measure([token]) for token in engine.vocabulary}
    await sizes.learn(engine)
    guessed = {token for token, weight in weights.items() if sizes.total(weight) != len(engine.vocabulary[token])}
    assert 40 in guessed
    assert len(guessed) <= 4
    assert all(sizes.total(weights[token]) == 4 for token in guessed)
    assert engine.calls < 12
    assert sizes.measure([40]) == (4, ())  # and the agent never asks again


async def test_tokens_of_unknown_size_weigh_a_guess_until_they_are_learned() -> None:
    sizes = TokenSizes()
    weight = sizes.measure([9, 2])
    assert weight == (0, (9, 2))
    assert sizes.total(weight) == 8
    await sizes.learn(Detokenizer())
    assert sizes.total(weight) == len("def cat")


async def test_an_engine_that_cannot_tell_is_not_asked_for_ever() -> None:
    sizes, engine = TokenSizes(), Detokenizer({})
    for _ in range(20):
        sizes.measure([1, 2])
        await sizes.learn(engine)
    assert engine.calls == 5
    assert sizes.total(sizes.measure([1, 2])) == 8


def test_a_key_lies_where_its_bytes_do_and_not_its_tokens() -> None:
    token_places = TokenPlaces([100, 10, 10, 100], 10)
    assert token_places.between(0, 40, 100, 220) == 10
    assert token_places.between(0, 40, 110, 220) == 20
    assert token_places.between(0, 40, 120, 220) == 30
    assert token_places.between(10, 30, 5, 20) == 15


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
    st.integers(0, 300),
    st.integers(0, 300),
    st.lists(st.integers(0, 1000), min_size=2, max_size=2).map(sorted),
)
def test_a_place_lies_between_its_anchors_and_moves_with_its_share(
    text_bytes: list[int], a: int, b: int, parts: list[int]
) -> None:
    left, right = min(a, b), max(a, b)
    token_places = TokenPlaces(text_bytes, 16)
    near, far = (token_places.between(left, right, part, 1000) for part in parts)
    assert left <= near <= far <= right
