"""VEGAS as SGLang's scheduler sees it: predicates, argument defaults, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_vegas_kernels.instances import (  # pyright: ignore[reportMissingImports]
    MAX_BATCH,
    MAX_QUERIES,
    MAX_ROW_TILES,
)

from sgl_vegas.config import DEFAULT_NUM_STEPS, VegasConfig
from sgl_vegas.selection.policy import build_policy
from sgl_vegas.sglang_compat import (
    AttentionArch,
    CustomSpecAlgo,
    FutureMap,
    ServerArgs,
    SpeculativeAlgorithm,
    attention_backends_of,
    disable_cuda_graphs,
    disable_overlap_on_cpu,
    register_prefix_cache,
    resolved_view,
)
from sgl_vegas.tables.radix_tree import warn_not_kept

logger = logging.getLogger(__name__)

NAME = "VEGAS"
PREFIX_CACHE = "vegas"
CUDA_HEAD_DIMS = tuple(MAX_ROW_TILES)
MAX_CUDA_STEPS = MAX_QUERIES - 1
# A row is for padding.
MAX_CUDA_REQUESTS = MAX_BATCH - 1
ATTENTION_BACKENDS = {"cuda": ("fa3", "flashinfer"), "cpu": ("torch_native",)}


class VegasSpecAlgo(CustomSpecAlgo):
    """A plug-in algorithm without a draft model.

    `is_standalone` is what SGLang asks before it builds a verify input without hidden states;
    `is_eagle` stays false, since it would shift every radix key by one token.
    """

    def is_standalone(self) -> bool:
        return True

    # The three methods that the scheduler calls and CustomSpecAlgo lacks.
    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        return FutureMap(
            device,
            self,  # pyright: ignore[reportArgumentType]  # duck-typed, as SGLang documents
            req_to_token_pool,
            needs_cpu_seq_lens,
            needs_confidence_relay,
        )

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Fill in what VEGAS implies. Called by SGLang after `validate`."""
        if server_args.speculative_num_steps is None:
            server_args.speculative_num_steps = DEFAULT_NUM_STEPS
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48
            logger.warning(
                "Max running requests is reset to 48 for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            )
        if server_args.enable_mixed_chunk:
            server_args.enable_mixed_chunk = False
            logger.warning("Mixed chunked prefill is disabled because of using VEGAS.")
        if server_args.device == "cpu" and server_args.grammar_backend in (None, "xgrammar"):
            # SGLang's use of xgrammar ends the scheduler there: pinned masks, GPU-only kernels.
            server_args.grammar_backend = "llguidance"
            logger.warning("Grammar backend is set to llguidance: xgrammar needs a GPU.")
        disable_overlap_on_cpu(server_args)
        config = VegasConfig.from_env(server_args.speculative_num_steps)
        if config.reuses_tables and server_args.radix_cache_backend in (None, PREFIX_CACHE):
            server_args.radix_cache_backend = PREFIX_CACHE
        elif config.reuses_tables:
            warn_not_kept(f"--radix-cache-backend {server_args.radix_cache_backend}")
        if server_args.device == "cpu":
            disable_cuda_graphs(server_args)
        elif not config.selects_in_kernels:
            disable_cuda_graphs(server_args)
            logger.warning(
                "CUDA graphs are disabled: policy %s with score mode %s selects in Python.",
                config.policy,
                config.score_mode,
            )


def register() -> None:
    """Register VEGAS with SGLang, once a process."""

    def create(server_args: ServerArgs) -> type:
        from sgl_vegas.worker import VegasWorker

        return VegasWorker

    SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=validate, spec_class=VegasSpecAlgo
    )(create)
    register_prefix_cache(PREFIX_CACHE, lambda tree, runner: runner.vegas_worker.connect(tree))


def validate(server_args: ServerArgs) -> None:
    """Refuse, by name, what VEGAS can't serve.

    Raises:
        ValueError: naming the flag or model, and what to do instead.
    """
    policy = build_policy(VegasConfig.from_env(server_args.speculative_num_steps))
    view = resolved_view(server_args)
    for refused, is_asked in _REFUSED_FLAGS.items():
        if is_asked(view):
            raise ValueError(f"VEGAS does not support {refused}.")
    num_steps = server_args.speculative_num_steps or DEFAULT_NUM_STEPS
    if server_args.device != "cpu" and num_steps > MAX_CUDA_STEPS:
        raise ValueError(
            f"VEGAS does not support --speculative-num-steps {num_steps} on a GPU; "
            f"use {MAX_CUDA_STEPS} or fewer."
        )
    max_requests = server_args.max_running_requests or 1
    if server_args.device != "cpu" and max_requests > MAX_CUDA_REQUESTS:
        raise ValueError(
            f"VEGAS does not support --max-running-requests {max_requests} on a GPU; "
            f"use {MAX_CUDA_REQUESTS} or fewer."
        )
    num_draft_tokens = server_args.speculative_num_draft_tokens
    if num_draft_tokens is not None and num_draft_tokens != num_steps + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens ({num_draft_tokens}) must be "
            f"--speculative-num-steps + 1 ({num_steps + 1}) with VEGAS; leave it out."
        )
    _validate_attention(view, server_args.device)
    _validate_model(server_args)
    model: Any = server_args.get_model_config()
    policy.check_server(
        model.num_hidden_layers,
        model.get_total_num_kv_heads(),
        model.head_dim,
        in_kernels=server_args.device != "cpu" and policy.config.selects_in_kernels,
    )


