"""Measured acceptance with a roofline's times: tuning without the GPU that will serve."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_vegas.lab.experiment import Grid, Progress, make_texts, run_cells
from sgl_vegas.lab.model import LabModel
from sgl_vegas.tune.roofline import Hardware, ModelShape, floor
from sgl_vegas.tune.steps import Point


class Estimate:
    """Acceptance from the laboratory, tokens a second from the floor of each step's time."""

    def __init__(
        self,
        model: LabModel,
        prompts: list[tuple[str, list[int]]],
        grid: Grid,
        temperature: float,
        shape: ModelShape,
        hardware: Hardware,
        batch: int,
        context: int,
        progress: Progress,
    ) -> None:
        """Args:
        batch, context: requests that run together, and the length of each.
        """
        self.how = (
            f"acceptance measured on {len(prompts)} prompts; times are not measured but the least "
            f"that a {hardware.name} could need ({batch} requests of {context} tokens)"
        )
        self._model, self._grid, self._temperature = model, grid, temperature
        self._shape, self._hardware = shape, hardware
        self._batch, self._context = batch, context
        self._progress = progress
        self._texts = make_texts(model, prompts, grid, temperature, progress)
        self._known: dict[tuple[int, float], Point] = {}

    def acceptance(self, gamma: int, ratios: Sequence[float]) -> list[Point]:
        missing = [ratio for ratio in ratios if (gamma, ratio) not in self._known]
        for row in run_cells(
            self._model,
            self._texts,
            self._grid,
            self._temperature,
            gamma,
            missing,
            self._progress,
        ):
            self._known[gamma, row["ratio"]] = Point(gamma, row["ratio"], row["by_prompt"])
        return [self._known[gamma, ratio] for ratio in ratios]

    def throughput(self, gammas: Sequence[int], ratios: Sequence[float]) -> list[Point]:
        return [self._fast(point) for gamma in gammas for point in self.acceptance(gamma, ratios)]

    def plain(self) -> float:
        """Tokens a second without speculation."""
        times = floor(self._shape, self._hardware, self._batch, self._context, 1, 1.0)
        return self._batch / times.plain_ms * 1e3

    def _fast(self, point: Point) -> Point:
        times = floor(
            self._shape, self._hardware, self._batch, self._context, point.gamma, point.ratio
        )
        iterations_a_second = 1e3 / (point.gamma * times.draft_ms + times.verify_ms)
        return Point(
            point.gamma,
            point.ratio,
            {
                name: self._batch * tokens * iterations_a_second
                for name, tokens in point.by_prompt.items()
            },
        )
