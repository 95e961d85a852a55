"""Forms: finding the model, removing fields, and bounding the work for a hostile form. Starlette's reader, which vLLM
uses, tells what an engine reads in a form."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import UploadFile
from starlette.requests import Request

from gateway.errors import ApiError
from gateway.request.reading.form import MAX_PARTS, Form, read_form

TYPE = "multipart/form-data; boundary=x"
REMOVED = ("session_id", "priority")
Field = tuple[str, str | None, bytes]
"""A name, a file's name, and the content."""


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more, value)


def read(*parts: bytes, content_type: str = TYPE) -> Form:
    return read_form(content_type, b"".join((*parts, b"--x--\r\n")), REMOVED)


def engine_reads(content_type: str, body: bytes) -> list[Field]:
    async def fields() -> list[Field]:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "headers": [(b"content-type", content_type.encode("latin-1"))]}
        found: list[Field] = []
        async with Request(scope, receive).form() as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    found.append((name, value.filename, await value.read()))
                else:
                    found.append((name, None, value.encode()))
        return found

    return asyncio.run(fields())


def fields(form: Form) -> list[Field]:
    return engine_reads(form.content_type, form.body)


def refusal(body: bytes, content_type: str = TYPE) -> ApiError:
    with pytest.raises(ApiError) as refused:
        read_form(content_type, body, REMOVED)
    return refused.value


def test_the_model_of_a_form_is_found_wherever_it_stands() -> None:
    sound = part("file", b"RIFF" * 50_000, b'; filename="a.wav"\r\nContent-Type: audio/wav')
    form = read(sound, part("model", b"whisper"), part("language", b"en"))
    assert form.model == "whisper"
    assert fields(form) == [
        ("file", "a.wav", b"RIFF" * 50_000),
        ("model", None, b"whisper"),
        ("language", None, b"en"),
    ]
    assert b"Content-Type: audio/wav\r\n" in form.body
    assert read(sound).model is None
    assert fields(read()) == []


def test_of_several_models_the_last_counts_as_it_does_for_the_engine() -> None:
    form = read(part("model", b"a"), part("session_id", b"1"), part("model", "bé".encode()), part("n", b"1"))
    assert form.model == "bé"
    assert form.model_at is not None
    begin, end = form.model_at
    named = form._replace(body=form.body[:begin] + b"other" + form.body[end:])
    assert fields(named) == [("model", None, b"a"), ("model", None, b"other"), ("n", None, b"1")]


@given(st.permutations(["model", "session_id", "priority", "file", "timestamp_granularities[]", "session_id[a]"]))
def test_removed_fields_are_taken_out_and_nothing_else_is_touched(names: list[str]) -> None:
    values = {name: name.encode() * 20_000 if name == "file" else b"1" for name in names}
    kept = [(name, None, values[name]) for name in names if name.partition("[")[0] not in REMOVED]
    assert fields(read(*(part(name, values[name]) for name in names))) == kept


MODEL = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'


@pytest.mark.parametrize(
    ("content_type", "disposition", "name", "filename"),
    [
        ("multipart/form-data; charset=utf-8; boundary=x", 'form-data; name="file"; filename="a.wav"', "file", "a.wav"),
        ('Multipart/Form-Data; Boundary="x"', "form-data; name=file; filename=a.wav", "file", "a.wav"),
        (TYPE, "form-data; name=file; filename=a.wav; filename*=utf-8''b.wav", "file", "a.wav"),
        (TYPE, 'form-data; name="file"; filename="say \\"hi\\".wav"', "file", 'say "hi".wav'),
        (TYPE, 'form-data; name="file"; filename="C:\\audio\\a.wav"', "file", "a.wav"),
        (TYPE, 'form-data; name="file"; filename="a\\b;c=d.wav"', "file", "a\\b;c=d.wav"),
        (TYPE, 'form-data; filename="ä%22.wav"; name="file"', "file", "ä%22.wav"),
        (TYPE, 'attachment;name="file" ;filename=""', "file", ""),
        (TYPE, 'form-data; name="a"; name="file"; filename=x', "file", "x"),
        (TYPE, 'FORM-DATA; NAME="größe"', "größe", None),
    ],
)
def test_each_spelling_that_the_engine_reads_is_read_the_same(
    content_type: str, disposition: str, name: str, filename: str | None
) -> None:
    head = f"Content-Disposition: {disposition}\r\nContent-Type: audio/wav\r\n\r\n".encode()
    body = MODEL + b"--x\r\n" + head + b"RIFF\r\n--x--\r\nan end that nobody reads"
    form = read_form(content_type, b"\r\n" + body, REMOVED)
    assert form.model == "m"
    assert fields(form) == [("model", None, b"m"), (name, filename, b"RIFF")] == engine_reads(content_type, body)


