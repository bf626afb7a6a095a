"""How fast does VEGAS decode, against plain SGLang and against what the memory bus allows?

Starts plain SGLang and then VEGAS on this machine's device, with dummy weights of a config's
shapes, and measures steady decoding of a grid of batch x context: a client reads the streams, and
the VEGAS worker writes the GPU time of its phases. Dummy weights accept nothing by themselves, so
SGLang simulates a given number of tokens an iteration; the work of an iteration is all done.

    python benchmark/serving.py --config qwen3-8b --out benchmark/results/X.json \\
        [--plot benchmark/results/X.svg] [--cases 4x122880 64x1024] [-- --server-flag ...]

A case's context is that in the middle of its measurement. Both servers generate the same tokens
from the same lengths. Random prompts are cached first, so that all requests start together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import random
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import add_common_flags, commit, write_report  # noqa: E402
from benchmark.roofline import measure_hardware  # noqa: E402
from sgl_vegas.timing import TIMING_FILE  # noqa: E402
from sgl_vegas.tune.roofline import Hardware, ModelShape, floor  # noqa: E402
from sgl_vegas.tune.server_process import ServerStartError  # noqa: E402
from tests.server_process import (  # noqa: E402
    Server,
    free_port,
    has_cuda,
    server_command,
    start,
    stop,
    wait_until_healthy,
)

CONFIGS = Path(__file__).parent / "configs"
CONTEXT_LENGTH = 131072 + 4096
MAX_BATCH = 64
PROFILED_STEPS = 4
PROFILE_AFTER_S = 2.0  # the prompts are cached: decoding has begun
PROFILE_WRITE_S = 5
SILENCE_S = 300  # a stream that says nothing for so long is dead
# Drafts of the dummy model stand for accepted tokens. SGLang's other mode, one fixed token, would
# send a mixture of experts down the same few experts.
SIMULATION = {
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}


class BenchmarkError(RuntimeError):
    """A server or a measurement failed; the message is for the user.

    Attributes:
        detail: more lines for the screen, not for the report: they name this machine's paths.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class RefusedError(BenchmarkError):
    """VEGAS does not serve this model or these flags; the message is its own line."""


@dataclass(frozen=True)
class Case:
    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Of `BATCHxCONTEXT`."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxCONTEXT, such as 4x122880")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


def in_running_order(cases: Sequence[Case]) -> list[Case]:
    """Cases of one context together, the larger batch first: its prompts serve the smaller."""
    return sorted(set(cases), key=lambda case: (case.context, -case.batch))


