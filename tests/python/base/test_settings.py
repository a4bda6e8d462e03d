"""Bad settings give one clear error or warning; the program goes on natively."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from conftest import Program, run_program
from eagercache.base import config

pytestmark = pytest.mark.once  # settings and folders

ENABLE = """
import warnings, torch, eagercache
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    handle = eagercache.enable(["var.correction"])
    eagercache.enable(["var.correction"])
x = torch.randn(8, 8)
torch.testing.assert_close(torch.var(x, -1), x.var(-1))
report(said=[str(w.message) for w in caught if "eagercache" in str(w.message)],
       active=handle.active, hits=eagercache.stats().hits)
"""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "eagercache.enable(['no_such_operator'])",
            "there is no operator 'aten::no_such_operator'",
        ),
        ("eagercache.enable(['add.NoSuch'])", "has no overload 'NoSuch'"),
        ("eagercache.enable(on_miss='sometimes')", "on_miss='sometimes' is not one of"),
        ("eagercache.enable(choose='best')", "choose='best' is not one of"),
        ("eagercache.enable(numerics='exact')", "numerics='exact' is not one of"),
        ("eagercache.enable(devices=['tpu'])", "devices: 'tpu' is not one of"),
        ("eagercache.enable(['aten::view'])", "returns a view"),
        ("eagercache.enable(['normal_functional'])", "draws random numbers"),
        ("eagercache.enable(['aten::layer_norm'])", "made of aten::native_layer_norm"),
        ("eagercache.register('aten::linear')", "composite"),
        ("eagercache.register('aten::abs', 'Meta')", "dispatch_key='Meta' is not one of"),
        ("eagercache.register(42)", "named by a string"),
    ],
)
def test_a_bad_argument_is_one_error_that_names_the_thing_and_changes_nothing(
    program: Program, call: str, text: str
) -> None:
    result = program(
        f"""
        import torch, eagercache
        try:
            {call}
            message = "no error"
        except (ValueError, TypeError) as error:
            message = str(error)
        report(message=message, enabled=eagercache.is_enabled(),
               sum=torch.ones(3, 3).var(-1).sum().item())
        """
    )
    assert text in result["message"]
    assert not result["enabled"]
    assert result["sum"] == 0


def test_bad_variables_are_warned_about_and_ignored() -> None:
    with pytest.warns(RuntimeWarning) as caught:
        settings = config.read_settings(
            {
                "EAGERCACHE_ON_MISS": "sometimes",
                "EAGERCACHE_MAX_BYTES": "many",
                "EAGERCACHE_LOG": "loud",
                "EAGERCACHE_DISABLE": "maybe",
                "EAGERCACHE_WORKERS": "-3",
                "EAGERCACHE_VERIFY": "2",
            }
        )
    texts = [str(w.message) for w in caught]
    assert len(texts) == 6
    assert any("EAGERCACHE_ON_MISS='sometimes'" in t and "background" in t for t in texts)
    assert settings.on_miss is None and settings.log == "warning"
    assert settings.max_bytes == 10 << 30 and not settings.disable


def test_every_variable_sets_its_field() -> None:
    settings = config.read_settings(
        {
            "EAGERCACHE_DIR": "/somewhere",
            "EAGERCACHE_DISABLE": "1",
            "EAGERCACHE_SKIP": "aten::add, aten::cat",
            "EAGERCACHE_ON_MISS": "wait",
            "EAGERCACHE_WAIT_SECONDS": "1.5",
            "EAGERCACHE_NUMERICS": "bitwise",
            "EAGERCACHE_CHOOSE": "always",
            "EAGERCACHE_TRIALS": "0",
            "EAGERCACHE_SEARCH": "deep",
            "EAGERCACHE_MAX_BYTES": "1.5G",
            "EAGERCACHE_LOG": "debug",
            "EAGERCACHE_CXX": "/usr/bin/g++",
            "EAGERCACHE_WORKERS": "3",
            "EAGERCACHE_SLOTS": "5",
            "EAGERCACHE_LINGER": "30",
            "EAGERCACHE_GRAPH_BYTES": "16M",
            "EAGERCACHE_VERIFY": "0.25",
            "EAGERCACHE_TIERS": "/one:/two",
            "EAGERCACHE_ALLOW_UNTRUSTED": "1",
            "EAGERCACHE_REVOKED": "/list",
            "EAGERCACHE_METRICS": "/collector/{pid}.prom",
            "EAGERCACHE_REMOTE": "http://one/a, memory://b",
            "EAGERCACHE_REMOTE_TRUST": "/one.pub:/two.pub",
            "EAGERCACHE_REMOTE_KEY": "/own.pem",
            "EAGERCACHE_REMOTE_RETIME": "1",
        }
    )
    assert settings == config.Settings(
        directory=Path("/somewhere"),
        disable=True,
        skip=("aten::add", "aten::cat"),
        on_miss="wait",
        wait_seconds=1.5,
        numerics="bitwise",
        choose="always",
        trials=False,
        search="deep",
        max_bytes=3 << 29,
        log="debug",
        cxx="/usr/bin/g++",
        workers=3,
        slots=5,
        linger=30.0,
        graph_bytes=16 << 20,
        verify=0.25,
        tiers=(Path("/one"), Path("/two")),
        allow_untrusted=True,
        revoked=Path("/list"),
        metrics=Path("/collector/{pid}.prom"),
        remote=("http://one/a", "memory://b"),
        remote_trust=(Path("/one.pub"), Path("/two.pub")),
        remote_key=Path("/own.pem"),
        remote_retime=True,
    )
    assert {v.field for v in config.VARIABLES} == set(vars(settings))
    table = config.environment_table()
    assert all(v.name in table for v in config.VARIABLES)


def _refused(result: dict[str, object], path: Path) -> None:
    said = result["said"]
    assert isinstance(said, list) and len(said) == 1, result
    assert str(path) in said[0] and "EAGERCACHE_DIR" in said[0], said
    assert result["active"] is False
    assert result["hits"] == 0


def test_a_directory_that_others_may_write_is_refused(cache: Path) -> None:
    cache.chmod(0o777)
    _refused(run_program(ENABLE, cache), cache)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    _refused(run_program(ENABLE, path), path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_a_directory_of_another_user_is_refused(cache: Path) -> None:
    os.chown(cache, 12345, 12345)
    _refused(run_program(ENABLE, cache), cache)
    assert list(cache.iterdir()) == []


def test_a_directory_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "cache"
    _refused(run_program(ENABLE, path), path)


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache"
    (tmp_path / "new").mkdir(mode=0o700)
    result = run_program(ENABLE, path)
    assert result["active"] is True and result["said"] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
