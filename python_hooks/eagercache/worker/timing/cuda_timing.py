"""Whether a CUDA kernel is faster than native: host and device time of both, and the decision.

Device time is that of a CUDA graph of many calls, which has no host in it; host time that of calls
which nothing waits for. Both sides alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import CannotProve
from eagercache.calls.samples import Sample
from eagercache.calls.texts import first_line
from eagercache.worker.timing.timing import Probe, Timing, median_interval, quiet_pairs

# Data of calls larger than this is not in the cache when an operator begins: its inputs rotate
# through more than the cache holds.
HOT_BYTES = 16 << 20
_MAXIMUM_COPIES = 16
_GRAPH_NS = 300_000.0  # device time of one graph; far above an event's resolution of 500 ns
_MAXIMUM_CALLS = 64
_PAIRS = 25
_HOST_CALLS = 60  # below the launches that a stream queues before the host has to wait
_HOST_PAIRS = 25
_ENOUGH_QUIET = 15
_MOST_ROUNDS = 8

# Of whole modules.
_MODULE_BUDGET_NS = 4e9
_FEWEST_PAIRS = 11
_HEAD_START_NS = 200_000.0
_CYCLES_PER_NS = 2.0  # above any GPU's clock

# A kernel may cost so much more on the side that it was not chosen for.
HOST_SLACK = 1.05
DEVICE_SLACK = 1.03


@dataclass(frozen=True)
class CudaTiming(Timing):
    """Typical times in nanoseconds. What `Timing` holds is the side that decides.

    The intervals of the other side are (host_low, host_high) and (device_low, device_high).
    """

    native_host_ns: float
    kernel_host_ns: float
    native_device_ns: float
    kernel_device_ns: float
    host_high: float  # of kernel / native, 99 % confidence
    device_high: float

    def facts(self) -> dict[str, str]:
        """What else the store is to hold of it."""
        return {
            "native_host_ns": f"{self.native_host_ns:.0f}",
            "kernel_host_ns": f"{self.kernel_host_ns:.0f}",
            "native_device_ns": f"{self.native_device_ns:.0f}",
            "kernel_device_ns": f"{self.kernel_device_ns:.0f}",
        }

    @property
    def device_bound(self) -> bool:
        """Whether the device is what native's caller waits for."""
        return self.native_device_ns > self.native_host_ns


def time_cuda_call(call: Call, probe: Probe, sample: Sample) -> CudaTiming:
    """Times both sides of the captured call. Raises CannotProve when native cannot be captured."""
    samples = _rotation(call, sample)
    device = _device_pairs(call, probe, samples)
    return _judge(device, _host_pairs(probe), len(samples))


def _judge(
    device: Sequence[tuple[float, float]], host: Sequence[tuple[float, float]], calls: int
) -> CudaTiming:
    """The pairs (native, kernel) of either time, as one figure each."""
    host_low, host_high = median_interval([kernel / native for native, kernel in host])
    device_low, device_high = median_interval([kernel / native for native, kernel in device])
    native_host, kernel_host = _typical(host)
    native_device, kernel_device = _typical(device)
    on_device = native_device > native_host
    return CudaTiming(
        native_ns=native_device if on_device else native_host,
        kernel_ns=kernel_device if on_device else kernel_host,
        ratio_low=device_low if on_device else host_low,
        ratio_high=device_high if on_device else host_high,
        pairs=len(device) if on_device else len(host),
        calls=calls,
        native_host_ns=native_host,
        kernel_host_ns=kernel_host,
        native_device_ns=native_device,
        kernel_device_ns=kernel_device,
        host_high=host_high,
        device_high=device_high,
    )


def decide_cuda(timing: CudaTiming, margin: float) -> tuple[bool, str]:
    """Whether the kernel is used, and why not: "slower", or "undecided" when noise hides it.

    A device-bound call: less device time by the margin, and a host time that is not above native's
    or hides behind the kernel's device time. A host-bound one: less host time by the margin and no
    more device time, or less device time by the margin and certainly no more host time, for which
    its caller waits.
    """
    host = timing.kernel_host_ns / timing.native_host_ns
    device = timing.kernel_device_ns / timing.native_device_ns
    hidden = host <= HOST_SLACK or timing.kernel_host_ns < timing.kernel_device_ns
    if timing.device_high <= 1.0 - margin and (
        hidden if timing.device_bound else timing.host_high <= 1.0
    ):
        return True, ""
    if not timing.device_bound and timing.host_high <= 1.0 - margin and device <= DEVICE_SLACK:
        return True, ""
    best = device if timing.device_bound else min(host, device)
    return False, "undecided" if best <= 1.0 - margin else "slower"


