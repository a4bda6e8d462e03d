"""Programs whose time goes into calling operators on small tensors, unchanged, on CPU.

    make bench BENCH_ARGS='--only host_bound'
    python -m bench.overhead.host_bound [--only gru] [--rounds 20] [--json]

rollout  a policy network (4-64-64-2, tanh) plays CartPole in 16 environments of tensors, 50 steps
gru      a recurrent cell written in tensor operators, 50 steps (batch 1, 64 units)
lstm     the same with an LSTM's cell
sgd      torch.optim.SGD(momentum=0.9, foreach=False).step() over 500 parameters of 64 elements
adam     torch.optim.Adam(foreach=False).step() over the same

Each is measured natively, in a process that knows nothing of eagercache, and in processes that add
one line to it: "enable" is ``eagercache.enable()``, "all" ``eagercache.enable("all")``, "modules"
``eagercache.enable(modules="auto")``. Their kernels come from a store that an earlier process has
filled. One core, one thread; the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shared import frame, turns

SIDES = {"native": None, "enable": {}, "all": {"ops": "all"}, "modules": {"modules": "auto"}}
STEPS = 50
LONGEST_WAIT = 240.0


def recurrent(gates: int) -> Callable[[], Any]:
    """A GRU's cell (3 gates) or an LSTM's (4), in a loop."""
    import torch
    from torch import nn

    class Cell(nn.Module):
        def __init__(self, inputs: int, units: int) -> None:
            super().__init__()
            self.from_input = nn.Linear(inputs, gates * units)
            self.from_state = nn.Linear(units, gates * units)

    class GRUCell(Cell):
        def forward(self, x: Any, h: Any) -> Any:
            xr, xz, xn = self.from_input(x).chunk(3, dim=-1)
            hr, hz, hn = self.from_state(h).chunk(3, dim=-1)
            r = torch.sigmoid(xr + hr)
            z = torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            return (1 - z) * n + z * h

    class LSTMCell(Cell):
        def forward(self, x: Any, h: Any, c: Any) -> Any:
            i, f, g, o = (self.from_input(x) + self.from_state(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

    torch.manual_seed(0)
    cell = (GRUCell if gates == 3 else LSTMCell)(32, 64).eval()
    sequence = torch.randn(STEPS, 1, 32).unbind()
    start = torch.zeros(1, 64)

    @torch.inference_mode()
    def run() -> Any:
        state = (start,) * (gates - 2)
        for x in sequence:
            made = cell(x, *state)
            state = made if isinstance(made, tuple) else (made,)
        return state

    return run


def rollout() -> Callable[[], Any]:
    """CartPole in tensors (the equations of Barto, Sutton and Anderson), played greedily."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    policy = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    start = 0.05 * torch.randn(16, 4)

    def environment(state: Any, action: Any) -> tuple[Any, Any]:
        x, speed, angle, spin = state.unbind(-1)
        force = torch.where(action == 1, 10.0, -10.0)
        cos, sin = torch.cos(angle), torch.sin(angle)
        push = (force + 0.05 * spin.square() * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        pull = push - 0.05 * turn * cos / 1.1
        made = torch.stack(
            (x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn), -1
        )
        over = (made[:, 0].abs() > 2.4) | (made[:, 2].abs() > 0.2095)
        return torch.where(over.unsqueeze(-1), start, made), 1.0 - over.float()

    @torch.inference_mode()
    def run() -> Any:
        state = start
        total = torch.zeros(16)
        for _ in range(STEPS):
            action = policy(state).argmax(-1)
            state, reward = environment(state, action)
            total = total + reward
        return total

    return run


def optimizer(kind: str) -> Callable[[], Any]:
    """One step over 500 small parameters."""
    import torch

    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(64)) for _ in range(500)]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn(64)
    if kind == "sgd":
        made: Any = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=False)
    else:
        made = torch.optim.Adam(parameters, lr=1e-3, foreach=False)
    step: Callable[[], Any] = made.step
    return step


