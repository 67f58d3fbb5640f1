"""Who may come in, and what everybody is told: tokens, other sites, errors, an absent Redis."""

from __future__ import annotations

import httpx

from broker import admin
from broker.config import Config
from broker.store import Store
from tests.support.api import POOL, TOKEN, api_server, good, refused
from tests.support.player import register
from tests.support.servers import redis_server


def test_the_token(api: httpx.Client, store: Store) -> None:
    url = str(api.base_url)
    routes = (("GET", "/api/pools"), ("GET", "/metrics"), ("GET", "/api/nothing"), ("POST", "/api/reload"))
    for given in (None, "Bearer wrong", "Bearer", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"):
        for method, path in routes:
            headers = {} if given is None else {"authorization": given}
            response = httpx.request(method, url + path, headers=headers, trust_env=False)
            refused(response, 401, "unauthorized")
            assert response.headers["www-authenticate"].startswith("Bearer")
    for path in ("/livez", "/readyz", "/openapi.json"):
        assert httpx.get(url + path, trust_env=False).status_code == 200
    assert httpx.get(url + "/api/pools", headers={"authorization": f"bearer {TOKEN}"}, trust_env=False).is_success


def test_without_a_token_only_this_machine_by_its_own_name(store: Store) -> None:
    register(store, POOL)
    with api_server(store) as client:
        for host in ("localhost:80", "127.0.0.1", "[::1]:8080", "LOCALHOST"):
            assert client.get("/api/pools", headers={"host": host}).is_success
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
            refused(client.get("/api/pools", headers={"host": host}), 403, "foreign_host")


def test_without_a_token_no_other_site_can_post(store: Store) -> None:
    register(store, POOL)
    path = f"/api/pools/{POOL}/endpoints/vm1/drain"
    with api_server(store) as client:
        url = str(client.base_url)
        forms = ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x")
        for kind in forms:
            response = httpx.post(url + path, headers={"content-type": kind}, content=b"{}", trust_env=False)
            refused(response, 403, "cross_site")
        refused(httpx.post(url + path, trust_env=False), 403, "cross_site")
        refused(client.post(path, headers={"origin": "http://evil.example"}), 403, "cross_site")
        refused(client.post(path, json={}, headers={"origin": "null"}), 403, "cross_site")
        (vm1,) = admin.status(store, POOL).endpoints
        assert vm1.state == "absent"  # no worker here; it would be "draining"
        assert good(client.post(path, headers={"origin": url}))["state"] == "draining"
        assert httpx.post(url + path, json={}, trust_env=False).is_success


def test_every_answer_carries_the_security_headers(api: httpx.Client) -> None:
    anonymous = httpx.get(f"{api.base_url}/api/pools", trust_env=False)
    for response in (api.get("/api/pools"), api.get("/nothing"), api.get("/metrics"), anonymous):
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


# Errors


def test_errors_are_one_shape(api: httpx.Client, store: Store) -> None:
    register(store, POOL)
    drain = f"/api/pools/{POOL}/endpoints/vm1/drain"
    refused(api.get("/api/nothing"), 404, "not_found")
    refused(api.get("/api/pools/"), 404, "not_found")
    refused(api.put("/api/pools"), 405, "method_not_allowed")
    assert "there is npu" in refused(api.get("/api/pools/other/stats"), 404, "unknown_pool")
    refused(api.get("/api/pools/a%20b%0A/stats"), 404, "unknown_pool")
    refused(api.post(f"/api/pools/{POOL}/endpoints/vm9/drain"), 404, "unknown_endpoint")
    json_type = {"content-type": "application/json"}
    for body in (b"{", b"\xff", b"[" * 100_000, b"null", b'"x"'):
        refused(api.post(drain, content=body, headers=json_type), 400, "invalid")
    refused(api.post(drain, json={"surprise": 1}), 400, "invalid")
    refused(api.post(drain, content=b"a=b", headers={"content-type": "text/plain"}), 415, "not_json")
    refused(api.post(drain, content=b" " * (1 << 20) + b"{}", headers=json_type), 413, "too_large")
    (vm1,) = admin.status(store, POOL).endpoints
    assert vm1.state == "absent"  # no worker here; it would be "draining"


def test_when_redis_is_gone(config: Config) -> None:
    with redis_server() as server:
        store = Store(server.url)
        with api_server(store, config) as client:
            assert good(client.get("/readyz")) == {"ready": True}
            server.stop()
            refused(client.get("/readyz"), 503, "redis_unavailable")
            refused(client.get("/api/pools"), 503, "redis_unavailable")
            refused(client.get("/metrics"), 503, "redis_unavailable")
            assert good(client.get("/livez")) == {"live": True}
            server.start()
            assert good(client.get("/readyz")) == {"ready": True}
            server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            refused(client.get("/readyz"), 503, "redis_unsuitable")
        store.close()


def test_the_password_of_redis_is_in_no_answer(config: Config) -> None:
    with redis_server() as server:
        server.command("CONFIG", "SET", "requirepass", "other")
        store = Store(server.url.replace("redis://", "redis://:pa55@"))
        with api_server(store, config) as client:
            for path in ("/readyz", "/api/pools", "/metrics"):
                assert "pa55" not in refused(client.get(path), 503, "redis_unsuitable")
            server.stop()
            assert "pa55" not in refused(client.get("/api/pools"), 503, "redis_unavailable")
        store.close()
