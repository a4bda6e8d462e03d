"""The process that fills a store, or uses entries of one whose manifests it edits."""

from __future__ import annotations

import collections
import json
import mmap
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import eagercache
import torch
from eagercache import _C
from eagercache.modules.manager import manager
from eagercache.runtime.session import session

from manifests import calls, edits

_NOTE_BYTES = 1 << 16


def enable(store: Path, on_miss: Any) -> None:
    """Kernels of every kind answer, whatever they bring."""
    eagercache.enable(
        calls.OPERATORS,
        on_miss=on_miss,
        choose="always",
        modules=calls.Small,
        training=True,
        cache_dir=store,
    )


def fill(store: Path) -> dict[str, int]:
    """Makes the entries. How many kernels there are of each form."""
    torch.set_num_threads(1)
    enable(store, "wait")
    model = calls.make_model()
    for shift in (1, 2, 3, 4, 5):
        for call in calls.operator_calls(shift):
            call.run()
    for _ in range(3):
        for call in calls.module_calls(model, (6, 7, 8, 10, 12)):
            call.run()
        for call in calls.training_calls(model, (7, 9, 14)):
            call.run()
    eagercache.wait(600)
    return dict(
        collections.Counter(
            row["facts"]["form"] for row in session.store.entries() if row["kind"] == "kernel"
        )
    )


class Subject:
    """One entry's file, and the calls that it may answer."""

    def __init__(self, path: Path, rows: edits.Rows, text: bytes) -> None:
        self.path, self.rows, self.text = path, rows, text
        facts = dict(rest.split(" ", 1) for word, rest in rows if word == "fact" and " " in rest)
        self.form = facts.get("form", "")
        self.operator = facts.get("op", "")

    def put(self, text: bytes) -> None:
        """Replaces the file."""
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(text)
        self.path.chmod(0o444)


def subjects_of(store: Path) -> list[Subject]:
    """The kernels of a store, in an order that is always the same."""
    found = []
    for path in sorted(store.glob("v1/*/m/*/*")):
        text = path.read_bytes()
        if b"\nkind kernel\n" in text:
            found.append(Subject(path, edits.read(text.decode()), text))
    return found


class Trial:
    """Edits of one process. ``note`` has what is tried now, whatever becomes of the process."""

    def __init__(self, store: Path, note: Path) -> None:
        torch.set_num_threads(1)
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[str] = []
        self._expected: dict[str, list[torch.Tensor]] = {}
        model = calls.make_model()
        for call in (
            *calls.operator_calls(),
            *calls.module_calls(model),
            *calls.training_calls(model),
        ):
            self._expected[call.name] = [tensor.clone() for tensor in call.run()]
        enable(store, "native")
        _C.set_log_level(0)
        self._others = subjects_of(store)
        self.subjects = [subject for subject in self._others if self._answers(subject)]
        missing = calls.FORMS - {subject.form for subject in self.subjects}
        if missing:
            raise RuntimeError(f"no call is answered by an entry of the forms {missing}")
        note.write_bytes(bytes(_NOTE_BYTES))
        with note.open("r+b") as file:
            self._note = mmap.mmap(file.fileno(), _NOTE_BYTES)

    def _answers(self, subject: Subject) -> bool:
        """Whether the entry as it is answers some of the calls."""
        used = self._use(subject, "nothing edited")
        if self.findings:
            raise RuntimeError(self.findings[0])
        return used

    def run(self, seed: int, number: int) -> None:
        """One edit, and the calls of its entry."""
        chance = random.Random(f"{seed} {number}")
        subject = chance.choice(self.subjects)
        editor = edits.Editor(chance, [other.rows for other in self._others])
        rows, what = editor.edited(subject.rows)
        said = f"{subject.form} entry of {subject.operator}: {what}"
        data = f"{number} {said}".encode()[: _NOTE_BYTES - 1]
        self._note[: len(data) + 1] = data + b"\0"
        subject.put(edits.write(rows).encode())
        try:
            by_kernel = self._use(subject, said)
        finally:
            subject.put(subject.text)
        self.counts["by kernel" if by_kernel else "by native"] += 1

    def _use(self, subject: Subject, said: str) -> bool:
        """Makes the calls that an entry of its form may answer. Whether it did."""
        if subject.form.startswith("module"):
            manager.select(calls.Small)
            model = calls.make_model()
            made = calls.module_calls(model)
            if subject.form.startswith("module-training"):
                made = calls.training_calls(model)
        else:
            _C.set_policy("native", "always", "accurate", replicas=False, shape_classes=True)
            made = calls.operator_calls()
        for _ in range(2):  # the second time with what the first one loaded
            for call in made:
                self._compare(call, said)
        return _is_used(subject)

    def _compare(self, call: calls.Call, said: str) -> None:
        try:
            answer = call.run()
        except Exception as error:
            self.findings.append(f"{call.name} raised {error!r} with {said}")
            return
        _C.set_answering(False)  # the comparison is native's
        right = calls.same(answer, self._expected[call.name])
        _C.set_answering(True)
        if not right:
            self.findings.append(f"{call.name} answered otherwise with {said}")


def _is_used(subject: Subject) -> bool:
    """Whether a kernel of this entry is installed."""
    key = next(rest for word, rest in subject.rows if word == "key")
    if subject.form.startswith("module"):
        return any(row.hits or row.training_hits for _, row in manager.stats())
    return any(row["digest"] == key and row["decision"] == "kernel" for row in _C.verdicts())


def main() -> None:
    """`fill STORE`, or `try STORE NOTE SEED BEGIN END`."""
    warnings.simplefilter("ignore")
    if sys.argv[1] == "fill":
        print(json.dumps(fill(Path(sys.argv[2]))))
        return
    store, note = map(Path, sys.argv[2:4])
    seed, begin, end = map(int, sys.argv[4:])
    trial = Trial(store, note)
    for number in range(begin, end):
        trial.run(seed, number)
    print(json.dumps({"counts": trial.counts, "findings": trial.findings}))


if __name__ == "__main__":
    main()
