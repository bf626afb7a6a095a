"""Penalties through whole speculative runs, against SGLang's penalizers fed a token at a time."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import torch

from sgl_vegas.sampling.penalties import PenaltyRows, PenaltyTracker

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when SGLang is imported
torch.set_num_threads(1)

VOCAB = 12
EOS, EXTRA_STOP = 2, 5


class Request:
    """What the tracker reads of SGLang's Req: hashable by identity, weakly referable."""

    def __init__(self, output_ids: list[int] | None = None, tokenizer: bool = True, **params):
        defaults = {
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "stop_token_ids": None,
        }
        self.sampling_params = SimpleNamespace(**{**defaults, **params})
        self.output_ids = list(output_ids or ())
        self.tokenizer = (
            SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids={EXTRA_STOP})
            if tokenizer
            else None
        )


class FakeBatch(SimpleNamespace):
    """What SGLang's orchestrator reads of a ScheduleBatch."""


class PlainDecoding:
    """SGLang's own penalizers over a fixed batch of one request."""

    def __init__(self, req: Request) -> None:
        from sglang.srt.sampling import penaltylib

        self.batch = FakeBatch(reqs=[req], device="cpu")
        self.orchestrator = penaltylib.BatchedPenalizerOrchestrator(
            VOCAB,
            self.batch,  # pyright: ignore[reportArgumentType]
            {
                penaltylib.BatchedFrequencyPenalizer,
                penaltylib.BatchedMinNewTokensPenalizer,
                penaltylib.BatchedPresencePenalizer,
                penaltylib.BatchedRepetitionPenalizer,
            },
        )

    def emit(self, token: int) -> None:
        self.orchestrator.cumulate_output_tokens(torch.tensor([token]))

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """As SGLang's scheduler applies them: the additive ones together, then the scaling."""
        additive = torch.zeros(1, VOCAB)
        self.orchestrator.accumulate_additive_penalties(additive)
        result = logits + additive[0]
        scaling = self.orchestrator.accumulate_scaling_penalties()
        if scaling is not None:
            # Written out, since SGLang's function of one line compiles itself.
            result = torch.where(result < 0, result * scaling[0], result / scaling[0])
        return result


def requests() -> list[Request]:
    return [
        Request(frequency_penalty=0.4),
        Request(),
        Request(presence_penalty=-0.7),
        Request(repetition_penalty=1.6),
        Request(repetition_penalty=0.7, frequency_penalty=-0.3, presence_penalty=0.9),
        Request(min_new_tokens=6, stop_token_ids={7, 9}),
        Request(min_new_tokens=9, repetition_penalty=1.3, frequency_penalty=0.2),
        Request(min_new_tokens=1),
    ]


def random_logits(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=generator) * 2


