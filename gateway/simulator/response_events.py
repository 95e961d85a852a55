"""The event sequence of a streamed /v1/responses answer, as the official SDKs expect it."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.generation import Generation
from gateway.simulator.logprobs import Logprobs

_NO_TEXT = GeneratedAnswer((), "stop")


def output_item(
    response_id: str, answer: GeneratedAnswer, status: str, logprobs: Logprobs | None = None
) -> dict[str, Any]:
    """The only output item of a response: a message or a function call, empty while in progress."""
    text = answer.text if status == "completed" else ""
    if answer.tool is not None:
        return {
            "id": response_id.replace("resp_", "fc_"),
            "type": "function_call",
            "call_id": answer.tool.id,
            "name": answer.tool.name,
            "arguments": text,
            "status": status,
        }
    return {
        "id": response_id.replace("resp_", "msg_"),
        "type": "message",
        "role": "assistant",
        "content": [_text_part(answer, logprobs)] if status == "completed" else [],
        "status": status,
    }


def _text_part(answer: GeneratedAnswer, logprobs: Logprobs | None) -> dict[str, Any]:
    told = [] if logprobs is None else logprobs.chat(answer.pieces)["content"]
    return {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": told}


class ResponseEvents:
    """The format of a stream. `response` is the object in progress; the tail completes it."""

    def __init__(self, response: dict[str, Any], answers: list[GeneratedAnswer], logprobs: Logprobs | None) -> None:
        self.response = response
        self.answers = answers
        self.logprobs = logprobs
        self._item = output_item(response["id"], answers[0], "in_progress")
        self._sequence_number = 0

    @property
    def answer(self) -> GeneratedAnswer:
        return self.answers[0]

    def head(self) -> bytes:
        snapshot = {"response": self.response}
        return self._event("response.created", snapshot) + self._event("response.in_progress", snapshot)

    def piece(self, choice: int, at: int) -> bytes:
        if not self.answer.pieces[at]:  # it was aborted
            return b""
        opening = b"" if self._sequence_number > 2 else self._open_item()
        text = self.answer.texts[at]
        if self.answer.tool is not None:
            return opening + self._item_event("response.function_call_arguments.delta", {"delta": text})
        told = [] if self.logprobs is None else self.logprobs.chat([self.answer.pieces[at]], at)["content"]
        if not text and not told:
            return opening
        delta = {"content_index": 0, "delta": text, "logprobs": told}
        return opening + self._item_event("response.output_text.delta", delta)

    def tail(self, generation: Generation) -> bytes:
        closing = self._close_item() if self._sequence_number > 2 else b""
        return closing + self._event("response.completed", {"response": self.response})

    def _open_item(self) -> bytes:
        added = self._event("response.output_item.added", {"output_index": 0, "item": self._item})
        if self.answer.tool is not None:
            return added
        part = {"content_index": 0, "part": _text_part(_NO_TEXT, None)}
        return added + self._item_event("response.content_part.added", part)

    def _close_item(self) -> bytes:
        text = self.answer.text
        if self.answer.tool is not None:
            arguments = {"arguments": text, "name": self.answer.tool.name}
            closing = self._item_event("response.function_call_arguments.done", arguments)
        else:
            done = {"content_index": 0, "text": text, "logprobs": []}
            part = {"content_index": 0, "part": _text_part(self.answer, self.logprobs)}
            closing = self._item_event("response.output_text.done", done)
            closing += self._item_event("response.content_part.done", part)
        item = output_item(self.response["id"], self.answer, "completed", self.logprobs)
        return closing + self._event("response.output_item.done", {"output_index": 0, "item": item})

    def _item_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, {"output_index": 0, "item_id": self._item["id"], **fields})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
