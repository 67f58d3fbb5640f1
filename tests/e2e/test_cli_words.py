"""What the commands say is said once, adds up, and proposes nothing that would do harm."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from broker.cli import screen
from broker.cli.settings import meant
from broker.cli.tally import Tally
from broker.errors import DeadLettered, Expired
from tests.support.commands import headrace

pytestmark = pytest.mark.e2e


def test_an_outcome_is_said_once() -> None:
    assert str(Expired("t", "expired: its deadline passed")) == "task t: expired: its deadline passed"
    assert str(DeadLettered("t", "http_4xx: status 400")) == "task t: dead: http_4xx: status 400"


def test_a_resumed_run_says_that_earlier_lines_failed(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{oops\n")
    words = ("run", "in.jsonl", "-o", "out.jsonl", "--endpoint", "http://127.0.0.1:1")
    first, again = headrace(*words, cwd=tmp_path), headrace(*words, cwd=tmp_path)
    assert (first.returncode, again.returncode) == (1, 1)
    assert "1 bad line" in first.stderr + first.stdout
    assert "0 failed, 1 done earlier, of those 1 failed" in again.stderr + again.stdout
    told = headrace(*words, "--json", cwd=tmp_path)
    assert json.loads(told.stdout)["earlier_failed"] == 1


def test_a_run_calls_a_bad_line_the_same_while_it_goes_on_and_at_its_end() -> None:
    tally = Tally(answered=3, failed=1, bad=2, changed=1, retries=1)
    during, end = io.StringIO(), io.StringIO()
    screen.PlainProgress(during, every=0.0).update(tally, 9)
    screen.print_tally(tally, 0.0, end)
    assert during.getvalue().endswith("/s, 1 retry, 1 failed, 2 bad lines, 1 changed and not sent\n")
    assert "1 failed, 2 bad lines, 1 changed and not sent" in end.getvalue()


def test_remove_proposes_only_what_can_be_removed(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "headrace.yaml").write_text(
        "pools: {llm: {endpoints: [{id: gpu-1, url: 'http://gpu-1:1'}, {id: gpu-2, url: 'http://gpu-2:1'}]}}\n"
    )
    to = ("-c", "headrace.yaml", "--redis", redis_url)
    nothing = headrace("endpoint", "remove", "gpu-3", *to, cwd=tmp_path)
    assert (nothing.returncode, "gpu-2" in nothing.stderr) == (2, False)
    added = headrace("endpoint", "add", "http://gpu-3:8000", *to, cwd=tmp_path)
    assert added.stdout == "gpu-3-8000 of pool llm: added\n"
    meant_other = headrace("endpoint", "remove", "gpu-3", *to, cwd=tmp_path)
    assert (meant_other.returncode, "did you mean 'gpu-3-8000'?" in meant_other.stderr) == (2, True)


def test_the_one_name_that_begins_so_is_meant() -> None:
    assert meant("gpu-3", ["gpu-1", "gpu-2", "gpu-3-8000"]) == "; did you mean 'gpu-3-8000'?"
    assert meant("gpu-3", ["gpu-2", "gpu-3-a", "gpu-3-b"]).startswith("; did you mean 'gpu-")
    assert meant("zzz", ["llm"]) == "; there is llm"
