"""What `import sgl_kernel` gives once the platform entry point has run.

Each case is a process of its own, because it is about the first import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REAL = "__version__ = 'real'\n"
BROKEN = "from sgl_kernel import part\nraise OSError('no libcuda')\n"


def run_python(code: str, package: str, tmp_path: Path, cpu_engine: bool) -> str:
    """Run `code` where the package `sgl_kernel` has `package` as its source; return its output."""
    folder = tmp_path / "sgl_kernel"
    folder.mkdir()
    (folder / "__init__.py").write_text(package)
    (folder / "part.py").write_text("")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    env["SGLANG_USE_CPU_ENGINE"] = "1" if cpu_engine else "0"
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


ACTIVATE = "from sgl_vegas.cpu.platform import activate\nassert activate() is None\n"


def test_installed_when_the_real_package_fails(tmp_path: Path) -> None:
    code = ACTIVATE + (
        "activate()\n"
        "import sys, sgl_kernel\n"
        "assert 'sgl_kernel.part' not in sys.modules\n"
        "from sgl_kernel import fill_bonus_tokens_cpu\n"
        "from sgl_kernel.deep.er import anything\n"
        "print(fill_bonus_tokens_cpu.__module__)"
    )
    assert run_python(code, BROKEN, tmp_path, cpu_engine=True) == "sgl_vegas.cpu.operators"


def test_real_package_stays(tmp_path: Path) -> None:
    code = ACTIVATE + "import sgl_kernel\nprint(sgl_kernel.__version__)"
    assert run_python(code, REAL, tmp_path, cpu_engine=True) == "real"


def test_broken_package_stays_broken_without_the_cpu_engine(tmp_path: Path) -> None:
    code = ACTIVATE + "try:\n  import sgl_kernel\nexcept OSError as error:\n  print(error)"
    assert run_python(code, BROKEN, tmp_path, cpu_engine=False) == "no libcuda"


@pytest.mark.parametrize("module", ["sgl_kernel", "sgl_kernel.sub"])
def test_unsupported_operator_raises_when_called(module: str, tmp_path: Path) -> None:
    code = ACTIVATE + (
        f"from {module} import fancy_op\n"
        "try:\n  fancy_op(1, x=2)\nexcept NotImplementedError as error:\n  print(error)"
    )
    message = run_python(code, BROKEN, tmp_path, cpu_engine=True)
    assert message.startswith(f"{module}.fancy_op was called")
    assert "needs a GPU" in message
    assert "Intel AMX" in message


def test_no_compiled_operator_and_no_dunder_is_claimed(tmp_path: Path) -> None:
    code = ACTIVATE + (
        "import torch, sgl_kernel\n"
        "print(hasattr(torch.ops.sgl_kernel, 'convert_weight_packed'),"
        " hasattr(sgl_kernel, '__file__'), hasattr(sgl_kernel, '__all__'))"
    )
    assert run_python(code, BROKEN, tmp_path, cpu_engine=True) == "False False False"
