"""Traces as files: whole sections, added up; what is damaged, foreign or newer is said."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from eagercache.calls import trace

pytestmark = pytest.mark.once

STATE = {
    "default_dtype": "float32",
    "deterministic": False,
    "deterministic_warn_only": False,
    "fill_uninitialized_memory": False,
    "num_threads": 1,
}


def line(size: int, calls: int, name: str = "self", **more: object) -> str:
    tensor = {"kind": "tensor", "name": name, "dtype": "float32", "sizes": [size], "strides": [1]}
    return json.dumps(
        {
            "op": "aten::abs",
            "overload": "",
            "dispatch_key": "CPU",
            "state": STATE,
            "args": [{**tensor, "device": "cpu", "wrapped": False, "aligned": True}],
            "calls": calls,
            **more,
        }
    )


def read(path: Path) -> trace.Trace:
    result = trace.Trace()
    trace.read(path, result)
    return result


def counts(result: trace.Trace) -> dict[int, int]:
    return {call.description["args"][0]["sizes"][0]: call.calls for call in result.calls.values()}


def test_the_same_call_adds_up_over_sections_and_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    trace.append_section(first, [line(3, 2, native_ns=100), line(5, 1)], lost=4)
    trace.append_section(first, [line(3, 6, name="input", native_ns=200, digest="ff")])
    trace.append_section(second, [line(3, 1)])
    both = read(first)
    trace.read(second, both)
    assert counts(both) == {3: 9, 5: 1}
    assert (both.sections, both.lost, both.problems) == (3, 4, [])
    (three,) = [call for call in both.calls.values() if call.calls == 9]
    assert three.native_ns == pytest.approx(175)  # of 2 calls at 100 and 6 at 200
    assert three.name == "aten::abs"


def test_processes_that_write_at_the_same_time_leave_whole_sections(tmp_path: Path) -> None:
    path = tmp_path / "trace"

    def write(size: int) -> None:
        for _ in range(40):
            trace.append_section(path, [line(size, 1)] * 50)

    threads = [threading.Thread(target=write, args=(size,)) for size in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = read(path)
    assert counts(result) == {3: 2000, 5: 2000, 7: 2000}
    assert result.sections == 120


def test_a_line_that_a_killed_process_left_unfinished_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace.append_section(path, [line(3, 1), line(5, 1)])
    path.write_text(path.read_text()[:-20] + "\n")
    trace.append_section(path, [line(7, 1)])
    result = read(path)
    assert counts(result) == {3: 1, 7: 1}
    assert result.problems == [f"{path}:3: an unfinished line was left out"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eagercache_trace": 2}\n', "is of version 2 and this eagercache reads 1"),
        ('{"x": 1}\n', "its first line has no 'eagercache_trace'"),
        ("import torch\n", "is no JSON"),
        ('{"eagercache_trace": 1}\n[1]\n', "is no JSON object"),
        ('{"eagercache_trace": 1}\n{"op": "aten::abs"}\n', "is no call of a trace"),
        ('{"eagercache_trace": 1}\n' + line(3, 0) + "\n", "is no call of a trace"),
        ('{"eagercache_trace": 1}\nnonsense\n' + line(3, 1) + "\n", ":2: is no JSON"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(trace.TraceError) as raised:
        read(path)
    assert str(path) in str(raised.value) and message in str(raised.value)
    assert "\n" not in str(raised.value)


BEGIN = '{"eagercache_trace": 1}\n'


@pytest.mark.parametrize(
    "text",
    [
        BEGIN + "[" * 100_000,
        BEGIN + '{"op": ' + '{"a": ' * 100_000,
        BEGIN + line(3, 1).replace('"wrapped": false', '"wrapped": ' + "[" * 900 + "]" * 900),
        BEGIN + line(3, 1).replace('"calls": 1', '"calls": 1e400'),
        BEGIN + line(3, 1).replace('"calls": 1', '"calls": ' + "9" * 5000),
        BEGIN + line(3, 1).replace('"calls": 1', '"calls": ' + "9" * 400),
        BEGIN + line(3, 1, native_ns=float("nan")),
        BEGIN + line(3, 1, native_ns=10**400),
        BEGIN + line(3, 1, native_ns=-1),
        BEGIN + line(3, 1, native_ns=None),
        BEGIN + line(3, 1, args={"kind": "tensor"}),
        BEGIN + line(3, 1, args="text"),
        BEGIN + line(3, 1, op=["aten::abs"]),
        BEGIN + line(3, 1, overload=None),
        BEGIN + line(3, 1, dispatch_key={}),
        '{"eagercache_trace": 1, "lost": "many"}\n',
        '{"eagercache_trace": 1, "lost": null}\n',
        '{"eagercache_trace": 1, "lines": 1e999}\n',
        '{"eagercache_trace": 1, "lines": [1]}\n',
        '{"eagercache_trace": [' + "1," * 5000 + "1]}\n",
    ],
    ids=range(20),
)
def test_a_hostile_trace_is_one_error_of_our_own(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text + "\n")
    with pytest.raises(trace.TraceError) as raised:
        read(path)
        # What is deep and can be read all the same is no error.
        raise trace.TraceError(f"{path}: is read")
    message = str(raised.value)
    assert str(path) in message and "\n" not in message and len(message) < 500 + len(str(path))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("wb") as file:
        file.write(BEGIN.encode())
        file.truncate(trace.MAX_FILE_BYTES + 1)  # sparse
    with pytest.raises(trace.TraceError, match="is no trace: it has"):
        read(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b'{"eagercache_trace": 1}\n\xff\xfe\n')
    with pytest.raises(trace.TraceError, match="is not text"):
        read(path)


def test_only_traces_and_empty_files_are_written_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, expected in (
        ("", True),
        ('{"eagercache_trace":1}\n', True),
        ("Operator: aten.abs.default\n", True),
        ("import torch\n", False),
        ("{}\n", False),
    ):
        path.write_text(text)
        assert trace.is_trace(path) is expected, text


def test_a_section_that_cannot_be_written_whole_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    trace.append_section(path, [line(3, 1)])
    before = path.read_bytes()
    real = Path.open

    def open_on_a_full_disk(self: Path, *arguments: Any) -> Any:
        file = real(self, *arguments)

        def write(text: bytes) -> int:
            file.raw.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "no space left")

        full = mock.MagicMock(wraps=file)
        full.__enter__.return_value = full
        full.write = write
        return full

    monkeypatch.setattr(Path, "open", open_on_a_full_disk)
    with pytest.raises(OSError, match="no space left"):
        trace.append_section(path, [line(5, 1)] * 100)
    monkeypatch.undo()
    assert path.read_bytes() == before
