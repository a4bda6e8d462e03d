"""What a program switches on while a self-check is under way: done once it has passed."""

from __future__ import annotations

import sys

import pytest
from conftest import Program

# A check that waits for a file in the store's folder and then says what is in it.
PENDING = """
import json, os, threading, torch, eagercache
from pathlib import Path
from eagercache.base.load import core
from eagercache.base.untried.standing import standing
from eagercache.frontend.deferred import deferred
go = Path(os.environ["EAGERCACHE_DIR"], "go")
code = (
    "import sys, time, pathlib\\nfile = pathlib.Path(sys.argv[1])"
    "\\nwhile not file.exists(): time.sleep(.02)\\nprint(file.read_text())"
)
said = []
standing.begin([sys.executable, "-c", code, str(go)], said.append)
deferred.__init__()
def verdict(problem=""):
    new = go.with_name("new")
    new.write_text(json.dumps({"problem": problem}))
    new.rename(go)
    assert eagercache.wait()
def active():
    if not eagercache.is_enabled():
        return []
    return sorted(f"{op}.{overload}" for op, overload, _ in core.active_operators())
x = torch.randn(64, 96)
"""
VAR, SILU = "aten::var.correction", "aten::silu.out"


def test_the_latest_of_several_enablings_holds_and_those_that_ended_do_not(
    program: Program,
) -> None:
    done = program(
        PENDING
        + """
with eagercache.enable(["var.correction"], on_miss="native") as outer:
    with eagercache.enable(["silu.out"], on_miss="native") as inner:
        before = [outer.active, inner.active, active()]
    verdict()
    inside = active()
    with eagercache.enable(["silu.out"], on_miss="native") as later:
        report(later=[later.active, active()])
report(before=before, inside=inside, after=active())
"""
    )
    assert done["before"] == [False, False, []]
    assert done["inside"] == [VAR]
    assert done["later"] == [True, [SILU]]
    assert done["after"] == []


def test_operators_and_modules_join_in_the_order_in_which_they_were_named(program: Program) -> None:
    done = program(
        PENDING
        + """
from eagercache.modules.manager import manager
model = torch.nn.Linear(4, 4)
eagercache.accelerate(model, training=True, on_miss="native")
eagercache.register("silu.out")
names = iter(["var.correction"])
try:
    eagercache.accelerate(model, choose="always")
except ValueError as error:
    refused = str(error)
before = [active(), model in manager._accelerated]
verdict()
report(before=before, after=[active(), model in manager._accelerated], refused=refused)
eagercache.enable(names, on_miss="native")
report(again=active(), said=said)
"""
    )
    assert done["before"] == [[], False]
    assert done["after"] == [[SILU], True]
    assert "is enabled already" in done["refused"]
    assert done["again"] == [VAR] and done["said"] == [""]


def test_names_that_are_given_but_once_are_kept_and_mistakes_are_said_at_once(
    program: Program,
) -> None:
    done = program(
        PENDING
        + """
try:
    eagercache.enable(["no_such_operator"])
except ValueError as error:
    report(mistake=str(error))
eagercache.enable(iter(["var.correction", "silu.out"]), on_miss="native")
verdict()
report(active=active())
"""
    )
    assert "no_such_operator" in done["mistake"]
    assert done["active"] == [SILU, VAR]


@pytest.mark.parametrize("end", ["disable", "freeze"])
def test_what_was_switched_off_again_does_not_come(program: Program, end: str) -> None:
    done = program(
        PENDING
        + f"""
eagercache.enable(["var.correction"], on_miss="native")
eagercache.{end}()
verdict()
report(active=active(), frozen=eagercache.is_frozen())
eagercache.enable(["silu.out"], on_miss="native")
report(again=active())
"""
    )
    assert done["active"] == [] and done["again"] == [SILU]
    assert done["frozen"] == (end == "freeze")


def test_who_waits_for_kernels_waits_for_the_verdict(program: Program) -> None:
    done = program(
        PENDING
        + """
timer = threading.Timer(0.3, verdict)
timer.start()
with eagercache.enable(["var.correction"], on_miss="wait", choose="always") as enabled:
    torch.var(x, -1)
    torch.var(x, -1)
    report(active=enabled.active, hits=eagercache.stats().hits)
timer.join()
""",
        fills=True,
    )
    assert done["active"] and done["hits"] > 0


def test_beside_a_torch_that_failed_nothing_is_enabled_warmed_or_opened(program: Program) -> None:
    done = program(
        PENDING
        + """
later = eagercache.enable(["var.correction"])
verdict("an answer differs")
with eagercache.enable(["silu.out"]) as enabled:
    report(active=[enabled.active, active(), eagercache.available()])
errors = []
for call in (lambda: eagercache.warm_up([]), lambda: eagercache.load_module("x", keys=[])):
    try:
        call()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
report(errors=errors, said=said)
"""
    )
    assert done["active"] == [False, [], False]
    reason = "its self-check beside this torch failed: an answer differs"
    assert done["errors"] == [f"WarmError: {reason}", f"DeployError: {reason}"]
    assert done["said"] == ["an answer differs"]


def test_a_fork_stays_native_and_does_not_wait(program: Program) -> None:
    done = program(
        PENDING
        + """
eagercache.enable(["var.correction"], on_miss="native")
child = os.fork()
if child == 0:
    os._exit(10 + standing.wait() + eagercache.is_enabled())
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
verdict()
report(status=status, active=active())
"""
    )
    assert done["status"] == 10 and done["active"] == [VAR]


def test_what_was_found_is_said_before_anybody_goes_on(program: Program) -> None:
    done = program(
        f"""
import eagercache, time
from eagercache.base.untried.standing import Standing
said, standing = [], Standing()
def say(problem):
    time.sleep(0.5)
    said.append(problem)
standing.begin([{sys.executable!r}, "-c", "raise SystemExit(3)"], say)
report(waited=standing.wait(60), said=len(said))
"""
    )
    assert done["waited"] and done["said"] == 1


def test_a_check_that_says_nothing_has_failed(program: Program) -> None:
    done = program(
        f"""
import eagercache, threading
from eagercache.base.untried.standing import Standing
ended = threading.Event()
standing = Standing()
standing.begin([{sys.executable!r}, "-c", "raise SystemExit(3)"], lambda problem: ended.set())
assert standing.wait(60) and ended.wait(60)
other = Standing()
other.begin(["/no/such/program"], lambda problem: None)
report(first=standing.problem(), second=other.problem())
"""
    )
    assert done["first"] == "its process ended with status 3 and said nothing"
    assert "it could not be started" in done["second"]
