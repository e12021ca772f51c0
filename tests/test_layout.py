"""The root folders, the links under src/jointrag, the wheel and the import all tell the same story."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jointrag

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "jointrag"
OWN = {"__init__.py", "cli.py", "py.typed"}  # all that src/jointrag holds besides links
PACKAGES = sorted(init.parent.name for init in ROOT.glob("*/__init__.py"))
PYTHON = [sys.executable, "-P"]  # -P: the working directory stays off sys.path


def shipped_files(package: str) -> set[str]:
    """Every file of a root package folder that a wheel has to carry, as its path inside the wheel."""
    return {
        f"jointrag/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not any(part.startswith(".") for part in path.parts)
    }


def test_every_package_folder_has_a_link_and_every_link_a_folder() -> None:
    assert sorted(path.name for path in SOURCE.iterdir() if path.is_symlink()) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_links_are_relative_and_lead_to_the_root_folder(package: str) -> None:
    assert os.readlink(SOURCE / package) == f"../../{package}"
    assert (SOURCE / package).resolve() == ROOT / package


def test_src_jointrag_holds_only_its_own_files_and_links() -> None:
    others = {path.name for path in SOURCE.iterdir() if not path.is_symlink()} - {"__pycache__"}
    assert others <= OWN, f"got {sorted(others - OWN)}, expected only links and {sorted(OWN)}: move it to a root folder"
    assert {"__init__.py", "py.typed"} <= others


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_folder_refuses_its_bare_name(package: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {package}"
    done = subprocess.run([*PYTHON, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: got ")
    assert f"'{package}', expected 'jointrag.{package}'" in last_line


def test_importing_jointrag_imports_no_torch_and_no_third_party_package() -> None:
    # The environment's own start-up files may import things; only what jointrag adds counts.
    code = (
        "import sys; before = set(sys.modules); import jointrag; dir(jointrag); "
        "added = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(added - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([*PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['jointrag']"


def test_an_unknown_public_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"got jointrag\.Pipelin, expected one of \['Pipeline'"):
        _ = jointrag.Pipelin  # type: ignore[attr-defined]


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert set(jointrag.__all__) <= set(dir(jointrag))


def test_a_wheel_carries_every_file_of_every_folder(tmp_path: Path) -> None:
    # Built from a copy: a build folder in the clone would leak deleted files into the next wheel.
    copy = tmp_path / "clone"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in ("src", *PACKAGES):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)

    command = [*PYTHON, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("jointrag-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    expected = {f"jointrag/{path.name}" for path in SOURCE.iterdir() if path.is_file()}
    expected = expected.union(*(shipped_files(package) for package in PACKAGES))
    assert sorted(expected - names) == [], "add a pattern to [tool.setuptools.package-data] in pyproject.toml"
    strangers = {name for name in names - expected if ".dist-info/" not in name}
    assert sorted(strangers) == []
