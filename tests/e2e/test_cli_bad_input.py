"""What people get wrong: one line that says what, where and what to do; the right exit code; never a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import COMMAND, ROOT, environment, headrace, one_line, write_batch
from tests.support.servers import redis_server

pytestmark = pytest.mark.e2e

NOWHERE = "redis://127.0.0.1:1/0"
RUN = "run in.jsonl -o out.jsonl"

# words, exit code, parts of the line
TABLE = [
    ("rn", 2, ["'rn' is unknown", "did you mean 'run'?"]),
    ("run", 2, ["IN.jsonl", "--output"]),
    (f"{RUN} --endpiont http://a:1", 2, ["--endpiont"]),
    (f"{RUN}", 3, ["--endpoint URL"]),
    (f"{RUN} --endpoint a:8000", 3, ["--endpoint", "http://"]),
    (f"{RUN} --endpoint ftp://a:8000", 3, ["--endpoint", "http"]),
    (f"{RUN} --endpoint http://a:1 --slots 0", 2, ["--slots", "from 1"]),
    (f"{RUN} --endpoint http://a:1 --processes many", 2, ["--processes", "'many'"]),
    (f"{RUN} --endpoint http://a:1 --max-attempts 0", 2, ["--max-attempts"]),
    (f"{RUN} --slots 5", 2, ["--slots", "--endpoint"]),
    (f"{RUN} -c missing.yaml", 3, ["missing.yaml"]),
    (f"{RUN} -c broken.yaml", 3, ["broken.yaml:3"]),
    (f"{RUN} -c unknown.yaml", 3, ["unknown.yaml:4", "did you mean"]),
    (f"{RUN} -c doubled.yaml", 3, ["doubled.yaml", "one"]),
    (f"{RUN} -c good.yaml --pool lm", 2, ["'lm'", "did you mean 'llm'?"]),
    (f"{RUN} --endpoint http://a:1 --redis {NOWHERE}", 4, ["127.0.0.1:1", "cannot be reached"]),
    (f"{RUN} --endpoint http://a:1 --redis nonsense", 3, ["redis.url"]),
    ("run missing.jsonl -o out.jsonl --endpoint http://a:1", 2, ["missing.jsonl", "No such file"]),
    ("run . -o out.jsonl --endpoint http://a:1", 2, ["Is a directory"]),
    ("run in.jsonl -o in.jsonl --endpoint http://a:1", 2, ["in.jsonl", "another output file"]),
    ("run in.jsonl -o notes.txt --endpoint http://a:1", 2, ["notes.txt:1", "not a line of batch output"]),
    ("run in.jsonl -o no/such/folder.jsonl --endpoint http://a:1", 2, ["no/such/folder.jsonl"]),
    ("worker", 3, ["no endpoint to serve"]),
    ("worker -c good.yaml --endpoint gpu-l", 2, ["'gpu-l'", "did you mean 'gpu-1'?"]),
    ("worker -c good.yaml --pool lm", 2, ["'lm'", "did you mean 'llm'?"]),
    ("enqueue lm --json {} -c good.yaml", 2, ["'lm'", "did you mean 'llm'?"]),
    ("enqueue llm --json {oops", 2, ["--json", "not JSON"]),
    ("enqueue llm --file missing.json", 2, ["missing.json"]),
    ("enqueue llm", 2, ["no body"]),
    ("enqueue llm --json {} --file x", 2, ["given twice"]),
    ("enqueue llm --json {} --path http://a/v1", 2, ["give a path, not a URL"]),
    ("enqueue llm --json {} --priority High", 2, ["--priority", "did you mean 'high'?"]),
    ("enqueue llm --json {} --deadline soon", 2, ["--deadline", "duration"]),
    ("enqueue l!m --json {}", 2, ["pool 'l!m'"]),
    ("enqueue llm --json {} --requires two,three", 2, ["requires 'two,three'"]),
    (f"status --redis {NOWHERE}", 4, ["cannot be reached"]),
    ("status", 4, [".headrace", "--redis URL"]),
    ("status --redis redis://:secret@127.0.0.1:1/0", 4, ["cannot be reached"]),
    ("task", 2, ["VERB"]),
    ("task show no/such", 2, ["task id 'no/such'"]),
    ("dead redrive --all 12", 2, ["--all"]),
    ("dead purge", 2, ["--all"]),
    ("config chek", 2, ["did you mean 'check'?"]),
    ("config check -c unknown.yaml", 3, ["unknown.yaml:4"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    write_batch(made / "in.jsonl", 1)
    (made / "notes.txt").write_text("buy milk\n")
    (made / "good.yaml").write_text(f'redis: {{url: "{NOWHERE}"}}\npools: {{llm: {{endpoints: [{{id: gpu-1, url: "http://a:1"}}]}}}}\n')
    (made / "broken.yaml").write_text("pools:\n  llm: [\n")
    (made / "unknown.yaml").write_text('pools:\n  llm:\n    endpoints: [{id: a, url: "http://a:1"}]\n    retires: {}\n')
    twice = '{id: one, url: "http://a:1"}, {id: one, url: "http://b:1"}'
    (made / "doubled.yaml").write_text(f"pools: {{llm: {{endpoints: [{twice}]}}}}\n")
    return made


@pytest.mark.parametrize(("words", "code", "parts"), TABLE, ids=[row[0] for row in TABLE])
def test_one_line_and_an_exit_code(folder: Path, words: str, code: int, parts: list[str]) -> None:
    done = headrace(*words.split(), cwd=folder)
    line = one_line(done)
    assert done.returncode == code, line
    assert line.startswith("headrace: ")
    for part in parts:
        assert part in line
    assert "secret" not in line
    assert done.stdout == ""
    assert not (folder / ".headrace").exists()
    assert not (folder / "out.jsonl").exists()


@pytest.fixture(scope="module")
def evicting() -> Iterator[str]:
    with redis_server("valkey", {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}) as server:
        yield server.url


@pytest.mark.parametrize("words", [f"{RUN} --endpoint http://a:1", "worker --endpoint http://a:1", "status"])
def test_a_redis_that_evicts_is_refused(folder: Path, evicting: str, words: str) -> None:
    done = headrace(*words.split(), "--redis", evicting, cwd=folder)
    assert done.returncode == 4
    assert "maxmemory-policy is allkeys-lru" in done.stderr
    assert "noeviction" in done.stderr
    assert "Traceback" not in done.stderr


def test_verbose_shows_the_traceback(folder: Path) -> None:
    done = headrace("status", "-v", "--redis", NOWHERE, cwd=folder)
    assert done.returncode == 4
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("headrace: Redis at")


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    command = [*COMMAND, "config", "show", "-c", "good.yaml"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() in (0, 141)


def test_version_needs_no_library() -> None:
    code = (
        "import sys; from broker.cli import main; main(['--version']);"
        "sys.exit(bool({'redis', 'asyncio', 'httpx', 'rich', 'yaml', 'argparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("headrace ")


def test_a_stranger_s_package_is_named(tmp_path: Path) -> None:
    """Another distribution's `broker` in the place of ours: the command says whose it is."""
    stranger = tmp_path / "site"
    (stranger / "broker").mkdir(parents=True)
    (stranger / "broker" / "__init__.py").write_text("")
    (stranger / "broker" / "cli").symlink_to(ROOT / "broker" / "cli")
    record = stranger / "othertool-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: othertool\nVersion: 1.0\n")
    (record / "RECORD").write_text("broker/__init__.py,,\n")
    done = subprocess.run(
        [*COMMAND, "status"], cwd=tmp_path, env=environment(PYTHONPATH=str(stranger)), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "belongs to othertool" in one_line(done)
