"""The operators that programs are drawn from, family by family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch

from fuzz.templates import (
    FLOATS,
    IMAGES,
    INTEGERS,
    SCALARS,
    Named,
    Slot,
    Spec,
    Template,
    float_type,
    layout,
    number_type,
    partner,
    shape,
    spec,
    words,
)

Maker = Callable[[Random], Template]

# torch 2.11's own backward ends the process with SIGSEGV where the tensor is channels_last and no
# gradient of it is asked for: native_group_norm_backward with output_mask [False, True, True].
_GROUP_NORM_CRASHES = torch.__version__.startswith("2.11.")

_UNARY_FLOAT = words(
    "abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt sin cos tan asin acos atan sinh cosh "
    "tanh asinh acosh atanh sigmoid erf erfc reciprocal square floor ceil trunc round frac sign "
    "sgn isnan isinf signbit logit sinc nan_to_num digamma lgamma i0 relu deg2rad logical_not "
    "isfinite isposinf"
)

_UNARY_INTEGER = words("abs neg sign sgn square bitwise_not logical_not relu signbit exp sqrt")

_NO_IN_PLACE = {"isnan", "isinf", "signbit", "isfinite", "isposinf"}

_ACTIVATIONS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("gelu", ()),
    ("gelu", (("approximate", "tanh"),)),
    ("silu", ()),
    ("softplus", ()),
    ("elu", ()),
    ("leaky_relu", (("negative_slope", 0.2),)),
    ("hardtanh", ()),
    ("hardswish", ()),
    ("hardsigmoid", ()),
    ("mish", ()),
    ("celu", ()),
    ("selu", ()),
    ("logsigmoid", ()),
    ("softshrink", ()),
    ("hardshrink", ()),
    ("relu6", ()),
    ("relu", ()),
    ("threshold", (("threshold", 0.1), ("value", 2.0))),
)

_BINARY = words(
    "add add add sub sub mul mul mul div div maximum minimum eq ne lt le gt ge "
    "remainder fmod pow logical_and logical_or logical_xor"
)

_BINARY_FLOAT = words(
    "atan2 copysign hypot nextafter logaddexp logaddexp2 xlogy fmax fmin heaviside"
)

_BINARY_INTEGER = words("bitwise_and bitwise_or bitwise_xor bitwise_left_shift")

_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"}


def unary(rng: Random) -> Template:
    """f(x), f_(x), or f(x, out=y)."""
    dtype = number_type(rng)
    if dtype in ("bool", "complex64"):
        dtype = "float32"
    name = rng.choice(_UNARY_FLOAT if dtype in FLOATS else _UNARY_INTEGER)
    sizes = shape(rng)
    kind = rng.random()
    if kind < 0.2 and name not in _NO_IN_PLACE:
        return Template(
            f"torch.Tensor.{name}_", (Slot(0),), (spec(rng, dtype, sizes, written=True),), (), (0,)
        )
    if kind < 0.3 and name not in _NO_IN_PLACE | {"relu"}:
        specs = (spec(rng, dtype, sizes), spec(rng, dtype, sizes, written=True))
        return Template(_path(rng, name), (Slot(0),), specs, (("out", Slot(1)),), (1,))
    return Template(_path(rng, name), (Slot(0),), (spec(rng, dtype, sizes),))


def _path(rng: Random, name: str) -> str:
    """The function, or the operator through the dispatcher's other entrance."""
    return f"torch.ops.aten.{name}" if rng.random() < 0.15 else f"torch.{name}"


def activation(rng: Random) -> Template:
    """A function of torch.nn.functional on one tensor."""
    name, keywords = rng.choice(_ACTIVATIONS)
    sizes, dtype = shape(rng), float_type(rng)
    if name in ("relu", "silu", "elu", "hardtanh", "leaky_relu", "mish") and rng.random() < 0.2:
        keywords = (*keywords, ("inplace", True))
        specs = (spec(rng, dtype, sizes, written=True),)
        return Template(f"torch.nn.functional.{name}", (Slot(0),), specs, keywords, (0,))
    return Template(f"torch.nn.functional.{name}", (Slot(0),), (spec(rng, dtype, sizes),), keywords)


