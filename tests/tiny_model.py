"""A Llama of two layers with random weights: small enough to know its distribution exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server_process import Server, has_cuda, launch_server
from tests.tiny_tokenizer import make_tokenizer

VOCAB_SIZE = 96
CONTEXT_LEN = 256
BATCH = 64
# More than 7, so that a step at the context limit allocates past SGLang's own row width.
NUM_STEPS = 10
MIN_TOKENS = 32
# One row a request; a full batch of long answers overflows the pool, since requests are admitted as
# if they would hardly generate.
POOL_TOKENS = 8000
SERVER_FLAGS = (
    *(("--dtype", "float16") if has_cuda() else ()),
    *("--max-running-requests", str(BATCH), "--max-total-tokens", str(POOL_TOKENS)),
    *("--schedule-conservativeness", "0.01"),
    *("--tool-call-parser", "qwen25"),
)
# Sparse from the first tokens on.
VEGAS_FLAGS = (
    *("--speculative-num-steps", str(NUM_STEPS)),
    *("--vegas-min-tokens", str(MIN_TOKENS), "--vegas-sparsity-ratio", "0.1"),
    *("--vegas-speculate-above", "0"),
)
# Plain SGLang counts penalties one step late under its overlap schedule, and caches a token more.
PLAIN_FLAGS = ("--disable-overlap-schedule",)


def make_tiny_model(folder: Path) -> LlamaForCausalLM:
    """Save the model to `folder` in float32 and give it in float64.

    Weights are large enough that attention is far from uniform, so that sparse drafts go wrong.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # The GPU kernels' smallest.
        head_dim=64 if has_cuda() else 16,
        max_position_embeddings=CONTEXT_LEN,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        # Exact in any type that a server holds it in.
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return model.double().eval()


@torch.no_grad()
def check_greedy(model: LlamaForCausalLM, ids: list[int], answer: list[int]) -> None:
    """Assert that each token of `answer` is the model's best after `ids`.

    On a GPU, where sums are rounded in half precision, the best but for a near-tie.
    """
    near_tie = 0.1 if has_cuda() else 0.0
    logits = model(torch.tensor([ids + answer])).logits[0]
    for index, token in enumerate(answer):
        row = logits[len(ids) + index - 1]
        assert row[token] >= row.max() - near_tie, f"prompt of {len(ids)} tokens, answer {index}"


@contextmanager
def tiny_server(
    folder: Path,
    *flags: str,
    algorithm: str | None = "VEGAS",
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server over the model in `folder`; plain SGLang where `algorithm` is None."""
    with launch_server(
        folder,
        algorithm=algorithm,
        extra_args=(*SERVER_FLAGS, *(VEGAS_FLAGS if algorithm else PLAIN_FLAGS), *flags),
        # Its kernels are so small that a second thread only waits, and that compiling one costs
        # more than it saves.
        env={
            **{"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
            # So that clients that are gone are noticed after a second instead of four.
            "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
            **(env or {}),
        },
        log_path=folder / f"{algorithm or 'plain'}.log",
    ) as server:
        yield server
