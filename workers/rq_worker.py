"""`rq worker --worker-class workers.rq_worker.EndpointWorker POOL...`: headrace's worker process, from RQ's command.

RQ's command gives the Redis and the queues. Each queue is a pool of HEADRACE_CONFIG; or there is one queue, served by
the endpoints in HEADRACE_ENDPOINT. A command is one process for all endpoints of its pools; more share their slots.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote, urlencode

from rq import Worker
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.logutils import setup_loghandlers

from broker.config import Config, load_config
from broker.errors import ConfigError, HeadraceError, Problem, UsageError
from workers.process import Spec, run_process

_TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")


class EndpointWorker(Worker):
    """RQ's worker in name and arguments. `work` neither forks nor runs functions: it hosts headrace's process.

    The first SIGTERM or SIGINT drains, a second one stops at once. Delayed tasks need no `--with-scheduler`, and the
    order of the queues means nothing: capacity pulls.
    """

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: Any = "default",
    ) -> bool:
        """Serves the pools until a signal, or with `burst` until nothing waits or runs. True, whatever was done.

        A configuration or Redis that cannot be used ends the process with headrace's exit code and one line.
        """
        setup_loghandlers(logging_level or "INFO", date_format, log_format, name="headrace")
        try:
            if max_jobs is not None or max_idle_time is not None:
                raise UsageError(
                    "--max-jobs, --max-idle-time: EndpointWorker has none; use --burst or end it by SIGTERM"
                )
            pools = tuple(dict.fromkeys(self.queue_names()))
            config = config_for(pools, redis_url(self.connection), os.environ)
            run_process(spec_of(config, burst))
        except HeadraceError as error:
            self.log.error("%s", error)
            raise SystemExit(error.exit_code) from None
        return True


def config_for(pools: Sequence[str], url: str, environ: Mapping[str, str]) -> Config:
    """What HEADRACE_CONFIG or HEADRACE_ENDPOINT says about these pools, on RQ's Redis. Raises ConfigError."""
    if not environ.get("HEADRACE_CONFIG") and len(pools) == 1:
        environ = {"HEADRACE_POOL": pools[0], **environ}
    config = load_config(None, environ, {"redis.url": url})
    missing = [pool for pool in pools if pool not in config.pools or not config.pools[pool].enabled]
    if missing:
        known = ", ".join(name for name, pool in config.pools.items() if pool.enabled) or "none"
        text = f"no enabled endpoint (pools that have one: {known}); set HEADRACE_CONFIG or HEADRACE_ENDPOINT"
        source = str(config.source) if config.source else "environment"
        raise ConfigError([Problem(source, None, f"pools.{pool}", text) for pool in missing])
    return replace(config, pools={name: config.pools[name] for name in pools})


def spec_of(config: Config, burst: bool) -> Spec:
    """One process for every enabled endpoint."""
    pools = tuple(config.pools.values())
    attach = {pool.name: tuple(endpoint.id for endpoint in pool.enabled) for pool in pools}
    return Spec(config.redis.connection_url(), pools, attach, burst)


def redis_url(connection: Any) -> str:
    """The URL of the Redis that this redis-py client speaks to, credentials included. Raises ConfigError."""
    pool = connection.connection_pool
    kwargs: dict[str, Any] = pool.connection_kwargs
    if kwargs.get("credential_provider") is not None:
        text = "rq's credential provider settings cannot be taken over; start `headrace worker` instead"
        raise ConfigError([Problem("rq", None, "connection", text)])
    if kwargs.get("decode_responses"):
        text = "decode_responses is set: jobs are bytes; leave it out of the URL or settings that rq was given"
        raise ConfigError([Problem("rq", None, "connection", text)])
    user, password = kwargs.get("username") or "", kwargs.get("password") or ""
    credentials = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    database = kwargs.get("db") or 0
    if path := kwargs.get("path"):
        return f"unix://{credentials}{quote(path)}?db={database}"
    tls = "SSL" in pool.connection_class.__name__
    options = {name: str(kwargs[name]) for name in _TLS if tls and kwargs.get(name) is not None}
    scheme, place = "rediss" if tls else "redis", _place(kwargs)
    if hasattr(pool, "service_name"):
        asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
        scheme, place = f"{scheme}+sentinel", f"{','.join(_place(each) for each in asked)}/{pool.service_name}"
        own = {f"sentinel_{name}": asked[0].get(name) for name in ("username", "password")}
        options |= {name: value for name, value in own.items() if value}
    query = f"?{urlencode(options)}" if options else ""
    return f"{scheme}://{credentials}{place}/{database}{query}"


def _place(kwargs: Mapping[str, Any]) -> str:
    host = kwargs.get("host") or "localhost"
    return f"{f'[{host}]' if ':' in host else host}:{kwargs.get('port') or 6379}"