def binary(rng: Random) -> Template:
    """f(x, y) of tensors that broadcast, in place, or into an output; dtypes may differ."""
    dtype = number_type(rng)
    names = _BINARY
    if dtype in FLOATS and rng.random() < 0.25:
        names = _BINARY_FLOAT
    elif dtype in INTEGERS or dtype == "bool":
        names = [*_BINARY, *_BINARY_INTEGER]
    name = rng.choice(names)
    if dtype == "bool" and name == "sub":
        name = "add"
    sizes = shape(rng)
    other = dtype if rng.random() < 0.8 else number_type(rng)
    keywords: tuple[tuple[str, Any], ...] = ()
    if name in ("add", "sub") and rng.random() < 0.3 and dtype not in ("bool",):
        keywords = (("alpha", rng.choice((2, -1, 3))),)
    if name == "div" and rng.random() < 0.3:
        keywords = (("rounding_mode", rng.choice(("floor", "trunc"))),)
    kind = rng.random()
    if kind < 0.2 and name not in ("nextafter_",) and dtype in FLOATS:
        specs = (spec(rng, dtype, sizes, written=True), spec(rng, other, partner(rng, sizes)))
        if name in ("logaddexp", "logaddexp2", "maximum", "minimum", "fmax", "fmin"):
            name = "mul"
        return Template(f"torch.Tensor.{name}_", (Slot(0), Slot(1)), specs, keywords, (0,))
    left, right = sizes, partner(rng, sizes)
    if rng.random() < 0.3:
        left, right = right, left
    specs = (spec(rng, dtype, left), spec(rng, other, right))
    if kind < 0.3:
        result = "bool" if name in _COMPARISONS else dtype
        specs = (*specs, spec(rng, result, sizes, written=True))
        keywords = (*keywords, ("out", Slot(2)))
        return Template(_path(rng, name), (Slot(0), Slot(1)), specs, keywords, (2,))
    return Template(_path(rng, name), (Slot(0), Slot(1)), specs, keywords)


def with_scalar(rng: Random) -> Template:
    """f(x, 2), and clamps."""
    dtype = number_type(rng)
    if dtype in ("bool", "complex64"):
        dtype = "int64"
    sizes = shape(rng)
    number = rng.choice(SCALARS if dtype in FLOATS else (0, 1, 2, -1, 3))
    name = rng.choice(words("add sub mul div pow eq ne lt gt clamp remainder fmod rsub where"))
    arguments: tuple[Any, ...] = (Slot(0), number)
    specs: tuple[Spec, ...] = (spec(rng, dtype, sizes),)
    if name == "clamp":
        arguments = (Slot(0), rng.choice((-1, None)), rng.choice((1, 2)))
    if name == "where":
        arguments = (Slot(1), Slot(0), number)
        specs = (*specs, spec(rng, "bool", sizes))
    if name in ("remainder", "fmod", "div") and number == 0:
        arguments = (Slot(0), 2)
    if rng.random() < 0.25 and name not in ("rsub", "where") and dtype in FLOATS:
        specs = (spec(rng, dtype, sizes, written=True),)
        return Template(f"torch.Tensor.{name}_", arguments, specs, (), (0,))
    return Template(f"torch.{name}", arguments, specs)


