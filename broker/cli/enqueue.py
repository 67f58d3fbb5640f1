"""`headrace enqueue`: one task on a pool's queue."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from broker.cli import screen
from broker.cli.settings import load, redis_of, say, unknown_pool
from broker.client import Broker
from broker.errors import ResultTimeout, UsageError
from broker.task import NpuTask, Request, Work, check_names, check_pool

CHAT = "/v1/chat/completions"


def enqueue(args: argparse.Namespace) -> int:
    """Prints the task's id; with --wait the answer's body."""
    check_pool(args.pool)
    check_names("requires", args.requires)
    work = _work(args, _body(args))
    config = load(args, quiet=True)
    if config.pools and args.pool not in config.pools:
        raise unknown_pool(config, args.pool)
    with redis_of(config) as redis, Broker(redis.url) as broker:
        task = broker.enqueue(
            args.pool, work, idempotency_key=args.key, deadline=args.deadline, priority=args.priority,
            requires=args.requires, max_attempts=args.max_attempts,
        )  # fmt: skip
        if not args.wait:
            if redis.embedded:
                say("the embedded server ends with this command; the task waits in its data until a worker starts it")
            _print({"id": task.id, "pool": args.pool}, task.id, args.json)
            return 0
        try:
            result = task.result(timeout=args.timeout, raise_on_failure=False)
        except ResultTimeout as error:
            say(str(error))
            return 1
    told = {
        "id": task.id, "pool": args.pool, "outcome": result.outcome, "status_code": result.status_code,
        "endpoint": result.endpoint, "attempts": result.attempts, "reason": result.reason, "body": result.text,
    }  # fmt: skip
    if not result.ok:
        why = result.reason.removeprefix(f"{result.outcome}: ")
        say(f"task {task.id}: {result.outcome} after {screen.counted(result.attempts, 'attempt')}: {why}")
    if args.json or result.body:
        _print(told, result.text, args.json)
    return 0 if result.ok else 1


def _print(told: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        screen.print_json(told)
    else:
        sys.stdout.write(text.rstrip("\n") + "\n")


def _body(args: argparse.Namespace) -> Any:
    """The body, whatever it was given as; None for none."""
    given = [args.body is not None, args.file is not None, args.stdin is not None]
    if sum(given) > 1:
        raise UsageError("a body is given twice: use one of --json, --file and -")
    if args.stdin is not None:
        return _parse(sys.stdin.read(), "standard input")
    if args.file is not None:
        try:
            with open(args.file, encoding="utf-8") as file:
                return _parse(file.read(), args.file)
        except OSError as error:
            raise UsageError(f"--file {args.file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"--file {args.file}: not UTF-8 text") from None
    return None if args.body is None else _parse(args.body, "--json")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{place}: not JSON: nested too deeply") from None


def _work(args: argparse.Namespace, body: Any) -> Work:
    if args.task_type is not None:
        if args.path is not None or args.method is not None:
            raise UsageError("--task-type goes without --path and --method: the endpoint's adapter knows them")
        return NpuTask(args.task_type, body)
    if body is None and args.method in (None, "POST", "PUT", "PATCH") and args.path is None:
        raise UsageError("no body: give --json STR, --file F, or - for standard input")
    method = args.method or ("GET" if body is None else "POST")
    return Request(method, args.path or CHAT, json=body)
