"""The configuration: a YAML file, then `HEADRACE_*` variables, then flags; frozen values out, or every problem at once.

What each key means stands in config/headrace.example.yaml; the variables in broker/configlayers.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from broker.configfile import Findings, Node, check_text, from_python, interpolate, read_file
from broker.configlayers import add_endpoints, apply_environ, apply_overrides, single_endpoint
from broker.configlegacy import translate
from broker.configmodel import (
    Adapter,
    Api,
    Breaker,
    Config,
    Connection,
    Endpoint,
    Health,
    Log,
    Pool,
    QueuePolicy,
    RedisSettings,
    Retry,
    Timeouts,
    TransportName,
)
from broker.configschema import build
from broker.errors import ConfigError, Problem
from broker.secret import Secret

__all__ = [
    "load_config",
    "config_for_endpoints",
    "config_path",
    "Config",
    "RedisSettings",
    "Pool",
    "Endpoint",
    "Retry",
    "Timeouts",
    "Health",
    "Breaker",
    "QueuePolicy",
    "Connection",
    "Api",
    "Log",
    "Adapter",
    "TransportName",
    "Secret",
]


def config_path(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Path | None:
    """The file to read: `path`, else HEADRACE_CONFIG, else none."""
    environ = os.environ if environ is None else environ
    if path is not None:
        return Path(path)
    return Path(environ["HEADRACE_CONFIG"]) if environ.get("HEADRACE_CONFIG") else None


def load_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Reads everything and checks it as a whole.

    path       the YAML file; None takes HEADRACE_CONFIG, or no file at all (then everything has its default)
    environ    None takes the process's
    overrides  flags as dotted keys: {"redis.url": ..., "pools.*.retry.max_attempts": 5}; a value of None is unset

    Raises ConfigError with every problem found, in the order of the file.
    """
    environ = os.environ if environ is None else environ
    findings = Findings()
    source = config_path(path, environ)
    tree = Node({}, "", "configuration") if source is None else read_file(source, findings)
    interpolate(tree, environ, findings)
    translate(tree, findings)
    apply_environ(tree, environ, findings)
    apply_overrides(tree, overrides or {}, findings)
    single_endpoint(tree, environ, findings)
    check_text(tree, findings)
    config = build(tree, source, findings)
    _raise_problems(findings, str(source))
    return config


def config_for_endpoints(
    urls: Sequence[str],
    pool: str = "run",
    *,
    slots: int | Literal["auto"] | None = None,
    adapter: Adapter | None = None,
    overrides: Mapping[str, Any] | None = None,
    base: Config | None = None,
) -> Config:
    """A configuration of one pool with these endpoints, no file needed; ids are made of host and port.

    slots      max_concurrent of each endpoint; None takes the default (8)
    overrides  as for `load_config`, such as {"pools.run.retry.max_attempts": 5}
    base       where everything but `pools` comes from (what `load_config` gave)

    Raises ConfigError.
    """
    findings = Findings()
    tree = Node({}, "", "--endpoint")
    add_endpoints(tree, pool, urls, {"max_concurrent": slots}, "--endpoint")
    apply_overrides(tree, {f"pools.{pool}.adapter": adapter, **(overrides or {})}, findings)
    if not urls:
        findings.problem(from_python(None, "", "--endpoint"), "no URL given")
    check_text(tree, findings)
    made = build(tree, None, findings)
    _raise_problems(findings, "")
    if base is None:
        return made
    return replace(
        base, pools=made.pools, warnings=(*base.warnings, *made.warnings), origins={**base.origins, **made.origins}
    )


def _raise_problems(findings: Findings, source: str) -> None:
    def place(problem: Problem) -> tuple[bool, int]:
        return problem.file != source, problem.line or 0

    if findings.problems:
        raise ConfigError(sorted(findings.problems, key=place))