def ternary(rng: Random) -> Template:
    """Three tensors: where, addcmul, addcdiv, lerp, masked_fill, clamp."""
    dtype, sizes = float_type(rng), shape(rng)
    name = rng.choice(("where", "addcmul", "addcdiv", "lerp", "masked_fill", "clamp", "lerp_"))
    in_place = rng.random() < 0.25 and name not in ("where", "clamp")
    first = spec(rng, dtype, sizes, written=in_place)
    second, third = spec(rng, dtype, partner(rng, sizes)), spec(rng, dtype, sizes)
    suffix = "_" if in_place else ""
    base = "torch.Tensor." if in_place else "torch."
    writes = (0,) if in_place else ()
    if name == "where":
        specs = (spec(rng, "bool", sizes), first, second)
        return Template("torch.where", (Slot(0), Slot(1), Slot(2)), specs)
    if name == "masked_fill":
        specs = (first, spec(rng, "bool", partner(rng, sizes)))
        arguments: tuple[Any, ...] = (Slot(0), Slot(1), rng.choice((0.0, -1.0, 2.5)))
        return Template(f"{base}masked_fill{suffix}", arguments, specs, (), writes)
    if name == "lerp_":
        arguments = (Slot(0), Slot(1), rng.choice((0.1, 0.5, 0.9)))
        return Template(f"{base}lerp{suffix}", arguments, (first, second), (), writes)
    keywords: tuple[tuple[str, Any], ...] = ()
    if name in ("addcmul", "addcdiv") and rng.random() < 0.4:
        keywords = (("value", rng.choice((0.5, -1.0, 2.0))),)
    arguments = (Slot(0), Slot(1), Slot(2))
    return Template(f"{base}{name}{suffix}", arguments, (first, second, third), keywords, writes)


def reduction(rng: Random) -> Template:
    """Sums, means, extremes, scans, softmax, over one dimension or all."""
    names = words(
        "sum mean var std amax amin prod all any argmax argmin logsumexp cumsum cumprod max min "
        "var_mean softmax log_softmax count_nonzero nansum norm sum mean"
    )
    name = rng.choice(names)
    dtype = float_type(rng)
    if name in words("sum amax amin prod all any argmax argmin cumsum max min count_nonzero"):
        dtype = number_type(rng)
        dtype = "float32" if dtype == "complex64" else dtype
    sizes = shape(rng)
    dimension = rng.randrange(-len(sizes), len(sizes)) if sizes else 0
    specs = (spec(rng, dtype, sizes),)
    if name in ("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp"):
        return Template(f"torch.{name}", (Slot(0), dimension), specs)
    keywords: tuple[tuple[str, Any], ...] = ()
    if name in ("var", "std", "var_mean") and rng.random() < 0.5:
        keywords = (("correction", rng.choice((0, 1))),)
    if name == "norm":
        arguments: tuple[Any, ...] = (Slot(0), rng.choice((1, 2, math.inf)))
        return Template("torch.linalg.vector_norm", arguments, specs)
    if rng.random() < 0.35:
        return Template(f"torch.{name}", (Slot(0),), specs, keywords)
    if name not in ("count_nonzero",) and rng.random() < 0.5:
        keywords = (*keywords, ("keepdim", True))
    return Template(f"torch.{name}", (Slot(0), dimension), specs, keywords)


def normalization(rng: Random) -> Template:
    """Layer, group, batch and RMS norm; batch norm with running statistics that it writes."""
    dtype = rng.choices(("float32", "bfloat16", "float64"), (6, 2, 1))[0]
    kind = rng.random()
    functional = "torch.nn.functional."
    if kind < 0.35:
        sizes = rng.choice(((16, 17), (33, 8), (2, 3, 4), (4, 16, 8), (3, 5)))
        affine = (spec(rng, dtype, sizes[-1:]), spec(rng, dtype, sizes[-1:]))
        arguments: tuple[Any, ...] = (Slot(0), [sizes[-1]], Slot(1), Slot(2))
        return Template(f"{functional}layer_norm", arguments, (spec(rng, dtype, sizes), *affine))
    if kind < 0.5:
        sizes = rng.choice(((16, 17), (33, 8), (4, 16, 8)))
        specs = (spec(rng, dtype, sizes), spec(rng, dtype, sizes[-1:]))
        return Template(f"{functional}rms_norm", (Slot(0), [sizes[-1]], Slot(1)), specs)
    sizes = rng.choice(IMAGES)
    channels = (sizes[1],)
    weights = (Spec(dtype, channels), Spec(dtype, channels))
    if kind < 0.65:
        groups = rng.choice([g for g in (1, 2, 3, 4) if sizes[1] % g == 0])
        arguments = (Slot(0), groups, Slot(1), Slot(2))
        first = spec(rng, dtype, sizes)
        if _GROUP_NORM_CRASHES and first.layout == "channels_last":
            first = replace(first, layout="contiguous")
        return Template(f"{functional}group_norm", arguments, (first, *weights))
    statistics = (Spec(dtype, channels), Spec(dtype, channels, values="unit"))
    training = rng.random() < 0.7
    arguments = (Slot(0), Slot(1), Slot(2), Slot(3), Slot(4), training, rng.choice((0.1, 0.3)))
    specs = (spec(rng, dtype, sizes), *statistics, *weights)
    writes = (1, 2) if training else ()
    return Template(f"{functional}batch_norm", arguments, specs, (), writes)


