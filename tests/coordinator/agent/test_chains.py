"""Where keys end, found from the engine's events and from the text bytes between the keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.agent import chains
from coordinator.agent.blocks import MediaSpan
from coordinator.agent.chains import Binding, Bindings, places, prompt_end
from coordinator.agent.token_sizes import TokenPlaces

EVEN = TokenPlaces((), 1)
"""All tokens have the same size."""


def chain(*points: tuple[int, int], tokens: int = 0, measured: bool = True, tip: str = "tip") -> Binding:
    """Keys k0, k1, … and the tip, each at (text bytes, images)."""
    return Binding(
        tip=tip,
        keys=[*(f"k{index}" for index in range(len(points) - 1)), tip],
        text_bytes=[text for text, _ in points],
        image_counts=[images for _, images in points],
        prompt_tokens=tokens,
        is_measured=measured,
    )


def ends(
    binding: Binding, end: int, spans: Sequence[tuple[int, int]] = (), exact: dict[str, int] | None = None
) -> list[int]:
    media = [MediaSpan(f"image {index}", *span) for index, span in enumerate(spans)]
    return [place.tokens for place in places(binding, media, end, exact or {}, EVEN)]


# -- where keys end ----------------------------------------------------------------------------------------------

FOUR = ((100, 0), (200, 0), (300, 0), (400, 0))
UNTOLD = chain((100, 0), (100, 1), (200, 1), (200, 2), (300, 2), (400, 2))
PLACES: dict[str, tuple[Binding, int, list[tuple[int, int]], dict[str, int], list[int]]] = {
    "text lies in proportion to its bytes, rounded down": (
        chain((100, 0), (333, 0), (500, 0), (1000, 0)), 100, [], {}, [10, 33, 50, 100]),
    "a share that floats cannot hold is exact at block boundaries": (
        chain(*((each, 0) for each in range(3, 3000, 3))), 999, [], {}, list(range(1, 1000))),
    "a chain of one key ends at the prompt's end": (chain((10, 0)), 7, [], {}, [7]),
    "also if it has no text": (chain((0, 0)), 7, [], {}, [7]),
    "keys without text between them end no earlier than the text before them": (
        chain((0, 0), (500, 0), (500, 0), (1000, 0)), 100, [], {}, [0, 50, 50, 100]),
    "a chain without any text ends where its tip does": (
        chain((0, 0), (0, 0), (0, 0)), 100, [], {}, [100, 100, 100]),
    "an image ends exactly, the text around it reaches to its start and from its end": (
        chain((50, 0), (100, 0), (100, 1), (150, 1), (200, 1)), 540, [(20, 500)], {}, [10, 20, 500, 520, 540]),
    "images side by side end each at its own end": (
        chain((100, 1), (100, 2), (200, 2)), 700, [(20, 300), (301, 600)], {}, [300, 600, 700]),
    "a prompt that ends with an image ends where it was measured": (
        chain((50, 0), (100, 1)), 510, [(20, 500)], {}, [10, 510]),
    "what comes behind an image that is not told of yet is held to lie at the end": (
        UNTOLD, 900, [(10, 110)], {}, [10, 110, 900, 900, 900, 900]),
    "also if no image is told of": (UNTOLD, 900, [], {}, [900] * 6),
    "text before it lies where it does": (chain((100, 0), (200, 1), (300, 1)), 900, [], {}, [450, 900, 900]),
    "without the boundary behind an image the next key counts for the image alone": (
        chain((300, 1), (400, 1)), 600, [(20, 500)], {}, [500, 600]),
    "without the boundaries behind several images the next key counts for the last of them": (
        chain((300, 3), (350, 3), (400, 3)), 1000, [(20, 200), (210, 400), (410, 900)], {}, [900, 950, 1000]),
    "an image beyond the prompt's end is cut there": (
        chain((100, 1), (200, 1)), 300, [(20, 500)], {}, [300, 300]),
    "a key that is known exactly holds those around it": (chain(*FOUR), 100, [], {"k1": 80}, [40, 80, 90, 100]),
    "what lies beyond the end is ignored": (chain(*FOUR), 100, [], {"k1": 101}, [25, 50, 75, 100]),
    "what contradicts a key before it is ignored": (
        chain(*FOUR), 100, [], {"k0": 50, "k1": 40}, ends(chain(*FOUR), 100, exact={"k0": 50})),
    "an image that contradicts what was known before it ends there": (
        chain((50, 0), (100, 1), (200, 1)), 400, [(20, 200)], {"k0": 300}, [300, 300, 400]),
    "what was known of the tip does not outlive a new measure": (
        chain((100, 0), (200, 0)), 120, [], {"tip": 100}, [60, 120]),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES)
def test_keys_end_where_the_events_and_the_text_say(
    case: tuple[Binding, int, list[tuple[int, int]], dict[str, int], list[int]],
) -> None:
    binding, end, spans, exact, expected = case
    assert ends(binding, end, spans, exact) == expected


def test_each_place_spans_the_tokens_since_the_one_before() -> None:
    found = places(chain((100, 0), (300, 0), (1000, 0)), [], 100, {}, EVEN)
    assert [(place.key, place.tokens, place.span_tokens) for place in found] == [
        ("k0", 10, 10),
        ("k1", 30, 20),
        ("tip", 100, 70),
    ]


def test_keys_are_exact_where_they_were_measured_or_known() -> None:
    assert not any(place.is_exact for place in places(UNTOLD, [], 900, {}, EVEN)[:-1])
    found = places(chain(*FOUR), [], 100, {"k1": 80}, EVEN)
    assert [place.is_exact for place in found] == [False, True, False, True]
    assert not places(chain((9, 0), measured=False), [], 5, {}, EVEN)[-1].is_exact


# -- any chain ---------------------------------------------------------------------------------------------------


@st.composite
def any_prompt(draw: st.DrawFn) -> tuple[Binding, list[MediaSpan], int, dict[str, int]]:
    """A prompt of texts and images as an engine sees it, and a chain over it that lacks some boundaries."""
    points, spans, tokens, text_bytes = [], [], 0, 0
    for is_image in draw(st.lists(st.booleans(), min_size=1, max_size=12)):
        size = draw(st.integers(1, 50))
        if is_image:
            spans.append(MediaSpan("image", tokens, tokens + size))
        else:
            text_bytes += draw(st.integers(0, 300))
        tokens += size
        points.append((text_bytes, len(spans)))
    kept = [point for point in points[:-1] if draw(st.booleans())]
    binding = chain(*kept, points[-1], measured=draw(st.booleans()))
    exact = draw(st.dictionaries(st.sampled_from(binding.keys), st.integers(0, 700), max_size=3))
    return binding, spans[: draw(st.integers(0, len(spans)))], tokens + draw(st.integers(0, 9)), exact


@given(any_prompt())
def test_places_are_monotone_never_beyond_the_end_and_the_tip_is_there(
    prompt: tuple[Binding, list[MediaSpan], int, dict[str, int]],
) -> None:
    binding, spans, end, exact = prompt
    found = places(binding, spans, end, exact, EVEN)
    assert [place.key for place in found] == list(binding.keys)
    assert found[-1].tokens == end
    assert found[0].tokens == found[0].span_tokens >= 0
    for before, after in pairwise(found):
        assert after.tokens - before.tokens == after.span_tokens >= 0


@given(any_prompt())
def test_every_image_whose_own_boundary_is_a_key_ends_exactly(
    prompt: tuple[Binding, list[MediaSpan], int, dict[str, int]],
) -> None:
    binding, spans, end, _ = prompt
    images = 0
    for place, count in zip(places(binding, spans, end, {}, EVEN)[:-1], binding.image_counts[:-1], strict=True):
        if images < count <= len(spans):
            assert place.tokens == spans[count - 1].end
        images = count


# -- the prompt's end --------------------------------------------------------------------------------------------


def test_a_measured_prompt_ends_where_it_was_measured() -> None:
    binding = chain((9, 0), tokens=100)
    assert [prompt_end(binding, known, 16) for known in (0, 96, 160)] == [100, 100, 100]


@pytest.mark.parametrize(
    ("known", "end"),
    [(0, 100), (80, 100), (96, 100), (112, 100), (128, 128)],
    ids=["nothing", "on its way", "its last block", "a block of the answer", "longer"],
)
def test_an_estimate_holds_until_the_events_tell_of_more(known: int, end: int) -> None:
    assert prompt_end(chain((9, 0), tokens=100, measured=False), known, 16) == end


# -- bindings ----------------------------------------------------------------------------------------------------


def test_a_chain_that_is_bound_again_goes_on_from_what_was_known() -> None:
    bindings, first, second = Bindings(), chain((9, 0), tokens=50), chain((9, 0), tokens=40, measured=False)
    bindings.put(first)
    bindings.set_path(first, [1, 2], [MediaSpan("a", 1, 2)])
    first.last = 7
    bindings.put(second)
    assert bindings.get("tip") is second
    assert (second.path, second.spans, second.last, second.prompt_tokens) == ([1, 2], first.spans, 7, 50)
    bindings.forget_paths()
    assert (second.path, second.spans, second.last, second.is_measured) == ([], [], 0, True)


def test_the_binding_that_was_not_used_for_longest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_MAX_BINDINGS", 2)
    bindings, made = Bindings(), [chain((9, 0), tip=tip) for tip in "abc"]
    bindings.put(made[0])
    bindings.put(made[1])
    bindings.set_path(made[0], [1], [])
    bindings.put(made[2])
    assert ["a" in bindings, "b" in bindings, "c" in bindings] == [True, False, True]


def test_long_paths_are_given_up_before_there_are_many_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_MAX_PATH_BLOCKS", 10)
    bindings, made = Bindings(), [chain((9, 0), tip=tip) for tip in "abc"]
    for binding in made:
        bindings.put(binding)
        bindings.set_path(binding, [1] * 5, [])
    assert ["a" in bindings, "b" in bindings, "c" in bindings] == [False, True, True]
    bindings.set_path(made[2], [1] * 50, [])
    assert ["b" in bindings, "c" in bindings] == [False, True]


def test_a_path_is_complete_when_less_than_a_block_is_missing() -> None:
    binding = chain((9, 0), tokens=40)
    assert not binding.is_complete(16)
    binding.path = [1]
    assert not binding.is_complete(16)
    binding.path = [1, 2]
    assert binding.is_complete(16)
