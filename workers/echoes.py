"""Keeps an endpoint's own secrets out of what is stored: an endpoint may give back the request it got, with its key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from broker.configmodel import Endpoint
from broker.outcome import KEPT_HEADERS
from broker.secret import MASK
from workers.errors import AttemptFailed
from workers.transport.types import Answer

SHORTEST: Final = 8  # characters; less may stand in any answer
_NAMES: Final = re.compile("auth|cookie|credential|key|pass|secret|session|token")
# Of a header whose name says nothing: a long word with a digit in it, which the names of media types are not.
_TOKEN: Final = re.compile(r"(?=\D*\d)[\w.~+/=-]{20,}")


class Echoes:
    """What one endpoint must not tell: api_key, hmac_secret, headers that carry credentials. A look at an answer costs
    what a search for a few texts in it does, and nothing where there are no secrets."""

    def __init__(self, endpoint: Endpoint) -> None:
        forms = {form for secret in _secrets(endpoint) for form in _forms(secret)}
        longest_first = sorted(forms, key=len, reverse=True)  # one may be part of another
        self._pairs = [(text, text.encode()) for text in longest_first]

    def answer(self, answer: Answer) -> Answer:
        """It, or one with `***` where secrets stood in its body or in headers that are kept."""
        if self._pairs and self._echoed(answer.headers, answer.body):
            return answer._replace(headers=self._headers(answer.headers), body=self.body(answer.body))
        return answer

    def failure(self, failure: AttemptFailed) -> AttemptFailed:
        """The same for one that failed, and for what is said of it."""
        if not self._pairs:
            return failure
        return AttemptFailed(
            failure.kind,
            self.text(failure.detail),
            status=failure.status,
            retry_after=failure.retry_after,
            body=self.body(failure.body),
            headers=self._headers(dict(failure.headers)),
        )

    def text(self, text: str) -> str:
        for secret, _ in self._pairs:
            text = text.replace(secret, MASK)
        return text

    def body(self, body: bytes) -> bytes:
        for _, secret in self._pairs:
            body = body.replace(secret, MASK.encode())
        return body

    def _echoed(self, headers: dict[str, str], body: bytes) -> bool:
        for text, secret in self._pairs:
            if secret in body:
                return True
            for name in KEPT_HEADERS:
                if name in headers and text in headers[name]:
                    return True
        return False

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, **{name: self.text(headers[name]) for name in KEPT_HEADERS if name in headers}}


def _secrets(endpoint: Endpoint) -> Iterator[str]:
    for secret in (endpoint.api_key, endpoint.hmac_secret):
        if secret is not None:
            yield secret.reveal()
    for name, value in endpoint.headers.items():
        if _NAMES.search(name.lower()):
            yield value
            yield value.rpartition(" ")[2]  # without its scheme
        else:
            yield from _TOKEN.findall(value)


def _forms(secret: str) -> Iterator[str]:
    """As it is, and as JSON may write it; none of what is too short to be told from other text."""
    quoted = json.dumps(secret)[1:-1]
    for form in (secret, quoted, quoted.replace("/", r"\/")):
        if len(form) >= SHORTEST:
            yield form
