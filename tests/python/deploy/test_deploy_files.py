"""Files of modules with their weights: what is refused, what is mapped, and the command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deploy_zoo
import eagercache
import pytest
import torch
from conftest import clean_environment, run_python
from deploy_zoo import HERE, Deployed, answer_of, refusal
from eagercache import _C, DeployError, load_module, verify_module
from eagercache.ahead import bundle
from mapped_pages import pages_of

pytestmark = pytest.mark.once

# ---- refusals ------------------------------------------------------------------------------------


@pytest.fixture
def altered(deployed: Deployed, tmp_path: Path) -> Callable[[Callable[[bytearray], None]], Path]:
    """Makes a copy of an artifact with some bytes changed."""

    def make(change: Callable[[bytearray], None]) -> Path:
        content = bytearray((deployed.folder / "steps").read_bytes())
        change(content)
        path = tmp_path / "altered"
        path.write_bytes(content)
        return path

    return make


def flip(position: int) -> Callable[[bytearray], None]:
    """Changes one bit."""

    def change(content: bytearray) -> None:
        content[position] ^= 1

    return change


def test_what_was_altered_is_refused(
    deployed: Deployed, altered: Callable[[Callable[[bytearray], None]], Path]
) -> None:
    keys = [deployed.folder / "own.pub"]
    size = (deployed.folder / "steps").stat().st_size
    with refusal("refused", "altered or cut off"):
        load_module(altered(flip(300)), keys=keys)
    with refusal("corrupt", "its code was altered"):
        load_module(altered(flip(size // 2)), keys=keys)
    with refusal("corrupt", "bytes, not"):
        load_module(altered(lambda content: content.__delitem__(slice(-100, None))), keys=keys)
    with refusal("incompatible", "another version"):
        load_module(altered(flip(18)), keys=keys)
    with refusal("corrupt", "does not begin like one"):
        load_module(altered(flip(0)), keys=keys)
    last = altered(flip(-1))
    with refusal("corrupt", "was altered"):
        load_module(last, keys=keys, mmap=False)
    with refusal("corrupt", "was altered"):
        load_module(last, keys=keys, verify_weights=True)
    with refusal("corrupt", "was altered"):
        verify_module(last, keys=keys)
    load_module(last, keys=keys)  # as documented: mapped weights are not read


def test_unknown_signers_missing_files_and_bundles_are_refused(
    deployed: Deployed, tmp_path: Path
) -> None:
    with refusal("refused", "not among those that are trusted"):
        load_module(deployed.folder / "steps", keys=[deployed.folder / "other.pub"])
    with refusal("refused", "not among those that are trusted"):
        load_module(deployed.folder / "steps", keys=[])
    with refusal("not_found", "nothing"):
        load_module(tmp_path / "nothing", keys=[deployed.folder / "own.pub"])
    with refusal("corrupt", "no whole artifact"):
        load_module(deployed.folder / "own.pub", keys=[deployed.folder / "own.pub"])


def test_files_that_others_may_write_are_not_mapped(deployed: Deployed, tmp_path: Path) -> None:
    path = Path(shutil.copy(deployed.folder / "steps", tmp_path / "open"))
    path.chmod(0o666)
    keys = [deployed.folder / "own.pub"]
    with refusal("refused", "open"):
        load_module(path, keys=keys)
    assert answer_of(load_module(path, keys=keys, mmap=False)) == deploy_zoo.Steps.answer(1.0)


def rewritten(
    deployed: Deployed, path: Path, times: dict[str, int] | None = None, **changes: Any
) -> Path:
    """A signed artifact that says something else of itself."""
    keys = [str(deployed.folder / "own.pub")]
    row = _C.read_module_artifact(str(deployed.folder / "tied"), keys)
    values = {"environment": row["environment"], "cpu_features": [], "facts": row["facts"]}
    values.update(changes)
    times = times or {}
    module = deployed.load("tied")
    tensors = module._program.values(False, True)
    _C.write_module_artifact(
        str(path), values["environment"], values["cpu_features"], values["facts"],
        [str(deployed.folder / "own.pub")], row["constants"],
        [tensors[constant[0][0]] for constant in row["constants"]],
        str(deployed.folder / "own.pem"), **times,
    )  # fmt: skip
    return path


def test_a_foreign_environment_names_the_field(deployed: Deployed, tmp_path: Path) -> None:
    keys = [deployed.folder / "own.pub"]
    own = eagercache.verify_module(deployed.folder / "tied", keys=keys)
    assert own.mismatches == ()
    here = _C.read_module_artifact(str(deployed.folder / "tied"), [str(keys[0])])["environment"]
    foreign = re.sub(r"torch\.version: .*", "torch.version: 1.0.0", here)
    path = rewritten(deployed, tmp_path / "foreign", environment=foreign)
    with refusal("incompatible", "torch.version is", "made with 1.0.0"):
        load_module(path, keys=keys)
    info = eagercache.verify_module(path, keys=keys)
    assert info.mismatches == (("torch.version", "1.0.0", str(torch.__version__)),)
    path = rewritten(deployed, tmp_path / "future", cpu_features=["avx9000"])
    with refusal("incompatible", "avx9000"):
        load_module(path, keys=keys)


@pytest.mark.parametrize("field", [None, "torch.version", "platform.libc"])
def test_an_artifact_that_does_not_say_what_it_was_made_for_is_refused(
    deployed: Deployed, tmp_path: Path, field: str | None
) -> None:
    keys = [deployed.folder / "own.pub"]
    here = _C.read_module_artifact(str(deployed.folder / "tied"), [str(keys[0])])["environment"]
    text = "" if field is None else re.sub(rf"{re.escape(field)}: .*\n", "", here)
    path = rewritten(deployed, tmp_path / "mute", environment=text)
    with refusal("incompatible", "does not say what it was made for" if field is None else field):
        load_module(path, keys=keys)
    assert eagercache.verify_module(path, keys=keys).mismatches


def test_what_has_expired_is_revoked_or_comes_from_the_future_is_refused(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now = [deployed.folder / "own.pub"], int(time.time())
    path = rewritten(deployed, tmp_path / "old", {"created": now - 99, "expires": now - 9})
    with refusal("refused", "expired on", "get a newer one"):
        load_module(path, keys=keys)
    path = rewritten(deployed, tmp_path / "early", {"created": now + 2 * 86400})
    with refusal("refused", "set the clock"):
        verify_module(path, keys=keys)
    path = rewritten(deployed, tmp_path / "good", {"created": now, "expires": now + 86400})
    info = verify_module(path, keys=keys)
    assert info.created is not None
    assert info.expires is not None
    assert (info.expires - info.created).days == 1
    listed = tmp_path / "revoked"
    for revoked in (info.digest, info.signer):
        listed.write_text(f"# not to be used\n{revoked} it was lost\n")
        with refusal("refused", "is revoked", revoked):
            load_module(path, keys=keys, revoked=listed)
        with monkeypatch.context() as patch:
            patch.setenv("EAGERCACHE_REVOKED", str(listed))
            with refusal("refused", "is revoked"):
                verify_module(path, keys=keys)
    verify_module(path, keys=keys)
    listed.write_text("all of them\n")
    with refusal("invalid_argument", "line 1", str(listed)):
        load_module(path, keys=keys, revoked=listed)
    with refusal("refused", "cannot be read", "nowhere"):
        load_module(path, keys=keys, revoked=tmp_path / "nowhere")


def test_signed_nonsense_is_refused(deployed: Deployed, tmp_path: Path) -> None:
    keys = [deployed.folder / "own.pub"]
    path = rewritten(deployed, tmp_path / "code")
    with pytest.raises(DeployError):
        load_module(path, keys=keys)  # a key is no shared object
    module = deployed.load("tied")
    program = json.loads(module._program.facts["program"])
    for field, value in [
        ("main", [[True, 99]]),
        ("folded", [0]),
        ("open", [[9, 9]]),
        ("ranges", [[False, 0, -1, 4]]),
        ("version", 2),
        ("outputs", []),
    ]:
        text = json.dumps({**program, field: value}, sort_keys=True, separators=(",", ":"))
        with pytest.raises(_C.StoreError, match="program"):
            _C.DeployedProgram.make(
                text, module._program.constants, [None] * len(module.constants), ["/nothing"]
            )


# ---- mapping -------------------------------------------------------------------------------------

SHARING = """
import sys, time
from pathlib import Path
import torch
from eagercache import load_module
path, key = sys.argv[1:3]
module = load_module(path, keys=[key])
tracers = [name for name in sys.modules if name.startswith("eagercache.worker")]
module(torch.zeros(1, 1024))
print("ready" if not tracers else f"it imported {tracers}", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def large(deployed: Deployed) -> Path:
    """An artifact of 16 MiB of weights."""
    return deployed.folder / "large"


def test_processes_that_map_an_artifact_share_its_pages(deployed: Deployed, large: Path) -> None:
    command = [sys.executable, "-c", SHARING, str(large), str(deployed.folder / "own.pub")]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env=clean_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            pages = pages_of(process.pid, large)
            weights = 4 * 1024 * 1024 * 4 // 1024
            assert pages["Rss"] >= weights, "all weights were read"
            assert pages["Shared_Clean"] + pages["Shared_Dirty"] >= weights * 0.99
            assert pages["Private_Clean"] + pages["Private_Dirty"] < weights * 0.01
            assert pages["Pss"] < 0.6 * pages["Rss"]
        for process in processes:
            process.communicate("\n", timeout=60)


def test_opening_reads_no_mapped_weight(deployed: Deployed, large: Path) -> None:
    module = load_module(large, keys=[deployed.folder / "own.pub"])
    assert pages_of(os.getpid(), large).get("Rss", 0) < 1024
    assert len(module.constants) == 4


# ---- the command line ----------------------------------------------------------------------------


def command(*words: object, folder: Path) -> tuple[int, str, str]:
    """Runs `eagercache bundle ...`."""
    done = run_python(
        "import sys; from eagercache.cli.main import main; sys.exit(main())",
        clean_environment(),
        "bundle",
        *map(str, words),
        folder=folder,
        timeout=600,
        fills=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_exports_and_verifies(deployed: Deployed, tmp_path: Path) -> None:
    keys = deployed.folder
    made = tmp_path / "made"
    code, out, err = command(
        "export", "--with-weights", f"{HERE}/deploy_zoo.py:make", made, "--key", keys / "own.pem",
        "--json", folder=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    row = json.loads(out)
    assert row["constants"] == 5
    assert row["bytes"] == made.stat().st_size
    model, args = deploy_zoo.make()
    with torch.no_grad():
        expected = model(*args)
    torch.testing.assert_close(load_module(made, keys=[keys / "own.pub"])(*args), expected)

    code, out, _ = command("verify", made, "--key", keys / "own.pub", folder=tmp_path)
    assert code == 0
    assert "first.weight" in out
    assert "all intact" in out
    code, out, _ = command("verify", made, "--key", keys / "own.pub", "--json", folder=tmp_path)
    assert {row["name"] for row in json.loads(out)["constants"]} >= {"first.weight", "shift"}

    made.write_bytes(made.read_bytes()[:-1])
    code, _, err = command("verify", made, "--key", keys / "own.pub", folder=tmp_path)
    assert code != 0
    assert "is no whole artifact" in err
    code, _, err = command("import", made, "--key", keys / "own.pub", folder=tmp_path)
    assert code != 0
    assert "load_module" in err


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing.py:make", "nothing.py"),
        ("deploy_zoo.py", "FILE.py:FUNCTION"),
        ("deploy_zoo.py:nobody", "nobody"),
        ("deploy_zoo.py:Noisy", "(module, args)"),
    ],
)
def test_the_command_line_says_what_it_wants(
    deployed: Deployed, tmp_path: Path, what: str, text: str
) -> None:
    code, _, err = command(
        "export", "--with-weights", f"{HERE}/{what}", tmp_path / "made", "--key",
        deployed.folder / "own.pem", folder=tmp_path,
    )  # fmt: skip
    assert code != 0
    assert text in err
    assert "Traceback" not in err


def test_bundles_are_no_artifacts(deployed: Deployed, tmp_path: Path) -> None:
    with pytest.raises(bundle.BundleError, match="no whole bundle"):
        bundle.verify(deployed.folder / "steps", keys=[deployed.folder / "own.pub"])
