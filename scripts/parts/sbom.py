"""What a released wheel is made of and needs, as CycloneDX 1.5.

python scripts/parts/sbom.py --output FILE WHEEL...

Said are the libraries whose code is compiled into the extension (headers of pybind11 and
nlohmann-json, parts of libstdc++), each torch that it was compiled against, and what pip installs
besides. Versions are those that were there when the wheels were built: it runs in that environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import zipfile
from pathlib import Path

Component = dict[str, object]


def python_package(name: str, version: str, role: str) -> Component:
    """A component of the package index; `role` is what it is to the wheel."""
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "properties": [{"name": "eagercache:role", "value": role}],
    }


def compiled_in() -> list[Component]:
    """What the extension has the code of."""
    compiler = subprocess.run(
        ["g++", "-dumpfullversion"], capture_output=True, text=True, check=True
    )
    json_version = ".".join(
        _macro("nlohmann/json.hpp", f"NLOHMANN_JSON_VERSION_{part}")
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    rows = [("nlohmann-json", json_version, "MIT")]
    rows += [("libstdc++", compiler.stdout.strip(), "GPL-3.0-or-later WITH GCC-exception-3.1")]
    generic = [
        {
            "type": "library",
            "bom-ref": f"pkg:generic/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:generic/{name}@{version}",
            "licenses": [{"expression": licence}],
            "properties": [{"name": "eagercache:role", "value": "compiled in"}],
        }
        for name, version, licence in rows
    ]
    pybind11 = importlib.metadata.version("pybind11")
    return [*generic, python_package("pybind11", pybind11, "compiled in")]


def _macro(header: str, name: str) -> str:
    """What the compiler takes a macro for."""
    source = f"#include <{header}>\nEAGERCACHE_VALUE {name}\n"
    command = ["g++", "-std=c++20", "-x", "c++", "-E", "-P", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return re.findall(r"EAGERCACHE_VALUE (\S+)", done.stdout)[-1]


def of_wheel(wheel: Path) -> tuple[str, str, list[str]]:
    """The version, the torch and the other requirements that a wheel names."""
    with zipfile.ZipFile(wheel) as archive:
        info = archive.read("eagercache/_build_info.py").decode()
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode().partition("\n\n")[0]
    torch = re.search(r'^TORCH_VERSION = "(.*)"$', info, re.MULTILINE)
    version = re.search(r"^Version: (.*)$", text, re.MULTILINE)
    assert torch is not None and version is not None, wheel
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.MULTILINE)
    return version[1], torch[1], [name for name in needed if name != "torch"]


def document(wheels: list[Path]) -> dict[str, object]:
    """The whole of it; the same wheels in the same environment give the same."""
    said = [of_wheel(wheel) for wheel in wheels]
    version, _, needed = said[0]
    components = compiled_in()
    components += [
        python_package("torch", torch, "compiled against, not contained") for _, torch, _ in said
    ]
    components += [
        python_package(name, importlib.metadata.version(name), "needed, not contained")
        for name in needed
    ]
    own = f"pkg:pypi/eagercache@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": "eagercache",
                "version": version,
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
                "purl": own,
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [each["bom-ref"] for each in components]}],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("wheels", type=Path, nargs="+")
    options = parser.parse_args()
    found = document(options.wheels)
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{options.output.name}: {len(found['components'])} components")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
