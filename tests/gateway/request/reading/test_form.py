"""Forms: finding the model, removing fields, and bounding the work for a hostile form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.request.reading.form import Form, read_form

TYPE = "multipart/form-data; boundary=x"
REMOVED = ("session_id", "priority")


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more, value)


def read(*parts: bytes, max_parts: int = 16) -> Form:
    return read_form(TYPE, b"".join((*parts, b"--x--\r\n")), REMOVED, max_parts)


def refusal(body: bytes, max_parts: int = 16) -> ApiError:
    with pytest.raises(ApiError) as refused:
        read_form(TYPE, body, REMOVED, max_parts)
    return refused.value


def test_the_model_of_a_form_is_found_wherever_it_stands() -> None:
    sound = part("file", b"RIFF" * 50_000, b'; filename="a.wav"\r\nContent-Type: audio/wav')
    assert read(sound, part("model", b"whisper"), part("language", b"en")) == Form("whisper", None)
    assert read(sound) == Form(None, None)
    assert read() == Form(None, None)


def test_of_several_models_the_last_counts_as_it_does_for_the_engine() -> None:
    assert read(part("model", b"a"), part("model", b"b")).model == "b"


@given(st.permutations(["model", "session_id", "priority", "file", "timestamp_granularities[]", "session_id[a]"]))
def test_removed_fields_are_taken_out_and_nothing_else_is_touched(names: list[str]) -> None:
    parts = {name: part(name, name.encode() * 20_000 if name == "file" else b"1") for name in names}
    kept = [parts[name] for name in names if name.partition("[")[0] not in REMOVED]
    assert read(*parts.values()).body == b"".join((*kept, b"--x--\r\n"))


@pytest.mark.parametrize("size", [1, 60, 3000])
def test_a_form_whose_parts_have_no_end_of_their_heads_is_refused_at_the_first(size: int) -> None:
    """An older reader searched again after each `name`, so 60 KB of this input blocked a gateway for seconds."""
    assert refusal(b"--x\r\n" + b'name="model"\r\nx\r\n' * size + b"--x--\r\n").code == "invalid_form"


def test_a_form_of_too_many_parts_is_refused_by_the_name_of_the_limit() -> None:
    assert read(*[part("a", b"1")] * 4, max_parts=4).body is None
    refused = refusal(b"".join([part("a", b"1")] * 5) + b"--x--\r\n", max_parts=4)
    assert (refused.status, refused.code) == (400, "limit_exceeded")
    assert "limits.max_form_parts" in refused.message


@pytest.mark.parametrize(
    "head",
    [
        b"A: " + b"a" * 5000,
        b"".join(b"A%d: b\r\n" % number for number in range(20)),
        b"a" * 5000,
    ],
)
def test_a_part_with_a_very_long_head_is_refused(head: bytes) -> None:
    assert refusal(b"--x\r\n" + head + b"\r\n\r\n1\r\n--x--\r\n").code == "invalid_form"


def test_a_very_long_model_is_refused_by_name() -> None:
    assert refusal(part("model", b"m" * 300) + b"--x--\r\n").param == "model"


@given(st.binary(max_size=200).filter(lambda data: b"--x" not in data), st.integers(1, 40))
def test_a_file_of_any_bytes_is_left_alone(data: bytes, times: int) -> None:
    body = part("file", data * times + b"\r\n-") if b"--x" not in data * times else part("file", b"")
    assert read(body, part("model", b"m")) == Form("m", None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"--x--",
        b"hello",
        b"\r\n--x--\r\n",
        part("a", b"1"),
        part("a", b"1") + b"--x-",
        part("a", b"--x") + b"--x--\r\n",
        part("a", b"1").replace(b"\r\n", b"\n") + b"--x--\r\n",
        part("a", b"1") + b"--x--\r\n" + part("session_id", b"1") + b"--x--\r\n",
    ],
)
def test_what_is_not_plainly_a_form_is_refused_or_holds_no_hidden_field(body: bytes) -> None:
    code = ""
    try:
        body = read_form(TYPE, body, REMOVED, 16).body or body
    except ApiError as refused:
        code = refused.code
    assert code == "invalid_form" or b"session_id" not in body
