"""Every touch-point of sgl_vegas with SGLang, read from and checked against one version.

All other modules take SGLang's names from here, so that an upgrade is a review of this file and
of `docs/upstream.md`. On another SGLang version the import fails: these names drift between
releases, and a silent mismatch would corrupt KV or statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.arg_groups.speculative_hook import _disable_overlap_schedule_for_cpu
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner import get_batch_sizes_to_capture, model_capture_mode
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.observability.req_time_stats import set_time_batch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from sglang.srt.runtime_context import get_spec as get_spec_settings
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    GrammarTree,
    build_grammar_vocab_mask,
    generate_simulated_accept_index,
    record_stream_each,
    record_stream_for_v2_verify,
    spec_stage_span,
)
from sglang.srt.utils import get_available_gpu_memory

SUPPORTED_VERSION = "0.5.17"

if sglang.__version__ != SUPPORTED_VERSION:
    raise ImportError(
        f"sgl_vegas works with sglang=={SUPPORTED_VERSION}, found {sglang.__version__}. "
        f"Install sglang=={SUPPORTED_VERSION}."
    )

__all__ = [
    "SIMULATE_ACC_LEN",
    "AttentionArch",
    "AttentionBackend",
    "AttentionType",
    "BasePrefixCache",
    "BaseSpecWorker",
    "CaptureHiddenMode",
    "CustomSpecAlgo",
    "EagleVerifyInput",
    "ForwardBatch",
    "ForwardContext",
    "ForwardMode",
    "FutureMap",
    "GenerationBatchResult",
    "GrammarTree",
    "GuidanceGrammar",
    "LogitsProcessorOutput",
    "PositionalEmbeds",
    "RadixAttention",
    "Req",
    "SamplingBatchInfo",
    "ScheduleBatch",
    "ServerArgs",
    "SpecInput",
    "SpecInputType",
    "SpeculativeAlgorithm",
    "TpModelWorker",
    "assert_hooks_took",
    "attention_backends_of",
    "build_grammar_vocab_mask",
    "compute_spec_v2_logprobs",
    "disable_cuda_graphs",
    "disable_overlap_on_cpu",
    "forward_context",
    "free_memory",
    "generate_simulated_accept_index",
    "graph_batch_sizes",
    "graph_capture_session",
    "hook_cli",
    "hook_draft_kv_pool",
    "hook_finish_state",
    "hook_internal_state",
    "hook_request_check",
    "hook_row_width",
    "is_registered",
    "python_tree_problem",
    "record_stream_each",
    "record_stream_for_v2_verify",
    "register_prefix_cache",
    "replay_verify_graph",
    "resolved_view",
    "samples_with_flashinfer",
    "set_time_batch",
    "spec_stage_span",
]

_ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
_FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
_GET_DRAFT_KV_POOL = "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool"
_EXTRA_CONTEXT_LEN = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
_VALIDATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
_UPDATE_FINISH_STATE = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
_HOOKED = {
    _ADD_CLI_ARGS,
    _FROM_CLI_ARGS,
    _GET_DRAFT_KV_POOL,
    _EXTRA_CONTEXT_LEN,
    _VALIDATE_REQUEST,
    _UPDATE_FINISH_STATE,
    _INTERNAL_STATE,
}


def is_registered(name: str) -> bool:
    """Whether SGLang knows the plug-in algorithm `name` in this process."""
    return get_spec(name) is not None


def hook_cli(add_flags: Callable[[Any], None], export_flags: Callable[[Any], None]) -> None:
    """Let `add_flags(parser)` extend SGLang's command line, and `export_flags(namespace)` see it.

    SGLang has no extension point for flags; its hook registry is the documented way.
    """

    def after_add_cli_args(result: Any, parser: Any, *args: Any, **kwargs: Any) -> Any:
        add_flags(parser)
        return result

    def around_from_cli_args(original: Callable, cls: type, args: Any) -> Any:
        export_flags(args)
        return original(cls, args)

    HookRegistry.register(_ADD_CLI_ARGS, after_add_cli_args, HookType.AFTER)
    HookRegistry.register(_FROM_CLI_ARGS, around_from_cli_args, HookType.AROUND)


def hook_draft_kv_pool(algorithm: str) -> None:
    """Tell SGLang that `algorithm` has no draft KV pool: it drafts in the target's.

    At start SGLang asks every worker but NGRAM's for the pool of its draft model.
    """

    def around_get_draft_kv_pool(original: Callable, **kwargs: Any) -> Any:
        if kwargs["spec_algorithm"].name == algorithm:
            return None
        return original(**kwargs)

    HookRegistry.register(_GET_DRAFT_KV_POOL, around_get_draft_kv_pool, HookType.AROUND)


def hook_row_width(algorithm: str) -> None:
    """Widen the `req_to_token` rows of `algorithm` by what a decode step may allocate.

    SGLang allocates 2 * num_draft_tokens slots past a request's committed length, but widens rows
    by num_draft_tokens + 4 only: at the context limit the rest lands in the next request's row.
    It goes unseen with EAGLE, whose requests must stay num_draft_tokens below the limit.
    """

    def after_extra_context_len(result: int, server_args: ServerArgs) -> int:
        if server_args.speculative_algorithm != algorithm:
            return result
        return max(result, get_alloc_reserve_per_decode(server_args))

    HookRegistry.register(_EXTRA_CONTEXT_LEN, after_extra_context_len, HookType.AFTER)


def hook_request_check(algorithm: str, check: Callable[[Any, Any, list[int] | None], None]) -> None:
    """Have `check(manager, request, input_ids)` see every request for `algorithm`, one a prompt.

    A ValueError becomes HTTP 400.
    """

    def before_validate_request(
        manager: Any, obj: Any, input_ids: list[int] | None, *args: Any, **kwargs: Any
    ) -> None:
        if manager.server_args.speculative_algorithm == algorithm:
            check(manager, obj, input_ids)

    HookRegistry.register(_VALIDATE_REQUEST, before_validate_request, HookType.BEFORE)


def hook_finish_state(algorithm: str) -> None:
    """Look for the end of a request of `algorithm` token by token, as plain decoding does.

    Given a run of several tokens, SGLang asks for the length limit before it asks for stops, and
    for stop strings before stop tokens, wherever in the run they are: a stop ahead of the limit is
    missed, and the client gets the tokens behind it.
    """

    def around_update_finish_state(original: Callable, req: Req, new_accepted_len: int = 1) -> None:
        is_ours = get_spec_settings().speculative_algorithm == algorithm
        if new_accepted_len <= 1 or not is_ours or req.finished() or req.to_finish:
            original(req, new_accepted_len)
            return
        run, grammar = req.output_ids[-new_accepted_len:], req.grammar
        del req.output_ids[-new_accepted_len:]
        # The grammar has followed the whole run already, so it can end the last token only.
        req.grammar = None
        for index in range(new_accepted_len):
            req.output_ids.append(run[index])
            if index == new_accepted_len - 1:
                req.grammar = grammar
            original(req, 1)
            if req.finished():
                if req.finished_len is None:
                    req.finished_len = len(req.output_ids)
                req.output_ids.extend(run[index + 1 :])
                break
        req.grammar = grammar

    HookRegistry.register(_UPDATE_FINISH_STATE, around_update_finish_state, HookType.AROUND)


def hook_internal_state(algorithm: str) -> None:
    """Add what the worker of `algorithm` says of itself to the server's info endpoint."""

    def after_get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler.spec_algorithm.name == algorithm:
            result.internal_state[algorithm.lower()] = scheduler.draft_worker.info()
        return result

    HookRegistry.register(_INTERNAL_STATE, after_get_internal_state, HookType.AFTER)


