"""What the compiler makes once for all containers: precompiled headers, and the parts they share.

Of a wrapper these are its header, the templates of regular expressions and the functions by which a
container is called (`common_parts`), of a kernel its header. Together they cost 14 s of CPU time
and 230 MB, and each container without them 5 s. They are kept in the store's directory for all
workers (`shared_header`); those for a GPU, whose commands name folders of one worker, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagercache.base.toolchain import Compiler
from eagercache.worker.inductor import common_parts
from eagercache.worker.inductor.commands import CompileFailed
from eagercache.worker.inductor.shared_header import SharedHeader, compiled

# Runs the compiler in a step, until it ends. Raises CompileFailed.
Run = Callable[[str, list[str]], None]


@dataclass(frozen=True)
class Made:
    """A header, and by their names the objects that go with what is compiled with it."""

    header: Path
    objects: dict[str, Path]


class ContainerHeaders:
    """Those of one worker process. Not thread-safe.

    ``private`` is a folder that lives as long as the object; ``store`` is the store's directory, or
    None where nothing is kept for others.
    """

    def __init__(self, compiler: Compiler, private: Path, store: Path | None, run: Run) -> None:
        self._compiler = compiler
        self._private = private
        self._store = store
        self._run = run
        self._known: dict[str, Made] = {}
        self._shared: dict[str, SharedHeader] = {}

    def find(self, kind: str, words: Sequence[str]) -> Made | None:
        """What there is for the compile command ``words`` of a container's part ``kind``."""
        known = self._known.get(kind) or self._left_by_others(kind, words)
        if known is None or not compiled(known.header).exists():
            folder = self._private / kind  # of this process, or of one that has the same folder
            known = _in_folder(folder, kind) if compiled(folder / f"{kind}.h").exists() else None
        if known is None:
            self._known.pop(kind, None)
        else:
            self._known[kind] = known
        return known

    def make(
        self, kind: str, words: Sequence[str], include: str, *, interface: bool
    ) -> Made | None:
        """The same, made now; None while another worker does so. Raises CompileFailed.

        ``include`` is the header's own; of a wrapper the functions by which a container is called
        are made too where there is an ``interface``, and left out where they cannot stand alone.
        """
        shared = self._sharing(kind, words)
        if shared is None:
            self._known[kind] = self._make(kind, words, include, interface=interface)
            return self._known[kind]
        with shared.making() as alone:
            if not alone:
                return None
            made = self._left_by_others(kind, words)  # a moment ago
            if made is None:
                made = self._make(kind, words, include, interface=interface)
                rules = sorted(made.header.parent.glob("*.d"))
                place = shared.put(made.header, rules, sorted(made.objects.values()))
                made = made if place is None else _in_folder(place.parent, kind)
            self._known[kind] = made
        return made

    def _make(self, kind: str, words: Sequence[str], include: str, *, interface: bool) -> Made:
        folder = self._private / kind
        folder.mkdir(exist_ok=True)
        header = folder / f"{kind}.h"
        of_wrapper = kind.startswith("wrapper")
        extern = common_parts.regex_templates("extern ") if of_wrapper else ""
        header.write_text(f"#include <{include}>\n{extern}")
        if of_wrapper:
            self._object(folder, "regex", common_parts.regex_templates(""), words)
            if interface:
                try:
                    self._object(folder, "interface", common_parts.interface_text(), words)
                except CompileFailed as error:
                    if error.transient:
                        raise
        # Last, since where it is all is there.
        source, target = ["-x", "c++-header", str(header)], str(compiled(header))
        rules = ["-MD", "-MF", str(folder / f"{kind}.d")]
        self._run("headers", [*replaced(words, source, target), *rules])
        return _in_folder(folder, kind)

    def drop(self, kind: str) -> None:
        """They do not work: nobody is to use them."""
        made = self._known.pop(kind, None)
        if made is not None:
            compiled(made.header).unlink(missing_ok=True)
        if kind in self._shared:
            self._shared[kind].remove()

    def _left_by_others(self, kind: str, words: Sequence[str]) -> Made | None:
        shared = self._sharing(kind, words)
        header = None if shared is None else shared.find()
        return None if header is None else _in_folder(header.parent, kind)

    def _sharing(self, kind: str, words: Sequence[str]) -> SharedHeader | None:
        if self._store is None or kind.endswith("_cuda"):
            return None
        if kind not in self._shared:
            text = common_parts.interface_text() if kind == "wrapper" else ""
            told = [*replaced(words, (), kind), text]
            self._shared[kind] = SharedHeader(self._store, repr(self._compiler), told, f"{kind}.h")
        return self._shared[kind]

    def _object(self, folder: Path, name: str, text: str, words: Sequence[str]) -> None:
        source, target = folder / f"{name}.cpp", folder / f"{name}.o"
        source.write_text(text)
        command = replaced(words, [str(source)], str(target), keep=("-c",))
        command += ["-MD", "-MF", str(folder / f"{name}.d"), f"-ffile-prefix-map={folder}=."]
        self._run("headers", command)


def _in_folder(folder: Path, kind: str) -> Made:
    return Made(folder / f"{kind}.h", {path.stem: path for path in folder.glob("*.o")})


def source_of(words: Sequence[str]) -> str:
    """What a compile command compiles."""
    return next((word for word in words[1:] if word.endswith((".cpp", ".S"))), "")


def replaced(
    words: Sequence[str], source: Sequence[str], target: str, keep: Sequence[str] = ()
) -> list[str]:
    """A compile command with another source and target.

    Without its prefix map, which names a folder that the next command does not have.
    """
    old_source = source_of(words)
    command: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith("-ffile-prefix-map="):
            skip = False
        elif word == "-o":
            skip = True
        elif word == old_source:
            command.extend(source)
        elif word != "-c" or "-c" in keep:
            command.append(word)
    return [*command, "-o", target]