_REFUSED_FLAGS: dict[str, Callable[[Any], bool]] = {
    "--speculative-draft-model-path: it drafts with the target; leave it out": (
        lambda a: a.speculative_draft_model_path is not None
    ),
    "--speculative-eagle-topk other than 1: it drafts a chain; leave it out": (
        lambda a: a.speculative_eagle_topk not in (None, 1)
    ),
    "--speculative-adaptive; set --speculative-num-steps": lambda a: a.speculative_adaptive,
    "--speculative-token-map; leave it out": lambda a: a.speculative_token_map is not None,
    "--speculative-accept-threshold-single/-acc other than 1: it would not be lossless": (
        lambda a: (
            a.speculative_accept_threshold_single != 1.0
            or a.speculative_accept_threshold_acc != 1.0
        )
    ),
    # A replay would score no prompt.
    "--cuda-graph-backend-prefill full; leave it out": (
        lambda a: a.cuda_graph_backend_prefill == "full"
    ),
    "--page-size other than 1": lambda a: a.page_size not in (None, 1),
    # Nothing stands in its way, but ranks must agree on every drawn token, and that is not shown.
    "--tp-size other than 1 yet; use --dp-size": lambda a: a.tp_size != 1,
    "--enable-dp-attention; use --dp-size": lambda a: a.enable_dp_attention,
    "--pp-size other than 1; use --dp-size": lambda a: a.pp_size != 1,
    "decode context parallelism (--dcp-size); use --dp-size": lambda a: (a.dcp_size or 1) != 1,
    "prefill context parallelism (--attn-cp-size); use --dp-size": (
        lambda a: (a.attn_cp_size or 1) != 1
    ),
    "--disaggregation-mode prefill/decode; serve both phases in one process": (
        lambda a: a.disaggregation_mode != "null"
    ),
    "--enable-lmcache/--enable-flexkv: not tried with it; leave them out": (
        lambda a: a.enable_lmcache or a.enable_flexkv
    ),
    "--enable-hierarchical-cache; leave it out": lambda a: a.enable_hierarchical_cache,
    "--grammar-backend outlines; use xgrammar or llguidance": (
        lambda a: a.grammar_backend == "outlines"
    ),
    "--enable-two-batch-overlap; leave it out": lambda a: a.enable_two_batch_overlap,
    "--enable-pdmux; leave it out": lambda a: a.enable_pdmux,
    "--enable-hisparse; VEGAS selects KV itself": lambda a: a.enable_hisparse,
    "--enable-unified-memory; leave it out": lambda a: a.enable_unified_memory,
    "LoRA (--enable-lora, --lora-paths); merge the adapter into the model": (
        lambda a: bool(a.enable_lora or a.lora_paths)
    ),
    "--enable-deterministic-inference; use plain decoding for it": (
        lambda a: a.enable_deterministic_inference
    ),
    "--enable-custom-logit-processor; use logit_bias": lambda a: a.enable_custom_logit_processor,
    "--enable-return-hidden-states; use plain decoding for it": (
        lambda a: a.enable_return_hidden_states or a.return_hidden_states_mode is not None
    ),
    "diffusion models (--dllm-algorithm)": lambda a: a.dllm_algorithm is not None,
    "--tokenizer-worker-num above 1: SGLang does not load plug-ins in those processes": (
        lambda a: a.tokenizer_worker_num > 1
    ),
    "--enable-streaming-session: it would keep the KV of a token that has none yet; leave it out": (
        lambda a: a.enable_streaming_session
    ),
    "--smg-grpc-mode/--grpc-mode: its requests bypass the check of token ids; use HTTP": (
        lambda a: a.smg_grpc_mode or a.grpc_mode
    ),
    "--use-ray: SGLang does not load plug-ins in Ray actors": lambda a: bool(a.use_ray),
    "--kv-cache-dtype other than auto: verify and draft would read different numbers": (
        lambda a: a.kv_cache_dtype not in ("auto", "bfloat16", "bf16")
    ),
}


def _validate_attention(view: Any, device: str | None) -> None:
    allowed = ATTENTION_BACKENDS.get(device or "cuda")
    if allowed is None:
        raise ValueError(f"VEGAS runs on {tuple(ATTENTION_BACKENDS)} devices, not on {device!r}.")
    prefill, decode = attention_backends_of(view)
    if prefill != decode:
        raise ValueError(
            f"VEGAS uses one attention backend for prefill and verify, got prefill {prefill!r} and "
            f"decode {decode!r}; set --attention-backend alone."
        )
    if prefill is not None and prefill not in allowed:
        raise ValueError(
            f"VEGAS does not support --attention-backend {prefill} on {device}; "
            f"use one of {allowed}."
        )


def _validate_model(server_args: ServerArgs) -> None:
    model = server_args.get_model_config()
    name = (model.hf_config.architectures or ["?"])[0]
    reasons = {
        "its attention is not multi-head or grouped-query": (
            model.attention_arch != AttentionArch.MHA
        ),
        "it has sliding-window layers": model.is_hybrid_swa,
        "it is an encoder-decoder": model.is_encoder_decoder,
        "it takes images or audio": model.is_multimodal,
        "it has linear-attention or state-space layers": _has_recurrent_layers(
            model.hf_text_config
        ),
        "it has attention sinks": "GptOss" in name,
        f"its head dim is not one of {CUDA_HEAD_DIMS}": (
            server_args.device != "cpu" and model.head_dim not in CUDA_HEAD_DIMS
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"VEGAS does not support {name}: {reason}. Serve it without speculation."
            )


def _has_recurrent_layers(text_config: Any) -> bool:
    layer_types = getattr(text_config, "layer_types", None) or ()
    return any(kind in ("linear_attention", "mamba", "recurrent") for kind in layer_types) or any(
        hasattr(text_config, name)
        for name in ("mamba_d_state", "ssm_state_size", "linear_num_key_heads")
    )