@dataclass(frozen=True)
class Plan:
    """Lengths of one case, in tokens a request.

    Attributes:
        warm: not measured, at the start of decoding.
        measured: tokens of the window.
        interval: tokens between two chunks of a stream. One process sends every chunk, and 64
            streams of a chunk a step would load it fully.
        prompt: so long that `context` is reached in the middle of the window.
        new: what a request asks for; the rest behind the window covers uneven starts.
    """

    warm: int
    measured: int
    interval: int
    prompt: int
    new: int

    @classmethod
    def of(cls, case: Case, iterations: int, tokens_an_iteration: float, gamma: int) -> Plan:
        interval = max(1, case.batch // 8)
        margin = 2 * (gamma + 1) + interval
        measured = math.ceil(iterations * tokens_an_iteration)
        prompt = case.context - margin - measured // 2
        if prompt < 2:
            raise BenchmarkError(
                f"{case}: a context of {case.context} tokens is too short to measure {measured} "
                "tokens in; lower --iterations"
            )
        return cls(margin, measured, interval, prompt, margin + measured + margin)

    @property
    def longest(self) -> int:
        return self.prompt + self.new


def make_prompts(plan: Plan, batch: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, (batch, plan.prompt). Prompt i is the same for every batch; each starts
    with another token, so that no two share a cached prefix."""
    prompts = []
    for index in range(batch):
        draw = random.Random(f"{plan.prompt} {index}")
        prompts.append([index, *draw.choices(range(vocab_size), k=plan.prompt - 1)])
    return prompts


@dataclass(frozen=True)
class Chunk:
    """One chunk of a stream: request `index` had made `tokens` tokens at `time_s`."""

    time_s: float
    index: int
    tokens: int


@dataclass(frozen=True)
class Window:
    """Steady decoding of a batch, as the client saw it.

    Attributes:
        ms_per_token: of one request.
        tokens_per_s: of all requests.
        seconds: from the moment all requests were decoding to the first one's end.
        client_load: CPU seconds of this process a second; near 1 it would be the bottleneck.
        marks: what the caller's `mark` gave at both ends.
        finals: `meta_info` of every request's last chunk.
    """

    ms_per_token: float
    tokens_per_s: float
    seconds: float
    client_load: float
    marks: tuple[int, int]
    finals: list[dict[str, Any]]


class Recorder:
    """Collects the chunks of a batch and notices when steady decoding begins and ends.

    It begins when every request has made `warm` tokens, and ends when the first request ends: then
    the batch is no longer full.
    """

    def __init__(self, batch: int, warm: int, mark: Callable[[], int] = lambda: 0) -> None:
        self.warm = warm
        self.mark = mark
        self.counts = [0] * batch
        self.chunks: list[Chunk] = []
        self.finals: list[dict[str, Any]] = []
        self.began: tuple[float, float, int] | None = None
        self.ended: tuple[float, float, int] | None = None

    def add(self, index: int, meta: dict[str, Any], now: float) -> None:
        """Take a chunk's `meta_info`."""
        if meta.get("finish_reason"):
            self.finals.append(meta)
            self.ended = self.ended or (now, time.process_time(), self.mark())
            return  # its last run of tokens is cut at the limit: no measure of speed
        self.counts[index] = meta["completion_tokens"]
        self.chunks.append(Chunk(now, index, self.counts[index]))
        if self.began is None and min(self.counts) >= self.warm:
            self.began = (now, time.process_time(), self.mark())

    def window(self) -> Window:
        """
        Raises:
            BenchmarkError: if the requests never decoded together.
        """
        if self.began is None or self.ended is None or self.ended[0] <= self.began[0]:
            raise BenchmarkError(
                "the requests never decoded all at once; is the KV pool or --max-running-requests "
                "too small for them?"
            )
        if any(meta.get("num_retractions") for meta in self.finals):
            raise BenchmarkError("the KV pool is too small: SGLang retracted a request")
        (began, cpu_began, mark_began), (ended, cpu_ended, mark_ended) = self.began, self.ended
        rate = sum(
            request_rate([c for c in self.chunks if c.index == index and began <= c.time_s < ended])
            for index in range(len(self.counts))
        )
        return Window(
            ms_per_token=1e3 * len(self.counts) / rate,
            tokens_per_s=rate,
            seconds=ended - began,
            client_load=(cpu_ended - cpu_began) / (ended - began),
            marks=(mark_began, mark_ended),
            finals=self.finals,
        )


def request_rate(chunks: Sequence[Chunk]) -> float:
    """Tokens a second between a request's first and last chunk: both are the ends of steps, so
    the length of a step adds no error."""
    if len(chunks) < 3:
        raise BenchmarkError("a request sent under 3 chunks in the window; raise --iterations")
    first, last = chunks[0], chunks[-1]
    return (last.tokens - first.tokens) / (last.time_s - first.time_s)


def body_of(prompt: list[int], new_tokens: int, interval: int) -> bytes:
    sampling = {
        "temperature": 0,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "stream_interval": interval,
    }
    return json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True}).encode()


