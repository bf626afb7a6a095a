"""The model and the servers that tests share.

One server runs at a time, or one pair of tiny ones (more would fight for cores and memory), and
tests are sorted by the server that they use, so that each is started once however many files ask
for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.server_process import Server, launch_server

ROOT = Path(__file__).parent.parent
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    algorithm: str | None
    extra_args: tuple[str, ...] = ()


# Keys are fixture names. Different draft lengths, because nothing but speed may depend on them.
SETUPS = {
    "plain_server": Setup(None),
    "vegas_server": Setup(
        "VEGAS",
        (
            *("--speculative-num-steps", "7", "--vegas-sparsity-ratio", "0.07"),
            *("--enable-metrics", "--decode-log-interval", "8"),
        ),
    ),
}


class ServerSlot:
    """What serves now: one server, or a pair of tiny ones; asking for another stops it."""

    def __init__(self, model_path: Path, log_dir: Path) -> None:
        self._model_path = model_path
        self._log_dir = log_dir
        self._name: str | None = None
        self._serving: Any = None
        self._stack = ExitStack()

    def get(self, name: str) -> Server:
        """The server of `SETUPS[name]`, started unless it runs."""
        setup = SETUPS[name]
        return self.hold(
            name,
            lambda: launch_server(
                self._model_path,
                algorithm=setup.algorithm,
                extra_args=setup.extra_args,
                log_path=self._log_dir / f"{name}.log",
            ),
        )

    def hold(self, name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
        """What `start` gives, unless it is what serves. A crash fails the asking test."""
        if self._name != name:
            self.stop()
            self._serving = self._stack.enter_context(start())
            self._name = name
        return self._serving

    def stop(self) -> None:
        self._name = self._serving = None
        self._stack.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by server; within one, first what must record plain answers on another server.

    The tiny pair comes first, then servers that a test has for itself.
    """
    names = ["tiny_pair", None, *SETUPS]

    def order(item: pytest.Item) -> tuple[int, bool]:
        fixtures = getattr(item, "fixturenames", ())
        used = [place for place, name in enumerate(names) if name in fixtures]
        return max(used, default=names.index(None)), "plain" not in fixtures

    items.sort(key=order)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SGL_VEGAS_TEST_MODEL, or the model that `tools/prepare_model.py` makes (once a machine)."""
    asked = os.environ.get("SGL_VEGAS_TEST_MODEL")
    if asked:
        return Path(asked)
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "prepare_model.py")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def server_slot(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSlot]:
    slot = ServerSlot(model_path, tmp_path_factory.mktemp("servers"))
    yield slot
    slot.stop()


@pytest.fixture
def plain_server(server_slot: ServerSlot) -> Server:
    """SGLang without speculation."""
    return server_slot.get("plain_server")


@pytest.fixture
def vegas_server(server_slot: ServerSlot) -> Server:
    """VEGAS, gamma 7, with metrics and a pool that holds every test's requests."""
    return server_slot.get("vegas_server")
