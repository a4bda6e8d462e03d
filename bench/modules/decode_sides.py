"""The sides of decode.py: a language model's steps eager, with kernels and compiled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

POSITIONS = 1088
PROMPT = 64
LENGTHS = (64, 256, 512, 984)  # before the first step of a block
CALLS = 40
CHECKED = 8
KERNELS = "kernels"
NOT_REPLAYED = "kernels, not replayed"


@dataclass
class Decoder:
    """One side of ``static`` or ``dynamic``: what it calls, with a cache of its own.

    Attributes:
        model: reads prompts.
        call: decodes; ``model`` itself, or a compiled copy of it.
        static: whether the cache is a StaticCache, which then stays where it lies.
    """

    model: Any
    call: Callable[..., Any]
    static: bool
    cache: Any = None
    used: int = POSITIONS
    token: Any = None

    def begin(self, length: int) -> None:
        """Reads a prompt of ``length`` tokens. Only eager may do that: see `Sides.begin`."""
        import torch
        import transformers

        config = self.model.config
        if not self.static:
            self.cache = transformers.DynamicCache(config=config)
        elif self.cache is None:
            self.cache = transformers.StaticCache(config=config, max_cache_len=POSITIONS)
        else:
            self.cache.reset()
        ids = torch.randint(3, 999, (1, length), generator=torch.Generator().manual_seed(length))
        ids = ids.to(self.model.device)
        self.model(ids, past_key_values=self.cache, use_cache=True)
        self.token = ids[0, -1:].clone().view(1, 1)  # aligned, with strides as an argmax has
        self.used = length

    def step(self, token: Any = None) -> Any:
        """The logits after one more token."""
        token = self.token if token is None else token
        self.used += 1
        return self.call(token, past_key_values=self.cache, use_cache=True).logits


class Sides:
    """The sides of one program, of which one is active at a time."""

    def __init__(self, model: Any, static: bool, not_replayed: bool) -> None:
        self.model = model
        self.static = static
        self.decoders: dict[str, Decoder] = {"eager": Decoder(model, model, static)}
        mine = Decoder(model, model, static)
        if not_replayed:
            self.decoders[NOT_REPLAYED] = mine
        self.decoders[KERNELS] = mine
        self.failed: list[str] = []

    def add_compiled(self, name: str, options: Mapping[str, Any]) -> None:
        """A copy under torch.compile, called often enough to be compiled and recorded."""
        import torch

        other = copy.deepcopy(self.model)
        compiled = torch.compile(other.forward, **options)

        def call(*args: Any, **keywords: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*args, **keywords)

        decoder = Decoder(self.model, call, self.static)
        try:
            for length in LENGTHS[:2]:
                decoder.begin(length)
                for _ in range(6):
                    decoder.step()
        except Exception as error:  # what torch.compile cannot do is said, not measured
            self.failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        self.decoders[name] = decoder

    def begin(self, name: str, length: int) -> Decoder:
        """A decoder with a prompt read, whose side is active now."""
        from eagercache.base.load import core
        from eagercache.modules import replay
        from eagercache.runtime.session import session

        assert core is not None
        core.set_answering(False)
        decoder = self.decoders[name]
        if not self.static or decoder.used + CALLS > POSITIONS:
            decoder.begin(length)
        core.set_answering(name in (KERNELS, NOT_REPLAYED))
        replay.set_limit(0 if name == NOT_REPLAYED else session.graph_bytes)
        return decoder


def settle(sides: Sides, device: str, seconds: float) -> bool:
    """Decodes until nothing is compiled any more, then until replays are decided.

    False where the time was over before.
    """
    import eagercache
    import torch
    from eagercache.modules.manager import manager

    synchronize = torch.get_device_module(device).synchronize
    end = time.monotonic() + seconds
    done = False
    while not done and time.monotonic() < end:
        before = eagercache.stats().compiles
        for length in LENGTHS:
            decoder = sides.begin(KERNELS, length)
            for _ in range(CALLS):
                decoder.step()
            idle = manager.wait(max(0.0, end - time.monotonic()))
        done = idle and eagercache.stats().compiles == before
    for _ in range(4 if sides.static else 0):
        decoder = sides.begin(KERNELS, PROMPT)
        for _ in range(CALLS):
            decoder.step()
            synchronize()
    return done


def check(sides: Sides) -> tuple[float, float, int]:
    """The largest difference of kernels' logits from eager's, eager's largest logit, kernel calls.

    Where no kernel answered, eager was compared with itself.
    """
    from eagercache.modules.manager import manager

    def hits() -> int:
        return sum(row.hits for part, row in manager.stats() if part is sides.model)

    before = hits()
    tokens: list[Any] = []
    logits: dict[str, list[Any]] = {}
    for name in ("eager", KERNELS):
        sides.decoders[name].used = POSITIONS
        decoder = sides.begin(name, PROMPT)
        logits[name] = []
        for index in range(CHECKED):
            found = decoder.step(tokens[index - 1] if index else None)
            logits[name].append(found.float().cpu())
            if name == "eager":
                tokens.append(found[:, -1:].argmax(-1))
    pairs = zip(logits[KERNELS], logits["eager"], strict=True)
    differences = [float((one - other).abs().max()) for one, other in pairs]
    largest = max(float(one.abs().max()) for one in logits["eager"])
    return max(differences), largest, hits() - before