async def _read_stream(
    session: aiohttp.ClientSession, url: str, body: bytes, index: int, recorder: Recorder
) -> None:
    headers = {"Content-Type": "application/json"}
    async with session.post(url + "/generate", data=body, headers=headers) as response:
        if response.status != 200:
            raise BenchmarkError(f"/generate answered {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk or "abort" in str(chunk["meta_info"]["finish_reason"]):
                raise BenchmarkError(f"/generate failed: {str(chunk)[:500]}")
            recorder.add(index, chunk["meta_info"], time.perf_counter())


async def _read_streams(url: str, bodies: Sequence[bytes], recorder: Recorder) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        tasks = [
            asyncio.ensure_future(_read_stream(session, url, body, index, recorder))
            for index, body in enumerate(bodies)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:  # one failed: the others would wait in vain
            for task in tasks:
                task.cancel()


def steady_decode(
    url: str, prompts: list[list[int]], plan: Plan, mark: Callable[[], int] = lambda: 0
) -> Window:
    """Decode `prompts` together and measure the time in which all of them run.

    Args:
        mark: called once at each end of the window.
    """
    bodies = [body_of(prompt, plan.new, plan.interval) for prompt in prompts]
    recorder = Recorder(len(prompts), plan.warm, mark)
    asyncio.run(_read_streams(url, bodies, recorder))
    return recorder.window()


def tokens_per_iteration(finals: Sequence[dict[str, Any]]) -> float:
    """Mean over requests; 1 for plain SGLang. Not tokens / iterations: SGLang counts the last
    iteration whole, while the tokens it made past the limit are cut."""
    lengths = [
        1 + meta["spec_num_correct_drafts"] / meta["spec_verify_ct"]
        if meta.get("spec_verify_ct")
        else 1.0
        for meta in finals
    ]
    return statistics.mean(lengths)


@dataclass(frozen=True)
class Phases:
    """GPU time of one VEGAS iteration in ms, medians over a window.

    Attributes:
        mode: "speculate", or "plain" where VEGAS chose a plain step; then `draft_ms` is 0 and
            `verify_ms` is the plain step.
        draft_ms: all gamma draft steps.
        gap_ms: what is left of `iteration_ms`: accepting, sampling, waiting for the host.
        iterations: how many the medians are over.
    """

    mode: str
    draft_ms: float
    verify_ms: float
    gap_ms: float
    iteration_ms: float
    iterations: int


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_timing(path: Path, begin: int, end: int) -> list[dict[str, Any]]:
    """The whole lines that begin between two sizes the file had; both may cut a line."""
    with path.open("rb") as file:
        file.seek(max(begin - 1, 0))
        data = file.read(end - max(begin - 1, 0))
    if begin > 0:
        data = data.partition(b"\n")[2]
    return [json.loads(line) for line in data.rpartition(b"\n")[0].splitlines() if line]


def summarise(lines: Sequence[dict[str, Any]], batch: int) -> Phases | None:
    """Medians over the iterations of the whole batch in its commoner mode; None without any."""
    full = [line for line in lines if line["batch"] == batch and line["iteration_ms"] is not None]
    if not full:
        return None
    mode = statistics.mode(line["mode"] for line in full)
    full = [line for line in full if line["mode"] == mode]
    gaps = [line["iteration_ms"] - line["draft_ms"] - line["verify_ms"] for line in full]
    return Phases(
        mode=mode,
        draft_ms=statistics.median(line["draft_ms"] for line in full),
        verify_ms=statistics.median(line["verify_ms"] for line in full),
        gap_ms=statistics.median(gaps),
        iteration_ms=statistics.median(line["iteration_ms"] for line in full),
        iterations=len(full),
    )


@dataclass(frozen=True)
class Measurement:
    """One case on one server: the median of the repeats by time a token.

    Attributes:
        spread: (slowest - fastest) / median over the repeats.
    """

    ms_per_token: float
    tokens_per_s: float
    tokens_per_iteration: float
    phases: Phases | None
    spread: float
    client_load: float
    window_s: float


def measure_case(
    server: Server,
    plan: Plan,
    prompts: list[list[int]],
    repeats: int,
    timing: Path,
    say: Callable[[str], None],
) -> Measurement:
    say(f"caching {len(prompts)} prompts of {plan.prompt} tokens")
    # Also compiles and loads what the first iterations of this batch size need.
    server.generate(prompts, temperature=0, max_new_tokens=plan.warm, ignore_eos=True)
    windows: list[Window] = []
    for repeat in range(1, repeats + 1):
        windows.append(steady_decode(server.url, prompts, plan, lambda: size_of(timing)))
        say(
            f"window {repeat} of {repeats}: {windows[-1].ms_per_token:.2f} ms a token, "
            f"{windows[-1].tokens_per_s:.0f} tokens/s over {windows[-1].seconds:.1f} s"
        )
    windows.sort(key=lambda window: window.ms_per_token)
    median = windows[(len(windows) - 1) // 2]
    lines = read_timing(timing, *median.marks) if timing.exists() else []
    return Measurement(
        ms_per_token=median.ms_per_token,
        tokens_per_s=median.tokens_per_s,
        tokens_per_iteration=tokens_per_iteration(median.finals),
        phases=summarise(lines, len(prompts)),
        spread=(windows[-1].ms_per_token - windows[0].ms_per_token) / median.ms_per_token,
        client_load=median.client_load,
        window_s=median.seconds,
    )


def profile_decoding(server: Server, plan: Plan, prompts: list[list[int]], folder: Path) -> None:
    """Let SGLang write a GPU trace of a few steps in the middle of decoding to `folder`."""
    body = {"output_dir": str(folder), "num_steps": PROFILED_STEPS, "activities": ["GPU"]}
    decoding = threading.Timer(
        PROFILE_AFTER_S, lambda: server.request("POST", "/start_profile", body)
    )
    decoding.start()
    server.generate(prompts, temperature=0, max_new_tokens=plan.new, ignore_eos=True)
    decoding.join()
    time.sleep(PROFILE_WRITE_S)


class Progress:
    """Prints what is going on, with the seconds since the start."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    env: dict[str, str],
    log: Path,
    deadline_s: float,
    say: Callable[[str], None],
) -> Iterator[Server]:
    """A healthy server until the block ends.

    Raises:
        BenchmarkError: if it does not start, or dies under the block, with its log's end.
    """
    process = start(command, env, log)
    server = Server(f"http://127.0.0.1:{command[command.index('--port') + 1]}", log)
    try:
        told = 0.0
        for waited in wait_until_healthy(server, process, deadline_s):
            if waited - told > 15:
                told = waited
                say("still starting")
        say("healthy")
        yield server
    except ServerStartError as error:
        if refusal := find_refusal(server.log()):
            raise RefusedError(refusal) from error
        what, _, tail = str(error).partition("; ")
        raise BenchmarkError(what, tail) from error
    except (aiohttp.ClientError, asyncio.TimeoutError, requests.RequestException) as error:
        raise BenchmarkError(
            f"the server failed ({type(error).__name__}: {error})",
            f"the end of {log}:\n{server.log_tail()}",
        ) from error
    finally:
        stop(process)


def find_refusal(log: str) -> str | None:
    """VEGAS's own line in a server's log, if it refused to start."""
    found = re.findall(r"ValueError: (VEGAS .*|--(?:vegas|speculative)-.*)", log)
    return found[-1].strip() if found else None


def server_flags(options: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    """Flags of both servers, the user's last: a later flag wins."""
    flags = [
        *("--skip-tokenizer-init", "--load-format", "dummy", "--incremental-streaming-output"),
        *("--context-length", str(context_length(config))),
    ]
    if has_cuda():
        batch = str(max(MAX_BATCH, *(case.batch for case in options.cases)))
        flags += [
            *("--attention-backend", "fa3", "--max-running-requests", batch),
            *("--chunked-prefill-size", "16384", "--cuda-graph-max-bs-decode", batch),
            # Prefill is not measured, and capturing its graphs takes long.
            *("--cuda-graph-backend-prefill", "disabled"),
        ]
    return flags + list(options.server_args)


def vegas_flags(options: argparse.Namespace) -> list[str]:
    return [
        *("--speculative-num-steps", str(options.num_steps)),
        *("--vegas-sparsity-ratio", str(options.ratio)),
        *shlex.split(options.vegas_flags),
    ]


def vegas_env(options: argparse.Namespace, timing: Path) -> dict[str, str]:
    env = {TIMING_FILE: str(timing)}
    if options.tokens_per_iteration:
        env["SGLANG_SIMULATE_ACC_LEN"] = str(options.tokens_per_iteration)
        env |= SIMULATION
    return env


def context_length(config: dict[str, Any]) -> int:
    return min(config["max_position_embeddings"], CONTEXT_LENGTH)


def measure_server(
    options: argparse.Namespace,
    name: str,
    config: dict[str, Any],
    plans: dict[Case, Plan],
    progress: Progress,
) -> dict[Case, Measurement]:
    """All cases on one server, "plain" or "vegas"."""
    vegas = name == "vegas"
    timing = options.log_dir / "serving_vegas_timing.jsonl"
    timing.unlink(missing_ok=True)
    flags = server_flags(options, config) + (vegas_flags(options) if vegas else [])
    command = server_command(options.config, "VEGAS" if vegas else None, free_port(), flags)
    env = vegas_env(options, timing) if vegas else {}
    log = options.log_dir / f"serving_{name}.log"
    progress(f"{name}: starting, log {log}")
    results = {}
    with running_server(
        command, env, log, options.start_timeout, lambda text: progress(f"{name}: {text}")
    ) as server:
        context = None
        for number, (case, plan) in enumerate(plans.items(), 1):
            if context not in (None, case.context):
                server.flush_cache()  # nothing shared, and room in the KV pool
            context = case.context
            results[case] = measure_case(
                server,
                plan,
                make_prompts(plan, case.batch, config["vocab_size"]),
                options.repeats,
                timing,
                lambda text, case=case, number=number: progress(
                    f"{name}: case {number} of {len(plans)}, {case}: {text}"
                ),
            )
        if options.profile and vegas:
            # Of the longest context's first case, whose prompts are in the cache now.
            case = next(case for case in plans if case.context == context)
            progress(f"{name}: {case}: tracing {PROFILED_STEPS} iterations")
            prompts = make_prompts(plans[case], case.batch, config["vocab_size"])
            profile_decoding(server, plans[case], prompts, options.profile / f"{name}_{case}")
    return results


def case_report(
    options: argparse.Namespace,
    shape: ModelShape,
    hardware: Hardware,
    case: Case,
    plain: Measurement | None,
    vegas: Measurement | None,
) -> dict[str, Any]:
    """One entry of the report's `cases`; times in ms, what was not measured is None."""
    gamma, asked = options.num_steps, options.tokens_per_iteration
    phases = vegas.phases if vegas else None
    speculated = phases is None or phases.mode == "speculate"
    limit = floor(shape, hardware, case.batch, case.context, gamma, options.ratio)
    # Where VEGAS chose plain steps: what speculation could have given.
    roofline_tokens = vegas.tokens_per_iteration if vegas and speculated else asked
    return {
        "model": options.config.name,
        "batch": case.batch,
        "context": case.context,
        "mode": phases.mode if phases else None,
        "baseline_step_ms": plain.ms_per_token if plain else None,
        "draft_step_ms": phases.draft_ms / gamma if phases and speculated else None,
        "verify_ms": phases.verify_ms if phases else None,
        "gap_ms": phases.gap_ms if phases else None,
        "iteration_ms": phases.iteration_ms if phases else None,
        "timed_iterations": phases.iterations if phases else 0,
        "tokens_per_iteration": vegas.tokens_per_iteration if vegas else None,
        "simulated": bool(vegas and asked and speculated),
        "vegas_ms_per_token": vegas.ms_per_token if vegas else None,
        "speedup": plain.ms_per_token / vegas.ms_per_token if plain and vegas else None,
        "roofline_speedup": limit.speedup(gamma, roofline_tokens) if roofline_tokens else None,
        "roofline_plain_ms": limit.plain_ms,
        "roofline_draft_ms": limit.draft_ms,
        "roofline_verify_ms": limit.verify_ms,
        "baseline_tokens_per_s": plain.tokens_per_s if plain else None,
        "vegas_tokens_per_s": vegas.tokens_per_s if vegas else None,
        "baseline_spread": plain.spread if plain else None,
        "vegas_spread": vegas.spread if vegas else None,
        "client_load": max(m.client_load for m in (plain, vegas) if m) if plain or vegas else None,
    }


def build_report(
    options: argparse.Namespace,
    config: dict[str, Any],
    hardware: Hardware,
    results: dict[str, dict[Case, Measurement]],
    failure: str | None,
) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    plain, vegas = results.get("plain", {}), results.get("vegas", {})
    return {
        "gpu": hardware.name,
        "commit": options.commit or commit(),
        "model": options.config.name,
        "gamma": options.num_steps,
        "ratio": options.ratio,
        "copy_bandwidth_tb_s": hardware.copy_bandwidth / 1e12,
        "matrix_tflop_s": hardware.matrix_rate / 1e12,
        "simulation": (
            {"tokens_per_iteration": options.tokens_per_iteration, **SIMULATION}
            if options.tokens_per_iteration
            else None
        ),
        "weights": "dummy",
        "server_flags": server_flags(options, config),
        "vegas_flags": vegas_flags(options),
        "iterations": options.iterations,
        "repeats": options.repeats,
        "failure": failure,
        "cases": [
            case_report(options, shape, hardware, case, plain.get(case), vegas.get(case))
            for case in options.cases
        ],
    }


def table(report: dict[str, Any]) -> str:
    """One line a case; behind a time, in brackets, its ratio to the plain step."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def ratio(value: float | None, base: float | None) -> str:
        return number(value) + (f" ({value / base:.2f})" if value is not None and base else "")

    gamma = report["gamma"]
    lines = [
        f"{report['model']} on {report['gpu']}, {report['copy_bandwidth_tb_s']:.2f} TB/s, "
        f"gamma {gamma}, ratio {report['ratio']}; times in ms, in brackets against a plain step",
        f"{'case':>10} {'plain':>7} {'draft step':>13} {'verify':>13} {'gaps':>6} {'iteration':>9} "
        f"{'tokens/it':>9} {'tokens/s':>15} {'speed-up':>8} {'roofline':>8}  mode",
    ]
    for case in report["cases"]:
        base = case["baseline_step_ms"]
        rates = f"{number(case['baseline_tokens_per_s'], 0)} -> "
        rates += number(case["vegas_tokens_per_s"], 0)
        simulated = "~" if case["simulated"] else ""
        lines.append(
            f"{case['batch']}x{case['context']}".rjust(10)
            + f" {number(base):>7} {ratio(case['draft_step_ms'], base):>13}"
            f" {ratio(case['verify_ms'], base):>13} {number(case['gap_ms']):>6}"
            f" {number(case['iteration_ms']):>9}"
            f" {simulated + number(case['tokens_per_iteration']):>9} {rates:>15}"
            f" {number(case['speedup']):>8} {number(case['roofline_speedup']):>8}"
            f"  {case['mode'] or '-'}"
        )
    if any(case["simulated"] for case in report["cases"]):
        lines.append("~ simulated: the weights are dummies")
    return "\n".join(lines)


def find_config(name: str) -> Path:
    """A folder with a config.json: one of benchmark/configs/, or a path."""
    path = Path(name)
    for folder in (CONFIGS / name, path.parent if path.is_file() else path):
        if (folder / "config.json").is_file():
            return folder.resolve()
    known = ", ".join(sorted(path.parent.name for path in CONFIGS.glob("*/config.json")))
    raise argparse.ArgumentTypeError(f"no config.json in {name!r}; names are {known}")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode speed of VEGAS against plain SGLang and the roofline."
    )
    add_common_flags(parser)
    parser.set_defaults(num_steps=6)
    parser.add_argument(
        "--config",
        "--model-path",
        dest="config",
        type=find_config,
        default="qwen3-8b",
        help="a folder of benchmark/configs/, or a path",
    )
    default_cases = ["4x122880", "1x122880", "32x16384", "64x1024"]
    parser.add_argument("--cases", nargs="+", metavar="BATCHxCONTEXT", default=default_cases)
    parser.add_argument("--ratio", type=float, default=0.07, help="sparsity ratio")
    parser.add_argument(
        "--tokens-per-iteration",
        type=float,
        default=6.24,
        help="simulated; 0: what the weights accept",
    )
    parser.add_argument("--iterations", type=int, default=64, help="of VEGAS, in a window")
    parser.add_argument("--repeats", type=int, default=3, help="windows a case; the median counts")
    parser.add_argument("--only", choices=["plain", "vegas", "both"], default="both")
    parser.add_argument("--vegas-flags", default="", help="more flags for VEGAS, one string")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds")
    parser.add_argument("--plot", type=Path, nargs="+", default=[], help=".png or .svg; see plots")
    parser.add_argument(
        "--profile", type=Path, help="folder for a GPU trace of VEGAS; see trace_table.py"
    )
    options = parser.parse_args(arguments)
    if options.tokens_per_iteration and not (
        1 <= options.tokens_per_iteration <= options.num_steps + 1
    ):
        parser.error("--tokens-per-iteration must be from 1 to --num-steps + 1, or 0")
    try:
        options.cases = in_running_order([Case.parse(text) for text in options.cases])
    except argparse.ArgumentTypeError as error:
        parser.error(f"--cases: {error}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def make_plans(options: argparse.Namespace, config: dict[str, Any]) -> dict[Case, Plan]:
    tokens = options.tokens_per_iteration or options.num_steps + 1
    plans = {
        case: Plan.of(case, options.iterations, tokens, options.num_steps) for case in options.cases
    }
    for case, plan in plans.items():
        if plan.longest + options.num_steps >= context_length(config):
            raise BenchmarkError(
                f"{case}: needs {plan.longest} tokens, the servers' context length is "
                f"{context_length(config)}"
            )
    return plans


def main() -> None:
    options = parse_options()
    # As an exception, so that the servers, in process groups of their own, end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = json.loads((options.config / "config.json").read_text())
    progress = Progress()
    results: dict[str, dict[Case, Measurement]] = {}
    failure = None
    try:
        plans = make_plans(options, config)
        options.log_dir.mkdir(parents=True, exist_ok=True)
        progress("measuring the device")
        hardware = measure_hardware()
    except (BenchmarkError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    try:
        for name in ("plain", "vegas") if options.only == "both" else (options.only,):
            results[name] = measure_server(options, name, config, plans, progress)
    except RefusedError as error:
        failure = f"VEGAS refused {options.config.name}: {error}"
    except BenchmarkError as error:
        print(error.detail, file=sys.stderr)
        failure = str(error)
    report = build_report(options, config, hardware, results, failure)
    write_report(report, options.out)
    if options.plot and not failure:
        from benchmark.plots import plot

        plot(report, options.plot)
    if results:
        print(table(report))
    if failure:
        sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
