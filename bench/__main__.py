"""`python -m bench`: all measurements, or those named, in one run; prints the tables, with --write also to the docs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import NoReturn, get_args

from bench import interrupt
from bench.endpoints import fast_name
from bench.lab import Lab, Options, machine
from bench.measures import NAMES
from bench.peers import PEERS
from bench.processes import ROOT, BenchError, cores
from bench.report import Section, render, write
from bench.servers import server
from broker import __version__
from broker.errors import HeadraceError
from workers.transport import TransportName, make_transport

TRANSPORTS = get_args(TransportName)
DOCUMENT = ROOT / "docs" / "performance.md"
SMALL_TASKS = 300


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message} (see python -m bench --help)")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


def _parser() -> Parser:
    parser = Parser(prog="python -m bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="NAME", help=f"which of {', '.join(NAMES)}; all if none is named")
    parser.add_argument("--tasks", type=_count, metavar="N", help="for headrace to drain, others get a share (20000)")
    parser.add_argument("--repeats", type=_count, metavar="N", help="of which the median counts (5)")
    parser.add_argument("--small", action="store_true", help="small numbers, one round: does it run at all?")
    parser.add_argument("--full", action="store_true", help="more tasks for idle dispatch, whose tail counts")
    parser.add_argument("--peers", default="all", help="`all` that are installed, `none`, or names: rq,saq")
    parser.add_argument("--server", default="bundled", help="`bundled` Valkey, `redis` (redis-server), or a program")
    parser.add_argument("--aof", action="store_true", help="append-only file on, everysec, for everything")
    parser.add_argument("--transport", default="auto", help=f"one of {', '.join(TRANSPORTS)}, for the bare client too")
    parser.add_argument("--write", action="store_true", help="also into docs/performance.md: a whole run only")
    return parser


def _options(args: argparse.Namespace) -> Options:
    peers = PEERS if args.peers == "all" else () if args.peers == "none" else tuple(args.peers.split(","))
    for name, known in ((name, PEERS) for name in peers):
        if name not in known:
            raise BenchError(f"--peers {name}: there are {', '.join(known)}")
    for name in args.words:
        if name not in NAMES:
            raise BenchError(f"{name}: there are {', '.join(NAMES)}")
    if args.transport not in TRANSPORTS:
        raise BenchError(f"--transport {args.transport}: there are {', '.join(TRANSPORTS)}")
    try:
        make_transport(args.transport, slots=1)
    except ImportError as error:
        raise BenchError(f"--transport {args.transport}: {error}; install it, or take another") from None
    parts = {"--small": args.small, "measurements by name": args.words, "--peers": set(peers) != set(PEERS)}
    part = next((name for name, given in parts.items() if given), "")
    if args.write and part:
        raise BenchError(f"--write with {part}: the document holds one whole run; leave one of the two out")
    return Options(
        tasks=args.tasks or (SMALL_TASKS if args.small else 20_000),
        repeats=args.repeats or (1 if args.small else 5),
        full=args.full,
        small=args.small,
        transport=args.transport,
        peers=peers,
        aof=args.aof,
    )


def _about(lab: Lab) -> list[str]:
    def version(name: str) -> str:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            return f"no {name}"

    pinned = "worker on one core; server, endpoint on the other" if len(cores()) > 1 else "one core for all"
    lines = [
        f"machine: {machine()}; {pinned}",
        f"server: {lab.server.shown}; fast endpoint: {fast_name()}",
        f"headrace {__version__}, {', '.join(map(version, lab.headrace.versions))}; transport {lab.options.transport}",
        f"medians of {lab.options.repeats}; compare only inside this run",
    ]
    lines += [f"{h.name}: {', '.join(f'{n} {v}' for n, v in h.versions.items())}; {h.setup}" for h in lab.others]
    return lines + [f"{handle.name}: not measured, {handle.missing}" for handle in lab.skipped]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure(lab: Lab, names: Sequence[str]) -> list[Section]:
    sections = []
    for name in names or NAMES:
        start, known = time.monotonic(), len(lab.left_out)
        _say(f"{name} ...")
        try:
            sections.append(import_module(f"bench.measures.{name}").measure(lab))
        except (BenchError, HeadraceError, OSError) as error:
            sections.append(Section(name, name, (), notes=[f"could not be measured: {error}"]))
            _say(f"{name}: {error}")
        sections[-1].notes += [f"left out: {what}" for what in lab.left_out[known:]]
        _say(f"{name}: {time.monotonic() - start:.0f} s")
    return sections


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if something could not be measured. A missed goal is no failure: it is said in the table."""
    try:
        args = _parser().parse_args(argv)
        options = _options(args)
        interrupt.arm()
        with _folder() as folder, server(args.server, folder, args.aof) as running:
            lab = Lab(options, running, folder, _say, args.server)
            sections = _measure(lab, args.words)
            about = _about(lab)
    except (BenchError, HeadraceError) as error:
        _say(f"bench: {error}")
        return 2
    except KeyboardInterrupt:
        _say("bench: interrupted")
        return 130
    print(render(sections, about, markdown=False))
    missing = [section.name for section in sections if not section.columns]
    if args.write and missing:
        _say(f"not written: {', '.join(missing)} could not be measured, and the document holds one whole run")
    elif args.write:
        write(DOCUMENT, render(sections, about, markdown=True))
        _say(f"written: {DOCUMENT.relative_to(ROOT)}")
    return 1 if missing or lab.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
