"""TorchDynamo's kinds of guards, and how each is compared in another process."""

from __future__ import annotations

# How Dynamo's guards (GuardBuilder's methods) are compared here. None: not at all, since the key of
# a call, the identity of the module or the environment key has it.
KINDS: dict[str, str | None] = {
    **dict.fromkeys(
        ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "BUILTIN_MATCH"), "value"
    ),
    **dict.fromkeys(
        ("CLASS_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "ID_MATCH", "METHOD_MATCH"), "value"
    ),
    **dict.fromkeys(("MODULE_MATCH", "PYMODULE_MATCH"), "value"),
    **dict.fromkeys(("TYPE_MATCH", "NN_MODULE", "NOT_NONE_MATCH", "WEAKREF_ALIVE"), "type"),
    **dict.fromkeys(("SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "RANGE_ITERATOR_MATCH"), "length"),
    **dict.fromkeys(("DICT_KEYS_MATCH", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"), "keys"),
    "DICT_CONTAINS": "contains",
    "DICT_NOT_CONTAINS": "contains",
    "SET_CONTAINS": "contains",
    "HASATTR": "has",
    "NOT_PRESENT_IN_GENERIC_DICT": None,  # see row_of_class of worker/modules/questions.py
    "DUPLICATE_INPUT": "same",
    "OBJECT_ALIASING": "same",
    "EMPTY_NN_MODULE_HOOKS_DICT": None,
    "TENSOR_SUBCLASS_METADATA_MATCH": None,
}
# Of values in packages that the environment key covers these say nothing that may be another thing:
# what is read of the value, and each step to it, has guards of its own.
OF_THE_PACKAGE = frozenset(
    ("TYPE_MATCH", "CLASS_MATCH", "ID_MATCH", "METHOD_MATCH", "NN_MODULE", "NOT_NONE_MATCH")
)
_TRACER = (
    "eagercache.callables",
    "eagercache.worker",
    "torch._dynamo",
    "torch.utils._pytree",
    "torch.export",
    "torch.fx",
    "torch._export",
)


def is_of_tracer(name: str) -> bool:
    """Whether a module is of those that trace, whose own values no forward reads."""
    return any(name == package or name.startswith(f"{package}.") for package in _TRACER)
