"""A string that shows itself as `***` everywhere but in `reveal()`."""

from __future__ import annotations

import hmac
from typing import Any

MASK = "***"


class Secret(str):
    """A key, password or token.

    Its text, as any code but this class sees it, *is* `***`: so repr, str, format, concatenation, JSON and YAML show
    the mask and nothing can leak by accident. `reveal()` gives the real value. Equality and hash are those of the
    value; a Secret never equals a plain string. Pickling keeps the value: pickles of it belong on a pipe only.
    """

    __slots__ = ("_hidden",)
    _hidden: str

    def __new__(cls, value: str) -> Secret:
        self = super().__new__(cls, MASK)
        self._hidden = value.reveal() if isinstance(value, Secret) else value
        return self

    def reveal(self) -> str:
        return self._hidden

    def matches(self, text: str) -> bool:
        """Whether `text` is the secret, in constant time: for tokens that callers send."""
        return hmac.compare_digest(self._hidden.encode(), text.encode("utf-8", "surrogatepass"))

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._hidden)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Secret, self._hidden))

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._hidden,)
