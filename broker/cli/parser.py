"""The words of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from broker.cli.settings import meant
from broker.errors import UsageError
from broker.task import METHODS, NPU_TASK_TYPES, PRIORITIES

Verb = Callable[[argparse.Namespace], int]
BENCH = "bench"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """`.verb` is what to call with it. Raises UsageError; `--help` prints and exits."""
    parser = build()
    if not words:
        parser.print_help()
        raise SystemExit(2)
    if words[0] == BENCH:  # its options, --help too, are those of `python -m bench`, which is in no wheel
        return argparse.Namespace(verb=lazy("bench:bench"), words=list(words[1:]))
    return parser.parse_args(words)


class Parser(argparse.ArgumentParser):
    """argparse, but for errors: one line, raised."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.replace(chr(10), ' ')} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
            raise argparse.ArgumentError(None, f"{name}: {value!r} is unknown{meant(str(value), known)}")


def lazy(place: str) -> Verb:
    """The function `module:name` below broker.cli, imported when it is called."""
    module, _, name = place.partition(":")

    def verb(args: argparse.Namespace) -> int:
        code: int = getattr(import_module(f"broker.cli.{module}"), name)(args)
        return code

    return verb


def build() -> Parser:
    parser = Parser(
        prog="headrace",
        description="Task broker on Redis for inference endpoints: enqueue once, endpoints pull.",
        epilog="exit codes: 0 done, 1 some tasks failed, 2 usage, 3 configuration, 4 Redis unreachable",
    )
    parser.add_argument("--version", "-V", action="store_true", help="print the version")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    _add_run(verbs)
    _add_worker(verbs)
    _add_enqueue(verbs)
    _add_status(verbs)
    _add_task(verbs)
    _add_dead(verbs)
    _add_endpoint(verbs)
    _add_serve(verbs)
    _add_config(verbs)
    _add_tools(verbs)
    return parser


def _verb(verbs: Any, name: str, place: str, help: str, *, json: bool = True) -> Parser:
    parser: Parser = verbs.add_parser(name, help=help, description=help)
    common = parser.add_argument_group("everywhere")
    common.add_argument("-c", "--config", metavar="FILE", help="configuration (else HEADRACE_CONFIG)")
    common.add_argument("--redis", metavar="URL", help="else REDIS_URL, else the file's, else an embedded server")
    common.add_argument("-v", "--verbose", action="count", default=0, help="more logs, and tracebacks; -vv still more")
    if json:
        common.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=lazy(place))
    return parser


def _group(verbs: Any, name: str, help: str) -> Any:
    parser = verbs.add_parser(name, help=help, description=help)
    return parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)


def _add_run(verbs: Any) -> None:
    run = _verb(verbs, "run", "run:run", "send a batch (OpenAI batch lines) to endpoints and write the answers")
    run.add_argument("input", metavar="IN.jsonl", help="one request a line; - is standard input")
    run.add_argument("-o", "--output", metavar="OUT.jsonl", required=True, help="- is standard output")
    run.add_argument("--endpoint", metavar="URL", action="append", help="a server; again for each")
    run.add_argument("--slots", type=count_or_auto, metavar="N", help="requests in flight on each of them (8), or auto")
    run.add_argument("--pool", metavar="P", help="the pool of the configuration to use")
    run.add_argument("--no-workers", action="store_true", help="only send and collect: workers run elsewhere")
    run.add_argument("--processes", type=count_or_auto, metavar="N", help="worker processes, or auto")
    run.add_argument("--max-attempts", type=count, metavar="N", help="attempts at each task (the pool's, 3)")


def _add_worker(verbs: Any) -> None:
    worker = _verb(verbs, "worker", "worker:worker", "serve endpoints until told to stop", json=False)
    worker.add_argument("--pool", metavar="P", action="append", help="this pool only; again for each")
    worker.add_argument("--endpoint", metavar="ID|URL", action="append", help="this endpoint only; again for each")
    worker.add_argument("--processes", type=count_or_auto, metavar="N", help="worker processes, or auto")
    worker.add_argument("--burst", action="store_true", help="end when nothing waits any more")


def _add_enqueue(verbs: Any) -> None:
    enqueue = _verb(verbs, "enqueue", "enqueue:enqueue", "put one task on a pool's queue", json=False)
    enqueue.add_argument("pool", metavar="POOL")
    enqueue.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="read the body from standard input")
    enqueue.add_argument("--json", dest="body", metavar="STR", help="the body, JSON")
    enqueue.add_argument("--file", metavar="F", help="a file with the body, JSON")
    enqueue.add_argument("--path", default=None, metavar="/P", help="/v1/chat/completions without it")
    enqueue.add_argument("--method", choices=sorted(METHODS), help="POST with a body, GET without")
    enqueue.add_argument("--task-type", choices=NPU_TASK_TYPES, metavar="T", help="an NPU task; the body is its data")
    enqueue.add_argument("--wait", action="store_true", help="print the answer when it is there")
    enqueue.add_argument("--timeout", type=seconds, metavar="S", help="wait no longer, seconds")
    enqueue.add_argument("--priority", choices=PRIORITIES, metavar="P", help="high, normal, low")
    enqueue.add_argument("--deadline", type=seconds, metavar="S", help="give it up after so many seconds")
    enqueue.add_argument("--key", metavar="K", help="idempotency key: the same key is the same task")
    enqueue.add_argument("--requires", metavar="C", action="append", default=[], help="a capability; again for each")
    enqueue.add_argument("--max-attempts", type=count, metavar="N")
    enqueue.add_argument("--output-json", dest="json", action="store_true", help="print JSON (--json is the body)")


