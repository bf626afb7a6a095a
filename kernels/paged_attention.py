"""Memory-bound attention for self-speculative decoding, over a KV cache with page size 1.

`PagedAttention` runs verification (a few queries a request over all its KV) and drafts (one query
over a table's positions and everything after them). `ScoreCollector` makes the tables: it has
verification emit its scores and selects each layer's most attended positions.

Nothing here waits for the device or allocates after construction, lengths are read on the device
only, and buffers never move: all of it can be captured in CUDA graphs. A graph is captured for one
batch size and one number of queries, and replays with any lengths. Calls are for one stream at a
time, but a layer's `select` may run on another: it reads the attention's `lse`, the scores and what
`begin` wrote, and writes the tables, so that the next `dense`, `begin` or `plan_sparse` has to wait
for it.

Row 0 of `req_to_token` is the padding row: any number of requests may use it, nothing is selected
for it, and what its slots hold, which new K and V of all of them go to, nobody reads.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from . import structs
from .build import Source, check, load
from .instances import MAX_BATCH, Instance, find_instance, unsupported
from .structs import pointer

LOG2E = math.log2(math.e)
NewKV = tuple[torch.Tensor, torch.Tensor] | None


@dataclass
class Tables:
    """Selected positions of every layer and request row, on the device.

    A row's tables hold `counts` positions, all below `bases`; drafts attend to them and to every
    position from `bases` on. `bases` 0 means no table: drafts are dense.
    """

    # (num_layers, num_rows, max_k) int32
    positions: torch.Tensor
    # (num_rows,) int32
    counts: torch.Tensor
    # (num_rows,) int32
    bases: torch.Tensor


@dataclass
class _Loaded:
    """An instance with what its library says about itself."""

    instance: Instance
    library: ctypes.CDLL
    num_ctas: int
    slot_rows: int


@dataclass
class _CurrentPlan:
    loaded: _Loaded
    batch: int
    num_queries: int
    sparse: bool
    window: int


class PagedAttention:
    """Attention of up to num_queries queries a request over (num_slots, num_kv_heads, head_dim)
    caches. `plan_dense` or `plan_sparse` once a pass, then `dense` or `sparse` once a layer.

    Outputs and `lse` of a query that sees nothing are 0 and -inf.
    """

    # Bytes of all buffers.
    nbytes: int
    # (max_batch * num_queries * num_heads,) float32: log2 of the last call's softmax sums, which
    # is log2(e) times the natural log-sum-exp of scale * scores. [token][head], tokens dense.
    lse: torch.Tensor

    supports = staticmethod(unsupported)

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_queries: int,
        max_batch: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """num_queries: the most that a plan has. kv_dtype: the caches', None for the queries'.
        Builds the kernels where that is still to do.

        Raises ValueError for a shape that `supports` refuses.
        """
        device = _with_index(device)
        capability = torch.cuda.get_device_capability(device)
        kv_dtype = kv_dtype or dtype
        reason = unsupported(
            *(num_heads, num_kv_heads, head_dim, num_queries, dtype, capability, kv_dtype)
        )
        if reason is None and not 1 <= max_batch <= MAX_BATCH:
            reason = f"a batch of {max_batch} (1 to {MAX_BATCH} are supported)"
        if reason is not None:
            raise ValueError(f"VEGAS attention kernels don't support {reason}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_queries = num_queries
        self.max_batch = max_batch
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.device = device
        self.group = num_heads // num_kv_heads

        # The one for the most queries, and the one for a single query.
        instances: list[Instance] = []
        for queries in (1, num_queries):
            instance = find_instance(
                *(queries * self.group, num_kv_heads, head_dim, dtype, kv_dtype, capability)
            )
            assert instance is not None
            if instance not in instances:
                instances.append(instance)
        libraries = load([instance.source() for instance in instances])
        self._loaded = [
            _prepare(instance, library, device.index)
            for instance, library in zip(instances, libraries, strict=True)
        ]

        def bytes_buffer(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.uint8, device=device)

        # A piece's slot is its CTA's number plus its pair's.
        pairs = max_batch * num_kv_heads
        slot_rows = max((loaded.num_ctas + pairs) * loaded.slot_rows for loaded in self._loaded)
        self._partial_o = bytes_buffer(slot_rows * head_dim * 2)
        self._partial_stats = bytes_buffer(slot_rows * 8)
        self._pieces_done = bytes_buffer(pairs * 4)
        num_ctas = max(loaded.num_ctas for loaded in self._loaded)
        self._ctas = bytes_buffer((num_ctas + 1) * structs.CTA_START_BYTES)
        self._lists = bytes_buffer(max_batch * structs.LIST_BYTES)
        self.lse = torch.zeros(
            max_batch * num_queries * num_heads, dtype=torch.float32, device=device
        )
        buffers = (
            *(self._partial_o, self._partial_stats, self._pieces_done, self._ctas),
            *(self._lists, self.lse),
        )
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self._plan_struct = structs.Plan(self._ctas.data_ptr(), self._lists.data_ptr())
        self._current: _CurrentPlan | None = None

    def plan_dense(
        self, seq_lens: torch.Tensor, rows: torch.Tensor, num_queries: int, window: int = 0
    ) -> None:
        """Plans the `dense` calls that follow: num_queries queries a request, query i over
        positions [0, seq_lens[r] + i + 1), of which it sees the last `window` where that isn't 0.
        seq_lens: (batch,) int64; padding may be anything from -1 on. rows: (batch,) int64, each
        request's row of `req_to_token`."""
        if not 1 <= num_queries <= self.num_queries:
            raise ValueError(f"{num_queries} queries, made for up to {self.num_queries}")
        if window < 0:
            raise ValueError(f"window is {window}, must be 0 or more")
        self._plan(seq_lens, rows, None, num_queries, num_queries, window)

    def plan_sparse(
        self, seq_lens: torch.Tensor, rows: torch.Tensor, tables: Tables, step: int
    ) -> None:
        """Plans the `sparse` calls of one draft step: one query a request, at position
        seq_lens[r] + step. seq_lens, rows: (batch,) int64."""
        self._plan(seq_lens, rows, tables, step + 1, 1)

    def _plan(
        self,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        tables: Tables | None,
        extra: int,
        num_queries: int,
        window: int = 0,
    ) -> None:
        batch = seq_lens.shape[0]
        if not 1 <= batch <= self.max_batch:
            raise ValueError(f"batch of {batch}, made for up to {self.max_batch}")
        _check_shape(rows, (batch,), "rows")
        loaded = next(
            loaded for loaded in self._loaded if loaded.instance.rows >= num_queries * self.group
        )
        params = structs.PlanParams(
            plan=self._plan_struct,
            seq_lens=pointer(seq_lens, torch.int64, 1, "seq_lens"),
            rows=pointer(rows, torch.int64, 1, "rows"),
            batch=batch,
            num_head_sets=self.num_kv_heads // loaded.instance.heads,
            num_ctas=loaded.num_ctas,
            extra=extra,
            window=window,
        )
        if tables is not None:
            params.counts = pointer(tables.counts, torch.int32, 1, "tables.counts")
            params.bases = pointer(tables.bases, torch.int32, 1, "tables.bases")
            params.max_count = tables.positions.shape[2]
        error = loaded.library.vegas_plan(
            self.device.index, ctypes.byref(params), _stream(self.device)
        )
        check(loaded.library, error, "plan")
        self._current = _CurrentPlan(loaded, batch, num_queries, tables is not None, window)

    def dense(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: ScoreCollector | None = None,
        layer: int = 0,
        new_kv: NewKV = None,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Attends as the last `plan_dense` says, and has `scores` collect this layer's scores.

        q: (batch * num_queries, num_heads, head_dim) of `dtype`, rows may be strided; out: the
        same, dense. k_cache, v_cache: (num_slots, num_kv_heads, head_dim) of `kv_dtype`, dense.
        layer: the one whose references `scores` uses. req_to_token: (num_rows, width)
        int32, slot of every position. new_kv: K and V of the queries' own positions, (batch *
        num_queries, num_kv_heads, head_dim), rows may be strided: the call writes them into the
        caches. None where they are there already, as they must be with KV of 8 bits. sinks:
        (num_heads,) float32, for each head the score of one more entry, which has no value; `lse`
        includes it. k_scale, v_scale: what the caches' values are to be multiplied by.
        """
        if scores is not None and self._current is not None and self._current.window > 0:
            raise ValueError("a layer with a window has no scores to collect")
        self._run(
            *(q, k_cache, v_cache, req_to_token, None, layer, scale, out, scores, new_kv, sinks),
            *(k_scale, v_scale),
        )

    def sparse(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        tables: Tables,
        layer: int,
        scale: float,
        out: torch.Tensor,
        new_kv: NewKV = None,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Attends as the last `plan_sparse` says, with the layer's tables. q, out: (batch,
        num_heads, head_dim); the others as for `dense`. No table makes it read outside of its
        request's positions."""
        self._run(
            *(q, k_cache, v_cache, req_to_token, tables, layer, scale, out, None, new_kv, sinks),
            *(k_scale, v_scale),
        )

    def _run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        tables: Tables | None,
        layer: int,
        scale: float,
        out: torch.Tensor,
        scores: ScoreCollector | None,
        new_kv: NewKV,
        sinks: torch.Tensor | None,
        k_scale: float,
        v_scale: float,
    ) -> None:
        current = self._current
        if current is None or current.sparse != (tables is not None):
            raise ValueError("the last plan was of the other kind, or there was none")
        if scale * k_scale <= 0:
            raise ValueError(f"scales must be positive, got {scale} and {k_scale} for K")
        shape = (current.batch * current.num_queries, self.num_heads, self.head_dim)
        _check_shape(q, shape, "q")
        _check_shape(out, shape, "out")
        _check_shape(k_cache, (k_cache.shape[0], self.num_kv_heads, self.head_dim), "k_cache")
        _check_shape(v_cache, k_cache.shape, "v_cache")
        if not (k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous()):
            raise ValueError("k_cache, v_cache and out must be contiguous")
        _check_rows(q, "q")
        attend = structs.AttendParams(
            plan=self._plan_struct,
            q=pointer(q, self.dtype, 3, "q"),
            k=pointer(k_cache, self.kv_dtype, 3, "k_cache"),
            v=pointer(v_cache, self.kv_dtype, 3, "v_cache"),
            out=pointer(out, self.dtype, 3, "out"),
            lse=self.lse.data_ptr(),
            req_to_token=pointer(req_to_token, torch.int32, 2, "req_to_token"),
            partial_o=self._partial_o.data_ptr(),
            partial_stats=self._partial_stats.data_ptr(),
            pieces_done=self._pieces_done.data_ptr(),
            q_stride=q.stride(0),
            req_to_token_stride=req_to_token.stride(0),
            batch=current.batch,
            num_kv_heads=self.num_kv_heads,
            num_head_sets=self.num_kv_heads // current.loaded.instance.heads,
            group=self.group,
            num_queries=current.num_queries,
            window=current.window,
            scale=scale * k_scale * LOG2E,
            v_scale=v_scale,
        )
        if sinks is not None:
            _check_shape(sinks, (self.num_heads,), "sinks")
            attend.sinks = pointer(sinks, torch.float32, 1, "sinks")
        if new_kv is not None:
            if self.kv_dtype != self.dtype:
                raise ValueError(f"new K and V can't be written into caches of {self.kv_dtype}")
            for tensor, name in zip(new_kv, ("new K", "new V"), strict=True):
                _check_shape(tensor, (shape[0], self.num_kv_heads, self.head_dim), name)
                _check_rows(tensor, name)
            new_k, new_v = new_kv
            attend.new_k = pointer(new_k, self.dtype, 3, "new K")
            attend.new_v = pointer(new_v, self.dtype, 3, "new V")
            attend.new_k_stride, attend.new_v_stride = new_k.stride(0), new_v.stride(0)
            attend.num_new = current.num_queries
        if tables is not None:
            attend.positions = _positions(tables, layer)
            attend.max_count = tables.positions.shape[2]
        if scores is not None:
            scores.check_attention(self)
            attend.scores = scores.scores.data_ptr()
            attend.score_head_stride = scores.head_stride
            attend.references = scores.score_ref[layer].data_ptr()
            attend.score_groups = scores.score_groups.data_ptr()
            attend.keeps_scores = int(scores.keeps_scores)
        loaded = current.loaded
        error = loaded.library.vegas_attend(
            self.device.index,
            ctypes.byref(attend),
            loaded.num_ctas,
            int(tables is not None),
            int(scores is not None),
            _stream(self.device),
        )
        check(loaded.library, error, "attend")

    @property
    def planned_queries(self) -> int:
        """Queries a request of the last plan."""
        assert self._current is not None
        return self._current.num_queries

    @property
    def planned_batch(self) -> int:
        """Requests of the last plan."""
        assert self._current is not None
        return self._current.batch


