"""NPU tasks: text_analysis and knowledge_processing go to `POST /inference`, embedding_batch to `POST /embeddings`.

| sent          | taken from the first of these fields of `data`       |
|---------------|------------------------------------------------------|
| `input_text`  | input_text, text, prompt, query, content (a string)  |
| `texts`       | texts, inputs, input (a list of strings, or one)     |
| `model_id`    | model_id, model                                      |
| `max_tokens`, `temperature`, `top_p` | the same (/inference only)    |

Other fields of `data` are the caller's notes and are not sent. A plain Request goes out as on any other pool.
"""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from broker.configmodel import Endpoint, Pool
from broker.task import NpuTask, Request, Work
from workers.adapters.http import HttpAdapter, orjson
from workers.errors import AttemptFailed
from workers.transport.types import Answer, Call

INFERENCE_PATH: Final = "/inference"
EMBEDDINGS_PATH: Final = "/embeddings"

_TEXT: Final = ("input_text", "text", "prompt", "query", "content")
_TEXTS: Final = ("texts", "inputs", "input", *_TEXT)
_MODEL: Final = ("model_id", "model")
_SETTINGS: Final = ("max_tokens", "temperature", "top_p")


class NpuAdapter:
    """Requests for one NPU endpoint of a pool: addresses, credentials and limits as in HttpAdapter."""

    def __init__(self, endpoint: Endpoint, pool: Pool, *, clock: Callable[[], float] = time.time) -> None:
        self._http = HttpAdapter(endpoint, pool, clock=clock)

    def call(self, work: Work, task_id: str, attempt: int) -> Call:
        """The request; see `Adapter`."""
        return self._http.call(_request(work) if isinstance(work, NpuTask) else work, task_id, attempt)

    def check_answer(self, work: Work, answer: Answer) -> None:
        """As for HTTP. An NPU task's answer must also be an object, without `error`, and `success` not false."""
        self._http.check_answer(work, answer)
        if not isinstance(work, NpuTask):
            return
        told = _read(answer)
        if told.get("success") is False or told.get("error"):
            raise AttemptFailed(
                "app_error",
                f"status {answer.status}, but the answer says {_complaint(told)}",
                status=answer.status,
                body=answer.body,
                headers=answer.headers,
            )

    def blame(self, work: Work, failure: AttemptFailed) -> AttemptFailed:
        """See `Adapter`."""
        return self._http.blame(work, failure)


def _request(task: NpuTask) -> Request:
    data = task.data
    sent: dict[str, Any] = {}
    if (model := _first(data, _MODEL)) is not None:
        sent["model_id"] = model
    if task.task_type == "embedding_batch":
        sent["texts"] = _texts(task)
        return Request("POST", EMBEDDINGS_PATH, json=sent, timeout=task.timeout)
    sent["input_text"] = _text(task)
    sent.update({name: data[name] for name in _SETTINGS if data.get(name) is not None})
    return Request("POST", INFERENCE_PATH, json=sent, timeout=task.timeout)


def _first(data: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((data[name] for name in names if data.get(name) is not None), None)


def _text(task: NpuTask) -> str:
    text = _first(task.data, _TEXT)
    if not isinstance(text, str) or not text:
        raise AttemptFailed("task_error", f"{task.task_type}: data needs a text in one of {', '.join(_TEXT)}")
    return text


def _texts(task: NpuTask) -> list[str]:
    texts = _first(task.data, _TEXTS)
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
        raise AttemptFailed("task_error", f"{task.task_type}: data needs a list of texts in 'texts' or 'inputs'")
    return list(texts)


def _read(answer: Answer) -> Mapping[str, Any]:
    try:
        told = jsonlib.loads(answer.body) if orjson is None else orjson.loads(answer.body)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict):
        return told
    raise AttemptFailed(
        "malformed",
        f"status {answer.status}, but the answer is no JSON object",
        status=answer.status,
        body=answer.body,
        headers=answer.headers,
    )


def _complaint(told: Mapping[str, Any]) -> str:
    """Names the fields, not their text: an error message may repeat the input."""
    fields = [name for name in ("success", "error") if name in told]
    code = told.get("error_code")
    named = " and ".join("success: false" if name == "success" and told[name] is False else name for name in fields)
    return f"{named} (code {code})" if isinstance(code, (str, int)) else named
