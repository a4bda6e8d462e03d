"""Traces, bundles and artifacts with random edits, signed anew or not."""

from __future__ import annotations

from pathlib import Path

import manifests.__main__ as manifests

from attack.arena import VICTIM, Arena, Ran, Row

# argv: how many, the seed. Each edit is read, and is refused by an error of our own type.
_COMMON = """
import hashlib, json, os, random, struct, subprocess, sys, traceback
from pathlib import Path
import torch, eagercache
count, chance = int(sys.argv[1]), random.Random(int(sys.argv[2]))
folder = Path(os.environ["EAGERCACHE_DIR"]).parent
odd = [None, True, -1, 0, 1 << 70, 1.5, float("nan"), "", "\\ud800", [], [[]], {},
       {"kind": "tensor"}]
def altered(value):
    if chance.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return chance.choice(odd)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[place] = altered(value[place])
    return changed
def spoilt(data):
    data = bytearray(data)
    how = chance.randrange(4)
    if how == 0:
        del data[chance.randrange(len(data)):]
    elif how == 1:
        data += chance.randbytes(40)
    else:
        for _ in range(chance.choice((1, 1, 8))):
            at = chance.randrange(min(len(data), chance.choice((200, 4000, len(data)))))
            data[at] = chance.choice((0, 255, data[at] ^ 1, chance.randrange(256)))
    return bytes(data)
refused = read = escaped = 0
def attempt(function, errors):
    global refused, read, escaped
    try:
        function()
        read += 1
    except errors as error:
        refused += 1
        escaped += "\\n" in str(error)
    except Exception:
        escaped += 1
        traceback.print_exc()
def end():
    print("ATTACK " + json.dumps(
        {"right": True, "read": read, "refused": refused, "escaped": escaped}))
"""

_TRACES = """
from eagercache.ahead import warm
from eagercache.ahead.errors import WarmError
trace = folder / "calls.trace"
with eagercache.enable(["var.correction", "_softmax"], on_miss="native"):
    with eagercache.record(trace):
        torch.var(torch.ones(8, 8), -1); torch.softmax(torch.ones(8, 8), -1)
lines = trace.read_bytes().splitlines()
path = folder / "edited.trace"
for _ in range(count):
    if chance.random() < 0.3:
        path.write_bytes(spoilt(trace.read_bytes()))
    else:
        at = chance.randrange(len(lines))
        edited = [*lines]
        edited[at] = json.dumps(altered(json.loads(lines[at]))).encode()
        path.write_bytes(b"\\n".join(edited) + b"\\n")
    attempt(lambda: warm.warm_up(path, cache_dir=folder / "store", dry_run=True), WarmError)
end()
"""

_BUNDLES = """
from eagercache.ahead import bundle
from eagercache import _C
if not (folder / "key.pem").exists():
    _C.make_signing_key(str(folder / "key.pem"), str(folder / "key.pub"))
whole = folder / "kernels.bundle"
bundle.export(whole, store=folder / "store", key=folder / "key.pem")
data = whole.read_bytes()
head = data.index(b"\\n") + 1
path = folder / "edited.bundle"
def signed(body):
    (folder / "digest").write_bytes(b"eagercache-bundle-v2" + hashlib.sha256(body).digest())
    subprocess.run(["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", folder / "key.pem", "-in",
                    folder / "digest", "-out", folder / "signature"], check=True)
    return data[:head + 32] + (folder / "signature").read_bytes() + body
for _ in range(count):
    if chance.random() < 0.5:
        path.write_bytes(spoilt(data))
    else:
        path.write_bytes(signed(spoilt(data[head + 96:])))
    attempt(lambda: bundle.verify(path, keys=[folder / "key.pub"]), bundle.BundleError)
end()
"""

_ARTIFACTS = """
from eagercache import DeployError, _C, export_module, load_module
if not (folder / "key.pem").exists():
    _C.make_signing_key(str(folder / "key.pem"), str(folder / "key.pub"))
whole = folder / "module"
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
export_module(module, (torch.ones(2, 8),), path=whole, key=folder / "key.pem")
data = whole.read_bytes()
head = data.index(b"\\n") + 1
size = struct.unpack_from("<Q", data, head + 96)[0]
path = folder / "edited"
def signed(body):
    (folder / "digest").write_bytes(b"eagercache-module-v2" + hashlib.sha256(body).digest())
    subprocess.run(["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", folder / "key.pem", "-in",
                    folder / "digest", "-out", folder / "signature"], check=True)
    text = struct.pack("<Q", len(body)) + body
    return data[:head + 32] + (folder / "signature").read_bytes() + text
for _ in range(count):
    if chance.random() < 0.5:
        edited = spoilt(data)
    else:
        body = data[head + 104:head + 104 + size]
        edited = signed(spoilt(body)) + data[head + 104 + size:]
    path.unlink(missing_ok=True)
    path.write_bytes(edited)
    path.chmod(0o444)
    attempt(lambda: load_module(path, keys=[folder / "key.pub"]), DeployError)
end()
"""


