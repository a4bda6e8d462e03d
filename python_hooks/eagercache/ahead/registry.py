"""Bundles in an OCI registry, through oras: an artifact of one layer, pulled by tag or digest.

A registry is trusted with nothing: what comes is compared with the digest that was asked for, and a
bundle is checked like any other when it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from eagercache.ahead.bundle import BundleError

SCHEME = "oci://"
_LAYER = "application/vnd.eagercache.bundle.v2"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_MOST_MANIFEST_BYTES = 1 << 20
_MOST_BUNDLE_BYTES = 8 << 30
_CHUNK = 1 << 20
# Host and repository, then at most one of a tag and a digest.
_NAME = re.compile(
    r"(?P<host>[\w.-]+(?::\d+)?)/(?P<repository>[a-z0-9._/-]+)"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64})|:(?P<tag>\w[\w.-]{0,127}))?",
    re.ASCII,
)
_LOOPBACK = ("127.0.0.1", "localhost")
_SECONDS_TO_ANSWER = 30.0


def push(path: Path, target: str, tag: str) -> str:
    """Puts a bundle into a registry; its address by digest. Raises BundleError.

    ``tag``: where the target names none.
    """
    name = _parsed(target)
    if name["digest"]:
        raise BundleError(f"{target!r} names a digest, which only what is there has; name a tag")
    try:
        with path.open("rb") as file:
            digest, size = _hashed(file)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    client, container = _opened(target, name, tag)
    try:
        layer = {"mediaType": _LAYER, "digest": digest, "size": size}
        layer["annotations"] = {"org.opencontainers.image.title": path.name}
        empty = {"mediaType": "application/vnd.oci.empty.v1+json", "size": 2}
        empty["digest"] = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "artifactType": _LAYER}
        manifest |= {"config": empty, "layers": [layer]}
        body = json.dumps(manifest).encode()
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        beside.write_bytes(b"{}")
        try:
            for blob, what in ((beside, empty), (path, layer)):
                _expect(client.upload_blob(str(blob), container, what), target)
        finally:
            beside.unlink()
        headers = {"Content-Type": _MANIFEST}
        url = f"{client.prefix}://{container.manifest_url(name['tag'] or tag)}"
        _expect(client.do_request(url, "PUT", headers=headers, data=body), target)
    except BundleError:
        raise
    except (OSError, ValueError) as error:
        raise _trouble(target, error) from error
    whole = hashlib.sha256(body).hexdigest()
    return f"{SCHEME}{name['host']}/{name['repository']}@sha256:{whole}"


def pull(target: str, path: Path, tag: str) -> None:
    """Writes a registry's bundle into a file, whose place nothing takes by halves.

    Raises BundleError. ``tag``: where the target names neither tag nor digest.
    """
    name = _parsed(target)
    client, container = _opened(target, name, tag)
    wanted = name["digest"] or name["tag"] or tag
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        url = f"{client.prefix}://{container.manifest_url(wanted)}"
        answer = client.do_request(url, "GET", headers={"Accept": _MANIFEST}, stream=True)
        _expect(answer, target)
        body = answer.raw.read(_MOST_MANIFEST_BYTES, decode_content=True)
        digest, size = _layer(target, body, name["digest"])
        url = f"{client.prefix}://{container.get_blob_url(digest)}"
        blob = client.do_request(url, "GET", stream=True)
        _expect(blob, target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
            _copy(blob, file, digest, size, target)
        new.rename(path)
    except BundleError:
        raise
    except (OSError, ValueError) as error:
        raise _trouble(target, error) from error
    finally:
        new.unlink(missing_ok=True)


def _copy(blob: Any, file: Any, digest: str, size: int, target: str) -> None:
    """Copies what comes, never more than was named."""
    seen, left = hashlib.sha256(), size
    for piece in blob.iter_content(_CHUNK):
        left -= len(piece)
        if left < 0:
            break
        seen.update(piece)
        file.write(piece)
    if left or f"sha256:{seen.hexdigest()}" != digest:
        raise BundleError(f"{target!r}: what came is not what the artifact names")


def _layer(target: str, body: bytes, wanted: str | None) -> tuple[str, int]:
    """(digest, size) of the bundle that a manifest names. It must have the digest ``wanted``."""
    found = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if wanted not in (None, found):
        raise BundleError(f"{target!r} is answered with another artifact, {found}")
    manifest = json.loads(body)
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list) or len(layers) != 1 or not isinstance(layers[0], dict):
        raise BundleError(f"{target!r} is no bundle: it has not one layer")
    digest, size = layers[0].get("digest"), layers[0].get("size")
    if layers[0].get("mediaType") != _LAYER or not isinstance(digest, str):
        raise BundleError(f"{target!r} is no bundle, or of another version")
    if not isinstance(size, int) or not 0 < size <= _MOST_BUNDLE_BYTES:
        raise BundleError(f"{target!r} has a bundle of {size!r} bytes")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise BundleError(f"{target!r} names its bundle by {digest[:20]!r}")
    return digest, size


def _parsed(target: str) -> dict[str, Any]:
    found = _NAME.fullmatch(target.removeprefix(SCHEME))
    if not target.startswith(SCHEME) or found is None:
        raise BundleError(
            f"{target!r} is no artifact; use oci://HOST/REPOSITORY, with :TAG or @sha256:DIGEST"
        )
    return found.groupdict()


def _opened(target: str, name: dict[str, Any], tag: str) -> tuple[Any, Any]:
    if importlib.util.find_spec("oras") is None:
        raise BundleError(f"{target!r} needs oras: pip install 'eagercache[oci]'")
    import oras.client
    import oras.container

    host = name["host"]
    # As docker does: without TLS on this machine alone.
    client = oras.client.OrasClient(insecure=host.partition(":")[0] in _LOOPBACK)
    container = oras.container.Container(f"{host}/{name['repository']}:{name['tag'] or tag}")
    client.auth.load_configs(container)  # of `docker login` and `oras login`
    try:
        # Whatever it says: oras asks a host that is not there again for two minutes, in silence.
        client.session.get(f"{client.prefix}://{host}/v2/", timeout=_SECONDS_TO_ANSWER)
    except (OSError, ValueError) as error:
        text = f"{target!r}: {host} cannot be reached ({type(error).__name__})"
        raise BundleError(text) from error
    return client, container


def _expect(answer: Any, target: str) -> None:
    if not 200 <= answer.status_code < 300:
        raise BundleError(f"{target!r}: the registry answers with {answer.status_code}")


def _trouble(target: str, error: Exception) -> BundleError:
    return BundleError(f"{target!r}: {' '.join(str(error).split())[:200] or type(error).__name__}")


def _hashed(file: Any) -> tuple[str, int]:
    seen, size = hashlib.sha256(), 0
    while piece := file.read(_CHUNK):
        seen.update(piece)
        size += len(piece)
    return f"sha256:{seen.hexdigest()}", size
