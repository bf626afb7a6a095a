"""The tuner: its steps on made-up figures, its estimate on a tiny model, its client on a fake."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sgl_vegas.config import add_flags
from sgl_vegas.tune import served
from sgl_vegas.tune.__main__ import main
from sgl_vegas.tune.served import Served
from sgl_vegas.tune.steps import Point, fastest, smallest_as_good, tune
from tests.tiny_model import VOCAB_SIZE, make_tiny_model

NAMES = ("a", "b", "c", "d")


def point(gamma: int, ratio: float, values: Sequence[float]) -> Point:
    return Point(gamma, ratio, dict(zip(NAMES, values, strict=True)))


class MadeUp:
    """Acceptance rises up to ratio 0.1; the larger the list, the slower."""

    how = "made up"

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], list[float]]] = []

    def _tokens(self, gamma: int, ratio: float) -> float:
        rate = 0.6 + 3 * min(ratio, 0.1)
        return sum(rate**i for i in range(gamma + 1))

    def acceptance(self, gamma: int, ratios: Sequence[float]) -> list[Point]:
        self.asked.append(("acceptance", [gamma], list(ratios)))
        return [
            point(gamma, r, [self._tokens(gamma, r) + d for d in (-0.2, 0, 0, 0.2)]) for r in ratios
        ]

    def throughput(self, gammas: Sequence[int], ratios: Sequence[float]) -> list[Point]:
        self.asked.append(("throughput", list(gammas), list(ratios)))
        found = []
        for g in gammas:
            for r in ratios:
                rate = 100 * self._tokens(g, r) / (g * (0.2 + r) + 1)
                found.append(point(g, r, [rate + d for d in (-1, 0, 0, 1)]))
        return found


def test_the_three_steps() -> None:
    measure = MadeUp()
    gammas, ratios = [8, 2, 4, 6], [0.2, 0.03, 0.1, 0.06]
    first, second, third = tune(measure, gammas, ratios)
    assert measure.asked[0] == ("acceptance", [8], [0.03, 0.06, 0.1, 0.2])
    assert first.chosen.ratio == 0.1
    assert measure.asked[1] == ("throughput", [2, 4, 6, 8], [0.1])
    rates = {g: measure.throughput([g], [0.1])[0].mean for g in gammas}
    assert second.chosen.gamma == max(gammas, key=lambda g: rates[g])
    assert measure.asked[2][1:] == ([second.chosen.gamma], [0.03, 0.06, 0.1, 0.2])
    rates = {r: measure.throughput([second.chosen.gamma], [r])[0].mean for r in ratios}
    assert third.chosen.ratio == max(ratios, key=lambda r: rates[r])


def test_a_gain_that_is_noise_buys_no_larger_list() -> None:
    # 0.1 is ahead by 0.2 in the mean, but not of one prompt like of the other.
    small, large = point(8, 0.05, [5, 6, 7, 6]), point(8, 0.1, [6.2, 5.2, 7.4, 6])
    assert smallest_as_good([small, large])[0] is small
    # The same gain of each prompt is none by chance.
    sure = point(8, 0.1, [5.2, 6.2, 7.2, 6.2])
    assert smallest_as_good([small, sure])[0] is sure
    # Certain, but not worth it.
    tiny = point(8, 0.1, [5.01, 6.01, 7.01, 6.01])
    assert smallest_as_good([small, tiny])[0] is small


def test_doubt_is_told() -> None:
    best, near, far = (
        point(6, 0.07, [10, 12, 14, 12]),
        point(5, 0.07, [11, 11, 13, 12]),
        point(2, 0.07, [5, 6, 7, 6]),
    )
    chosen, doubt = fastest([far, near, best])
    assert chosen is best
    assert "gamma 5" in doubt and "gamma 2" not in doubt
    assert "ahead of all others" in fastest([far, best])[1]
    one = [Point(g, 0.07, {"a": float(g)}) for g in (1, 2)]
    assert "gamma 1" in fastest(one)[1], "of one prompt nothing is sure"


def test_an_estimate_writes_a_config_that_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    generator = torch.Generator().manual_seed(0)
    with prompts.open("w") as file:
        for length in (100, 120):
            ids = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids}) + "\n")
    config, out, picture = (tmp_path / name for name in ("v.yaml", "tune.json", "tune.svg"))

    class Vocabulary:
        def __len__(self) -> int:
            return VOCAB_SIZE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sgl_vegas.lab.model.AutoTokenizer.from_pretrained", lambda path: Vocabulary()
        )
        main(
            [
                *("--model-path", str(tmp_path), "--prompts", str(prompts), "--gpu", "H100"),
                *("--ratios", "0.1", "0.5", "--gammas", "2", "4", "--iterations", "4"),
                *("--config", str(config), "--out", str(out), "--plot", str(picture)),
                *("--policy", "streaming"),
            ]
        )
    report = json.loads(out.read_text())
    assert "not measured but the least that a H100" in report["how"]
    assert [len(step["points"]) for step in report["steps"]] == [2, 2, 2]
    chosen = report["steps"][-1]["chosen"]
    written = yaml.safe_load(config.read_text())
    assert written["speculative-num-steps"] == chosen["gamma"]
    assert written["vegas-sparsity-ratio"] == chosen["ratio"]
    assert picture.read_text().startswith("<?xml")
    printed = capsys.readouterr().out
    assert f"--speculative-num-steps {chosen['gamma']}" in printed

    # As launch_server reads it.
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if not any(a.dest == "vegas_sparsity_ratio" for a in parser._actions):
        add_flags(parser)
    line = ["--model-path", str(tmp_path), "--config", str(config)]
    merged = ConfigArgumentMerger(parser=parser).merge_config_with_args(line)
    args = parser.parse_args(merged)
    assert args.speculative_algorithm == "VEGAS"
    assert args.speculative_num_steps == chosen["gamma"]
    assert float(args.vegas_sparsity_ratio) == chosen["ratio"]
    assert args.vegas_policy == "streaming"


TOKEN_S = 0.01


class Clock:
    """Of each thread its own: every look at it is TOKEN_S later than the one before."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def perf_counter(self) -> float:
        self._of_thread.now = getattr(self._of_thread, "now", 0.0) + TOKEN_S
        return self._of_thread.now


