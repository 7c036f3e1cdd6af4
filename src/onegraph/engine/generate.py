"""Where a model meets a graph: prompts in, tokens out, the decode step one replay.

Everything that a step changes lives on the device and is advanced inside the step, so replays chain without host work:
position and last token of each row, and by `limits` also when a row is to stand still. The host decides only which
sequence sits in which row, and writes the rows anew when that changes.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, closing
from functools import partial
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from onegraph.engine.choice import PLAIN, Choice, ChoiceState, Constrain, draw, row_buffers, row_values
from onegraph.engine.decoder import Breakable, Decoder
from onegraph.engine.pages import PageAllocator
from onegraph.engine.params import SamplingParams, Stats
from onegraph.engine.sequence import Sequence, make_sequences
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.ops.step import begin_step, finish_step
from onegraph.runtime.graph import GraphPool, Runner
from onegraph.runtime.pipeline import Pipeline, check_links, running
from onegraph.runtime.transfer import Download

Tokens = list[tuple[int, int]]  # (prompt's number, token), of a step
Report = tuple[Callable[[], Tensor], Callable[[], Tensor] | None]  # what waits for a step's tokens, log-probabilities


class Engine:
    """Generates from a model with a paged KV cache and one graph for each device and batch-size bucket.

    A step is a pipeline of the model's stages. Every device keeps its own positions, limits and block tables and
    advances them itself; what travels is the stream from each stage to the next, and the drawn tokens from the last to
    all others.

    Args:
        model: see `Decoder`.
        max_batch: sequences that decode at once; further prompts wait for a free row.
        max_context: tokens of a sequence, prompt and continuation (default: the model's, at most 4096).
        page_size: tokens in a page of the cache (default: the model's `page_size`).
        pages: pages of the cache, one of them the sentinel (default: enough for max_batch full sequences).
        chunk: prompt tokens that one prefill step takes.
        kv: how keys and values are stored: None in the model's dtype, else a setting of
            `onegraph.formats.turboquant` or its text ("turboquant:4").
        capture: True captures, False runs eagerly, "split" captures around attention, None captures where the model is
            on a GPU.

    A batch gives each prompt the tokens that it would get alone, up to the last bit of the matrix products (a GEMM
    of another batch size may round a near-tie the other way); draws never depend on the batch.

    Not thread-safe: one `generate` or `stream` at a time. Raises ValueError where a peer link between devices is
    missing; a device that fails while running comes out as a DeviceError that names it.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_batch: int = 8,
        max_context: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        chunk: int = 256,
        kv: TurboQuantConfig | str | None = None,
        capture: bool | Literal["split"] | None = None,
    ):
        self.model = model
        self.devices = model.devices
        check_links(self.devices)
        self.max_context = min(model.max_context, 4096) if max_context is None else max_context
        page_size = model.page_size if page_size is None else page_size
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}: got {value}; allowed is 1 and more")
        if not 1 <= self.max_context <= model.max_context:
            raise ValueError(
                f"max_context: got {max_context}; the model was loaded for 1 to {model.max_context} tokens"
            )
        if capture not in (None, True, False, "split"):
            raise ValueError(f"capture: got {capture!r}; allowed are True, False, 'split' and None for automatic")
        self.max_batch, self.chunk = max_batch, chunk
        captured = self.devices[0].type == "cuda" if capture is None else bool(capture)
        self.mode = "split" if capture == "split" else "captured" if captured else "eager"
        self._pools = [GraphPool(device) for device in self.devices] if captured else []
        self._ahead = 1 if captured else 0  # steps launched before the tokens of one are read

        self._per_row = -(-self.max_context // page_size)
        total = 1 + max_batch * self._per_row if pages is None else pages
        kv = parse_kv(kv) if isinstance(kv, str) else kv
        self._cache = model.new_cache(
            rows=max_batch, pages=total, page_size=page_size, pages_per_row=self._per_row, kv=kv
        )
        self._allocator = PageAllocator(total, page_size)
        self._slots = list(range(max_batch, 0, -1))  # of state that does not grow; slot 0 belongs to nobody
        self._runners: dict[tuple[str, Choice], Pipeline] = {}
        self._choices: ChoiceState | None = None  # made when a row first asks for more than temperature, top-k, top-p
        self.constrain: Constrain | None = None  # who makes a row's constraint; that takes a tokenizer
        self._download = Download(
            torch.zeros(max_batch, dtype=torch.int64, device=self.devices[-1]), depth=self._ahead + 1
        )
        # What a step on a CPU need not look at, where the reference reads all that it may: see `_trim`.
        self._trims = not captured and [device.type for device in self.devices] == ["cpu"]
        self._width, self._length = self._per_row, chunk
        self._busy = False
        self.stats = Stats(mode=self.mode)

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        on_token: Callable[[int, int], object] | None = None,
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) and return the new tokens of each.

        Args:
            params: for all prompts, or one for each.
            on_token: called as on_token(prompt's number, token) as soon as the host has it; True ends that prompt.

        Raises ValueError for what cannot run (before anything does), FloatingPointError where the model gives NaN.
        """
        return [sequence.output for sequence in self.complete(prompts, params, on_token)]

    def complete(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        on_token: Callable[[int, int], object] | None = None,
    ) -> list[Sequence]:
        """`generate`, but all that is known of each: output, seed, log-probabilities."""
        sequences = self._sequences(prompts, params)
        with self.running(), closing(self._run(sequences)) as steps:
            for tokens in steps:
                if on_token is not None:
                    for index, token in tokens:
                        if on_token(index, token) is True:
                            sequences[index].cancelled = True
        return sequences

    def stream(
        self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Generator[tuple[int, int], None, None]:
        """`generate`, but (prompt's number, token) one by one, as soon as the host has it.

        Closed early or dropped, it gives back rows and pages; until it ends, nothing else may run. Raises what
        `generate` raises.
        """
        return self._stream(self._sequences(prompts, params))

    def running(self) -> AbstractContextManager[None]:
        """The devices' streams; wrap a loop over a step's `replay` in it once."""
        return running(self._pools)

    def runner(
        self,
        kind: Literal["decode", "prefill"],
        *,
        sampling: bool = False,
        shaping: bool = False,
        logprobs: bool = False,
    ) -> Pipeline:
        """A step, built when first asked for, one graph for each device and bucket: greedy or sampling, with or without
        what changes logits before, with log-probabilities or without."""
        choice = Choice(sampling, shaping, logprobs)
        key = (kind, choice)
        if key not in self._runners:
            started = perf_counter()
            decoding = kind == "decode"
            if (shaping or logprobs) and self._choices is None:
                self._choices = self._new_choices()
            # Zeros in all inputs: no row has a sequence, so that warm-up touches nothing but the sentinel page.
            stages = [
                Runner(
                    partial(self._step, stage, choice),
                    self._inputs(stage, decoding, choice),
                    _buckets(self.max_batch) if decoding else None,
                    capture=bool(self._pools),
                    pool=self._pools[stage] if self._pools else None,
                    split="attention" if self.mode == "split" else (),
                )
                for stage in range(len(self.devices))
            ]
            self._runners[key] = Pipeline(stages, carried="stream", shared=("drawn",) if decoding else ())
            self.stats.build_seconds += perf_counter() - started
        return self._runners[key]

    # The steps: the capture contract holds here.

    def _step(
        self, stage: int, choice: Choice, positions: Tensor, limits: Tensor, table: Tensor, **inputs: Tensor
    ) -> Tensor:
        """One stage's part of a step: what the next stage takes, or from the last what the host reads, int64 [B].

        Decoding reads each row's last token (`drawn`, int64 [B]) and puts the next one in its place; prefill reads up
        to `chunk` tokens of a prompt (`tokens`, [1, chunk]) and draws the one behind them.
        """
        decoding = "drawn" in inputs
        tokens = inputs["drawn"].unsqueeze(1) if decoding else inputs["tokens"][:, : self._length]
        # Padding rows and rows at their end have 0 tokens to read, and stay where they are.
        counts, after = begin_step(positions, limits, tokens.shape[1])
        cache = self._cache.parts[stage].view()
        cache.block_table, cache.positions, cache.counts = table[:, : self._width], positions, counts
        cache.slots = inputs["slots"]
        stream = inputs["stream"] if stage else self.model.enter(tokens)
        stream = self.model.run(stage, stream, tokens, Breakable(cache))
        if stage < len(self.devices) - 1:
            positions.copy_(after)
            return stream
        new, logits = self._draw(self.model.leave(stream), counts, after, inputs, choice)
        return finish_step(new, logits, after, inputs["drawn"] if decoding else torch.empty_like(new), positions)

    def _draw(
        self, hidden: Tensor, counts: Tensor, after: Tensor, inputs: dict[str, Tensor], choice: Choice
    ) -> tuple[Tensor, Tensor]:
        """From hidden states [B, Q, D]: the token behind each row's last one, and the model's logits there."""
        if hidden.shape[1] == 1:
            hidden = hidden.squeeze(1)
        else:
            last = (counts.long() - 1).clamp(min=0)
            hidden = hidden.gather(1, last.view(-1, 1, 1).expand(-1, 1, hidden.shape[2])).squeeze(1)
        logits = self.model.logits(hidden)
        if self._choices is None or not (choice.shaping or choice.logprobs):
            return draw(logits, after, inputs, sampling=choice.sampling), logits
        return self._choices.choose(logits, counts, after, inputs, choice), logits

    def _new_choices(self) -> ChoiceState:
        slots, vocabulary = self.max_batch + 1, self.model.config.vocab_size
        return ChoiceState(slots, self.max_batch, vocabulary, self.devices[-1], depth=self._ahead + 1)

    # The host's part.

    def _sequences(self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams] | None) -> list[Sequence]:
        return make_sequences(
            prompts,
            params,
            vocabulary=self.model.config.vocab_size,
            max_context=self.max_context,
            allocator=self._allocator,
            constrain=self.constrain,
        )

    def _stream(self, sequences: list[Sequence]) -> Generator[tuple[int, int], None, None]:
        """Who takes the tokens works on streams of his own: the engine's are current only while it computes."""
        steps = self._run(sequences)
        try:
            while True:
                with self.running():
                    tokens = next(steps, None)
                if tokens is None:
                    return
                yield from tokens
        finally:
            steps.close()

    def _run(self, sequences: list[Sequence]) -> Generator[Tokens, None, None]:
        """Prefill and decode until all sequences are done, what each step gave at a time."""
        if self._busy:
            raise ValueError("the engine is generating already; exhaust or close the stream that is open first")
        self._busy = True
        waiting = deque(sequences)
        active: list[Sequence] = []
        self.stats = Stats(mode=self.mode)
        try:
            while waiting or active:
                while waiting and len(active) < self.max_batch and self._take_pages(waiting[0]):
                    active.append(waiting.popleft())
                    active[-1].slot = self._slots.pop()
                    yield self._prefill(active[-1])
                    active = self._release_finished(active)
                if active:
                    yield from self._decode(active)
                    active = self._release_finished(active)
        except FloatingPointError:
            self._cache.reset()  # the next owner of a page masks what it finds there, and 0 * NaN is NaN
            raise
        finally:
            for sequence in active:  # after an error, an interrupt or a close; the engine stays usable
                self._give_back(sequence)
            self._busy = False

    def _prefill(self, sequence: Sequence) -> Tokens:
        choice = Choice.of([sequence.params])
        runner = self.runner("prefill", **choice._asdict())
        self._prepare([sequence], begin=True)
        started = perf_counter()
        report = None
        for start in range(0, len(sequence.prompt), self.chunk):
            part = sequence.prompt[start : start + self.chunk]
            rows = self._rows([sequence], [start], limits=[start + len(part)], choice=choice)
            tokens = torch.zeros(1, self.chunk, dtype=torch.int64)
            tokens[0, : len(part)] = torch.tensor(part)
            runner.load(tokens=tokens, **rows)
            self._trim(len(part), start + len(part))
            report = runner.replay()
        assert report is not None
        new = self._collect([sequence], self._fetch(report, choice))
        self.stats.prefill_tokens += len(sequence.prompt)
        self.stats.prefill_seconds += perf_counter() - started
        return new

    def _decode(self, active: list[Sequence]) -> Iterator[Tokens]:
        """Step all rows until a sequence ends; captured, the next step is launched before the last tokens are read.

        So at most one step too many runs for a row that met a stop token; it writes to the row's own pages, which are
        given back only afterwards, and what it drew is dropped.
        """
        choice = Choice.of(s.params for s in active)
        runner = self.runner("decode", **choice._asdict())
        # What may follow a token is known when the host has it: a constraint makes the next step wait for the last.
        ahead = 0 if any(s.constraint for s in active) else self._ahead
        started = perf_counter()
        positions = [len(s.prompt) + len(s.output) - 1 for s in active]
        rows = self._rows(active, positions, limits=[s.limit for s in active], choice=choice)
        _, bucket = runner.load(drawn=torch.tensor([s.output[-1] for s in active]), **rows)
        under_way: deque[Report] = deque()
        reach, left = max(positions), min(s.left for s in active)
        while left or under_way:
            if left:
                left, reach = left - 1, reach + 1
                self._trim(1, reach)
                self._prepare(active)
                under_way.append(self._fetch(runner.replay(bucket)[: len(active)], choice))
                self.stats.decode_steps += 1
            if len(under_way) > ahead or not left:
                new = self._collect(active, under_way.popleft())
                self.stats.decode_tokens += len(new)
                now = perf_counter()
                self.stats.decode_seconds += now - started
                yield new
                started = perf_counter()  # what the caller does with the tokens is not counted
                if any(s.done for s in active):
                    left = 0

    def _prepare(self, active: list[Sequence], *, begin: bool = False) -> None:
        """Before a step: what its rows have said so far, where they begin, and what may follow in those constrained."""
        if self._choices is None:
            return
        for sequence in active if begin else ():
            if sequence.params.shaping:
                self._choices.begin(sequence.slot, sequence.prompt, sequence.output)
        self._choices.constrain({s.slot: s.constraint for s in active if s.constraint is not None})

    def _fetch(self, report: Tensor, choice: Choice) -> Report:
        """Begin to copy what a step tells the host."""
        told = self._choices.fetch(len(report)) if choice.logprobs and self._choices is not None else None
        return self._download.start(report), told

    def _collect(self, active: list[Sequence], report: Report) -> Tokens:
        """Wait for a step's tokens and hand out those of sequences that still run."""
        new = []
        tokens, told = report
        drawn, rows = tokens().tolist(), told() if told is not None else None
        for row, (sequence, token) in enumerate(zip(active, drawn, strict=True)):
            if sequence.done:
                continue
            if token < 0:
                at = len(sequence.prompt) + len(sequence.output)
                raise FloatingPointError(
                    f"prompt {sequence.index}: the model gives NaN at position {at}: its weights hold NaN or "
                    "infinities, or activations overflow its dtype; check the checkpoint, or load it in float32"
                )
            sequence.take(token)
            if rows is not None and self._choices is not None and sequence.params.logprobs is not None:
                sequence.logprobs.append(self._choices.logprob(rows[row], token, sequence.params.logprobs))
            new.append((sequence.index, token))
        return new

    def _rows(
        self, active: list[Sequence], positions: list[int], *, limits: list[int], choice: Choice
    ) -> dict[str, Tensor]:
        """The host's side of `_row_inputs`."""
        table = torch.zeros(len(active), self._per_row, dtype=torch.int32)
        for row, sequence in zip(table, active, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        return {
            "positions": torch.tensor(positions, dtype=torch.int32),
            "limits": torch.tensor(limits, dtype=torch.int32),
            "table": table,
            "slots": torch.tensor([s.slot for s in active], dtype=torch.int32),
            "seed": torch.tensor([s.seed for s in active], dtype=torch.int64),
            **row_values([s.params for s in active], choice),
        }

    def _inputs(self, stage: int, decoding: bool, choice: Choice) -> dict[str, Tensor]:
        """The static buffers of one stage's step."""
        device = self.devices[stage]
        rows, length = (self.max_batch, 1) if decoding else (1, self.chunk)
        inputs = self._row_inputs(rows, device, choice)
        if decoding:
            inputs["drawn"] = torch.zeros(rows, dtype=torch.int64, device=device)
        else:
            inputs["tokens"] = torch.zeros(rows, length, dtype=torch.int64, device=device)
        if stage:
            inputs["stream"] = torch.zeros(self.model.stream_shape(rows, length), dtype=self.model.dtype, device=device)
        return inputs

    def _row_inputs(self, rows: int, device: torch.device, choice: Choice = PLAIN) -> dict[str, Tensor]:
        def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return {
            "positions": tensor(torch.int32),  # where the next token of the row is written
            "limits": tensor(torch.int32),  # where the row stops: a padding row has 0
            "table": tensor(torch.int32, self._per_row),
            "slots": tensor(torch.int32),  # which state of fixed size is the row's: a padding row has 0
            "seed": tensor(torch.int64),
            **row_buffers(rows, choice, device),
        }

    def _trim(self, length: int, reach: int) -> None:
        """Before an eager step on a CPU: the tokens of the chunk and the pages of the longest row.

        Not on a GPU, eagerly either: kernels split their work by shape, so that another shape rounds in another order,
        and an eager step would then draw other tokens at near-ties than the captured one that it is compared with. Nor
        between stages, which hand on whole buffers.
        """
        if self._trims:
            self._length, self._width = length, self._allocator.needed(reach)

    def _take_pages(self, sequence: Sequence) -> bool:
        pages = self._allocator.take(sequence.limit)
        sequence.pages = pages or []
        return pages is not None

    def _release_finished(self, active: list[Sequence]) -> list[Sequence]:
        for sequence in active:
            if sequence.done:
                self._give_back(sequence)
        return [sequence for sequence in active if not sequence.done]

    def _give_back(self, sequence: Sequence) -> None:
        self._allocator.give_back(sequence.pages)
        self._slots.append(sequence.slot)


def _buckets(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8: padding costs at most a doubling of small batches and 7 rows of large ones."""
    return sorted({b for b in (1, 2, 4, *range(8, largest, 8)) if b < largest} | {largest})