def rearrangement(rng: Random) -> Template:
    """Copies that move elements: cat, stack, flip, roll, tril, pad, clone, casts."""
    name = rng.choice(
        words("cat cat stack flip roll tril triu clone contiguous to to pad repeat constant_pad_nd")
    )
    dtype, sizes = number_type(rng), shape(rng)
    one = (spec(rng, dtype, sizes),)
    if name in ("cat", "stack"):
        sizes = sizes or (7,)
        dimension = rng.randrange(len(sizes))
        count = rng.choice((2, 2, 3))
        specs = tuple(spec(rng, dtype, sizes) for _ in range(count))
        return Template(f"torch.{name}", ([Slot(i) for i in range(count)], dimension), specs)
    if name == "clone":
        form = rng.choice(("preserve_format", "contiguous_format"))
        return Template("torch.clone", (Slot(0),), one, (("memory_format", Named(form)),))
    if name == "contiguous":
        return Template("torch.Tensor.contiguous", (Slot(0),), one)
    if name == "to":
        other = number_type(rng)
        return Template("torch.Tensor.to", (Slot(0), Named(other)), one)
    if not sizes:
        sizes = (7,)
        one = (spec(rng, dtype, sizes),)
    if name == "flip":
        return Template("torch.flip", (Slot(0), [rng.randrange(len(sizes))]), one)
    if name == "roll":
        arguments: tuple[Any, ...] = (Slot(0), rng.choice((1, -2)), rng.randrange(len(sizes)))
        return Template("torch.roll", arguments, one)
    if name in ("tril", "triu"):
        sizes = rng.choice(((3, 5), (16, 17), (33, 8), (4, 16, 8)))
        return Template(
            f"torch.{name}", (Slot(0), rng.choice((0, 1, -1))), (spec(rng, dtype, sizes),)
        )
    if name == "repeat":
        return Template("torch.Tensor.repeat", (Slot(0), *(2 for _ in sizes)), one)
    value = 1.5 if dtype in FLOATS else 1
    pad = [rng.choice((0, 1, 2)), rng.choice((1, 2))]
    return Template("torch.nn.functional.pad", (Slot(0), pad, "constant", value), one)


def image(rng: Random) -> Template:
    """Pooling, upsampling and padding of images."""
    dtype = rng.choices(("float32", "bfloat16", "float64"), (6, 2, 1))[0]
    one = (spec(rng, dtype, rng.choice(IMAGES)),)
    f = "torch.nn.functional."
    return rng.choice(
        (
            Template(f"{f}avg_pool2d", (Slot(0), 2), one),
            Template(f"{f}avg_pool2d", (Slot(0), 3, 1, 1), one),
            Template(f"{f}max_pool2d", (Slot(0), 2), one),
            Template(f"{f}max_pool2d", (Slot(0), 3, 2, 1), one),
            Template(f"{f}adaptive_avg_pool2d", (Slot(0), 2), one),
            Template(f"{f}adaptive_avg_pool2d", (Slot(0), 1), one),
            Template(f"{f}interpolate", (Slot(0),), one, (("scale_factor", 2),)),
            Template(f"{f}pad", (Slot(0), [1, 2, 1, 1], "reflect"), one),
            Template(f"{f}pad", (Slot(0), [1, 2, 1, 1], "replicate"), one),
        )
    )


