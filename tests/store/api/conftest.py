"""The API on a real server: its configuration file, Redis as the tests see it, a producer, and a client of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from broker.config import Config, load_config
from broker.store import Store
from tests.support.api import FILE, TOKEN, api_server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return path


@pytest.fixture
def config(file: Path) -> Config:
    return load_config(file, {})


@pytest.fixture
def api(store: Store, config: Config) -> Iterator[httpx.Client]:
    with api_server(store, config, token=TOKEN) as client:
        yield client
