"""Traces, bundles, artifacts, manifests and settings that hypothesis makes up or edits.

Whatever they hold, it is read or refused by one error of our own type. FUZZ_EXAMPLES (30) says how
many are tried of each: `make soak` takes more.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagercache import _C
from eagercache.ahead import bundle, warm
from eagercache.ahead.errors import WarmError
from eagercache.base import config, environment, warn
from eagercache.deploy.artifact import load_module
from eagercache.deploy.deployed_module import DeployedModule
from eagercache.deploy.errors import DeployError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hostile_inputs import Program
from test_trace import BEGIN, line

pytestmark = pytest.mark.once

examples = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "30")),
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

# ---- values and edits ----------------------------------------------------------------------------

ODD = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    st.sampled_from([-1, 0, 1 << 31, 1 << 63, 1 << 70, 10**400, "\ud800", "nan", "float33"]),
)
JSON = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@st.composite
def edited(draw: st.DrawFn, value: Any) -> Any:
    """`value` with a part of it replaced, doubled or left out."""
    if not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 4)) == 0:
        return draw(JSON)
    changed = value.copy()
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    place = draw(st.sampled_from(places))
    how = draw(st.integers(0, 5))
    if how == 0:
        del changed[place]
    elif how == 1 and isinstance(changed, list):
        changed.insert(place, value[place])
    elif how == 2 and isinstance(changed, dict):
        changed[draw(st.text(max_size=8))] = value[place]
    else:
        changed[place] = draw(edited(value[place]))
    return changed


@st.composite
def spoilt(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some bytes replaced, put in or left out, most often near the beginning."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        reach = draw(st.sampled_from([16, 200, 4000, len(changed)]))
        at = draw(st.integers(0, max(0, min(reach, len(changed)) - 1)))
        new = draw(st.binary(max_size=9) | st.sampled_from([b"\xff" * 8, bytes(8), b"\n"]))
        changed[at : at + draw(st.sampled_from([0, 1, len(new), 64]))] = new
    return bytes(changed)


def expect(function: Callable[[], Any], errors: type[Exception]) -> None:
    """It works or is refused in one line."""
    try:
        function()
    except errors as error:
        assert "\n" not in str(error)


# ---- traces and settings -------------------------------------------------------------------------

WHOLE = json.loads(line(3, 1, native_ns=100.0))
HEAD = json.loads(BEGIN.splitlines()[0])


@examples
@given(head=edited(HEAD), call=edited(WHOLE), which=st.integers(0, 2))
def test_traces(tmp_path_factory: pytest.TempPathFactory, head: Any, call: Any, which: int) -> None:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "store").mkdir(mode=0o700)
    rows = [head if which != 1 else HEAD, call if which != 0 else WHOLE]
    path = folder / "trace"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expect(lambda: warm.warm_up(path, cache_dir=folder / "store", dry_run=True), WarmError)
    shutil.rmtree(folder)


@examples
@given(data=spoilt((BEGIN + json.dumps(WHOLE) + "\n").encode()))
def test_bytes_of_traces(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "store").mkdir(mode=0o700)
    path = folder / "trace"
    path.write_bytes(data)
    expect(lambda: warm.warm_up(path, cache_dir=folder / "store", dry_run=True), WarmError)
    shutil.rmtree(folder)


@examples
@given(
    values=st.dictionaries(
        st.sampled_from([variable.name for variable in config.VARIABLES]),
        st.text(max_size=40)
        | st.sampled_from(["1e999", "nan", "inf", "-0", "9" * 400, "1e30", "1e18T"])
        | st.from_regex(r"-?[0-9.e+]{1,40}[KMGkmg]?"),
    )
)
def test_settings(values: dict[str, str]) -> None:
    warn._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.read_settings(values)
    assert len(caught) <= len(values)
    assert all("\n" not in str(one.message) for one in caught)


# ---- signed files --------------------------------------------------------------------------------


def _sign(folder: Path, domain: bytes, body: bytes) -> bytes:
    """The signature of the key in `folder`. The core signs no bytes that somebody else made."""
    (folder / "digest").write_bytes(domain + hashlib.sha256(body).digest())
    command = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", "key.pem", "-in", "digest"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key and a bundle of three decisions."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to sign what was edited")
    folder = tmp_path_factory.mktemp("packed")
    bundle.keygen(folder / "key")
    store = folder / "store"
    store.mkdir(mode=0o700)
    opened = _C.Store(str(store), environment.environment_text())
    for digit in "123":
        opened.publish({"key": digit * 64, "kind": "native", "facts": {"op": "aten::cat"}})
    bundle.export(folder / "bundle", store=store, key=folder / "key.pem")
    return folder


@examples
@given(data=st.data(), signed=st.booleans())
def test_bundles(packed: Path, data: st.DataObject, signed: bool) -> None:
    whole = (packed / "bundle").read_bytes()
    head = whole.index(b"\n") + 1 + 32
    if signed:
        body = data.draw(spoilt(whole[head + 64 :]))
        whole = whole[:head] + _sign(packed, b"eagercache-bundle-v2", body) + body
    else:
        whole = data.draw(spoilt(whole))
    path = packed / "edited"
    path.write_bytes(whole)
    keys = [packed / "key.pub"]
    expect(lambda: bundle.verify(path, keys=keys), bundle.BundleError)
    target = packed / "target"
    target.mkdir(mode=0o700, exist_ok=True)
    expect(lambda: bundle.import_into(path, store=target, keys=keys), bundle.BundleError)


PARTS = {
    "call_spec": list(Program().call_spec),
    "inputs": [list(row) for row in Program().inputs],
    "outputs": [list(row) for row in Program().outputs],
    "constants": [list(row) for row in Program().constants],
    "open_sizes": [["x", 0, 2, 8]],
}


@examples
@given(data=st.data(), field=st.sampled_from(sorted(PARTS)), inside=st.booleans())
def test_what_an_artifact_says_of_itself(data: st.DataObject, field: str, inside: bool) -> None:
    """The core checks the types of fields; texts inside of them are anybody's."""
    if field == "call_spec" and inside:
        texts = [json.loads(text) for text in Program().call_spec]
        value: Any = tuple(json.dumps(data.draw(edited(text))) for text in texts)
    elif field == "call_spec":
        value = (data.draw(st.text()), data.draw(st.text()))
    else:
        value = [tuple(row) for row in PARTS[field] if data.draw(st.booleans())]
    expect(lambda: DeployedModule(Program(**{field: value})), DeployError)