def loss(rng: Random) -> Template:
    """Losses on two tensors."""
    dtype, sizes = float_type(rng), shape(rng) or (7,)
    name = rng.choice(
        words("mse_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div l1_loss")
    )
    specs = (spec(rng, dtype, sizes), Spec(dtype, sizes, layout(rng, sizes), "unit"))
    how = rng.choice(("mean", "sum", "none"))
    function = f"torch.nn.functional.{name}"
    return Template(function, (Slot(0), Slot(1)), specs, (("reduction", how),))


def update(rng: Random) -> Template:
    """Writes that take little else: copy_, fill_, zero_."""
    dtype = number_type(rng)
    sizes = shape(rng)
    target = spec(rng, dtype, sizes, written=True)
    kind = rng.random()
    if kind < 0.6:
        source = spec(rng, dtype if rng.random() < 0.6 else number_type(rng), partner(rng, sizes))
        return Template("torch.Tensor.copy_", (Slot(0), Slot(1)), (target, source), (), (0,))
    if kind < 0.85:
        return Template("torch.Tensor.fill_", (Slot(0), rng.choice((0, 1, 2))), (target,), (), (0,))
    return Template("torch.Tensor.zero_", (Slot(0),), (target,), (), (0,))


def for_each(rng: Random) -> Template:
    """Operators on lists of tensors, in place and not."""
    dtype = rng.choices(FLOATS, (6, 2, 1, 2))[0]
    count = rng.choice((2, 3))
    shapes = [rng.choice(((7,), (64,), (3, 5), (16, 17))) for _ in range(count)]
    name, lists, extra = rng.choice(
        (
            ("add", 2, ()),
            ("mul", 2, ()),
            ("sub", 2, ()),
            ("div", 2, ()),
            ("add", 1, (1.0,)),
            ("mul", 1, (0.5,)),
            ("sqrt", 1, ()),
            ("neg", 1, ()),
            ("addcmul", 3, (0.5,)),
            ("addcdiv", 3, (-0.5,)),
            ("lerp", 2, (0.1,)),
            ("maximum", 2, ()),
            ("copy", 2, ()),
            ("norm", 1, (2,)),
        )
    )
    in_place = name not in ("norm",) and (name == "copy" or rng.random() < 0.5)
    specs: list[Spec] = []
    arguments: list[Any] = []
    for which in range(lists):
        arguments.append([Slot(len(specs) + i) for i in range(count)])
        written = in_place and which == 0
        specs += [spec(rng, dtype, sizes, written=written) for sizes in shapes]
    return Template(
        f"torch._foreach_{name}{'_' if in_place else ''}",
        (*arguments, *extra),
        tuple(specs),
        (),
        tuple(range(count)) if in_place else (),
    )


MAKERS: tuple[tuple[Maker, int], ...] = (
    (unary, 20),
    (activation, 9),
    (binary, 24),
    (with_scalar, 10),
    (ternary, 9),
    (reduction, 18),
    (normalization, 8),
    (rearrangement, 14),
    (image, 5),
    (loss, 4),
    (update, 6),
    (for_each, 8),
)


def draw(rng: Random) -> Template:
    """Any template. Some are errors: sizes that do not fit, dtypes that are not taken."""
    (make,) = rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])
    template = make(rng)
    if rng.random() < 0.015 and len(template.specs) > 1:
        broken = Spec(template.specs[1].dtype, (5, 11))
        specs = (template.specs[0], broken, *template.specs[2:])
        return Template(
            template.function, template.arguments, specs, template.keywords, template.writes
        )
    return template
