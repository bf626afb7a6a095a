"""Would it pay to choose each request's gamma by its own recent acceptance?

Replays recorded runs of accepted drafts with other draft lengths, fixed and adaptive, at several
costs of a draft step. A run's length at another gamma is read off the same tokens: whether a token
was accepted is taken to depend on the token and not on how far back the last verify pass was, which
is nearly so (docs/refresh.md). Times are for a request alone: in a batch a shorter gamma saves the
attention of a step, not the step.

    python benchmark/gamma_per_request.py benchmark/results/accepted_h200.json [--out X.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import commit, write_report  # noqa: E402

# Of a draft step, in verify passes.
COSTS = (0.05, 0.1, 0.2, 0.4)
MOST = (7, 15)
# What an iteration's counts keep of their weight at the next.
DECAYS = (0.5, 0.8, 0.9, 0.97)


@dataclass
class Adaptive:
    """Gamma by a decaying mean of how many drafts were accepted of those that were decided."""

    cost: float
    most: int
    decay: float
    accepted: float = 4.0  # as if 8 of 9 had been
    decided: float = 4.5

    def __call__(self) -> int:
        p = min(max(self.accepted / self.decided, 0.01), 0.9999)

        def rate(gamma: int) -> float:
            tokens = (1 - p ** (gamma + 1)) / (1 - p)
            return tokens / (1 + gamma * self.cost)

        return max(range(1, self.most + 1), key=rate)

    def saw(self, accepted: int, gamma: int) -> None:
        self.accepted = self.accepted * self.decay + accepted
        self.decided = self.decided * self.decay + accepted + (accepted < gamma)


def tokens_of(accepted: list[int], gamma: int) -> list[bool]:
    """Whether each token would have been accepted as a draft. A run's bonus token, which nobody
    drafted, counts as one that would."""
    tokens: list[bool] = []
    for count in accepted:
        tokens += [True] * count + [count == gamma]
    return tokens


def rate_of(
    tokens: list[bool],
    cost: float,
    gamma_of: Callable[[], int],
    saw: Callable[[int, int], None] = lambda accepted, gamma: None,
) -> float:
    """Tokens per verify pass's time."""
    at, emitted, spent = 0, 0, 0.0
    while at + max(MOST) < len(tokens):
        gamma = gamma_of()
        accepted = [*tokens[at : at + gamma], False].index(False)
        saw(accepted, gamma)
        at += accepted + 1
        emitted += accepted + 1
        spent += 1 + gamma * cost
    return emitted / spent


def gain(rates: list[float], base: list[float]) -> dict[str, float]:
    """In per cent, mean over requests and its standard error."""
    gains = [100 * (rate / of_base - 1) for rate, of_base in zip(rates, base, strict=True)]
    return {
        "percent": statistics.mean(gains),
        "stderr": statistics.stdev(gains) / len(gains) ** 0.5,
    }


def compare(requests: list[list[bool]], cost: float, most: int) -> dict[str, Any]:
    fixed = {
        gamma: [rate_of(tokens, cost, lambda gamma=gamma: gamma) for tokens in requests]
        for gamma in range(1, most + 1)
    }
    best = max(fixed, key=lambda gamma: statistics.mean(fixed[gamma]))
    hindsight = [max(rates) for rates in zip(*fixed.values(), strict=True)]
    row = {
        "cost": cost,
        "most": most,
        "best_gamma": best,
        "hindsight": gain(hindsight, fixed[best]),
    }
    for decay in DECAYS:
        rates = []
        for tokens in requests:
            choose = Adaptive(cost, most, decay)
            rates.append(rate_of(tokens, cost, choose, choose.saw))
        row[f"decay_{decay}"] = gain(rates, fixed[best])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recorded", type=Path, help="accepted drafts of each iteration")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recorded = json.loads(options.recorded.read_text())
    rows = []
    for run in recorded["runs"]:
        requests = [tokens_of(accepted, run["gamma"]) for accepted in run["accepted"]]
        rows += [
            {"temperature": run["temperature"], **compare(requests, cost, most)}
            for most in MOST
            for cost in COSTS
        ]
    report = {"recorded": options.recorded.name, "commit": commit(), "rows": rows}
    write_report(report, options.out)
    print("Gain over the best fixed gamma, per cent (a draft step's cost in verify passes):")
    names = ["hindsight", *(f"decay_{decay}" for decay in DECAYS)]
    print("    T  cost  most  fixed  " + "  ".join(f"{name:>11}" for name in names))
    for row in rows:
        gains = (f"{row[name]['percent']:+.1f} ± {row[name]['stderr']:.1f}" for name in names)
        print(
            f"{row['temperature']:5} {row['cost']:5} {row['most']:5} {row['best_gamma']:6}  "
            + "  ".join(f"{text:>11}" for text in gains)
        )


if __name__ == "__main__":
    main()