class ScoreCollector:
    """Collects the scores of a verification's first and last query and selects from them.

    A pass: `begin` once; a layer: `PagedAttention.dense(..., scores=self)`, then `select`. The
    weight of position t in a layer is the sum, over the query heads and both queries, of t's
    softmax probability; the k heaviest positions of [0, rank_len) become the row's table, those
    at the threshold last, each in ascending order: the same scores give the same table.

    Scores leave the attention as 4 bits a head, the power of two next to the sum of both queries'
    2^(score - reference); a reference is the head's and query's log-sum-exp in the previous pass
    over the row. The range of 15 octaves ends where a single weight makes its position one of the
    k heaviest anyway, and 3 octaves above that, since references are old. The exact log-sum-exps
    are applied when the heads are summed: every head has its exact part of the weight, within
    which the queries' shares differ by as much as their references' ages do.
    """

    # Bytes of all buffers.
    nbytes: int
    # (num_layers, num_rows, num_heads, 2) float32, log2: references of the first and last query.
    score_ref: torch.Tensor

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        capacity_tokens: int,
        max_batch: int,
        ratio: float,
        min_tokens: int,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        """capacity_tokens: positions to rank in one pass, of all requests together; requests that
        come when it is full keep their tables. A request of L positions gets
        k = clamp(ceil(ratio * L), min_tokens, max_tokens) of them; one with L <= k gets no table
        and drafts densely."""
        device = _with_index(device)
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"max_batch is {max_batch}, 1 to {MAX_BATCH} are supported")
        if capacity_tokens * num_heads // structs.GROUP_TOKENS >= 1 << 32:
            raise ValueError(f"capacity_tokens is {capacity_tokens}: too many for 32-bit offsets")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        self.capacity_tokens = capacity_tokens
        self.max_batch = max_batch
        self.ratio = ratio
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.device = device
        (self._library,) = load(
            [Source("selection.cu", (), torch.cuda.get_device_capability(device))]
        )
        keeps, blocks, begin_bytes, select_bytes = (ctypes.c_int() for _ in range(4))
        error = self._library.vegas_prepare(
            *(device.index, num_heads),
            *map(ctypes.byref, (keeps, blocks, begin_bytes, select_bytes)),
        )
        check(self._library, error, "prepare")
        assert begin_bytes.value == ctypes.sizeof(structs.BeginParams)
        assert select_bytes.value == ctypes.sizeof(structs.SelectParams)
        self._num_blocks = blocks.value
        # Whether scores stay in a part of the L2.
        self.keeps_scores = bool(keeps.value)

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Each request's tokens begin a new group.
        self._groups = -(-capacity_tokens // structs.GROUP_TOKENS) + max_batch
        self.scores = buffer(
            self._groups * structs.GROUP_TOKENS // 2 * num_heads, dtype=torch.uint8
        )
        # The last keys of a token pass, 12 bits of its weight's logarithm.
        self.keys = buffer(self._groups * structs.GROUP_TOKENS, dtype=torch.int16)
        self.score_ref = buffer(num_layers, num_rows, num_heads, 2, dtype=torch.float32)
        self.score_groups = buffer(max_batch, structs.SCORE_GROUPS_BYTES // 4, dtype=torch.int32)
        max_shares = self._num_blocks + max_batch
        self._num_shares = buffer(1, dtype=torch.int32)
        self._shares = buffer(max_shares * structs.SHARE_BYTES, dtype=torch.uint8)
        self._chosen = buffer(max_shares, dtype=torch.int64)
        self._states = buffer(max_batch * structs.LAYER_STATE_BYTES, dtype=torch.uint8)
        self._histograms = buffer(max_batch, structs.HISTOGRAM_BINS, dtype=torch.int32)
        buffers = (
            *(self.scores, self.keys, self.score_ref, self.score_groups, self._num_shares),
            *(self._shares, self._chosen, self._states, self._histograms),
        )
        self.nbytes = sum(one.nbytes for one in buffers)
        self._selection = structs.Selection(
            self.score_groups.data_ptr(),
            self._num_shares.data_ptr(),
            self._shares.data_ptr(),
            self._chosen.data_ptr(),
            self._states.data_ptr(),
            self._histograms.data_ptr(),
            self.keys.data_ptr(),
            self.scores.data_ptr(),
        )

    @staticmethod
    def bytes_per_token(num_heads: int) -> int:
        """What a token of the capacity takes."""
        return -(-num_heads // 2) + 2

    def begin(self, rank_lens: torch.Tensor, rows: torch.Tensor, tables: Tables) -> None:
        """Starts a pass: decides who collects and writes `counts` and `bases` of their rows (0
        where the request is too short for a table or its row is 0; unchanged where it doesn't fit
        into the capacity). The tables' positions follow layer by layer, so nothing may draft in
        between. rank_lens, rows: (batch,) int64; positions [0, rank_lens[r]) are ranked."""
        batch = rank_lens.shape[0]
        if not 1 <= batch <= self.max_batch:
            raise ValueError(f"batch of {batch}, made for up to {self.max_batch}")
        _check_shape(rows, (batch,), "rows")
        self._check_tables(tables)
        params = structs.BeginParams(
            selection=self._selection,
            rank_lens=pointer(rank_lens, torch.int64, 1, "rank_lens"),
            rows=pointer(rows, torch.int64, 1, "rows"),
            counts=pointer(tables.counts, torch.int32, 1, "tables.counts"),
            bases=pointer(tables.bases, torch.int32, 1, "tables.bases"),
            ratio=self.ratio,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            capacity=self.capacity_tokens,
            num_heads=self.num_heads,
            batch=batch,
            num_blocks=self._num_blocks,
        )
        error = self._library.vegas_begin(
            self.device.index, ctypes.byref(params), _stream(self.device)
        )
        check(self._library, error, "begin")

    def select(
        self, attention: PagedAttention, layer: int, rows: torch.Tensor, tables: Tables
    ) -> None:
        """Writes the layer's tables from the scores that `attention.dense` just collected, and
        keeps its log-sum-exps as the next pass's references. rows, tables: those of `begin`."""
        self._check_tables(tables)
        params = self._select_params(attention, layer, rows)
        params.positions = _positions(tables, layer)
        params.max_count = tables.positions.shape[2]
        error = self._library.vegas_select(
            self.device.index, ctypes.byref(params), self._num_blocks, _stream(self.device)
        )
        check(self._library, error, "select")

    def prefill(
        self,
        attention: PagedAttention,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        tables: Tables,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        """Selects from the prompt's last query alone, for which no reference exists: attends twice.

        The caller has called `attention.plan_dense(seq_lens - 1, rows, 1)` and
        `begin(seq_lens, rows, tables)` for the pass; rows, seq_lens: (batch,) int64. q: (batch,
        num_heads, head_dim), the last token's; out, of q's shape, gets its attention. The others
        are as for `PagedAttention.dense`.
        """
        _check_shape(seq_lens, (q.shape[0],), "seq_lens")
        attention.dense(q, k_cache, v_cache, req_to_token, scale, out)
        params = self._select_params(attention, layer, rows)
        error = self._library.vegas_set_references(
            self.device.index, ctypes.byref(params), _stream(self.device)
        )
        check(self._library, error, "set_references")
        attention.dense(q, k_cache, v_cache, req_to_token, scale, out, self, layer)
        self.select(attention, layer, rows, tables)

    def check_attention(self, attention: PagedAttention) -> None:
        """Raises ValueError where the attention has other heads or a larger batch."""
        if (attention.num_heads, attention.num_kv_heads) != (self.num_heads, self.num_kv_heads):
            raise ValueError("the attention and the collector have different heads")
        if attention.planned_batch > self.max_batch:
            raise ValueError(f"batch of {attention.planned_batch}, made for up to {self.max_batch}")

    def _check_tables(self, tables: Tables) -> None:
        if self.max_tokens > tables.positions.shape[2]:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, tables hold {tables.positions.shape[2]}"
            )

    @property
    def head_stride(self) -> int:
        """Bytes between two KV heads in `scores`."""
        return self._groups * structs.GROUP_TOKENS // 2 * self.group

    def _select_params(
        self, attention: PagedAttention, layer: int, rows: torch.Tensor
    ) -> structs.SelectParams:
        self.check_attention(attention)
        batch = attention.planned_batch
        _check_shape(rows, (batch,), "rows")
        return structs.SelectParams(
            selection=self._selection,
            rows=pointer(rows, torch.int64, 1, "rows"),
            lse=attention.lse.data_ptr(),
            references=self.score_ref[layer].data_ptr(),
            score_head_stride=self.head_stride,
            batch=batch,
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            num_queries=attention.planned_queries,
        )


def _with_index(device: torch.device | str) -> torch.device:
    """The launchers want a device's number; "cuda" is the current one."""
    device = torch.device(device)
    if device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def _positions(tables: Tables, layer: int) -> int:
    if not tables.positions.is_contiguous():
        raise ValueError("tables.positions must be contiguous")
    return pointer(tables.positions[layer], torch.int32, 2, "tables.positions")


def _stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _prepare(instance: Instance, library: ctypes.CDLL, device: int) -> _Loaded:
    num_ctas, slot_rows = ctypes.c_int(), ctypes.c_int()
    attend_bytes, plan_bytes = ctypes.c_int(), ctypes.c_int()
    error = library.vegas_prepare(
        device, *map(ctypes.byref, (num_ctas, slot_rows, attend_bytes, plan_bytes))
    )
    check(library, error, "prepare")
    if num_ctas.value == 0 or slot_rows.value != instance.rows * instance.heads:
        raise RuntimeError(f"the device can't hold VEGAS's attention kernel {instance}")
    assert attend_bytes.value == ctypes.sizeof(structs.AttendParams)
    assert plan_bytes.value == ctypes.sizeof(structs.PlanParams)
    return _Loaded(instance, library, num_ctas.value, slot_rows.value)


def _check_rows(tensor: torch.Tensor, what: str) -> None:
    if tensor.stride(1) != tensor.shape[2] or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
        raise ValueError(f"{what}: heads must be dense and rows aligned to 16 bytes")


def _check_shape(tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{what}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