class FakeServer(BaseHTTPRequestHandler):
    """Streams a token a line, of which two are an iteration's."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        total = body["sampling_params"]["max_new_tokens"]
        self.send_response(200)
        self.end_headers()
        for count in range(1, total + 1):
            meta = {"completion_tokens": count, "spec_verify_ct": (count - 1) // 2}
            self.wfile.write(f"data: {json.dumps({'meta_info': meta})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


def test_servers_are_measured_by_their_streams(tmp_path: Path) -> None:
    fake = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=fake.serve_forever, daemon=True).start()
    commands: list[list[str]] = []

    @contextlib.contextmanager
    def server(command: list[str], log_path: Path) -> Iterator[str]:
        commands.append(command)
        yield f"http://127.0.0.1:{fake.server_port}"

    seen: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "_server", server)
        patch.setattr(served, "time", Clock())
        measure = Served(
            "M",
            [(name, [1, 2, 3]) for name in NAMES],
            31,
            0.6,
            0.95,
            2,
            ["--mem-fraction-static", "0.8"],
            tmp_path / "log",
            lambda *what: seen.append(what),
        )
        (tokens,) = measure.acceptance(5, [0.1])
        (rate,) = measure.throughput([5], [0.1])
        measure.plain()
    fake.shutdown()
    assert tokens.by_prompt == dict.fromkeys(NAMES, 2.0)
    # Two streams at a time, of which each is read a token a look at the clock.
    assert rate.by_prompt == pytest.approx(dict.fromkeys(NAMES, 2 / TOKEN_S))
    vegas, plain = commands  # a setting is measured once
    assert vegas[:6] == plain[:6] and "--mem-fraction-static" in plain
    assert vegas[vegas.index("--speculative-num-steps") + 1] == "5"
    assert "VEGAS" not in plain
    assert seen[3] == ("gamma 5, ratio 0.1", 4, 4)


def test_a_server_that_ends_is_told_of(tmp_path: Path) -> None:
    command = ["python3", "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match="no such model"),
        served._server(command, tmp_path / "log"),
    ):
        pass
