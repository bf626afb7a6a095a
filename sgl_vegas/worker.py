"""The speculative worker: one draft and verify round a call, under SGLang's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sgl_vegas_kernels.paged_attention import (  # pyright: ignore[reportMissingImports]
    ScoreCollector,
)

from sgl_vegas.algorithm import PREFIX_CACHE
from sgl_vegas.attention.backend import VegasAttentionBackend
from sgl_vegas.attention.cuda_kernels import CudaKernels, CudaWorkspace
from sgl_vegas.attention.kernels import AttentionKernels
from sgl_vegas.attention.torch_kernels import TorchKernels
from sgl_vegas.config import VegasConfig
from sgl_vegas.draft_graphs import DraftGraphs
from sgl_vegas.draft_input import VegasDraftInput
from sgl_vegas.drafting import Drafter
from sgl_vegas.key_codes.step_ranking import StepRanking
from sgl_vegas.logits import LogitsRules
from sgl_vegas.model_check import attention_layers, kv_bytes_per_token
from sgl_vegas.payoff import Payoff, measure_costs
from sgl_vegas.sampling.penalties import PenaltyTracker
from sgl_vegas.selection.policy import Collected, build_policy
from sgl_vegas.selection.refresh import RefreshPolicy
from sgl_vegas.sglang_compat import (
    BasePrefixCache,
    BaseSpecWorker,
    CaptureHiddenMode,
    GenerationBatchResult,
    LogitsProcessorOutput,
    ScheduleBatch,
    ServerArgs,
    TpModelWorker,
    assert_hooks_took,
    free_memory,
    graph_batch_sizes,
    samples_with_flashinfer,
    set_time_batch,
    spec_stage_span,
)
from sgl_vegas.tables.counters import prometheus_counters
from sgl_vegas.tables.first_tables import FirstTables
from sgl_vegas.tables.prefix_tables import PrefixTables, to_device
from sgl_vegas.tables.radix_tree import keep_tables, warn_not_kept
from sgl_vegas.tables.request_tables import RequestTables
from sgl_vegas.timing import PhaseTimer
from sgl_vegas.verification import Verified, accept, verify_batch

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]

# Of the memory that is free for the KV pool, what scores may take where prefixes are shared.
MAX_SCORE_SHARE = 0.01
# Of the KV pool's bytes, what tables of cached prefixes may take if nothing is said.
TABLE_CACHE_SHARE = 0.01


class VegasWorker(BaseSpecWorker):
    """Self-speculative decoding with the target's own weights and KV pool.

    A prefill samples the first token and makes the first table from the prompt's last query. A
    decode call drafts gamma tokens over the tables, verifies them, and makes the next tables from
    the verify pass. The scheduler drives it the same way with and without overlap.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        ps: Any,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        assert_hooks_took()
        self.server_args = server_args
        # Set by VegasSpecAlgo.handle_server_args.
        self.max_requests: int = server_args.max_running_requests  # pyright: ignore[reportAttributeAccessIssue]
        self.device: Any = server_args.device
        self._target_worker = target_worker
        self.model_runner: Any = target_worker.model_runner
        self.model_runner.vegas_worker = self  # for the prefix cache, which SGLang builds later
        self.config = VegasConfig.from_env(server_args.speculative_num_steps)
        self.policy = build_policy(self.config)
        # SGLang's metrics read these two.
        self.speculative_num_steps = self.config.num_steps
        self.speculative_num_draft_tokens = self.config.num_draft_tokens
        _validate_kv_dtype(self.model_runner.kv_cache_dtype, self.model_runner.dtype)
        self.layers = attention_layers(self.model_runner.model)
        self.kv_bytes = kv_bytes_per_token(self.layers, self.model_runner.kv_cache_dtype)
        self.tables = self._make_tables()
        self.first_tables = FirstTables(self.policy, self.tables, self._make_prefix_tables())
        self.workspace = None
        if self.device != "cpu":
            self.workspace = self._make_workspace()
            if self.workspace.scores is not None:
                self.tables.references = self.workspace.scores.score_ref.flatten(2)
                self.first_tables.score_capacity = self.workspace.score_capacity
        self.payoff = Payoff(self.policy, costs=None)
        self.penalties = PenaltyTracker(self.vocab_size, self.device)
        self.timer = PhaseTimer.from_env()
        self.graphs: DraftGraphs | None = None

    @property
    def draft_worker(self) -> None:
        """None: the target drafts for itself."""
        return None

    @property
    def vocab_size(self) -> int:
        return self.model_runner.model_config.vocab_size

    # SGLang sizes the KV pool by the memory that is free after the worker's constructor, so
    # everything of VEGAS's own is allocated there and nothing later.
    def _make_tables(self) -> RequestTables:
        max_selected = self.policy.table_size(self.model_runner.model_config.context_len)
        num_rows = self.max_requests + 1  # row 0 is for padding
        return RequestTables(len(self.layers), num_rows, max_selected, self.device)

    def _make_prefix_tables(self) -> PrefixTables | None:
        args = self.server_args
        if not (self.policy.needs_scores and self.config.reuses_tables):
            return None
        if args.disable_radix_cache:
            warn_not_kept("it is switched off")
            return None
        if args.radix_cache_backend != PREFIX_CACHE:  # said at start
            return None
        free_bytes = free_memory(self.device)
        cached_tokens = free_bytes // self.kv_bytes
        cached_tokens = min(cached_tokens, args.max_total_tokens or cached_tokens)
        budget = cached_tokens * self.kv_bytes * TABLE_CACHE_SHARE
        if self.config.table_cache_gb is not None:
            budget = self.config.table_cache_gb * 1e9
        num_pages = int(budget) // PrefixTables.page_bytes(len(self.layers))
        if num_pages == 0:
            warn_not_kept(f"a budget of {int(budget)} bytes holds none")
            return None
        counters = {}
        if args.enable_metrics:
            counters = {
                "on_event": prometheus_counters(args.served_model_name, args.extra_metric_labels)
            }
        prefixes = PrefixTables(self.tables, num_pages, **counters)
        logger.info(
            "VEGAS keeps tables of cached prefixes in %.3f GB, %d bytes per token that the KV pool "
            "may hold; a table of n positions takes %d bytes a position.",
            prefixes.nbytes / 1e9,
            prefixes.nbytes // max(cached_tokens, 1),
            4 * len(self.layers),
        )
        return prefixes

    def connect(self, tree: BasePrefixCache) -> None:
        """Have SGLang's prefix cache keep tables, if that is wanted. Called when it is built."""
        if self.first_tables.prefixes is not None:
            self.first_tables.connected = keep_tables(tree, self.first_tables.prefixes, self.policy)

    def _make_workspace(self) -> CudaWorkspace:
        dtype = self.model_runner.kv_cache_dtype
        free_bytes = free_memory(self.device)
        token_bytes = self.kv_bytes
        if isinstance(self.policy, RefreshPolicy):
            token_bytes += StepRanking.bytes_per_token(
                len(self.layers), self.layers[0].tp_k_head_num
            )
        pool_tokens = free_bytes // token_bytes
        pool_tokens = min(pool_tokens, self.server_args.max_total_tokens or pool_tokens)
        # Requests that share a prefix are each scored on it, so a batch may have more positions
        # than the pool has tokens.
        per_token = ScoreCollector.bytes_per_token(self.layers[0].tp_q_head_num)
        score_tokens = min(
            self.max_requests * self.model_runner.model_config.context_len,
            max(pool_tokens, int(free_bytes * MAX_SCORE_SHARE) // per_token),
        )
        workspace = CudaWorkspace(
            self.layers,
            self.tables,
            self.config,
            self.policy,
            score_tokens,
            pool_tokens + 1,  # a page more, for padding
            dtype,
        )
        graphs: Any = self.server_args.cuda_graph_config
        bs = min(max(graphs.decode.bs or [1]), self.max_requests)
        self.draft_probs = torch.zeros(
            (bs, self.config.num_steps, self.vocab_size), device=self.device
        )
        sizes = {
            "tables": self.tables.nbytes,
            "scores": workspace.score_bytes,
            "key codes and their ranking": workspace.code_bytes,
            "draft probabilities": self.draft_probs.nbytes,
            "attention workspaces": workspace.nbytes,
        }
        logger.info(
            "VEGAS uses %.2f GB: %s.",
            sum(sizes.values()) / 2**30,
            ", ".join(f"{name} {nbytes / 2**30:.2f}" for name, nbytes in sizes.items()),
        )
        return workspace

    def init_attention_backends(self) -> None:
        """Put the VEGAS backend around the target's, before anything runs."""
        runner = self.model_runner
        req_to_token = runner.req_to_token_pool.req_to_token
        assert len(req_to_token) <= len(self.tables.counts), "more request rows than tables"
        # Padded rows of a verify graph write their K and V there: into slot 0, which nobody reads.
        assert not req_to_token[0].any(), "row 0 isn't for padding"
        kernel_arguments = (
            self.policy,
            self.tables,
            req_to_token,
            self.config.num_draft_tokens,
        )
        if self.workspace is None:
            kernels: AttentionKernels = TorchKernels(*kernel_arguments)
        else:
            ranking = self.workspace.ranking
            pool_slots = len(runner.token_to_kv_pool.get_key_buffer(0))
            if ranking is not None and pool_slots > ranking.words.shape[1]:
                raise RuntimeError(
                    f"The KV pool has {pool_slots} slots, and there is room for the codes of "
                    f"{ranking.words.shape[1]}: memory was freed while the server started. Start "
                    "again, or set --max-total-tokens."
                )
            kernels = CudaKernels(self.workspace, *kernel_arguments)
        self.backend = VegasAttentionBackend(
            runner.attn_backend, kernels, runner.req_to_token_pool, runner.token_to_kv_pool
        )
        runner.attn_backend = self.backend
        self.drafter = Drafter(runner, self.backend, self.config.num_steps)
        logger.info(
            "VEGAS speculative decoding: %s, attention: prefill %s, drafts, verify and selection "
            "%s",
            self.config.describe(),
            self.server_args.attention_backend,
            kernels.name,
        )

    def init_cuda_graphs(self) -> None:
        """Capture drafts and plain steps for the batch sizes of SGLang's verify graphs, and
        measure all three."""
        batch_sizes = graph_batch_sizes(self.model_runner)
        if not batch_sizes:
            return
        assert batch_sizes[-1] <= len(self.draft_probs)
        self.graphs = DraftGraphs(self.drafter, batch_sizes, self.draft_probs)
        self.graphs.capture()
        if self.config.speculate_above is None:
            self.payoff.costs = measure_costs(
                self.graphs, self.model_runner, self.kv_bytes, self.policy, self.tables
            )

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self.payoff.saw(num_correct_drafts_per_req)

    def clear_cache_pool(self) -> None:
        """Called by SGLang when it empties the prefix cache."""
        self.tables.clear()
        if self.first_tables.prefixes is not None:
            self.first_tables.prefixes.clear()

    def info(self) -> dict[str, Any]:
        """For the server's info endpoint."""
        prefixes = self.first_tables.prefixes
        cache = {"enabled": self.first_tables.connected}
        if prefixes is not None:
            cache |= {
                "bytes": prefixes.nbytes,
                "used_bytes": prefixes.used_bytes,
                "tables": prefixes.num_tables,
                **prefixes.events,
            }
        return {"table_cache": cache}

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        """Called by SGLang when a request has finished.

        A run may be accepted past the token that ended the request. The prefix cache would take
        those tokens too, and a later prompt could match what no client was sent.
        """
        if req.finished_len is not None:
            answered = len(req.origin_input_ids) + req.finished_len
            req.kv_committed_len = min(req.kv_committed_len, answered)
            # SGLang counted the whole run.
            req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
            # Sessions build their next prompt from these.
            del req.output_ids[req.finished_len :]

    # The weights are the target's, which SGLang updates itself or through these.
    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        return True, "VEGAS drafts with the target's weights."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "VEGAS drafts with the target's weights."

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        return self.target_worker.update_weights_from_tensor(recv_req)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Publish | None = None, **kwargs: Any
    ) -> GenerationBatchResult:
        """Run a prefill, or one draft and verify round.

        Args:
            on_publish: given under overlap scheduling; takes the new committed lengths,
                (batch_size,), as soon as they are known.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        self.penalties.start(batch.reqs)
        scored = self.first_tables.before_prefill(batch)
        if len(scored) < len(batch.reqs):
            self.backend.scored = to_device(scored, self.tables.counts.device)
        try:
            result = self.target_worker.forward_batch_generation(
                batch, capture_hidden_mode=CaptureHiddenMode.NULL
            )
        finally:
            self.backend.scored = None
        self.first_tables.after_prefill(batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = VegasDraftInput(bonus_tokens=result.next_token_ids)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return result

    def _decode(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        draft_input: Any = batch.spec_info
        assert isinstance(draft_input, VegasDraftInput) and draft_input.bonus_tokens is not None
        bonus_tokens = draft_input.bonus_tokens.long()
        rules = LogitsRules.of_batch(
            batch.sampling_info,
            self.penalties.rows(batch.reqs, bonus_tokens),
            renormalise_between=samples_with_flashinfer(),
        )
        drafts_pay = self.payoff.drafts(len(batch.reqs), _context_tokens(batch))
        if self.timer is not None:
            self.timer.begin("speculate" if drafts_pay else "plain", len(batch.reqs))
        if drafts_pay:
            candidates, verified, result = self._speculate(batch, bonus_tokens, rules)
            self.first_tables.verified(batch)
        else:
            candidates, verified, result = self._plain_step(batch, bonus_tokens, rules)
        new_seq_lens = batch.seq_lens + verified.accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self.penalties.commit(batch.reqs, candidates[:, 1:], verified.accept_lens - 1)
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=verified.tokens,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=verified.accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=VegasDraftInput(bonus_tokens=verified.bonus_tokens),  # pyright: ignore[reportArgumentType]
            # How far apart the requests' tokens lie in next_token_ids.
            speculative_num_draft_tokens=candidates.shape[1],
            routed_experts_output=result.routed_experts_output,
            extra_keep_alive_refs=[batch.input_ids, batch.out_cache_loc, batch.spec_info],
        )

    def _speculate(
        self, batch: ScheduleBatch, bonus_tokens: torch.Tensor, rules: LogitsRules
    ) -> tuple[torch.Tensor, Verified, GenerationBatchResult]:
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens
        set_time_batch(batch.reqs, "set_spec_draft_start_time", trace_only=True)
        with spec_stage_span("draft"):
            graphs = self._graphs_for(len(rows))
            if graphs is not None:
                drafts = graphs.draft(bonus_tokens, rows, seq_lens, rules.rows)
            else:
                drafts = self.drafter.draft(bonus_tokens, rows, seq_lens, rules)
            self._mark("drafted")
        set_time_batch(batch.reqs, "set_spec_draft_end_time", trace_only=True)
        with spec_stage_span("verify"):
            candidates = torch.cat([bonus_tokens.unsqueeze(1), drafts.tokens], dim=1)
            steps = torch.arange(candidates.shape[1], device=candidates.device)
            req_to_token = self.model_runner.req_to_token_pool.req_to_token
            cache_locs = req_to_token[rows.unsqueeze(1), seq_lens.unsqueeze(1) + steps].long()
            forward_batch = verify_batch(batch, self.target_worker, candidates, cache_locs)
            self._mark("verify")
            result = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
            self._mark("verified")
            # It would say that rows may change hands, while the pass still writes through them.
            assert self.model_runner.war_fastpath_read_done_event is None
            verified = accept(
                batch,
                candidates,
                drafts.probs,
                result.logits_output,
                rules.along(drafts.tokens),
            )
            if self.policy.collects is Collected.LAST_ACCEPTED:
                # Of the emitted tokens the last was not drafted.
                self.backend.kernels.accepted(verified.accept_lens - 1)
        return candidates, verified, result

    def _plain_step(
        self, batch: ScheduleBatch, bonus_tokens: torch.Tensor, rules: LogitsRules
    ) -> tuple[torch.Tensor, Verified, GenerationBatchResult]:
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens
        graphs = self._graphs_for(len(rows))
        stepper = self.drafter if graphs is None else graphs
        self._mark("drafted")
        self._mark("verify")
        logits_output = LogitsProcessorOutput(
            next_token_logits=stepper.plain_step(bonus_tokens, rows, seq_lens)
        )
        self._mark("verified")
        candidates = bonus_tokens.unsqueeze(1)
        verified = accept(batch, candidates, None, logits_output, rules)
        return (
            candidates,
            verified,
            GenerationBatchResult(
                logits_output=logits_output, can_run_cuda_graph=graphs is not None
            ),
        )

    def _graphs_for(self, batch_size: int) -> DraftGraphs | None:
        """None if graphs are off or none is large enough."""
        fits = self.graphs is not None and self.graphs.can_run(batch_size)
        return self.graphs if fits else None

    def _mark(self, phase: str) -> None:
        if self.timer is not None:
            self.timer.mark(phase)


def _context_tokens(batch: ScheduleBatch) -> int:
    """KV tokens of a batch, all requests together, to within an iteration's under overlap."""
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)


def _validate_kv_dtype(kv: torch.dtype, model: torch.dtype) -> None:
    """Also where `--kv-cache-dtype auto` follows a checkpoint.

    Raises:
        ValueError: naming both.
    """
    if kv.itemsize < 2:
        raise ValueError(
            f"VEGAS does not support a KV cache of {kv}: verify and draft would read different "
            "numbers. Set --kv-cache-dtype bfloat16."
        )
    if kv != model:
        raise ValueError(
            f"VEGAS does not support a KV cache of {kv} with a model in {model}; "
            "leave --kv-cache-dtype at auto."
        )