def register_prefix_cache(name: str, after_build: Callable[[BasePrefixCache, Any], None]) -> None:
    """Register prefix cache `name`: the one that SGLang would choose, given to
    `after_build(tree, model_runner)` when it is made."""

    def build(context: TreeCacheBuildContext) -> BasePrefixCache:
        tree = default_radix_cache_factory(context)
        after_build(tree, context.tp_worker.model_runner)
        return tree

    if get_radix_cache_factory(name) is None:
        register_radix_cache_backend(name, build)


def free_memory(device: str) -> int:
    """Bytes that are free on this process's device."""
    gpu = torch.cuda.current_device() if device == "cuda" else 0
    return int(get_available_gpu_memory(device, gpu, empty_cache=False) * 2**30)


def python_tree_problem(tree: BasePrefixCache) -> str | None:
    """Why `tree` isn't a radix tree whose nodes are Python objects, or None."""
    if type(tree) not in (RadixCache, UnifiedRadixCache):
        return f"it is a {type(tree).__name__}"
    if isinstance(tree, UnifiedRadixCache) and type(tree.tree_core) is not UnifiedTreeCore:
        return f"its core is a {type(tree.tree_core).__name__}"
    if tree.disable:
        return "it is switched off"
    return None


def assert_hooks_took() -> None:
    """Raise if SGLang swallowed an error while applying our hooks (its registry only logs)."""
    missing = _HOOKED - HookRegistry._patched
    if missing:
        raise RuntimeError(
            f"VEGAS: SGLang {sglang.__version__} did not take the hooks {sorted(missing)}; "
            "see the log for 'Failed to apply hooks'."
        )


def disable_overlap_on_cpu(server_args: ServerArgs) -> None:
    """As EAGLE does: SGLang's overlap schedule for speculation needs a GPU."""
    _disable_overlap_schedule_for_cpu(server_args)


def disable_cuda_graphs(server_args: ServerArgs) -> None:
    """Switch both phases' graphs off; the parsed configuration counts, not the old boolean."""
    server_args.disable_cuda_graph = True
    if server_args.cuda_graph_config is not None:
        server_args.cuda_graph_config.decode.backend = GraphBackend.DISABLED
        server_args.cuda_graph_config.prefill.backend = GraphBackend.DISABLED


def samples_with_flashinfer() -> bool:
    """Whether plain SGLang would sample with FlashInfer, whose filters differ with min-p."""
    return get_exec().kernel.sampling_backend == "flashinfer"


def graph_batch_sizes(model_runner: Any) -> list[int]:
    """Batch sizes of the server's decode graphs, ascending; empty if graphs are off."""
    if model_runner.decode_cuda_graph_runner is None:
        return []
    return get_batch_sizes_to_capture(model_runner, 1)[0]


def replay_verify_graph(model_runner: Any, batch_size: int) -> None:
    """Replay SGLang's verify graph on the padded rows that its capture left behind."""
    runner = model_runner.decode_cuda_graph_runner
    runner.backend.replay(runner._make_graph_key(batch_size), None)


@contextlib.contextmanager
def graph_capture_session(model_runner: Any) -> Iterator[tuple[torch.cuda.Stream, Any]]:
    """What SGLang puts around its own captures: (stream, memory pool shared with its graphs)."""
    collect = model_runner.server_args.enable_cudagraph_gc
    with model_capture_mode(), freeze_gc(collect), graph_capture() as context:
        yield context.stream, get_or_create_global_graph_memory_pool(torch.cuda)
