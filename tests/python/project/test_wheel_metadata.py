"""A wheel's metadata admits the torch that it was built against, and no other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.once

FILE = Path(__file__).resolve().parent.parent.parent.parent / "cmake" / "torch_requirement.py"


@pytest.fixture
def provider() -> Iterator[ModuleType]:
    if not FILE.exists():
        pytest.skip("no sources beside the package")
    spec = importlib.util.spec_from_file_location("torch_requirement", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.11.0+cu130", "torch>=2.11,<2.12"),
        ("2.15.0a0", "torch>=2.15,<2.16"),
        ("x", "torch>=2.11"),
    ],
)
def test_a_wheel_takes_one_minor_version(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, wanted: str
) -> None:
    monkeypatch.setattr(provider.importlib.metadata, "version", lambda _: version)
    provider.build_state("wheel")
    assert provider.dynamic_metadata({}, {})["dependencies"][0] == wanted
    provider.build_state("sdist")
    assert provider.dynamic_metadata({}, {})["dependencies"][0] == "torch>=2.11"
    assert provider.dynamic_wheel({}) == {"dependencies": True}


def test_without_torch_every_version_is_admitted(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> str:
        raise provider.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(provider.importlib.metadata, "version", missing)
    assert provider.torch_requirement() == "torch>=2.11"
