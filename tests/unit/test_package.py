"""The wheel carries every source and data file and both entry points."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folder in the repository: where the wheel installs it.
FOLDERS = {"sgl_vegas": "sgl_vegas", "kernels": "sgl_vegas_kernels", "patches": "sgl_vegas_patches"}
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: setuptools leaves files behind where it builds."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=IGNORED)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."],
        cwd=source,
        check=True,
    )
    (file,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.mark.parametrize("folder", FOLDERS)
def test_carries_every_file(folder: str, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    # Copied with the same filter as the fixture's, so that both see the same files.
    copy = shutil.copytree(ROOT / folder, tmp_path / folder, ignore=IGNORED)
    files = [path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()]
    assert files
    missing = {f"{FOLDERS[folder]}/{file}" for file in files} - set(wheel.namelist())
    assert not missing


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "sglang.srt.plugins": {"vegas": "sgl_vegas.plugin:load"},
        "sglang.srt.platforms": {"vegas": "sgl_vegas.cpu.platform:activate"},
    }


def test_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    assert "Apache License" in wheel.read(name).decode()


def test_importing_the_package_is_cheap() -> None:
    """Packaging tools read the version; that must not load torch or SGLang."""
    code = (
        "import sys; before = set(sys.modules); import sgl_vegas; assert sgl_vegas.__version__;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == ["sgl_vegas"]


@pytest.mark.parametrize("folder", ["kernels", "patches"])
def test_source_folder_is_no_package(folder: str) -> None:
    """Run from the repository root, `kernels` would hide the package that transformers uses."""
    assert not (ROOT / folder / "__init__.py").exists()
