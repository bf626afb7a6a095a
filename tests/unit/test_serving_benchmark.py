"""benchmark/serving.py without a server: roofline, cases, timing file, report, and the client."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmark import serving
from benchmark.serving import (
    BenchmarkError,
    Case,
    Measurement,
    Phases,
    Plan,
    Recorder,
    find_refusal,
    in_running_order,
    make_prompts,
    parse_options,
    read_timing,
    steady_decode,
    summarise,
    table,
    tokens_per_iteration,
)
from sgl_vegas.tune.roofline import Hardware, ModelShape, floor

H200 = Hardware(name="H200", copy_bandwidth=4.27e12, matrix_rate=790e12)
STEP_S = 0.01


def config_of(name: str) -> dict[str, Any]:
    return json.loads((serving.CONFIGS / name / "config.json").read_text())


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(config_of(name))


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("qwen3-4b", 4.02e9, 147_456),
        ("qwen3-8b", 8.19e9, 147_456),
        ("qwen3-30b-a3b", 30.5e9, 98_304),
        ("gpt-oss-20b", 20.9e9, 49_152),
    ],
)
def test_configs_have_the_published_sizes(name: str, parameters: float, kv_bytes: int) -> None:
    shape = shape_of(name)
    assert shape.stored_bytes / 2 == pytest.approx(parameters, rel=0.005)
    assert shape.kv_bytes_a_token == kv_bytes


def test_weights_of_qwen3_8b() -> None:
    shape = shape_of("qwen3-8b")
    assert shape.stored_bytes == pytest.approx(16.4e9, rel=0.002)
    # By hand; a step reads all but the embedding, 151936 x 4096.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    assert shape.read_bytes(1) == shape.read_bytes(64) == 2 * (36 * layer + 151936 * 4096)
    assert shape.stored_bytes - shape.read_bytes(1) == 2 * 151936 * 4096


def test_floor_of_qwen3_8b() -> None:
    shape = shape_of("qwen3-8b")
    limit = floor(shape, H200, batch=4, context=122_880, gamma=6, ratio=0.07)
    kv = 4 * 122_880 * 147_456
    assert limit.plain_ms == pytest.approx(1e3 * (15.136e9 + kv) / 4.27e12, rel=1e-3)
    # With the embedding's bytes it is the design's 20.8 ms.
    assert 1e3 * (shape.stored_bytes + kv) / 4.27e12 == pytest.approx(20.8, abs=0.05)
    assert limit.draft_ms == pytest.approx(1e3 * (15.136e9 + 0.07 * kv) / 4.27e12, rel=1e-3)
    assert limit.verify_ms == pytest.approx(limit.plain_ms)  # 28 tokens: no matter to the matrices
    expected = 6.24 * limit.plain_ms / (6 * limit.draft_ms + limit.verify_ms)
    assert limit.speedup(6, 6.24) == pytest.approx(expected)
    assert 2.6 < expected < 2.65


def test_many_tokens_are_bound_by_the_matrices() -> None:
    shape = shape_of("qwen3-8b")
    limit = floor(shape, H200, batch=64, context=1024, gamma=6, ratio=0.07)
    kv_s = 64 * 1024 * 147_456 / 4.27e12
    compute_s = 7 * 64 * 15.136e9 / 790e12  # two operations a parameter, two bytes a parameter
    assert limit.verify_ms == pytest.approx(1e3 * (compute_s + kv_s), rel=1e-3)


def test_drafts_read_what_vegas_config_says() -> None:
    from sgl_vegas.config import VegasConfig

    shape = ModelShape.from_config(config_of("qwen3-8b"))
    for context in (100, 256, 1024, 16_384, 122_880):
        limit = floor(shape, H200, batch=4, context=context, gamma=6, ratio=0.07)
        full_ms = 1e3 * 4 * shape.kv_bytes(context) / H200.copy_bandwidth
        kv_bytes = 147_456 * VegasConfig().budget(context)
        draft_ms = limit.plain_ms - full_ms + 1e3 * 4 * kv_bytes / H200.copy_bandwidth
        assert limit.draft_ms == pytest.approx(draft_ms)


def test_experts_touched() -> None:
    shape = shape_of("qwen3-30b-a3b")
    assert shape.experts_touched(1) == pytest.approx(8)
    assert shape.experts_touched(2) == pytest.approx(8 + 8 * 120 / 128)
    assert shape.experts_touched(10_000) == pytest.approx(128)
    assert shape_of("qwen3-8b").experts_touched(5) == 1


def test_sliding_layers_read_their_window() -> None:
    shape = shape_of("gpt-oss-20b")
    assert shape.kv_bytes(100_000) == 2048 * 12 * (100_000 + 128)
    assert shape.kv_bytes(100_000, attended=7000) == 2048 * 12 * (7000 + 128)


def test_parses_cases() -> None:
    assert Case.parse("4x122880") == Case(batch=4, context=122_880)
    assert str(Case(64, 1024)) == "64x1024"
    for text in ("4", "4x", "x4", "0x5", "4X5", "4x5x6", "-1x5"):
        with pytest.raises(argparse.ArgumentTypeError, match="BATCHxCONTEXT"):
            Case.parse(text)


def test_larger_batch_of_a_context_runs_first() -> None:
    cases = [Case(1, 122_880), Case(64, 1024), Case(4, 122_880), Case(1, 122_880)]
    assert in_running_order(cases) == [Case(64, 1024), Case(4, 122_880), Case(1, 122_880)]


def test_options() -> None:
    options = parse_options(
        ["--config", "qwen3-4b", "--cases", "1x512", "4x512", "--num-steps", "9", "--", "--x", "1"]
    )
    assert options.config.name == "qwen3-4b"
    assert options.cases == [Case(4, 512), Case(1, 512)]
    assert (options.num_steps, options.server_args) == (9, ["--x", "1"])
    assert parse_options([]).num_steps == 6
    by_path = parse_options(["--config", str(serving.CONFIGS / "qwen3-4b" / "config.json")])
    assert by_path.config == options.config
    for wrong in (
        ["--config", "qwen2"],
        ["--cases", "4y5"],
        ["--tokens-per-iteration", "7.5"],
        ["--tokens-per-iteration", "0.5"],
    ):
        with pytest.raises(SystemExit):
            parse_options(wrong)


def test_plan_reaches_its_context_in_mid_window() -> None:
    plan = Plan.of(Case(4, 122_880), iterations=64, tokens_an_iteration=6.24, gamma=6)
    assert plan.measured == 400
    assert plan.prompt + plan.warm + plan.measured // 2 == 122_880
    assert plan.interval == 1
    assert Plan.of(Case(64, 1024), 64, 6.24, 6).interval == 8
    with pytest.raises(BenchmarkError, match="too short"):
        Plan.of(Case(1, 200), 64, 6.24, 6)


def test_prompts_are_shared_across_batches_and_by_nothing_else() -> None:
    plan = Plan(warm=1, measured=10, interval=1, prompt=50, new=12)
    prompts = make_prompts(plan, 8, vocab_size=1000)
    assert [len(prompt) for prompt in prompts] == [50] * 8
    assert len({prompt[0] for prompt in prompts}) == 8
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert make_prompts(plan, 2, vocab_size=1000) == prompts[:2]


def timing_line(batch: int, iteration_ms: float | None, mode: str = "speculate") -> dict[str, Any]:
    return {
        "mode": mode,
        "batch": batch,
        "draft_ms": 30.0 if mode == "speculate" else 0.0,
        "verify_ms": 22.0,
        "iteration_ms": iteration_ms,
    }


def test_reads_the_timing_of_a_window(tmp_path: Path) -> None:
    path = tmp_path / "timing.jsonl"
    rows = [json.dumps(timing_line(4, float(number))) + "\n" for number in range(5)]
    path.write_text("".join(rows))
    edges = [0]
    for row in rows:
        edges.append(edges[-1] + len(row))

    def numbers(begin: int, end: int) -> list[float]:
        return [line["iteration_ms"] for line in read_timing(path, begin, end)]

    assert numbers(0, edges[5]) == [0, 1, 2, 3, 4]
    assert numbers(edges[1], edges[3]) == [1, 2]
    assert numbers(edges[1] + 3, edges[3]) == [2]  # the file ended within line 1 at that moment
    assert numbers(edges[1], edges[3] + 5) == [1, 2]
    assert numbers(edges[2], edges[2]) == []


def test_summarises_full_batches_in_the_commoner_mode() -> None:
    lines = [timing_line(4, ms) for ms in (54.0, 55.0, 90.0)]
    lines += [timing_line(3, 10.0), timing_line(4, None), timing_line(4, 21.0, "plain")]
    assert summarise(lines, batch=4) == Phases("speculate", 30.0, 22.0, 3.0, 55.0, 3)
    assert summarise(lines, batch=2) is None
    plain = summarise([timing_line(1, 23.0, "plain")], batch=1)
    assert plain is not None and (plain.mode, plain.draft_ms, plain.gap_ms) == ("plain", 0.0, 1.0)


def test_tokens_per_iteration() -> None:
    speculative = [
        {"spec_num_correct_drafts": 52, "spec_verify_ct": 10},
        {"spec_num_correct_drafts": 54, "spec_verify_ct": 10},
    ]
    assert tokens_per_iteration(speculative) == pytest.approx(6.3)
    assert tokens_per_iteration([{"completion_tokens": 100}]) == 1.0


def meta(tokens: int, finished: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "completion_tokens": tokens,
        "finish_reason": {"type": "length"} if finished else None,
        **more,
    }


def test_window_is_where_all_requests_decode() -> None:
    """Request 0 starts at once and fast; it is slower, 10 ms a token, when request 1 runs too."""
    marks = iter([100, 200])
    recorder = Recorder(2, warm=3, mark=lambda: next(marks))
    for step in range(50):
        recorder.add(0, meta(step + 1), step * 0.001)
    for step in range(40):
        recorder.add(0, meta(51 + step), 1 + step * 0.010)
        recorder.add(1, meta(1 + step), 1.001 + step * 0.010)
    recorder.add(0, meta(91, finished=True), 1.4)
    for step in range(30):  # alone again, and not measured
        recorder.add(1, meta(41 + step), 1.4 + step * 0.001)
    recorder.add(1, meta(71, finished=True), 1.44)
    window = recorder.window()
    assert window.ms_per_token == pytest.approx(10)
    assert window.tokens_per_s == pytest.approx(200)
    assert window.seconds == pytest.approx(1.4 - 1.021)
    assert window.marks == (100, 200)
    assert len(window.finals) == 2


def test_window_refuses_what_it_cannot_measure() -> None:
    recorder = Recorder(2, warm=1)
    for step in range(1, 10):
        recorder.add(0, meta(step), step * 0.01)
    recorder.add(0, meta(10, finished=True), 0.1)
    for step in range(1, 10):
        recorder.add(1, meta(step), 0.1 + step * 0.01)
    recorder.add(1, meta(10, finished=True), 0.2)
    with pytest.raises(BenchmarkError, match="never decoded all at once"):
        recorder.window()

    recorder = Recorder(1, warm=1)
    for step in range(1, 10):
        recorder.add(0, meta(step), step * 0.01)
    recorder.add(0, meta(10, finished=True, num_retractions=1), 0.2)
    with pytest.raises(BenchmarkError, match="retracted"):
        recorder.window()


class FakeSGLang(BaseHTTPRequestHandler):
    """Streams as SGLang does under --skip-tokenizer-init and --incremental-streaming-output: 6 or
    7 tokens a step of STEP_S, request i i * STEP_S later than request 0."""

    answered: list[tuple[float, int]]  # of request 0: when, and tokens so far

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            self.send_error(404)
            return
        assert body["stream"] is True
        assert body["sampling_params"]["ignore_eos"] is True
        index, limit = body["input_ids"][0], body["sampling_params"]["max_new_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(index * STEP_S)
        tokens, steps = 1, 0
        self.chunk(index, tokens, limit, steps)
        while tokens < limit:
            time.sleep(STEP_S)
            steps += 1
            tokens = min(limit, tokens + 6 + steps % 2)
            self.chunk(index, tokens, limit, steps)
        self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, index: int, tokens: int, limit: int, steps: int) -> None:
        info = meta(tokens, finished=tokens == limit, num_retractions=0)
        if tokens == limit:
            info |= {"spec_verify_ct": steps, "spec_num_correct_drafts": 5.5 * steps}
        if index == 0 and tokens < limit:
            self.answered.append((time.perf_counter(), tokens))
        text = json.dumps({"output_ids": [7], "meta_info": info})
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake_url() -> Iterator[str]:
    FakeSGLang.answered = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeSGLang)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_client_measures_a_servers_rate(fake_url: str) -> None:
    plan = Plan.of(Case(4, 2048), iterations=40, tokens_an_iteration=6.5, gamma=6)
    window = steady_decode(fake_url, make_prompts(plan, 4, 1000), plan)
    # Against what the server did, not what it was to do: sleeping is inexact on a busy machine.
    (began, first), (ended, last) = FakeSGLang.answered[5], FakeSGLang.answered[-1]
    assert window.ms_per_token == pytest.approx(1e3 * (ended - began) / (last - first), rel=0.25)
    assert window.tokens_per_s == pytest.approx(4e3 / window.ms_per_token)
    assert tokens_per_iteration(window.finals) == 6.5


def test_client_reports_a_refused_request(fake_url: str) -> None:
    plan = Plan(warm=1, measured=10, interval=1, prompt=2, new=12)
    with pytest.raises(BenchmarkError, match="answered 404"):
        steady_decode(fake_url + "/nothing", [[0, 1]], plan)


def test_finds_a_refusal() -> None:
    log = (
        "ValueError: earlier\nTraceback (most recent call last):\n"
        "ValueError: VEGAS does not support GptOssForCausalLM: it has attention sinks. Serve it\n"
        "later lines\n"
    )
    assert find_refusal(log) == (
        "VEGAS does not support GptOssForCausalLM: it has attention sinks. Serve it"
    )
    assert find_refusal("RuntimeError: CUDA out of memory\n") is None


CASE_KEYS = {
    *("model", "batch", "context", "baseline_step_ms", "draft_step_ms", "verify_ms", "gap_ms"),
    *("iteration_ms", "tokens_per_iteration", "simulated", "speedup", "roofline_speedup"),
    *("baseline_tokens_per_s", "vegas_tokens_per_s", "mode"),
}


def measurement(ms: float, tokens: float, phases: Phases | None) -> Measurement:
    return Measurement(ms, 4e3 / ms, tokens, phases, spread=0.01, client_load=0.1, window_s=5)


@pytest.fixture
def report() -> dict[str, Any]:
    """One speculated case, one that VEGAS decoded plainly, one that was not measured."""
    options = parse_options(
        ["--cases", "4x122880", "64x1024", "1x512", "--commit", "abc", "--iterations", "32"]
    )
    unmeasured, short, big = options.cases
    assert unmeasured == Case(1, 512)
    speculated = Phases("speculate", 33.0, 22.5, 1.5, 57.0, 60)
    plainly = Phases("plain", 0.0, 6.5, 0.1, 6.6, 60)
    results = {
        "plain": {big: measurement(21.4, 1, None), short: measurement(6.5, 1, None)},
        "vegas": {big: measurement(9.1, 6.2, speculated), short: measurement(6.6, 1, plainly)},
    }
    return serving.build_report(options, config_of("qwen3-8b"), H200, results, None)


def test_report(report: dict[str, Any]) -> None:
    assert {"gpu", "commit", "gamma", "ratio", "copy_bandwidth_tb_s", "cases"} <= report.keys()
    assert (report["gpu"], report["commit"], report["gamma"]) == ("H200", "abc", 6)
    assert report["copy_bandwidth_tb_s"] == pytest.approx(4.27)
    for case in report["cases"]:
        assert case.keys() >= CASE_KEYS
    unmeasured, short, big = report["cases"]
    assert big["draft_step_ms"] == 5.5
    assert big["speedup"] == pytest.approx(21.4 / 9.1)
    assert big["roofline_speedup"] == pytest.approx(6.2 * 20.518 / (6 * 4.733 + 20.518), rel=1e-3)
    assert (big["simulated"], big["mode"]) == (True, "speculate")
    assert (short["draft_step_ms"], short["simulated"], short["mode"]) == (None, False, "plain")
    assert short["roofline_speedup"] == pytest.approx(1.02, abs=0.01)  # of speculation
    assert unmeasured["speedup"] is None and unmeasured["mode"] is None
    assert json.loads(json.dumps(report)) == report


def test_table(report: dict[str, Any]) -> None:
    text = table(report)
    assert "4x122880   21.40   5.50 (0.26)  22.50 (1.05)   1.50     57.00     ~6.20" in text
    assert "~ simulated" in text
    assert [line.rsplit(maxsplit=1)[-1] for line in text.splitlines()[2:5]] == [
        *("-", "plain", "speculate")
    ]
