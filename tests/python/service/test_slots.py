"""Slots are exclusive between processes, and go with their holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment
from eagercache.service.slots import Slots

pytestmark = pytest.mark.once

HOLDER = """
import sys, time
from pathlib import Path
from eagercache.service.slots import Slots
slot = Slots(int(sys.argv[1]), Path(sys.argv[2])).try_take()
print(slot is not None, flush=True)
time.sleep(600)
"""


def test_as_many_are_given_as_there_are(tmp_path: Path) -> None:
    slots = Slots(2, tmp_path / "s")
    first, second = slots.try_take(), slots.try_take()
    assert first is not None and second is not None
    assert slots.try_take() is None
    first.release()
    first.release()
    third = slots.try_take()
    assert third is not None and slots.try_take() is None


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "1", str(folder)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        slots = Slots(1, folder)
        assert slots.try_take() is None
    finally:
        holder.kill()
        holder.wait()
    assert slots.try_take() is not None


def test_a_forked_child_does_not_keep_a_released_slot(tmp_path: Path) -> None:
    slots = Slots(1, tmp_path / "s")
    slot = slots.try_take()
    assert slot is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    slot.release()
    again = slots.try_take()
    os.close(writing)
    os.waitpid(child, 0)
    assert again is not None


@pytest.mark.parametrize("how", ["link", "open", "file"])
def test_a_folder_that_is_not_ours_alone_limits_nobody(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "s"
    if how == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_text("")
    slots = Slots(1, folder)
    taken = [slots.try_take(), slots.try_take()]
    assert None not in taken
    assert list(tmp_path.glob("*/slot-*")) == []