def _add_status(verbs: Any) -> None:
    status = _verb(verbs, "status", "inspect:status", "pools, queues and endpoints")
    status.add_argument("--pool", metavar="P", action="append", help="this pool only")
    status.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")


def _add_task(verbs: Any) -> None:
    group = _group(verbs, "task", "one task")
    for name, help in (
        ("show", "what became of it"),
        ("explain", "why it waits"),
        ("cancel", "take it back, running or not"),
    ):
        verb = _verb(group, name, f"inspect:task_{name}", help)
        verb.add_argument("id", metavar="ID")


def _add_dead(verbs: Any) -> None:
    group = _group(verbs, "dead", "dead letters: tasks given up")
    listing = _verb(group, "list", "dead:dead_list", "the dead letters of each pool, latest first")
    listing.add_argument("--limit", type=count, default=50, metavar="N", help="at most so many (50)")
    show = _verb(group, "show", "dead:dead_show", "one of them, with its attempts")
    show.add_argument("id", metavar="ID")
    for name, help in (("redrive", "put them back on the queue"), ("purge", "delete them")):
        verb = _verb(group, name, f"dead:dead_{name}", help)
        verb.add_argument("ids", metavar="ID", nargs="*")
        verb.add_argument("--all", action="store_true", help="all of the pool")
        verb.add_argument("--pool", metavar="P")
    listing.add_argument("--pool", metavar="P")


def _add_endpoint(verbs: Any) -> None:
    group = _group(verbs, "endpoint", "endpoints: look, take out of use, add")
    listing = _verb(group, "list", "endpointverbs:endpoint_list", "state, load, health and counters of each")
    listing.add_argument("--pool", metavar="P")
    for name, help in (
        ("drain", "give it no more tasks; what runs finishes"),
        ("undrain", "give it tasks again"),
        ("reset", "close its breaker, end its pause"),
        ("remove", "remove one that was added; what runs finishes"),
    ):
        verb = _verb(group, name, f"endpointverbs:endpoint_{name}", help)
        verb.add_argument("id", metavar="ID")
        verb.add_argument("--pool", metavar="P", help="needed where two pools have the id")
    add = _verb(group, "add", "endpointverbs:endpoint_add", "add one to a pool at run time; it survives restarts")
    add.add_argument("url", metavar="URL")
    add.add_argument("--pool", metavar="P", help="needed where there is more than one")
    add.add_argument("--id", metavar="ID", help="made of host and port without it")
    add.add_argument("--priority", type=count, metavar="N", help="1 to 10 (5); 10 is preferred")
    add.add_argument("--slots", type=count_or_auto, metavar="N", help="requests in flight (8), or auto")
    add.add_argument("--capability", metavar="C", action="append", default=[], help="what it can do; again for each")
    add.add_argument("--label", metavar="NAME=VALUE", action="append", default=[], help="again for each")


def _add_serve(verbs: Any) -> None:
    serve = _verb(verbs, "serve", "serve:serve", "the management API over HTTP", json=False)
    serve.add_argument("--host", metavar="H", help="127.0.0.1 without it; others need HEADRACE_API_TOKEN")
    serve.add_argument("--port", type=port, metavar="P", help="8080 without it; 0 takes a free one")


def _add_config(verbs: Any) -> None:
    group = _group(verbs, "config", "the configuration")
    _verb(group, "check", "configverbs:check", "judge it, print the order of the endpoints and who serves them")
    show = _verb(group, "show", "configverbs:show", "print it whole, secrets masked")
    show.add_argument("--origins", action="store_true", help="where each value that was set comes from")


def _add_tools(verbs: Any) -> None:
    _verb(verbs, "doctor", "doctor:doctor", "look for what would go wrong on this machine")
    demo = _verb(verbs, "demo", "demo:demo", "a batch over three sample endpoints, one of which fails for a while")
    demo.add_argument("--processes", type=count_or_auto, default=3, metavar="N", help="worker processes (3), or auto")
    verbs.add_parser(BENCH, help="measure, in a checkout of the repository; see bench --help")


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


def count_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else count(text)


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    from broker.durations import parse_seconds

    try:
        value = parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0 seconds")
    return value
