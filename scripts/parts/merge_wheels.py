"""Makes one wheel of several that differ in the torch that they were built against.

python scripts/parts/merge_wheels.py --output FOLDER [--platform TAG] [--sbom FILE] WHEEL...

What depends on torch (the extension module, its build information, the library and the package for
C++ programs) goes to eagercache/_torch/MINOR/, from where the import takes the one that fits
(eagercache.base.load). The rest has to be the same in all of them and is there once. The metadata
admits the torch versions that are in it and no others. With --platform it gets that tag instead of
linux_x86_64, which audit_wheel.py has to agree with; --sbom goes into it, too (PEP 770).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python_hooks" / "eagercache" / "base"))
from torch_versions import in_order, minor

PACKAGE = "eagercache/"
# Of a release, in bytes: an index takes more, but nobody should have to load more.
LARGEST = 20_000_000
# The same content gives the same file: 1980-01-01 is where a zip's calendar begins.
EPOCH = (1980, 1, 1, 0, 0, 0)


class Misfit(Exception):
    """The wheels cannot be one; the message says why."""


def depends_on_torch(name: str) -> bool:
    """Whether a file of a wheel is of the build against one torch."""
    below = name.removeprefix(PACKAGE)
    is_extension = bool(re.fullmatch(r"_C\.[\w.-]*\.so", below))
    return is_extension or below == "_build_info.py" or below.startswith(("lib/", "include/"))


def contents(wheel: Path) -> dict[str, tuple[bytes, int]]:
    """The files of a wheel: content, and mode as a zip keeps it."""
    with zipfile.ZipFile(wheel) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
        return {info.filename: (archive.read(info), info.external_attr) for info in infos}


def torch_of(files: dict[str, tuple[bytes, int]]) -> str:
    """The version that a wheel was built against."""
    text = files[f"{PACKAGE}_build_info.py"][0].decode()
    found = re.search(r'^TORCH_VERSION = "(.*)"$', text, re.MULTILINE)
    if found is None:
        raise Misfit("a wheel does not say which torch it was built against")
    return found[1]


def admitted(minors: list[str]) -> str:
    """The requirement that lets in these minor versions, from the oldest on, and no others."""
    numbers = [[int(part) for part in text.split(".")] for text in minors]
    (major, first), last = numbers[0], numbers[-1][1]
    if any(number[0] != major for number in numbers):
        raise Misfit(f"torch {', '.join(minors)} are of several major versions")
    between = [number for number in range(first, last) if [major, number] not in numbers]
    left_out = "".join(f",!={major}.{number}.*" for number in between)
    return f"torch>={major}.{first},<{major}.{last + 1}{left_out}"


def admitting(metadata: bytes, minors: list[str]) -> bytes:
    """The metadata of a wheel for one torch, with these admitted instead."""
    line = f"Requires-Dist: {admitted(in_order(minors))}".encode()
    changed, count = re.subn(rb"^Requires-Dist: torch\b.*$", line, metadata, flags=re.MULTILINE)
    if count != 1:
        raise Misfit("the metadata does not require torch in one line")
    return changed


def merged(wheels: list[dict[str, tuple[bytes, int]]]) -> dict[str, tuple[bytes, int]]:
    """The files of the one wheel, without its RECORD."""
    result: dict[str, tuple[bytes, int]] = {}
    minors = [minor(torch_of(files)) for files in wheels]
    for version in minors:
        if minors.count(version) > 1:
            raise Misfit(f"two wheels are for torch {version}")
    for version, files in zip(minors, wheels, strict=True):
        for name, (content, mode) in files.items():
            if name.endswith(".dist-info/RECORD"):
                continue
            if name.endswith(".dist-info/METADATA"):
                content = admitting(content, minors)
            if depends_on_torch(name):
                if name.endswith(".cmake") and b"PREFIX_DIR}/eagercache/" in content:
                    raise Misfit(f"{name} names its folder, which is another one here")
                name = f"{PACKAGE}_torch/{version}/{name.removeprefix(PACKAGE)}"
            elif name in result and result[name][0] != content:
                raise Misfit(f"{name} is not the same in all wheels")
            result[name] = (content, mode)
    return result


def tagged(files: dict[str, tuple[bytes, int]], tag: str) -> dict[str, tuple[bytes, int]]:
    """The same files, of a wheel for that platform."""
    name = next(name for name in files if name.endswith(".dist-info/WHEEL"))
    content, mode = files[name]
    text = re.sub(rb"^(Tag: \S+-)[^-\s]+$", rb"\g<1>" + tag.encode(), content, flags=re.MULTILINE)
    return {**files, name: (text, mode)}


def write(path: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """The wheel with its RECORD, which comes last, as the format wants it."""
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(name: str, content: bytes, mode: int) -> None:
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = mode or 0o100644 << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, 9)

        for name, (content, mode) in sorted(files.items()):
            add(name, content, mode)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            rows.append(f"{name},sha256={digest.decode()},{len(content)}")
        folder = next(name for name in files if name.endswith(".dist-info/METADATA"))
        record = folder.replace("METADATA", "RECORD")
        add(record, "\n".join([*rows, f"{record},,", ""]).encode(), 0o100644 << 16)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--platform", default="", help="the tag of the platform")
    parser.add_argument("--sbom", type=Path, help="what is in it, as CycloneDX")
    parser.add_argument("wheels", type=Path, nargs="+")
    options = parser.parse_args()
    names = {wheel.name for wheel in options.wheels}
    if len(names) != 1:
        sys.exit(f"merge_wheels: they are for different Pythons: {', '.join(sorted(names))}")
    path = options.output / names.pop()
    try:
        files = merged([contents(wheel) for wheel in options.wheels])
        if options.platform:
            files = tagged(files, options.platform)
            path = path.with_name(f"{path.stem.rpartition('-')[0]}-{options.platform}.whl")
        if options.sbom:
            folder = next(name for name in files if name.endswith(".dist-info/METADATA"))
            name = folder.replace("METADATA", f"sboms/{options.sbom.name}")
            files[name] = (options.sbom.read_bytes(), 0)
        write(path, files)
    except Misfit as error:
        sys.exit(f"merge_wheels: {error}")
    size = path.stat().st_size
    if size > LARGEST:
        sys.exit(f"{path.name} has {size:,} bytes; {LARGEST:,} are the most")
    print(f"{path.name}: {size:,} bytes")


if __name__ == "__main__":
    main()
