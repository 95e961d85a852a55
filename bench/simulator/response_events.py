"""The event sequence of a streamed /v1/responses answer, as the official SDKs expect it."""

from __future__ import annotations

from typing import Any

import orjson

from bench.simulator.answers import Answer
from bench.simulator.generation import Generation


def output_item(response_id: str, answer: Answer, status: str) -> dict[str, Any]:
    """A response's one output item: a message or a function call, empty while it is in progress."""
    text = "".join(answer.pieces) if status == "completed" else ""
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
        "content": [_text_part(text)] if status == "completed" else [],
        "status": status,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """A stream's dialect. `response` is the object in progress, completed by whoever makes the tail."""

    def __init__(self, response: dict[str, Any], answer: Answer) -> None:
        self.response = response
        self.answer = answer
        self._item = output_item(response["id"], answer, "in_progress")
        self._sequence_number = 0

    def head(self) -> bytes:
        snapshot = {"response": self.response}
        return self._event("response.created", snapshot) + self._event("response.in_progress", snapshot)

    def piece(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        opening = b"" if self._sequence_number > 2 else self._open_item()
        if self.answer.tool is not None:
            return opening + self._item_event("response.function_call_arguments.delta", {"delta": text})
        delta = {"content_index": 0, "delta": text, "logprobs": []}
        return opening + self._item_event("response.output_text.delta", delta)

    def tail(self, generation: Generation) -> bytes:
        return self._close_item() + self._event("response.completed", {"response": self.response})

    def _open_item(self) -> bytes:
        added = self._event("response.output_item.added", {"output_index": 0, "item": self._item})
        if self.answer.tool is not None:
            return added
        part = {"content_index": 0, "part": _text_part("")}
        return added + self._item_event("response.content_part.added", part)

    def _close_item(self) -> bytes:
        text = "".join(self.answer.pieces)
        if self.answer.tool is not None:
            arguments = {"arguments": text, "name": self.answer.tool.name}
            closing = self._item_event("response.function_call_arguments.done", arguments)
        else:
            done = {"content_index": 0, "text": text, "logprobs": []}
            part = {"content_index": 0, "part": _text_part(text)}
            closing = self._item_event("response.output_text.done", done)
            closing += self._item_event("response.content_part.done", part)
        item = output_item(self.response["id"], self.answer, "completed")
        return closing + self._event("response.output_item.done", {"output_index": 0, "item": item})

    def _item_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, {"output_index": 0, "item_id": self._item["id"], **fields})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
