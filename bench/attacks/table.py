"""Every attack by name, with a sentence that describes its input."""

from __future__ import annotations

from functools import partial

from bench.attacks import connections, documents, faults, forms, images
from bench.attacks.answers import lie
from bench.attacks.attack import Attack
from bench.attacks.documents import beside_six, body_of, messages

_UNREAD = {"timeouts": {"write_s": connections.WRITE_S}}

ATTACKS = {
    "form-60k": Attack('a form of 60 KB: `name="model"` again and again, no blank line', forms.no_blank_lines(60_000)),
    "form-1m": Attack("the same, 1 MB", forms.no_blank_lines(1_000_000)),
    "form-parts": Attack("a form of 64 MiB in empty parts, 1.3 million of them", forms.many_parts),
    "form-heads": Attack("a form of 64 MiB in parts whose heads have 1 000 lines", forms.long_heads),
    "form-boundaries": Attack(
        "a form of 64 MiB of text that differs from the boundary in one byte", forms.near_boundaries
    ),
    "png-texts": Attack("10 PNG images with 60 compressed texts (zTXt) of 1 MiB each", images.png_texts),
    "jpeg-1m": Attack("a JPEG image of empty markers, 0.96 MB as base64", images.jpeg_markers(720_000)),
    "jpeg-21m": Attack("a JPEG image of 21 MB of empty markers", images.jpeg_markers(21_000_000)),
    "tiff-tags": Attack("a TIFF image with 400 broken tags", images.tiff_tags),
    "json-messages": Attack("0.9 MB of JSON: 30 000 tiny messages", body_of(partial(messages, 930_000))),
    "json-objects": Attack("16 MB of `{}` as messages", body_of(partial(messages, 16_000_000, b"{}"))),
    "json-mixed": Attack(
        "12 MB of JSON: long text, small objects, nested lists", body_of(partial(documents.mixed, 12_000_000))
    ),
    "json-string": Attack("64 MiB of JSON: one long text", body_of(documents.one_string)),
    "json-commas": Attack("64 MiB of JSON: one text of `,[{`", body_of(documents.commas)),
    "json-numbers": Attack("64 MiB of JSON: a list of numbers", body_of(documents.numbers, "/v1/completions")),
    "json-nested": Attack("64 MiB of JSON: lists in one another", body_of(documents.nested)),
    "six-messages": Attack(
        "6 connections send 2 MB of tiny messages each, again and again; another client 1.3 MB of text",
        beside_six(partial(messages, 2_000_000)),
    ),
    "six-texts": Attack(
        "the same with 2 MB in 1 000 messages of text",
        beside_six(partial(messages, 2_000_000, b'{"role":"user","content":"%b"}' % (b"word " * 400))),
    ),
    "json-hang-up": Attack("10 bodies of 8 MB of `{}`, whose clients hang up at once", documents.hang_up),
    "event-48m": Attack("a replica's event of 48 MiB without its blank line", lie("unended-event", stream=True)),
    "answer-400m": Attack("a replica's whole answer of 400 MiB", lie("huge")),
    "answer-400m-cut": Attack("the same, cut off after 390 MiB, by every replica", lie("huge-cut")),
    "answer-gzip-cut": Attack("a replica's answer as `gzip, chunked`, cut off", lie("gzip-cut")),
    "upgrades": Attack("4 200 pipelined heads that ask for an upgrade, in 270 KB", connections.upgrades),
    "pipelined": Attack("20 connections with 250 KiB of pipelined heads each", connections.pipelined_heads),
    "one-byte": Attack("1 024 connections, each with one byte of a body", connections.one_byte_bodies),
    "unread": Attack("50 clients that do not read their stream", connections.unread_streams, _UNREAD),
    "hang-ups": Attack("20 clients that hang up behind a pipelined request", connections.hang_up_behind_pipelined),
    "prompt-500": Attack("a prompt at which every replica answers 500, 15/s for 20 s", faults.one_prompt),
    "retries": Attack("300 prompts, 30/s, at which every replica answers 500", faults.many_prompts),
}
