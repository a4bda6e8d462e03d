"""What worlds read of another module (process.txt)."""

FACTOR = 2.0
HIDDEN = 2.0


class Options:
    """An option in the class, one in the object."""

    shared = 2.0

    def __init__(self) -> None:
        self.value = 2.0


OPTIONS = Options()


def value() -> float:
    """Reads a global."""
    return FACTOR


original = value


def __getattr__(name: str) -> float:
    if name == "dynamic":
        return HIDDEN
    raise AttributeError(name)
