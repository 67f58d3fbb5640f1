"""Deterministic answers: the same question always has the same answer, which holds a digest of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any, Final

DIMENSIONS: Final = 8
ECHO_CHARS: Final = 60
BOMB_BYTES: Final = 64 * 1024 * 1024


def answer_text(prompt: str) -> str:
    """What a completion says to this prompt: 16 hex digits of its SHA-256, then its first 60 characters."""
    return f"{sha256(prompt.encode()).hexdigest()[:16]} {prompt[:ECHO_CHARS]}"


def embedding(text: str) -> list[float]:
    """Its 8 numbers from -1 to 1, from its SHA-256."""
    return [byte / 127.5 - 1 for byte in sha256(text.encode()).digest()[:DIMENSIONS]]


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked: the kind of answer wanted, the prompts, whether as a stream, and the body's own fields."""

    kind: str
    prompts: tuple[str, ...]
    stream: bool
    fields: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        return "\n".join(self.prompts)


_PROMPT_FIELDS: Final = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/embeddings": ("input",),
    "/inference": ("input_text",),
    "/embeddings": ("texts", "input_text"),
}
WORK_PATHS: Final = frozenset(_PROMPT_FIELDS)


def read_question(path: str, body: bytes) -> Question:
    """Raises ValueError, in the words of an error answer."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("the body is not a JSON object")
    given = next((fields[name] for name in _PROMPT_FIELDS[path] if name in fields), None)
    if not given:
        raise ValueError(f"{_PROMPT_FIELDS[path][0]} is missing")
    prompts = (_chat(given),) if path == "/v1/chat/completions" else _texts(given)
    return Question(path, prompts, fields.get("stream") is True, fields)


def _chat(messages: Any) -> str:
    """The last message: a string, or the text parts of a list."""
    last = messages[-1] if isinstance(messages, list) else None
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise ValueError("messages must be a list of objects with a content")
    return content


def _texts(given: Any) -> tuple[str, ...]:
    return tuple(str(text) for text in given) if isinstance(given, list) else (str(given),)


def answer(question: Question) -> dict[str, Any]:
    """The body of a success."""
    model = question.fields.get("model") or question.fields.get("model_id") or "simulated"
    if question.kind == "/inference":
        text = answer_text(question.prompt)
        return {"success": True, "model_id": model, "result": text, "tokens": len(text.split())}
    if question.kind == "/embeddings":
        return {"success": True, "model_id": model, "embeddings": [embedding(text) for text in question.prompts]}
    if question.kind == "/v1/embeddings":
        vectors = [
            {"object": "embedding", "index": index, "embedding": embedding(text)}
            for index, text in enumerate(question.prompts)
        ]
        return {"object": "list", "model": model, "data": vectors, "usage": _usage(question.prompt, "")}
    return _completion(question, model)


def _completion(question: Question, model: str) -> dict[str, Any]:
    text = answer_text(question.prompt)
    chat = question.kind == "/v1/chat/completions"
    said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        "id": "sim-" + text[:16],
        "object": "chat.completion" if chat else "text_completion",
        "model": model,
        "choices": [{"index": 0, **said, "finish_reason": "stop"}],
        "usage": _usage(question.prompt, text),
    }


def _usage(prompt: str, text: str) -> dict[str, int]:
    asked, said = len(prompt.split()), len(text.split())
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def events(question: Question, whole: bool = True) -> list[bytes]:
    """The answer as server-sent events, a word each; not `whole`: without the last ones."""
    chat = question.kind == "/v1/chat/completions"
    words = answer_text(question.prompt).split(" ")
    sent = []
    for number, word in enumerate(words):
        piece = word if number == 0 else " " + word
        choice: dict[str, Any] = {"index": 0, **({"delta": {"content": piece}} if chat else {"text": piece})}
        sent.append(b"data: " + json.dumps({"object": "chunk", "choices": [choice]}).encode() + b"\n\n")
    return [*sent, b"data: [DONE]\n\n"] if whole else sent[: max(1, len(sent) // 2)]


def error(status: int, message: str = "") -> dict[str, Any]:
    return {"error": {"message": message or f"simulated {status}", "type": "simulated", "code": status}}


@cache
def bomb() -> bytes:
    return gzip.compress(b"\0" * BOMB_BYTES, 1)  # the quickest level: 64 MiB are compressed while somebody waits