def _count(row: Row, ran: Ran) -> None:
    row.count(ran)
    row.tried += int(ran.report.get("read", 0)) + int(ran.report.get("refused", 0)) - 1
    row.died += int(ran.report.get("escaped", 0))
    row.note = row.note or ("" if not ran.report.get("escaped") else ran.stderr[-90:].strip())


def _edits(arena: Arena, name: str, code: str, rounds: int, each: int) -> Row:
    row = Row(name)
    for _ in range(rounds):
        store = arena.warm_copy() if "bundle" in name else arena.new_folder() / "store"
        store.mkdir(mode=0o700, exist_ok=True)
        seed = str(arena.random.randrange(1 << 30))
        _count(row, arena.fork(_COMMON + code, store, str(each), seed))
    return row


def traces(arena: Arena) -> Row:
    """Lines and bytes of a trace."""
    return _edits(arena, "edited traces", _TRACES, 1 if arena.quick else 20, 200)


def bundles(arena: Arena) -> Row:
    """Half of them signed anew."""
    return _edits(
        arena, "edited bundles, half signed anew", _BUNDLES, 1 if arena.quick else 20, 150
    )


def artifacts(arena: Arena) -> Row:
    """Half of them signed anew; a module is exported for each round."""
    if arena.quick:
        return Row("edited artifacts, half signed anew", note="not in the quick form")
    return _edits(arena, "edited artifacts, half signed anew", _ARTIFACTS, 3, 1000)


def edited_manifests(arena: Arena) -> Row:
    """With right digests, in the place of entries of every form, which are then used."""
    row = Row("edited manifests, right digests")
    folder = arena.new_folder()
    manifests.fill(folder / "store")
    row.tried = 300 if arena.quick else 10_000
    for first in range(0, row.tried, manifests.BATCH):
        count = min(manifests.BATCH, row.tried - first)
        seed = arena.random.randrange(1 << 30)
        counts, findings = manifests.try_batch(folder / "store", folder, seed, count)
        died = counts.get("died", 0)
        row.died += died
        row.wrong += len(findings) - died
        row.note = row.note or "".join(findings[:1])[:110]
    return row


# What a settings variable holds: one warning, or one line, and the answers are native's at worst.
_SETTINGS = (
    "EAGERCACHE_DIR",
    "EAGERCACHE_SLOTS",
    "EAGERCACHE_MAX_BYTES",
    "EAGERCACHE_VERIFY",
    "EAGERCACHE_WAIT_SECONDS",
    "EAGERCACHE_TIERS",
    "EAGERCACHE_SKIP",
    "EAGERCACHE_LOG",
    "EAGERCACHE_CXX",
    "EAGERCACHE_ON_MISS",
    "EAGERCACHE_CHOOSE",
    "EAGERCACHE_NUMERICS",
)
_VALUES = (
    "",
    "-1",
    "0",
    "1e999",
    "nan",
    "9" * 400,
    "\udcff\udcfe",
    "a\nb",
    "/",
    "/dev/null",
    "\u2028",
    "x" * 100_000,
    "../..",
    "'; touch /tmp/x; '",
    "[" * 5000,
)


def settings(arena: Arena) -> Row:
    """Values that no setting has."""
    row = Row("odd settings")
    for _ in range(6 if arena.quick else 200):
        store = arena.warm_copy()
        names = arena.random.sample(_SETTINGS, 3)
        changed = {name: arena.random.choice(_VALUES) for name in names}
        changed.setdefault("EAGERCACHE_DIR", str(store))
        row.count(_run_with(arena, store, changed))
    return row


def _run_with(arena: Arena, store: Path, changed: dict[str, str]) -> Ran:
    body = "import os\n" + "".join(
        f"os.environ[{name!r}] = {value!r}\n" for name, value in changed.items()
    )
    return arena.fork(body + VICTIM, store, "native", "2")


SCENES = (traces, bundles, artifacts, edited_manifests, settings)