WORKLOADS: dict[str, Callable[[], Callable[[], Any]]] = {
    "rollout": rollout,
    "gru": lambda: recurrent(3),
    "lstm": lambda: recurrent(4),
    "sgd": lambda: optimizer("sgd"),
    "adam": lambda: optimizer("adam"),
}


def settle(step: Callable[[], Any]) -> None:
    """Runs until nothing is left to compile or to load."""
    import eagercache

    begin, quiet = time.perf_counter(), 0
    while quiet < 20 and time.perf_counter() - begin < LONGEST_WAIT:
        step()
        quiet = quiet + 1 if eagercache.wait(0.2) else 0


def child(name: str, side: str, fill: bool) -> None:
    """One side of one workload: fills the store, or takes its turns."""
    import torch

    if not fill:
        frame.pin()
    torch.set_num_threads(1)
    step = WORKLOADS[name]()
    step()
    chosen = SIDES[side]
    facts: dict[str, Any] = {}
    if chosen is not None:
        import eagercache

        eagercache.enable(**chosen)
        settle(step)
        first = eagercache.stats()
        step()
        last = eagercache.stats()
        outcomes = ("hits", "native", "misses", "pending", "aside")
        facts = {key: getattr(last, key) - getattr(first, key) for key in outcomes}
        facts["compiles"] = last.compiles
        facts["operators"] = {
            operator: {
                key: getattr(row, key) - getattr(first.operators[operator], key) for key in outcomes
            }
            for operator, row in last.operators.items()
            if operator in first.operators
        }
    if fill:
        # Not os._exit: what this process learned is noted at its end.
        print(turns.READY + json.dumps(facts), flush=True)
        return
    turns.serve({name: lambda calls: frame.one_round(step, calls)}, facts)


def measure(options: argparse.Namespace) -> list[frame.Figure]:
    """All workloads, all sides."""
    figures: list[frame.Figure] = []
    chosen = [side for side in SIDES if side == "native" or side in options.sides.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(options.store or folder) / "store"
        store.mkdir(mode=0o700, exist_ok=True)
        environment = {"EAGERCACHE_DIR": str(store), "OMP_NUM_THREADS": "1"}
        for name in WORKLOADS:
            if options.only not in name:
                continue
            command = [*frame.command(__file__), "--child", name]
            sides = {}
            for side in chosen:
                if side != "native" and options.store is None:
                    turns.Side([*command, "--side", side, "--fill"], environment).end()
                sides[side] = turns.Side([*command, "--side", side], environment)
                say(f"{name} {side}: {describe(sides[side].facts, options.verbose)}")
            calls = max(1, int(5e7 / sides["native"].ns(name, 3)))
            measured = turns.compare(sides, name, rounds=options.rounds, calls=calls)
            for figure in measured.values():
                say(f"{figure.name}: {figure.ns / 1e3:.0f} us, {figure.ratio or 1:.2f}")
            figures.extend(measured.values())
            for one in sides.values():
                one.end()
    return figures


def describe(facts: dict[str, Any], verbose: bool) -> str:
    """A line on how the calls of one step were answered."""
    counts = ", ".join(f"{facts[key]} {key}" for key in facts if key != "operators")
    rows = facts.get("operators", {}).items() if verbose else ()
    return "\n    ".join([counts, *(f"{op}: {row}" for op, row in rows if any(row.values()))])


def say(line: str) -> None:
    """Progress, beside the table."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of blocks by turns")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--sides", default="enable", help="what is compared: enable,all,modules")
    parser.add_argument("--store", help="a folder whose store is filled already")
    parser.add_argument("--verbose", action="store_true", help="calls by operator")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.side, options.fill)
        return
    frame.show(frame.as_json("Host-bound programs, one core", measure(options)), options.json)


if __name__ == "__main__":
    main()
