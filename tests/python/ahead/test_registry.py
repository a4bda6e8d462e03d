"""Bundles in an OCI registry: a real one, and what one must not answer."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from pathlib import Path

import pytest
import real_servers
from click.testing import CliRunner
from eagercache.ahead import registry
from eagercache.ahead.bundle import BundleError
from eagercache.cli import main as cli
from remote_server import RemoteServer

pytestmark = pytest.mark.once

DIGEST = "sha256:" + "0" * 64


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli.main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output.strip()


def test_a_bundle_comes_back_by_tag_and_by_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.bundle"
    with real_servers.oci_registry(tmp_path) as host:
        path.write_bytes(b"first")
        first = run("bundle", "push", path, f"oci://{host}/team/kernels")
        path.write_bytes(b"the second one")
        second = run("bundle", "push", path, f"oci://{host}/team/kernels:v2")
        again = run("bundle", "push", path, f"oci://{host}/team/kernels")
        assert first != second == again and "@sha256:" in first
        new = tmp_path / "b.bundle"
        for target, content in {
            f"oci://{host}/team/kernels": b"the second one",  # this environment's
            f"oci://{host}/team/kernels:v2": b"the second one",
            first: b"first",
        }.items():
            run("bundle", "pull", target, new)
            assert new.read_bytes() == content
        for missing in (f"oci://{host}/team/kernels:none", f"oci://{host}/other"):
            with pytest.raises(BundleError, match="answers with 404"):
                registry.pull(missing, new, "none")
        assert sorted(p.name for p in tmp_path.glob("*bundle*")) == ["a.bundle", "b.bundle"]


def manifest(**changes: object) -> bytes:
    layer = {"mediaType": registry._LAYER, "size": 6}
    layer["digest"] = f"sha256:{hashlib.sha256(b'bundle').hexdigest()}"
    return json.dumps({"layers": [{**layer, **changes}]}).encode()


@pytest.mark.parametrize(
    ("body", "blob", "text"),
    [
        (manifest(), b"bundlE", "is not what the artifact names"),
        (manifest(), b"bundle and more", "is not what the artifact names"),
        (manifest(), b"bund", "is not what the artifact names"),
        (manifest(size=1 << 50), b"bundle", "has a bundle of"),
        (manifest(size="6"), b"bundle", "has a bundle of"),
        (manifest(mediaType="text/html"), b"bundle", "is no bundle"),
        (manifest(digest="md5:1"), b"bundle", "names its bundle by"),
        (b'{"layers": []}', b"bundle", "has not one layer"),
        (b"[]", b"bundle", "has not one layer"),
        (b"no json", b"bundle", "Expecting value"),
    ],
)
def test_what_is_not_the_bundle_is_one_line_and_no_file(
    server: RemoteServer, tmp_path: Path, body: bytes, blob: bytes, text: str
) -> None:
    real_servers.require("oras")
    server.content["/v2/kernels/manifests/tag"] = body
    name = json.loads(manifest())["layers"][0]["digest"]
    server.content[f"/v2/kernels/blobs/{name}"] = blob
    host = server.url.removeprefix("http://").removesuffix("/cache")
    with pytest.raises(BundleError) as caught:
        registry.pull(f"oci://{host}/kernels:tag", tmp_path / "new", "tag")
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_another_artifact_than_the_digests_is_refused(server: RemoteServer, tmp_path: Path) -> None:
    real_servers.require("oras")
    server.content[f"/v2/kernels/manifests/{DIGEST}"] = manifest()
    host = server.url.removeprefix("http://").removesuffix("/cache")
    with pytest.raises(BundleError, match="answered with another artifact"):
        registry.pull(f"oci://{host}/kernels@{DIGEST}", tmp_path / "new", "tag")


def test_what_names_no_artifact_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"bundle")
    for bad in ("host/kernels", "oci://host", "oci://host/Kernels", f"oci://host/k@{DIGEST}1"):
        with pytest.raises(BundleError, match="use oci://HOST/REPOSITORY"):
            registry.pull(bad, tmp_path / "new", "tag")
    with pytest.raises(BundleError, match="name a tag"):
        registry.push(tmp_path / "file", f"oci://host/kernels@{DIGEST}", "tag")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BundleError, match=r"pip install 'eagercache\[oci\]'"):
        registry.pull("oci://host/kernels", tmp_path / "new", "tag")


def test_a_registry_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    real_servers.require("oras")
    (tmp_path / "file").write_bytes(b"bundle")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    before = time.monotonic()
    for work in (
        lambda: registry.pull(f"oci://127.0.0.1:{port}/kernels", tmp_path / "new", "tag"),
        lambda: registry.push(tmp_path / "file", f"oci://127.0.0.1:{port}/kernels", "tag"),
    ):
        with pytest.raises(BundleError, match="cannot be reached"):
            work()
    assert time.monotonic() - before < 30  # oras asks again for two minutes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(BundleError, match="none cannot be read: No such file"):
        registry.push(tmp_path / "none", "oci://127.0.0.1:1/kernels", "tag")