@examples
@given(data=st.data())
def test_artifacts(packed: Path, data: st.DataObject) -> None:
    """A file with a good head and a signature over a header that was made up."""
    text = data.draw(st.binary(max_size=200) | spoilt(_header()))
    public = (packed / "bundle").read_bytes().split(b"\n", 1)[1][:32]
    signature = _sign(packed, b"eagercache-module-v2", text)
    size = len(text).to_bytes(8, "little")
    path = packed / "module"
    path.unlink(missing_ok=True)
    path.write_bytes(b"eagercache-module 2\n" + public + signature + size + text)
    with pytest.raises(DeployError) as raised:
        load_module(path, keys=[packed / "key.pub"])
    assert "\n" not in str(raised.value)


def _header() -> bytes:
    """Of an artifact without libraries and constants (FORMAT.md, 9)."""
    number = (0).to_bytes(8, "little")
    environment_text = environment.running_text().encode()
    size = len(environment_text).to_bytes(8, "little")
    return number * 2 + size + environment_text + number * 6


# ---- manifests -----------------------------------------------------------------------------------


@st.composite
def manifests(draw: st.DrawFn, data: bytes) -> bytes:
    """A manifest with lines edited, doubled, moved or left out, and most often the right digest."""
    rows = data.split(b"\n")[:-2]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(rows) - 1))
        how = draw(st.integers(0, 4))
        if how == 0 and len(rows) > 1:
            del rows[at]
        elif how == 1:
            rows.insert(draw(st.integers(0, len(rows))), rows[at])
        else:
            word, _, rest = rows[at].partition(b" ")
            value = draw(st.binary(max_size=20) | st.just(rest + rest) | spoilt(rest or b" "))
            rows[at] = word + b" " + value
    body = b"\n".join(rows) + b"\n"
    digest = hashlib.sha256(body).hexdigest().encode()
    return body + b"digest " + (digest if draw(st.integers(0, 5)) else digest[::-1]) + b"\n"


@examples
@given(data=st.data())
def test_manifests(packed: Path, data: st.DataObject) -> None:
    store = packed / "edited-store"
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(packed / "store", store)
    store.chmod(0o700)
    for path in sorted(store.glob("v1/*/m/*/*")):
        text = data.draw(manifests(path.read_bytes()))
        path.chmod(0o600)
        path.write_bytes(text)
        path.chmod(0o444)
    opened = _C.Store(str(store), environment.environment_text())
    for entry in opened.entries(all=True):
        assert entry["kind"] in ("kernel", "native", "failed")
    assert all("\n" not in problem for *_, problem in opened.verify(all=True))  # "": it is well
