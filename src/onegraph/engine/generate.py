"""Where a model meets a graph: prompts in, tokens out, the decode step one replay.

Everything that a step changes lives on the device and is advanced inside the step, so replays chain without host work:
position and last token of each row, and by `limits` also when a row is to stand still. The host decides only which
sequence sits in which row, and writes the rows anew when that changes.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from onegraph.engine.pages import PageAllocator
from onegraph.engine.params import SamplingParams, Stats
from onegraph.engine.sequence import Sequence, make_sequences
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.ops.sampling import greedy, sample
from onegraph.ops.step import begin_step, finish_step
from onegraph.runtime.graph import GraphPool, Runner, split_point
from onegraph.runtime.transfer import Download

OnToken = Callable[[int, int], None]


class Decoder(Protocol):
    """What the engine asks of a model; `onegraph.models.llama.Llama` is one."""

    @property
    def config(self) -> Any: ...  # with vocab_size
    @property
    def device(self) -> torch.device: ...
    @property
    def max_context(self) -> int: ...
    def __call__(self, tokens: Tensor, cache: Any) -> Tensor: ...  # int64 [B, Q] -> [B, Q, D]
    def logits(self, hidden: Tensor) -> Tensor: ...  # [B, D] -> [B, V]
    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int) -> Any: ...  # see _Paged


@dataclass(frozen=True)
class _Paged:
    """A way to attend that a split mode can break at; a plain call elsewhere.

    `cache` is what the model made: a PagedCache, or what has its face and its own arguments of `attend`.
    """

    cache: Any

    def attend(self, attention: Any, *inputs: Tensor | None) -> Tensor:
        return split_point("attention", self.cache.attend, attention, *inputs)


class Engine:
    """Generates from a model with a paged KV cache and one graph for each batch-size bucket.

    Args:
        model: see `Decoder`.
        max_batch: sequences that decode at once; further prompts wait for a free row.
        max_context: tokens of a sequence, prompt and continuation (default: the model's, at most 4096).
        page_size: tokens in a page of the cache (default: the model's `page_size`, or 16 where it has none).
        pages: pages of the cache, one of them the sentinel (default: enough for max_batch full sequences).
        chunk: prompt tokens that one prefill step takes.
        kv: how keys and values are stored: None in the model's dtype, else a setting of
            `onegraph.formats.turboquant` or its text ("turboquant:4").
        capture: True captures, False runs eagerly, "split" captures around attention, None captures where the model is
            on a GPU.

    A batch gives each prompt the tokens that it would get alone, up to the last bit of the matrix products (a GEMM
    of another batch size may round a near-tie the other way); draws never depend on the batch.

    Not thread-safe: one `generate` at a time.
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
        self.device = torch.device(model.device)
        self.max_context = min(model.max_context, 4096) if max_context is None else max_context
        page_size = getattr(model, "page_size", 16) if page_size is None else page_size
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
        captured = self.device.type == "cuda" if capture is None else bool(capture)
        self.mode = "split" if capture == "split" else "captured" if captured else "eager"
        self._pool = GraphPool(self.device) if captured else None
        self._ahead = 1 if captured else 0  # steps launched before the tokens of one are read

        per_row = -(-self.max_context // page_size)
        total = 1 + max_batch * per_row if pages is None else pages
        kv = parse_kv(kv) if isinstance(kv, str) else kv
        how = {} if kv is None else {"kv": kv}
        if how and "kv" not in signature(model.new_cache).parameters:
            raise ValueError(f"kv: got {kv}; this model has a cache of its own kind, leave kv out")
        self._cache = model.new_cache(rows=max_batch, pages=total, page_size=page_size, pages_per_row=per_row, **how)
        self._allocator = PageAllocator(total, page_size)
        self._slots = list(range(max_batch, 0, -1))  # of state that does not grow; slot 0 belongs to nobody
        self._decode_inputs = {"drawn": self._tensor(max_batch, torch.int64), **self._row_inputs(max_batch)}
        self._prefill_inputs = {"tokens": self._tensor((1, chunk), torch.int64), **self._row_inputs(1)}
        self._runners: dict[tuple[str, bool], Runner] = {}
        self._download = Download(self._decode_inputs["drawn"], depth=self._ahead + 1)
        # What a step on a CPU need not look at, where the reference reads all that it may.
        self._width, self._length = per_row, chunk
        self.stats = Stats(mode=self.mode)

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) and return the new tokens of each.

        Args:
            params: for all prompts, or one for each.
            on_token: called as on_token(prompt's number, token) as soon as the host has it.

        Raises ValueError for what cannot run (before anything does), FloatingPointError where the model gives NaN.
        """
        sequences = make_sequences(
            prompts,
            params,
            vocabulary=self.model.config.vocab_size,
            max_context=self.max_context,
            allocator=self._allocator,
        )
        waiting = deque(sequences)
        active: list[Sequence] = []
        self.stats = Stats(mode=self.mode)
        on_token = on_token or (lambda index, token: None)
        try:
            with self._pool.running() if self._pool else nullcontext():
                while waiting or active:
                    while waiting and len(active) < self.max_batch and self._take_pages(waiting[0]):
                        active.append(waiting.popleft())
                        active[-1].slot = self._slots.pop()
                        self._prefill(active[-1], on_token)
                        active = self._release_finished(active)
                    if active:
                        self._decode(active, on_token)
                        active = self._release_finished(active)
        except FloatingPointError:
            self._cache.reset()  # the next owner of a page masks what it finds there, and 0 * NaN is NaN
            raise
        finally:
            for sequence in active:  # after an error or an interrupt; the engine stays usable
                self._give_back(sequence)
        return [sequence.output for sequence in sequences]

    def runner(self, kind: Literal["decode", "prefill"], *, sampling: bool = False) -> Runner:
        """The Runner of a step, built when first asked for: greedy or sampling, one graph for each bucket."""
        key = (kind, sampling)
        if key not in self._runners:
            started = perf_counter()
            inputs = self._decode_inputs if kind == "decode" else self._prefill_inputs
            for tensor in inputs.values():
                tensor.zero_()  # no row has a sequence: warm-up then touches nothing but the sentinel page
            self._runners[key] = Runner(
                partial(self._decode_step if kind == "decode" else self._prefill_step, sampling=sampling),
                inputs,
                _buckets(self.max_batch) if kind == "decode" else None,
                capture=self._pool is not None,
                pool=self._pool,
                split="attention" if self.mode == "split" else (),
            )
            self.stats.build_seconds += perf_counter() - started
        return self._runners[key]

    # The steps: the capture contract holds here.

    def _decode_step(
        self, drawn: Tensor, positions: Tensor, limits: Tensor, table: Tensor, *, sampling: bool, **choice: Tensor
    ) -> Tensor:
        """Read each row's last token, draw the next, move on. drawn int64 [B] -> what the host reads, int64 [B]."""
        tokens, logits, after = self._forward(drawn.unsqueeze(1), positions, limits, table, choice, sampling)
        return finish_step(tokens, logits, after, drawn, positions)

    def _prefill_step(
        self, tokens: Tensor, positions: Tensor, limits: Tensor, table: Tensor, *, sampling: bool, **choice: Tensor
    ) -> Tensor:
        """Read up to `chunk` tokens of a prompt [1, chunk] and draw the one behind them, int64 [1]."""
        part = tokens[:, : self._length]
        drawn, logits, after = self._forward(part, positions, limits, table, choice, sampling)
        return finish_step(drawn, logits, after, torch.empty_like(drawn), positions)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        limits: Tensor,
        table: Tensor,
        choice: dict[str, Tensor],
        sampling: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over tokens [B, Q]: the tokens drawn, the logits behind them, and the rows' next positions."""
        length = tokens.shape[1]
        counts, after = begin_step(positions, limits, length)  # padding rows and rows at their end have 0, and stay
        cache = self._cache.view()
        cache.block_table, cache.positions, cache.counts = table[:, : self._width], positions, counts
        cache.slots = choice["slots"]
        return *self._draw(self.model(tokens, _Paged(cache)), counts, after, choice, sampling), after

    def _draw(
        self, hidden: Tensor, counts: Tensor, after: Tensor, choice: dict[str, Tensor], sampling: bool
    ) -> tuple[Tensor, Tensor]:
        """From hidden states [B, Q, D]: the token behind each row's last one, and the logits that it was drawn from."""
        if hidden.shape[1] == 1:
            hidden = hidden.squeeze(1)
        else:
            last = (counts.long() - 1).clamp(min=0)
            hidden = hidden.gather(1, last.view(-1, 1, 1).expand(-1, 1, hidden.shape[2])).squeeze(1)
        logits = self.model.logits(hidden)
        if sampling:
            row = (choice[name] for name in ("temperature", "top_k", "top_p", "seed"))
            return sample(logits, *row, after), logits
        return greedy(logits), logits

    # The host's part.

    def _prefill(self, sequence: Sequence, on_token: OnToken) -> None:
        runner = self.runner("prefill", sampling=sequence.params.temperature > 0)
        started = perf_counter()
        report = None
        for start in range(0, len(sequence.prompt), self.chunk):
            part = sequence.prompt[start : start + self.chunk]
            rows = self._rows([sequence], [start], limits=[start + len(part)])
            tokens = torch.zeros(1, self.chunk, dtype=torch.int64)
            tokens[0, : len(part)] = torch.tensor(part)
            runner.load(tokens=tokens, **rows)
            self._trim(len(part), start + len(part))
            report = runner.replay()
        assert report is not None
        self._collect([sequence], self._download.start(report), on_token)
        self.stats.prefill_tokens += len(sequence.prompt)
        self.stats.prefill_seconds += perf_counter() - started

    def _decode(self, active: list[Sequence], on_token: OnToken) -> None:
        """Step all rows until a sequence ends; captured, the next step is launched before the last tokens are read.

        So at most one step too many runs for a row that met a stop token; it writes to the row's own pages, which are
        given back only afterwards, and what it drew is dropped.
        """
        runner = self.runner("decode", sampling=any(s.params.temperature > 0 for s in active))
        started = perf_counter()
        positions = [len(s.prompt) + len(s.output) - 1 for s in active]
        rows = self._rows(active, positions, limits=[s.limit for s in active])
        _, bucket = runner.load(drawn=torch.tensor([s.output[-1] for s in active]), **rows)
        under_way: deque[Callable[[], Tensor]] = deque()
        for step in range(min(s.left for s in active)):
            self._trim(1, max(positions) + step + 1)
            under_way.append(self._download.start(runner.replay(bucket)[: len(active)]))
            self.stats.decode_steps += 1
            if len(under_way) > self._ahead:
                self.stats.decode_tokens += self._collect(active, under_way.popleft(), on_token)
                if any(s.done for s in active):
                    break
        for tokens in under_way:
            self.stats.decode_tokens += self._collect(active, tokens, on_token)
        self.stats.decode_seconds += perf_counter() - started

    def _collect(self, active: list[Sequence], tokens: Callable[[], Tensor], on_token: OnToken) -> int:
        """Wait for a step's tokens and hand them out; returns how many belonged to a sequence that still runs."""
        count = 0
        for sequence, token in zip(active, tokens().tolist(), strict=True):
            if sequence.done:
                continue
            if token < 0:
                at = len(sequence.prompt) + len(sequence.output)
                raise FloatingPointError(
                    f"prompt {sequence.index}: the model gives NaN at position {at}: its weights hold NaN or "
                    "infinities, or activations overflow its dtype; check the checkpoint, or load it in float32"
                )
            sequence.output.append(token)
            on_token(sequence.index, token)
            count += 1
        return count

    def _rows(self, active: list[Sequence], positions: list[int], *, limits: list[int]) -> dict[str, Tensor]:
        """The host's side of `_row_inputs`."""
        table = torch.zeros(len(active), self._decode_inputs["table"].shape[1], dtype=torch.int32)
        for row, sequence in zip(table, active, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        return {
            "positions": torch.tensor(positions, dtype=torch.int32),
            "limits": torch.tensor(limits, dtype=torch.int32),
            "table": table,
            "slots": torch.tensor([s.slot for s in active], dtype=torch.int32),
            "temperature": torch.tensor([s.params.temperature for s in active], dtype=torch.float32),
            "top_k": torch.tensor([s.params.top_k for s in active], dtype=torch.int32),
            "top_p": torch.tensor([s.params.top_p for s in active], dtype=torch.float32),
            "seed": torch.tensor([s.seed for s in active], dtype=torch.int64),
        }

    def _row_inputs(self, rows: int) -> dict[str, Tensor]:
        per_row = self._cache.block_table.shape[1]
        return {
            "positions": self._tensor(rows, torch.int32),  # where the next token of the row is written
            "limits": self._tensor(rows, torch.int32),  # where the row stops: a padding row has 0
            "table": self._tensor((rows, per_row), torch.int32),
            "slots": self._tensor(rows, torch.int32),  # which state of fixed size is the row's: a padding row has 0
            "temperature": self._tensor(rows, torch.float32),
            "top_k": self._tensor(rows, torch.int32),
            "top_p": self._tensor(rows, torch.float32),
            "seed": self._tensor(rows, torch.int64),
        }

    def _tensor(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _trim(self, length: int, reach: int) -> None:
        """Before an eager step on a CPU: the tokens of the chunk and the pages of the longest row.

        Not on a GPU, eagerly either: kernels split their work by shape, so that another shape rounds in another order,
        and an eager step would then draw other tokens at near-ties than the captured one that it is compared with.
        """
        if self._pool is None and self.device.type == "cpu":
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