def tokens(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    # From few, so that counts grow and repetitions happen.
    return torch.randint(5, shape, generator=generator)


def check(rows: PenaltyRows, plain: list[PlainDecoding], generator: torch.Generator) -> None:
    logits = random_logits(len(plain), generator)
    expected = torch.stack([p.logits(row) for p, row in zip(plain, logits, strict=True)])
    rows.apply_(logits)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_speculative_run_equals_decoding_one_token_at_a_time() -> None:
    """Every draft step and every verify row of ten iterations, random acceptance."""
    generator = torch.Generator().manual_seed(0)
    reqs, gamma = requests(), 3
    n = len(reqs)
    tracker = PenaltyTracker(VOCAB, "cpu")
    tracker.start(reqs)
    plain = [PlainDecoding(req) for req in reqs]
    last = tokens((n,), generator)  # what the prefill emitted
    for _ in range(10):
        for p, token in zip(plain, last.tolist(), strict=True):
            p.emit(token)
        rows = tracker.rows(reqs, last)
        assert rows is not None
        drafts = tokens((n, gamma), generator)
        correct = torch.randint(gamma + 1, (n,), generator=generator)
        final = tokens((n,), generator)

        # The drafter walks on a state of its own; verification lays all of them out.
        verify_logits = random_logits(n * (gamma + 1), generator)
        got = verify_logits.clone()
        rows.along(drafts).apply_(got)
        walking = rows
        for step in range(gamma + 1):
            draft_logits = random_logits(n, generator)
            walked = draft_logits.clone()
            walking.apply_(walked)
            for i in range(n):
                line = verify_logits[i * (gamma + 1) + step]
                # A fresh reference along the drafts, also behind the accepted ones.
                reference = PlainDecoding(reqs[i])
                for token in [*reqs[i].output_ids, int(last[i]), *drafts[i, :step].tolist()]:
                    reference.emit(token)
                torch.testing.assert_close(
                    got[i * (gamma + 1) + step], reference.logits(line), rtol=1e-5, atol=1e-5
                )
                torch.testing.assert_close(
                    walked[i], reference.logits(draft_logits[i]), rtol=1e-5, atol=1e-5
                )
            if step < gamma:
                walking = walking.after(drafts[:, step])
        check(rows, plain, generator)  # neither changed the state it started from

        tracker.commit(reqs, drafts, correct)
        for i, req in enumerate(reqs):
            accepted = drafts[i, : int(correct[i])].tolist()
            req.output_ids += [int(last[i]), *accepted]
            for token in accepted:
                plain[i].emit(token)
        last = final


def test_batches_change_between_iterations() -> None:
    """Requests join, leave and change places; counts stay with the request."""
    generator = torch.Generator().manual_seed(1)
    reqs = requests()
    tracker = PenaltyTracker(VOCAB, "cpu")
    plain = {id(req): PlainDecoding(req) for req in reqs}
    tracker.start(reqs[:4])
    for batch in ([0, 1, 2, 3], [3, 0], [2], None, [6, 0, 5, 4], [5, 7, 1, 2, 3]):
        if batch is None:
            tracker.start(reqs[4:])
            continue
        members = [reqs[i] for i in batch]
        last = tokens((len(batch),), generator)
        rows = tracker.rows(members, last)
        assert rows is not None
        for req, token in zip(members, last.tolist(), strict=True):
            plain[id(req)].emit(token)
        check(rows, [plain[id(req)] for req in members], generator)
        drafts = tokens((len(batch), 2), generator)
        correct = torch.randint(3, (len(batch),), generator=generator)
        tracker.commit(members, drafts, correct)
        for i, req in enumerate(members):
            for token in drafts[i, : int(correct[i])].tolist():
                plain[id(req)].emit(token)


def test_without_penalties_there_is_nothing_to_do() -> None:
    tracker = PenaltyTracker(VOCAB, "cpu")
    reqs = [Request(), Request(stop_token_ids={3})]
    tracker.start(reqs)
    assert tracker.rows(reqs, torch.tensor([1, 2])) is None
    tracker.commit(reqs, torch.tensor([[1], [2]]), torch.tensor([1, 0]))
    assert len(tracker._counts) == 0


def test_a_retracted_request_goes_on_with_what_it_emitted() -> None:
    generator = torch.Generator().manual_seed(2)
    emitted = [1, 1, 3, 0, 1]
    params = {"frequency_penalty": 0.5, "repetition_penalty": 1.4, "min_new_tokens": 7}
    req = Request(**params)
    tracker = PenaltyTracker(VOCAB, "cpu")
    tracker.start([req])
    # Accepted just before the retraction and thrown away by it: must be forgotten.
    tracker.rows([req], torch.tensor([4]))
    tracker.commit([req], torch.tensor([[4, 4]]), torch.tensor([2]))
    req.output_ids = list(emitted)
    for _ in range(2):  # each chunk of the second prefill starts it again
        tracker.start([req])
    plain = PlainDecoding(req)
    for token in [*emitted, 3]:
        plain.emit(token)
    rows = tracker.rows([req], torch.tensor([3]))
    assert rows is not None
    check(rows, [plain], generator)
    # Six emitted, so the next token is the last that may not stop.
    logits = torch.zeros(1, VOCAB)
    rows.apply_(logits)
    assert bool(logits[0, EOS].isneginf())
    logits = torch.zeros(1, VOCAB)
    rows.after(torch.tensor([0])).apply_(logits)
    assert not logits.isinf().any()


def test_stop_tokens_are_forbidden_until_enough_was_emitted() -> None:
    req = Request(min_new_tokens=3, stop_token_ids={7, 9})
    bare = Request(min_new_tokens=3, stop_token_ids={8}, tokenizer=False)
    none = Request(min_new_tokens=3, tokenizer=False)
    free = Request(stop_token_ids={8})
    batch = [req, bare, none, free]
    tracker = PenaltyTracker(VOCAB, "cpu")
    tracker.start(batch)
    rows = tracker.rows(batch, torch.zeros(4, dtype=torch.int64))
    assert rows is not None
    verify = rows.along(torch.zeros(4, 3, dtype=torch.int64))
    logits = torch.zeros(16, VOCAB)
    verify.apply_(logits)
    forbidden = [set(row.isneginf().nonzero().flatten().tolist()) for row in logits]
    stops = [{7, 9, EOS, EXTRA_STOP}, {8}, set(), set()]
    # The prefill emitted one, so that rows 0 and 1 are the second and the third token.
    assert forbidden == [s if step < 2 else set() for s in stops for step in range(4)]


def test_counts_die_with_their_request() -> None:
    tracker = PenaltyTracker(VOCAB, "cpu")
    reqs = [Request(frequency_penalty=1.0), Request(presence_penalty=1.0)]
    tracker.start(reqs)
    tracker.rows(reqs, torch.tensor([1, 1]))
    assert len(tracker._counts) == 2
    survivor = reqs.pop()
    reqs.clear()
    gc.collect()
    assert list(tracker._counts) == [survivor]
