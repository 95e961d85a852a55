"""Keys after images, and after URLs whose image changes."""

from __future__ import annotations

from coordinator.agent.chains import Binding
from coordinator.agent.kv_events import Stored
from tests.coordinator.agent.prompts import IMAGE, SIZE, bound, brief, held, removed, told


def picture(session: str = "tip", first: int = 1, name: str = "a", blocks: slice = slice(0, 4)) -> Stored:
    """Two tokens of text, ten of an image, and four of text."""
    tokens = [0, 0, *[IMAGE] * 10, 0, 0, 0, 0]
    extra = [[[name, 2]], [[name, -2]], [[name, -6]], None]
    hashes = [*range(first, first + 4)]
    return told(
        hashes[blocks],
        hashes[blocks.start - 1] if blocks.start else None,
        session,
        tokens=tokens[blocks.start * SIZE : blocks.stop * SIZE],
        extra=extra[blocks],
    )


def album(tip: str = "tip", estimate: int = 16) -> Binding:
    return Binding(tip, ["text", "image", tip], [10, 10, 30], [0, 1, 1], estimate)


def test_a_key_behind_an_image_ends_with_it() -> None:
    residency = bound(album())
    assert brief(residency.apply([picture()])) == ["+image@3", "+tip@4"]


def test_an_image_that_goes_on_in_the_next_chunk_has_not_ended() -> None:
    residency = bound(album())
    assert residency.apply([picture(blocks=slice(0, 2))]) == []
    assert brief(residency.apply([picture(blocks=slice(2, 4))])) == ["+image@3", "+tip@4"]


def test_an_image_that_is_computed_again_in_part_has_not_ended() -> None:
    residency = bound(album())
    residency.apply([picture()])
    residency.measure("tip", 16)
    residency.apply([removed(4, 3, 2, 1)])
    assert residency.apply([picture(blocks=slice(0, 2))]) == []
    assert residency.measure("tip", 16) == []


def test_behind_a_url_that_names_another_image_the_keys_move_to_its_blocks() -> None:
    residency = bound(album())
    residency.apply([picture()])
    residency.measure("tip", 16)
    assert brief(residency.apply([picture(first=11, name="b")])) == ["+image@13", "+tip@14"]
    assert residency.apply([removed(4, 3, 2, 1)]) == []
    assert brief(residency.apply([removed(14)])) == ["-tip"]


def test_a_larger_image_behind_the_same_url_is_not_cut_to_what_was_measured_of_the_smaller() -> None:
    residency = bound(album(estimate=8))
    small = told([21, 22], tokens=[0, 0, IMAGE, IMAGE, 0, 0, 0, 0], extra=[[["b", 2]], None])
    residency.apply([small])
    residency.measure("tip", 8)
    assert brief(residency.apply([picture()])) == ["+image@3", "+tip@4"]


def test_an_image_of_another_size_behind_the_same_url_is_measured_anew() -> None:
    residency = bound(album(estimate=16))
    residency.apply([picture()])
    residency.measure("tip", 16)
    small = told([21, 22], tokens=[0, 0, IMAGE, IMAGE, 0, 0, 0, 0], extra=[[["b", 2]], None])
    assert brief(residency.apply([small])) == ["+image@21"]
    assert brief(residency.measure("tip", 8)) == ["+tip@22"]
    assert held(residency) == {"image": 21, "tip": 22}
