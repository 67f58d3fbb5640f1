"""What the API answers is what its description says: schemathesis asks every route, within it and outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from broker import Broker
from broker.config import load_config
from broker.store import Store
from broker.web.app import OPERATIONS
from tests.support.api import FILE, POOL, TOKEN, api_server, good, in_use, supervisor

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
LIMITS = settings(
    max_examples=8, database=None, derandomize=True, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture
def api(redis_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """A pool in use, with a supervisor that answers reloads."""
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump(FILE))
    store = Store(redis_url)
    with api_server(store, load_config(file, {}), token=TOKEN) as client, Broker(redis_url) as broker:
        in_use(store, broker)
        with supervisor(store, POOL, success=True, message="1 endpoint loaded", loaded=1):
            yield client
    store.close()


def test_the_description_names_every_route(api: httpx.Client) -> None:
    described = good(api.get("/openapi.json"))
    assert described["openapi"] == "3.1.0"
    routes = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert {(each.method, each.path) for each in OPERATIONS} < routes
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize("known", [False, True], ids=["any names", "a pool that is there"])
def test_what_fits_the_description_is_answered_as_described(api: httpx.Client, known: bool) -> None:
    def asked(case: Any) -> None:
        if known:
            names = {"pool": POOL, "endpoint": "vm1"}
            case.path_parameters |= {name: names[name] for name in case.path_parameters if name in names}
        # a URL has more rules than a schema can say
        case.call_and_validate(headers=AUTHORIZED, excluded_checks=[positive_data_acceptance] if known else None)

    assert _ask_every_route(api, GenerationMode.POSITIVE, asked) == len(OPERATIONS) + 3


def test_what_does_not_fit_is_refused(api: httpx.Client) -> None:
    def asked(case: Any) -> None:
        case.call_and_validate(headers=AUTHORIZED)

    assert _ask_every_route(api, GenerationMode.NEGATIVE, asked) > len(OPERATIONS) / 2


def _ask_every_route(api: httpx.Client, mode: GenerationMode, asked: Callable[[Any], None]) -> int:
    """How many routes were asked. One that takes nothing can be asked nothing wrong."""
    schema = schemathesis.openapi.from_url(f"{api.base_url}/openapi.json")
    count = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        strategy = found.ok().as_strategy(generation_mode=mode)
        with suppress(Unsatisfiable):
            LIMITS(given(case=strategy)(asked))()
            count += 1
    return count