def test_a_boundary_of_any_characters_is_read() -> None:
    body = part("model", b"m").replace(b"--x", b"--*****") + b"--*****--\r\n"
    assert read_form("multipart/form-data; boundary=*****", body, REMOVED).model == "m"


def test_a_boundary_in_the_middle_of_a_line_is_content() -> None:
    inner = b'RIFF--x\r\nContent-Disposition: form-data; name="session_id"\r\n\r\n1--x--'
    assert fields(read(part("file", inner))) == [("file", None, inner)]


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=" + "b" * 257,
        "multipart/form-data; boundary=x" + "; a=1" * 50,
        "multipart/form-data; boundary=x; charset=" + "y" * 5000,
        "multipart/form-data; boundary=",
    ],
)
def test_a_content_type_that_is_no_plain_one_is_refused(content_type: str) -> None:
    assert refusal(part("a", b"1") + b"--x--\r\n", content_type=content_type).status == 400


@pytest.mark.parametrize("charset", ["utf-7", "utf-16", "cp037", "nonesuch"])
def test_a_charset_in_which_names_have_other_spellings_is_refused(charset: str) -> None:
    refused = refusal(part("+AHM-ession_id", b"1") + b"--x--\r\n", content_type=f"{TYPE}; charset={charset}")
    assert (refused.status, refused.param) == (400, "content-type")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [b"name=%b", b'name="%b"', b'name = "%b"', b'x=1; name="%b"', b'name="%b"; name*=a', b'"%b"']
            ),
            st.sampled_from([b"model", b"session_id", b"session_id[a]", b"file", b"priority", b"session\\_id", b"a b"]),
            st.sampled_from([b"", b"; filename=a", b'; filename="session_id"', b"\r\nX-Other: 1", b"; ", b" ;;"]),
        ),
        max_size=4,
    )
)
def test_no_spelling_hides_a_field_from_the_gateway(parts: Sequence[tuple[bytes, bytes, bytes]]) -> None:
    """Whatever was read, the engine finds no trusted field in the form that it gets."""
    body = b"".join(
        b"--x\r\nContent-Disposition: form-data; %b%b\r\n\r\n1\r\n" % (spelling % name, more)
        for spelling, name, more in parts
    )
    try:
        form = read(body)
    except ApiError:
        return
    assert not {name.partition("[")[0] for name, _, _ in fields(form)} & set(REMOVED)
    engine = [one for one in engine_reads(TYPE, body + b"--x--\r\n") if one[0].partition("[")[0] not in REMOVED]
    assert fields(form) == engine


@pytest.mark.parametrize("size", [1, 60, 3000])
def test_a_form_whose_parts_have_no_end_of_their_heads_is_refused_at_the_first(size: int) -> None:
    """An older reader searched again after each `name`, so 60 KB of this input blocked a gateway for seconds."""
    assert refusal(b"--x\r\n" + b'name="model"\r\nx\r\n' * size + b"--x--\r\n").code == "invalid_form"


def test_a_form_of_too_many_parts_is_refused_by_the_name_of_the_limit() -> None:
    assert len(fields(read(*[part("a", b"1")] * MAX_PARTS))) == MAX_PARTS
    refused = refusal(b"".join([part("a", b"1")] * (MAX_PARTS + 1)) + b"--x--\r\n")
    assert (refused.status, refused.code) == (400, "limit_exceeded")
    assert f"{MAX_PARTS} parts" in refused.message


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


@given(st.binary(max_size=200), st.integers(1, 40))
def test_a_file_of_any_bytes_is_left_alone(data: bytes, times: int) -> None:
    content = data * times + b"\r\n-"
    sound = part("file", content if b"\r\n--x" not in content else b"", b"; filename=a")
    (_, _, arrived), model = fields(read(sound, part("model", b"m")))
    assert arrived in (content, b"")
    assert model == ("model", None, b"m")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"hello",
        b"hello\r\n" + part("a", b"1") + b"--x--\r\n",
        part("a", b"1"),
        part("a", b"1") + b"--x-",
        part("a", b"1").replace(b"\r\n", b"\n") + b"--x--\r\n",
        b"--x\r\nContent-Type: text/plain\r\n\r\n1\r\n--x--\r\n",
        b"--x\r\nContent-Disposition: form-data; name*=utf-8''session_id\r\n\r\n1\r\n--x--\r\n",
        part("session%5Fid", b"1") + b"--x--\r\n",
        part("session\\_id", b"1") + b"--x--\r\n",
        part("a", b"1").replace(b"form-data;", b"form-data;\r\n") + b"--x--\r\n",
        part("a", b"1").replace(b"Disposition:", b"Disposition :") + b"--x--\r\n",
        part("a", b"1").replace(b"Content", b"X-Other: 1\nContent") + b"--x--\r\n",
    ],
)
def test_what_is_no_complete_form_is_refused(body: bytes) -> None:
    assert refusal(body).code == "invalid_form"
