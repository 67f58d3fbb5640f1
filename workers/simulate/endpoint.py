"""The simulated endpoint itself: what it knows, and what it decides for each request."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from workers.simulate.answers import WORK_PATHS, Question, error, read_question
from workers.simulate.behaviour import Asked, Behaviour, Fate, Moment, fate
from workers.simulate.stats import Stats


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request: method, path without its query, headers (names lower-cased) and body."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def task(self) -> str:
        return self.headers.get("idempotency-key", "")

    @property
    def bearer(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def echo(self) -> str:
        """The header line by which an answer tells whose it is; "" if the request has no X-Request-Id."""
        name = self.headers.get("x-request-id", "")
        return f"X-Request-Id: {name}\r\n" if name and name.isascii() and name.isprintable() else ""

    @property
    def attempt(self) -> int:
        number = self.headers.get("x-task-attempt", "")
        return int(number) if number.isascii() and number.isdigit() else 1


class Endpoint:
    """Behaviour, statistics, and chance (`seed`) of one simulated endpoint."""

    def __init__(self, behaviour: Behaviour, stats: Stats, seed: int | None = None) -> None:
        self.behaviour, self.stats = behaviour, stats
        self._chance = random.Random(seed)
        self._controlled_at, self._since_control = asyncio.get_running_loop().time(), 0

    def decide(self, request: Incoming) -> tuple[Fate, Question | None, str]:
        """For a request counted in `stats` already: its fate, the question if it was one, else the complaint."""
        try:
            question = read_question(request.path, request.body)
            wishes = question.fields.get("x_sim")
            asked = Asked(
                sum(map(len, question.prompts)), request.bearer, wishes if isinstance(wishes, dict) else {},
                request.attempt,
            )  # fmt: skip
            decided = fate(self.behaviour, asked, self._moment())
        except ValueError as problem:
            return Fate(0.0, "status", 400, 0.0), None, str(problem)
        self._since_control += 1
        return decided, question, ""

    def _moment(self) -> Moment:
        now = asyncio.get_running_loop().time()
        chance = self._chance.random
        return Moment(now - self._controlled_at, self._since_control, self.stats.in_flight, chance(), chance())

    def control(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Change the settings; `"reset_stats": true` forgets what was seen. The status, and the settings in force."""
        try:
            settings = json.loads(body)
            if not isinstance(settings, dict):
                raise ValueError("the body is not a JSON object")
            forget = settings.pop("reset_stats", False)
            self.behaviour = self.behaviour.changed(settings)
        except ValueError as problem:
            return 400, error(400, str(problem))
        self._controlled_at, self._since_control = asyncio.get_running_loop().time(), 0
        if forget:
            self.stats.reset()
        return 200, asdict(self.behaviour)

    def plain(self, request: Incoming) -> tuple[int, dict[str, Any]] | None:
        """The answer to a request that is no work: status and body. None: never answer."""
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            health = self.behaviour.health
            return None if health == "hang" else (200 if health == "ok" else 503, {"status": health})
        if route == ("GET", "/stats"):
            return 200, self.stats.report()
        if route == ("GET", "/v1/models"):
            if self.behaviour.api_key and request.bearer != self.behaviour.api_key:
                return 401, error(401, "the key is wrong")
            return 200, {"object": "list", "data": [{"id": "simulated", "object": "model"}]}
        if route == ("POST", "/control"):
            return self.control(request.body)
        known = request.path in WORK_PATHS or request.path in ("/health", "/stats", "/control", "/v1/models")
        status = 405 if known else 404
        return status, error(status, f"{request.method} {request.path}: there is no such thing here")
