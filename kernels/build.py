"""Compiles a CUDA file of this folder with nvcc into a shared library, once a machine.

Libraries are kept under ~/.cache/sgl_vegas/kernels (or $SGLANG_VEGAS_CACHE/kernels), named by a
hash of everything that they are made from. No torch headers, so that it takes seconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
EXPECTED_SECONDS = 10


@dataclass(frozen=True)
class Source:
    """A library to build."""

    file: str
    # Macros, by name.
    defines: tuple[tuple[str, int], ...]
    capability: tuple[int, int]

    def flags(self) -> list[str]:
        major, minor = self.capability
        # 90a: Hopper's own instructions are outside plain sm_90.
        arch = f"{major}{minor}" + ("a" if self.capability == (9, 0) else "")
        return [
            *FLAGS,
            *("-gencode", f"arch=compute_{arch},code=sm_{arch}"),
            *(f"-D{name}={value}" for name, value in self.defines),
        ]


def cache_folder() -> Path:
    root = os.environ.get("SGLANG_VEGAS_CACHE") or Path.home() / ".cache" / "sgl_vegas"
    return Path(root) / "kernels"


@functools.cache
def find_nvcc() -> str:
    """nvcc's path. Raises RuntimeError where there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    for path in [paths[0], "nvcc", *paths[1:]]:
        found = shutil.which(path)
        if found:
            return found
    raise RuntimeError(
        "VEGAS needs nvcc to build its attention kernels and found none in CUDA_HOME, PATH or "
        "/usr/local/cuda: install the CUDA toolkit of the version that torch was built with, or "
        "set CUDA_HOME to it"
    )


@functools.cache
def _nvcc_version() -> str:
    return subprocess.run(
        [find_nvcc(), "--version"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _library_path(source: Source) -> Path:
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.cuh"), FOLDER / source.file]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join([*source.flags(), _nvcc_version()]).encode())
    return cache_folder() / f"{Path(source.file).stem}-{digest.hexdigest()[:20]}.so"


def _compile(source: Source, library: Path) -> None:
    """Other processes may want the same library at the same time: one builds, the others wait."""
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        partial = library.with_suffix(f".{os.getpid()}.partial")
        command = [find_nvcc(), *source.flags(), str(FOLDER / source.file), "-o", str(partial)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            partial.unlink(missing_ok=True)
            raise RuntimeError(
                f"VEGAS couldn't build its attention kernels: {' '.join(command)} ended with "
                f"{done.returncode}:\n{done.stdout[-4000:]}"
            )
        partial.rename(library)


_loaded: dict[Path, ctypes.CDLL] = {}


def load(sources: list[Source]) -> list[ctypes.CDLL]:
    """The libraries, in `sources`' order, those that are missing built in parallel.

    Raises RuntimeError when nvcc is missing or fails.
    """
    libraries = [_library_path(source) for source in sources]
    missing = {
        path: source
        for path, source in zip(libraries, sources, strict=True)
        if path not in _loaded and not path.exists()
    }
    if missing:
        cache_folder().mkdir(parents=True, exist_ok=True)
        logger.warning(
            "VEGAS builds its attention kernels with nvcc (about %d s, once)", EXPECTED_SECONDS
        )
        start = time.perf_counter()
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_compile, missing.values(), missing.keys()))
        logger.info("Built %d kernels in %.1f s", len(missing), time.perf_counter() - start)
    for path in libraries:
        if path not in _loaded:
            _loaded[path] = ctypes.CDLL(str(path))
    return [_loaded[path] for path in libraries]


def check(library: ctypes.CDLL, error: int, what: str) -> None:
    """Raises RuntimeError when a launcher of the library returned an error."""
    if error != 0:
        library.vegas_error_name.restype = ctypes.c_char_p
        library.vegas_error_text.restype = ctypes.c_char_p
        name = library.vegas_error_name(error).decode()
        text = library.vegas_error_text(error).decode()
        raise RuntimeError(f"VEGAS kernel {what} failed: {name}: {text}")
