"""The output file. It is a file, so this does I/O, in a temporary folder; nothing else runs."""

from __future__ import annotations

import io
import json
import os
import resource
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.batch import TASK_ID, BadLine, BatchTask, bad_line, output_line, read_batch, result_line
from broker.batch_output import SYNC_BYTES, OutputFile, _read, read_done
from broker.errors import HeadraceError, UsageError
from broker.task import Request, Result

INPUT = b"".join(
    b'{"custom_id": "%d", "method": "POST", "url": "/x", "body": {"n": %d}}\n' % (i, i) for i in range(4)
) + (b'{\n{\n{"custom_id": "1", "method": "POST", "url": "/x", "body": {}}\n{"custom_id": "u"}\n')


def items() -> list[BatchTask | BadLine]:
    return list(read_batch(io.BytesIO(INPUT)))


def written(item: BatchTask | BadLine) -> bytes:
    if isinstance(item, BadLine):
        return bad_line(item)
    status = 400 if item.custom_id == "3" else 200
    result = Result("t", "ok" if status == 200 else "dead", status, body='{"text": "äö\u2028"}'.encode())
    return result_line(item.custom_id, item.digest, result)


OUTPUT = b"".join(map(written, items()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# Reading


def test_no_file_is_nothing_done(path: Path) -> None:
    done = read_done(path)
    assert (len(done), done.errors, done.end) == (0, 0, 0)
    assert {done.look(item) for item in items()} == {"new"}
    assert not path.exists()


def test_a_whole_file_is_all_done(path: Path) -> None:
    path.write_bytes(OUTPUT)
    done = read_done(path)
    assert (len(done), len(done.tasks), len(done.lines)) == (8, 4, 4)
    assert done.errors == 5
    assert {done.look(item) for item in items()} == {"done"}


@settings(max_examples=60)
@given(st.integers(0, len(OUTPUT)))
def test_a_file_cut_anywhere_has_its_whole_lines(cut: int) -> None:
    done = _read(io.BytesIO(OUTPUT[:cut]), "out")
    whole = OUTPUT[:cut].count(b"\n")
    if cut < len(OUTPUT) and OUTPUT[cut : cut + 1] == b"\n":  # all of a line but its end
        whole += 1
        assert done.unfinished
    looks = [done.look(item) for item in items()]
    assert looks == ["done"] * whole + ["new"] * (8 - whole)
    assert done.end + done.torn == cut


def test_a_changed_body_under_the_same_custom_id_is_noticed(path: Path) -> None:
    path.write_bytes(OUTPUT)
    changed = INPUT.replace(b'{"n": 2}', b'{"n": 3}')
    looks = [read_done(path).look(item) for item in read_batch(io.BytesIO(changed))]
    assert looks == ["done", "done", "changed", "done", "done", "done", "done", "done"]


def test_a_corrected_line_is_new(path: Path) -> None:
    path.write_bytes(OUTPUT)
    corrected = INPUT.replace(b'{"custom_id": "u"}', b'{"custom_id": "u", "method": "GET", "url": "/x"}')
    assert [read_done(path).look(item) for item in read_batch(io.BytesIO(corrected))][-1] == "new"


def test_lines_of_other_programs_are_done_by_their_custom_id(path: Path) -> None:
    line = {"id": "vllm-1", "custom_id": "2", "response": {"status_code": 200, "body": {}}, "error": None}
    path.write_text(json.dumps(line) + "\n\n")
    done = read_done(path)
    assert [done.look(item) for item in items()[:4]] == ["new", "new", "done", "new"]


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"{}\n", b"[]\n", b'{"id": 1, "custom_id": "a", "error": null}\n', INPUT, b'{"id": "a"}\n', b"\xff\n"],
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(OUTPUT + content)
    with pytest.raises(UsageError, match=r"out\.jsonl:9: not a line of batch output"):
        OutputFile(path)
    assert path.read_bytes() == OUTPUT + content


@pytest.mark.parametrize("tail", [b"", b'{"id": "batch_req_', b"\x00" * 100, b"\xc3"])
def test_repair_cuts_a_torn_line_off(path: Path, tail: bytes) -> None:
    path.write_bytes(OUTPUT + tail)
    assert read_done(path).torn == len(tail)
    assert path.read_bytes() == OUTPUT + tail
    assert read_done(path, repair=True).torn == 0
    assert path.read_bytes() == OUTPUT


def test_repair_ends_a_line_that_only_lacks_its_end(path: Path) -> None:
    path.write_bytes(OUTPUT[:-1])
    done = read_done(path, repair=True)
    assert len(done) == 8
    assert path.read_bytes() == OUTPUT
    assert done.end == len(OUTPUT)


# Writing


def test_a_run_stopped_anywhere_resumes_to_the_same_file(path: Path) -> None:
    for cut in range(0, len(OUTPUT), 7):
        path.write_bytes(OUTPUT[:cut])
        with OutputFile(path) as out:
            out.append(written(item) for item in items() if out.done.look(item) == "new")
        assert path.read_bytes() == OUTPUT
    with OutputFile(path) as out:
        assert [item for item in items() if out.done.look(item) == "new"] == []


def test_a_long_output_resumes_in_flat_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.seenkeys.IN_MEMORY", 100)
    lines = 5_000
    path.write_bytes(
        b"".join(output_line(f"{TASK_ID}{n:024x}", f"{n}", status_code=200, body=b"1") for n in range(lines))
    )
    read_done(path)  # what is imported at first use is not asked about
    tracemalloc.start()
    done = read_done(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000  # SQLite's own is 4 MiB, however many lines there are
    assert len(done) == lines
    work = Request("GET", "/")
    for number in (0, 99, 100, lines - 1):
        assert done.look(BatchTask(1, f"{number}", work, f"{number:024x}" + "0" * 40)) == "done"
        assert done.look(BatchTask(1, f"{number}", work, "f" * 64)) == "changed"
    assert done.look(BatchTask(1, f"{lines}", work, "f" * 64)) == "new"


@pytest.mark.parametrize("in_memory", [0, 2])
def test_it_resumes_as_rightly_from_a_file_of_keys(path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr("broker.seenkeys.IN_MEMORY", in_memory)
    for test in (
        test_a_whole_file_is_all_done, test_a_changed_body_under_the_same_custom_id_is_noticed,
        test_a_corrected_line_is_new, test_a_run_stopped_anywhere_resumes_to_the_same_file,
        test_lines_of_other_programs_are_done_by_their_custom_id,
    ):  # fmt: skip
        path.unlink(missing_ok=True)
        test(path)


def test_append_tells_when_all_is_on_the_disk(path: Path) -> None:
    clock = Clock()
    with OutputFile(path, clock=clock) as out:
        assert out.append([b"a\n"]) is False
        clock.now = 0.9
        assert out.append([b"b\n"]) is False
        assert path.read_bytes() == b"a\nb\n"
        clock.now = 1.1
        assert out.append([b"c\n"]) is True
        assert out.append([b"d\n"]) is False
        out.sync()
        assert out.append([]) is True
        assert out.append([b"x" * SYNC_BYTES + b"\n"]) is True


def test_a_second_run_is_refused_until_the_first_ends(path: Path) -> None:
    with OutputFile(path), pytest.raises(UsageError, match="another run is writing it"):
        OutputFile(path)
    OutputFile(path).close()


@pytest.mark.parametrize("make", ["same", "symlink", "hardlink", "dots"])
def test_the_input_is_never_the_output(tmp_path: Path, make: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(INPUT)
    target = tmp_path / "other.jsonl"
    if make == "symlink":
        target.symlink_to(source)
    elif make == "hardlink":
        target.hardlink_to(source)
    else:
        target = source if make == "same" else tmp_path / "." / ".." / tmp_path.name / "in.jsonl"
    with pytest.raises(UsageError, match="is the input file as well"):
        OutputFile(target, source)
    assert source.read_bytes() == INPUT


def test_an_empty_input_is_not_mistaken_for_the_output(tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    OutputFile(tmp_path / "out", tmp_path / "in").close()


@pytest.mark.parametrize("where", ["", "missing/out.jsonl"])
def test_a_path_that_cannot_be_opened_is_one_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match="choose another output file"):
        OutputFile(tmp_path / where)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line_that_says_what_to_do() -> None:
    with OutputFile("/dev/full") as out, pytest.raises(HeadraceError, match="the disk is full") as caught:
        out.append([b"a\n"])
    assert "/dev/full" in str(caught.value)
    assert "what is not written is dropped, since this is no file" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may grow over this many bytes: the kernel takes part of a write, then refuses, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_is_cut_short_leaves_whole_lines(path: Path, small_files: int) -> None:
    first = written(items()[0])
    assert len(first) < small_files < 20 * len(first)
    with OutputFile(path) as out:
        out.append([first])
        with pytest.raises(HeadraceError, match="may not grow further; nothing is lost"):
            out.append([first] * 20)
    assert path.read_bytes() == first
    with OutputFile(path) as out:
        assert len(out.done) == 1


def test_a_device_is_written_and_never_read(path: Path) -> None:
    assert not stat.S_ISREG(os.stat(os.devnull).st_mode)
    with OutputFile(os.devnull) as out, OutputFile(os.devnull):
        out.append([b"a\n"])
        out.sync()


def test_close_is_harmless_when_repeated(path: Path) -> None:
    out = OutputFile(path)
    out.append([b"a\n"])
    out.close()
    out.close()
    assert path.read_bytes() == b"a\n"
