"""A progress bar for a run of several parts."""

from __future__ import annotations

from tqdm import tqdm


class Bar:
    """A progress bar for whatever is being done; a new one for each label."""

    def __init__(self) -> None:
        self._label, self._bar = "", None

    def update(self, label: str, done: int, total: int) -> None:
        if label != self._label:
            self.close()
            self._label, self._bar = label, tqdm(total=total, desc=label)
        assert self._bar is not None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
