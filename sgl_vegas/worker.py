"""The speculative worker: one draft and verify round a call, under SGLang's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from sgl_vegas.attention.backend import VegasAttentionBackend
from sgl_vegas.attention.draft_kernels import build_draft_kernel
from sgl_vegas.config import VegasConfig
from sgl_vegas.draft_input import VegasDraftInput
from sgl_vegas.drafting import draft
from sgl_vegas.logits import LogitsRules
from sgl_vegas.model_check import attention_layers
from sgl_vegas.sampling.penalties import PenaltyTracker
from sgl_vegas.selection.policy import build_policy
from sgl_vegas.sglang_compat import (
    BaseSpecWorker,
    CaptureHiddenMode,
    GenerationBatchResult,
    ScheduleBatch,
    ServerArgs,
    TpModelWorker,
    assert_hooks_took,
    samples_with_flashinfer,
    set_time_batch,
    spec_stage_span,
)
from sgl_vegas.tables.draft_indices import DraftIndices
from sgl_vegas.tables.request_tables import RequestTables
from sgl_vegas.verification import verify

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]


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
        self.device: Any = server_args.device
        self._target_worker = target_worker
        self.model_runner: Any = target_worker.model_runner
        self.config = VegasConfig.from_env(server_args.speculative_num_steps)
        self.policy = build_policy(self.config)
        # SGLang's metrics read these two.
        self.speculative_num_steps = self.config.num_steps
        self.speculative_num_draft_tokens = self.config.num_draft_tokens
        _refuse_narrow_kv(self.model_runner.kv_cache_dtype)
        self.layers = attention_layers(self.model_runner.model)
        self.tables = RequestTables()
        self.penalties = PenaltyTracker(self.model_runner.model_config.vocab_size, self.device)

    @property
    def draft_worker(self) -> None:
        """None: the target drafts for itself."""
        return None

    def init_attention_backends(self) -> None:
        """Put the VEGAS backend around the target's, before anything runs."""
        dense = self.model_runner.attn_backend
        self.backend = VegasAttentionBackend(
            dense=dense,
            draft_kernel=build_draft_kernel(self.layers[0], self.model_runner),
            policy=self.policy,
            req_to_token_pool=self.model_runner.req_to_token_pool,
            token_to_kv_pool=self.model_runner.token_to_kv_pool,
            dense_can_verify=self.device != "cpu",
        )
        self.model_runner.attn_backend = self.backend
        prefill_backend = self.server_args.attention_backend
        self._needs_mask = self.backend.dense_can_verify and prefill_backend != "fa3"
        logger.info(
            "VEGAS speculative decoding: %s, attention: prefill and verify %s, drafts %s, "
            "scores and selection torch",
            self.config.describe(),
            prefill_backend if self.backend.dense_can_verify else f"{prefill_backend} and torch",
            self.backend.draft_kernel.name,
        )

    def clear_cache_pool(self) -> None:
        self.tables.clear()

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        """Called by SGLang when a request has finished.

        A run may be accepted past the token that ended the request. The prefix cache would take
        those tokens too, and a later prompt could match what no client was sent.
        """
        self.tables.drop(req.req_pool_idx)
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
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        self._keep_tables(batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = VegasDraftInput(bonus_tokens=result.next_token_ids)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return result

    def _decode(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        draft_input: Any = batch.spec_info
        assert isinstance(draft_input, VegasDraftInput) and draft_input.bonus_tokens is not None
        bonus_tokens = draft_input.bonus_tokens.long()
        rows = _rows(batch)
        seq_lens = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
        req_to_token = self.model_runner.req_to_token_pool.req_to_token
        steps = torch.arange(self.config.num_draft_tokens, device=self.device)
        cache_locs = req_to_token[
            batch.req_pool_indices.unsqueeze(1), batch.seq_lens.unsqueeze(1) + steps
        ].long()
        rules = LogitsRules.of_batch(
            batch.sampling_info,
            self.penalties.rows(batch.reqs, bonus_tokens),
            renormalise_between=samples_with_flashinfer(),
        )

        set_time_batch(batch.reqs, "set_spec_draft_start_time", trace_only=True)
        with spec_stage_span("draft"):
            indices = DraftIndices(
                self.tables, req_to_token, rows, seq_lens, self.config.num_steps, len(self.layers)
            )
            drafts = draft(batch, self.target_worker, bonus_tokens, cache_locs, indices, rules)
        set_time_batch(batch.reqs, "set_spec_draft_end_time", trace_only=True)
        with spec_stage_span("verify"):
            verified = verify(
                batch,
                self.target_worker,
                bonus_tokens,
                drafts,
                cache_locs,
                rules.along(drafts.tokens),
                self._needs_mask,
            )
        new_seq_lens = batch.seq_lens + verified.accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._keep_tables(batch)
        self.penalties.commit(batch.reqs, drafts.tokens, verified.accept_lens - 1)
        return GenerationBatchResult(
            logits_output=verified.result.logits_output,
            next_token_ids=verified.tokens,
            can_run_cuda_graph=verified.result.can_run_cuda_graph,
            accept_lens=verified.accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=VegasDraftInput(bonus_tokens=verified.bonus_tokens),  # pyright: ignore[reportArgumentType]
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            routed_experts_output=verified.result.routed_experts_output,
            extra_keep_alive_refs=verified.keep_alive,
        )

    def _keep_tables(self, batch: ScheduleBatch) -> None:
        """Replace the batch's tables by those of the pass that just ran."""
        tables = self.backend.take_tables()
        for index, row in enumerate(_rows(batch)):
            if tables is None:
                self.tables.drop(row)
            else:
                self.tables.put(row, tables[index])


def _refuse_narrow_kv(dtype: torch.dtype) -> None:
    """Also where `--kv-cache-dtype auto` follows a checkpoint."""
    if dtype.itemsize < 2:
        raise ValueError(
            f"VEGAS does not support a KV cache of {dtype}: verify and draft would read different "
            "numbers. Set --kv-cache-dtype bfloat16."
        )


def _rows(batch: ScheduleBatch) -> list[int]:
    """Request-pool rows of a batch, on the host.

    Not `req.req_pool_idx`: with a grammar in the batch, SGLang processes the previous result, and
    frees the rows of requests that ended in it, after it has built this batch.
    """
    return cast(list[int], batch.req_pool_indices_cpu.tolist())