def time_sides(run: Callable[[bool, int], None]) -> CudaTiming:
    """The same for two sides that may not be captured: whole modules.

    ``run(by_kernel, calls)`` makes calls and waits for none. The device is kept busy until the host
    has queued them, so that its time has no host in it, as long as they fit into a stream's queue.
    """
    host_ns = {side: _host_ns(run, side, 1) for side in (False, True)}
    host_ns = {side: min(_host_ns(run, side, 1) for _ in range(3)) for side in host_ns}
    slower = max(host_ns.values())
    calls = max(1, min(_HOST_CALLS // 2, int(_GRAPH_NS * 5 / slower)))
    pairs = max(_FEWEST_PAIRS, min(_PAIRS, int(_MODULE_BUDGET_NS / (6 * slower * calls))))

    def measure(by_kernel: bool) -> tuple[float, float]:
        device = _queued_device_ns(run, by_kernel, calls, host_ns[by_kernel])
        return _host_ns(run, by_kernel, calls), device

    measure(False), measure(True)
    host: list[tuple[float, float]] = []
    device: list[tuple[float, float]] = []
    for index in range(2 * pairs):
        first = index % 2 == 1
        sides = {side: measure(side) for side in (first, not first)}
        host.append((sides[False][0], sides[True][0]))
        device.append((sides[False][1], sides[True][1]))
        if index + 1 >= pairs and min(map(len, map(quiet_pairs, (host, device)))) >= _FEWEST_PAIRS:
            break
    return _judge(_quiet_enough(device), _quiet_enough(host), calls)


def _quiet_enough(pairs: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The quiet pairs; all where those are few, as beside a program that keeps the GPU busy.

    Its load is on both sides of a pair, and the interval of all ratios says what is certain.
    """
    quiet = quiet_pairs(pairs)
    return quiet if len(quiet) >= _FEWEST_PAIRS else pairs


def _host_ns(run: Callable[[bool, int], None], by_kernel: bool, calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    run(by_kernel, calls)
    elapsed = (time.perf_counter_ns() - begin) / calls
    torch.cuda.synchronize()
    return elapsed


def _queued_device_ns(
    run: Callable[[bool, int], None], by_kernel: bool, calls: int, host_ns: float
) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int((1.5 * host_ns * calls + _HEAD_START_NS) * _CYCLES_PER_NS))
    start.record()
    run(by_kernel, calls)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6 / calls


def _typical(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of each side: the median, or where few pairs are quiet what a tenth of the times is below.

    A GPU that others use too takes turns of milliseconds, which can only add.
    """
    count = len(pairs)
    at = count // 2 if len(quiet_pairs(pairs)) >= min(_FEWEST_PAIRS, count) else count // 10
    native, kernel = (sorted(side) for side in zip(*pairs, strict=True))
    return native[at], kernel[at]


def _rotation(call: Call, sample: Sample) -> list[Sample]:
    """Copies of the call's data, together more than the cache holds; one where that is hot."""
    size = sum(base.nbytes for base in sample.bases if base is not None and base.is_cuda)
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    copies = 1 if size <= HOT_BYTES else min(_MAXIMUM_COPIES, -(-2 * cache // size))
    return [sample, *(sample.clone() for _ in range(copies - 1))]


def _device_pairs(call: Call, probe: Probe, samples: Sequence[Sample]) -> list[tuple[float, float]]:
    def native(sample: Sample) -> Any:
        return call.invoke(sample.values)

    def kernel(sample: Sample) -> Any:
        probe.force()
        outputs = call.invoke(sample.values)
        if not probe.forced:
            raise CannotProve(f"the kernel did not answer: {probe.error}")
        return outputs

    with torch.no_grad():
        calls = _calls_in_graph(native, samples)
        native_graph = _captured(native, samples, calls)
        kernel_graph = _captured(kernel, samples, calls)

        def measure(kernel_first: bool) -> tuple[float, float]:
            if kernel_first:
                first = _replay_ns(kernel_graph, calls)
                return _replay_ns(native_graph, calls), first
            first = _replay_ns(native_graph, calls)
            return first, _replay_ns(kernel_graph, calls)

        measure(False)  # warms up
        return until_quiet(measure, _PAIRS)


def until_quiet(
    measure: Callable[[bool], tuple[float, float]], pairs: int
) -> list[tuple[float, float]]:
    """The quiet ones among (native, kernel) pairs, which take turns at which side is first.

    As long as few are, more are taken: the program whose call it is uses the GPU too.
    """
    taken: list[tuple[float, float]] = []
    while True:
        taken.extend(measure(index % 2 == 1) for index in range(pairs))
        quiet = quiet_pairs(taken)
        if len(quiet) >= _ENOUGH_QUIET or len(taken) >= _MOST_ROUNDS * pairs:
            return quiet


def _calls_in_graph(run: Callable[[Sample], Any], samples: Sequence[Sample]) -> int:
    """Calls that make a graph of about `_GRAPH_NS`, a multiple of the samples."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run(samples[0])
    start.record()
    for _ in range(4):
        run(samples[0])
    end.record()
    end.synchronize()
    each = max(start.elapsed_time(end) * 1e6 / 4, 1_000.0)
    wanted = max(1, min(_MAXIMUM_CALLS, int(_GRAPH_NS / each)))
    return max(1, round(wanted / len(samples))) * len(samples)


def _captured(
    run: Callable[[Sample], Any], samples: Sequence[Sample], calls: int
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for index in range(calls):
                run(samples[index % len(samples)])
    except CannotProve:
        raise
    except RuntimeError as error:
        raise CannotProve(f"the call cannot be captured: {first_line(error, 150)}") from error
    return graph


def _replay_ns(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6 / calls


def _host_pairs(probe: Probe) -> list[tuple[float, float]]:
    def measure(_: bool) -> tuple[float, float]:
        torch.cuda.synchronize()
        return probe.time(1, _HOST_CALLS // 2)[0]

    probe.time(1, 4)
    pairs = until_quiet(measure, _HOST_PAIRS)
    torch.cuda.synchronize()
    return pairs
