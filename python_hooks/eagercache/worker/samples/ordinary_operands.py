"""Arguments whose values a kernel looks at before it begins, and leaves some calls to native for.

What a normalization multiplies by its weights is a rest that may cancel: a number that is its row's
mean. Native's rounding then decides of what sign it is, or that it is zero, and an infinite weight
makes of that one infinity, the other, or NaN. No kernel with another order of the sum gives the
same, so kernels look at the weights, which are few, and native answers where one is not ordinary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagercache.calls.call import Call
from eagercache.calls.samples import Sample

# By operator, without its overload, the arguments that are looked at. Not batch norm's: its kernels
# must equal native bit for bit in training, and are given the mean otherwise.
_LOOKED_AT = {
    "aten::native_layer_norm": "weight",
    "aten::native_group_norm": "weight",
}

# Bits of a number without its sign, from which on it is not ordinary: those of infinity; in the
# wider formats of 2**100, below which no normalised number's last place makes an infinity of it.
_LIMITS = {
    torch.float16: (16, 0x7C00),
    torch.bfloat16: (16, 0x7180),
    torch.float32: (32, 0x71800000),
}


@dataclass(frozen=True)
class OrdinaryInput:
    """An input that is to be looked at; sizes and strides are C++ text.

    Without strides it is so many numbers without gaps.
    """

    input: int
    dtype: torch.dtype
    sizes: tuple[str, ...]
    strides: tuple[str, ...] | None

    def text(self) -> str:
        """Statements that return 2 where some value is not ordinary."""
        bits, limit = _LIMITS[self.dtype]
        body = _FLAT if self.strides is None else _STRIDED
        loops = "".join(
            f"    for (std::int64_t i{n} = 0; i{n} < {size}; ++i{n})\n"
            for n, size in enumerate(self.sizes)
        )
        place = [f"i{n} * {step}" for n, step in enumerate(self.strides or ())]
        return body.format(
            kind=f"std::int{bits}_t",
            input=self.input,
            count="*".join(f"({size})" for size in self.sizes) or "1",
            loops=loops,
            place=" + ".join(place) or "0",
            mask=f"{(1 << (bits - 1)) - 1:#x}",
            limit=f"{limit:#x}",
        )


# The kernels' flags keep the compiler from vectorizing loops by itself.
_FLAT = """\
  {{
    using Bits = at::vec::Vectorized<{kind}>;
    const auto* const values = static_cast<const {kind}*>(p[{input}]);
    const std::int64_t count = {count};
    Bits largest({kind}(0));
    for (std::int64_t i = 0; i < count; i += Bits::size()) {{
      const auto some = std::min<std::int64_t>(count - i, Bits::size());
      largest = at::vec::maximum(largest, Bits::loadu(values + i, some) & Bits({kind}({mask})));
    }}
    {kind} each[Bits::size()];
    largest.store(each);
    for (const {kind} one : each) {{
      if (one >= {limit}) return 2;
    }}
  }}
"""
_STRIDED = """\
  {{
{loops}    {{
      {kind} value;
      std::memcpy(&value, static_cast<const {kind}*>(p[{input}]) + {place}, sizeof value);
      if ((value & {mask}) >= {limit}) return 2;
    }}
  }}
"""


def looked_at(call: Call) -> tuple[int, ...]:
    """The tensors of ``call`` that its kernel looks at; none but on CPU."""
    wanted = _LOOKED_AT.get(call.name.partition(".")[0])
    if wanted is None or any(spec.device != "cpu" for spec in call.tensors):
        return ()
    return tuple(index for index in call.places(wanted) if call.tensors[index].dtype in _LIMITS)


def ordinary_inputs(
    call: Call, sizes: Sequence[Sequence[str]] | None = None
) -> tuple[OrdinaryInput, ...]:
    """What the kernel of ``call`` looks at first.

    ``sizes``, of all tensors, stand in for the call's own; such tensors are dense.
    """
    found = []
    for index in looked_at(call):
        spec = call.tensors[index]
        lengths = tuple(map(str, spec.sizes)) if sizes is None else tuple(sizes[index])
        dense = sizes is not None or spec.extent == spec.numel
        strides = None if dense else tuple(map(str, spec.strides))
        found.append(OrdinaryInput(index, spec.dtype, lengths, strides))
    return tuple(found)


def is_ordinary(call: Call, sample: Sample) -> bool:
    """Whether the kernel of ``call`` answers it for these values."""
    for index in looked_at(call):
        value = sample.values[index]
        assert isinstance(value, torch.Tensor)
        bits, limit = _LIMITS[value.dtype]
        whole = value.contiguous().view(torch.int16 if bits == 16 else torch.int32)
        if bool(((whole & ((1 << (bits - 1)) - 1)) >= limit).any()):
            return False
    return True
