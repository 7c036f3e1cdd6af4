"""Prompts in, tokens out: an executor that runs a model's steps, and a scheduler that decides whose."""

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Literal

from onegraph.engine.choice import Constrain
from onegraph.engine.decoder import Model
from onegraph.engine.draft import MakeDrafter
from onegraph.engine.exact_window import sizes_of
from onegraph.engine.executor import Executor, Mode
from onegraph.engine.params import SamplingParams, Stats
from onegraph.engine.scheduler import Scheduler
from onegraph.engine.sequence import Sequence, make_sequences
from onegraph.engine.speculate import DraftTokens
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.nn.lora import Adapters

Tokens = list[tuple[int, int]]  # (prompt's number, token), of a step
Params = SamplingParams | Seq[SamplingParams] | None


class Engine:
    """Generates from a model with a paged KV cache and one graph for each device and batch-size bucket.

    Args:
        model: see `Model`.
        max_batch: sequences that decode at once; further prompts wait for a free row.
        max_context: tokens of a sequence, prompt and continuation (default: the model's, at most 4096).
        page_size: tokens in a page of the cache (default: the model's `page_size`, or of codes what
            `engine.exact_window.page_size_of` says).
        pages: pages of the cache, one of them the sentinel (default: enough for max_batch full sequences, and for some
            that are exact while short, of a cache in codes: `engine.exact_window.sizes_of`).
        chunk: prompt tokens that one prefill step takes.
        kv: how keys and values are stored: None in the model's dtype, else a setting of
            `onegraph.formats.turboquant` or its text ("turboquant:4").
        draft: the draft source for speculative decoding (`engine/draft.py`): what makes the drafter of each rank, or
            one that makes all of them; None for none. draft_tokens: how many a round checks, or "auto" for as many as
            pay.
        capture: True captures, False runs eagerly, "split" captures around attention (not of ranks), None captures
            where the model is on a GPU.
        batch_invariant: what a decode step computes of a token is the same, bit by bit, whatever rows and drafts are
            in the same step. For dense models of the Llama kind on one device with an exact cache; others are a
            ValueError.

        kv_offloading_size: GiB of host memory, of all ranks together, for what the prefix cache evicts
            (`engine/offload.py`); None for none. ValueError where prefixes are not shared.

    A batch gives each prompt the tokens that it would get alone: with `batch_invariant` exactly, else up to the last
    bit of the matrix products (a GEMM of another batch size may round a near-tie the other way), and but for a cache in
    codes, whose rows are exact while the whole batch is short (`engine/exact_window.py`). Sampling never depends on the
    batch.

    Attributes:
        constrain: makes a row's constraint, which takes a tokenizer; None where there is none.

    Not thread-safe: one `generate`, `stream` or open scheduler at a time. Raises ValueError where a peer link between
    devices is missing; a device that fails while running comes out as a DeviceError that names it, a rank that waits
    for another in vain as a PeerError.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = 8,
        max_context: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        chunk: int = 256,
        kv: TurboQuantConfig | str | None = None,
        draft: MakeDrafter | Seq[MakeDrafter] | None = None,
        draft_tokens: DraftTokens = "auto",
        capture: bool | Literal["split"] | None = None,
        batch_invariant: bool = False,
        kv_offloading_size: float | None = None,
    ):
        context = min(model.max_context, 4096) if max_context is None else max_context
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("chunk", chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; allowed is 1 and more")
        if not 1 <= context <= model.max_context:
            raise ValueError(
                f"max_context: got {max_context}; the model was loaded for 1 to {model.max_context} tokens"
            )
        if capture not in (None, True, False, "split"):
            raise ValueError(f"capture: got {capture!r}; allowed are True, False, 'split' and None for automatic")
        if capture == "split" and len(model.ranks) > 1:
            raise ValueError("capture: got 'split' for a model on several ranks; allowed are True, False and None")
        captured = model.devices[0].type == "cuda" if capture is None else bool(capture)
        mode: Mode = "split" if capture == "split" else "captured" if captured else "eager"
        kv = parse_kv(kv) if isinstance(kv, str) else kv
        sizes = sizes_of(model, kv, rows=max_batch, context=context, page_size=page_size, pages=pages)
        self.model = model
        self.executor = Executor(
            model, sizes, mode, chunk=chunk, kv=kv, draft=draft, draft_tokens=draft_tokens,
            batch_invariant=batch_invariant, kv_offloading_size=kv_offloading_size,
        )  # fmt: skip
        self.scheduler = Scheduler(self.executor)
        self.constrain: Constrain | None = None

    @property
    def mode(self) -> str:
        """captured, eager or split."""
        return self.executor.mode

    @property
    def max_batch(self) -> int:
        return self.executor.sizes.rows

    @property
    def max_context(self) -> int:
        return self.executor.sizes.context

    @property
    def kv(self) -> str:
        """How keys and values are stored, with the layers that the model itself keeps exact."""
        return self.executor.cache.setting

    @property
    def stats(self) -> Stats:
        """Of the last run."""
        return self.executor.stats

    def generate(
        self, prompts: Seq[Seq[int]], params: Params = None, on_token: Callable[[int, int], object] | None = None
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) and return the new tokens of each.

        Args:
            params: for all prompts, or one for each.
            on_token: called as on_token(prompt's number, token) as soon as the host has it; True ends that prompt.

        Raises ValueError for what cannot run (before anything does), FloatingPointError where the model gives NaN,
        StepError where a step cannot be captured.
        """
        return [sequence.output for sequence in self.complete(prompts, params, on_token)]

    def complete(
        self,
        prompts: Seq[Seq[int]],
        params: Params = None,
        on_token: Callable[[int, int], object] | None = None,
        on_done: Callable[[Sequence], object] | None = None,
    ) -> list[Sequence]:
        """`generate`, but all that is known of each: output, seed, log-probabilities.

        on_done: called with each as soon as it is done, behind the step's calls of `on_token`.
        """
        sequences = self._sequences(prompts, params)
        told, left = [0] * len(sequences), dict(enumerate(sequences))
        with self.executor.running(), closing(self._run(sequences)) as steps:
            for tokens in steps:
                if on_token is not None:
                    for index, token in tokens:
                        if not sequences[index].cancelled:
                            told[index] += 1
                            if on_token(index, token) is True:
                                sequences[index].end(told[index])
                if on_done is not None:
                    for index in [index for index, each in left.items() if each.done and each.error is None]:
                        on_done(left.pop(index))
        return sequences

    def stream(
        self, prompts: Seq[Seq[int]], params: Params = None, cancelled: Callable[[], bool] | None = None
    ) -> Generator[tuple[int, int], None, None]:
        """`generate`, but (prompt's number, token) one by one, as soon as the host has it.

        Closed early or dropped, it frees rows and pages; until it ends, nothing else may run. `cancelled` is called
        before each step, of which a long prompt takes several: True ends the stream. Raises what `generate` raises.
        """
        return self._stream(self._sequences(prompts, params), cancelled)

    @property
    def adapters(self) -> dict[str, int]:
        """Slots of the model's adapters by name."""
        found: Adapters | None = getattr(self.model.ranks[0], "adapters", None)
        return {} if found is None else found.names

    def request(self, prompt: Seq[int], params: SamplingParams) -> Sequence:
        """What `scheduler` takes. Raises ValueError for what cannot run."""
        return self.requests(prompt, [params])[0]

    def requests(self, prompt: Seq[int], params: Seq[SamplingParams]) -> list[Sequence]:
        """`request` of several answers to one prompt, which is scored once."""
        return self._sequences([prompt] * len(params), params)

    def _sequences(self, prompts: Seq[Seq[int]], params: Params) -> list[Sequence]:
        vocabulary = self.model.config.vocab_size
        return make_sequences(
            prompts,
            params,
            vocabulary=vocabulary,
            sizes=self.executor.sizes,
            constrain=self.constrain,
            adapters=self.adapters,
        )

    def _stream(
        self, sequences: list[Sequence], cancelled: Callable[[], bool] | None
    ) -> Generator[tuple[int, int], None, None]:
        """The caller works on its own streams: the engine's are current only while it computes."""
        steps = self._run(sequences)
        try:
            while cancelled is None or not cancelled():
                with self.executor.running():
                    tokens = next(steps, None)
                if tokens is None:
                    return
                yield from tokens
        finally:
            steps.close()

    def _run(self, sequences: list[Sequence]) -> Generator[Tokens, None, None]:
        """All prompts first, then steps until all sequences are done: what each step gave at a time.

        Prefixes are shared within the call alone, so that a prompt given twice, to be timed say, is read twice.
        """
        with closing(self.scheduler.open(interleave=False)) as scheduler:
            scheduler.prefixes.forget()
            for sequence in sequences:
                scheduler.add(sequence)
            while not scheduler.idle:
                new = scheduler.step()
                yield [(sequence.index, token) for sequence, token in new if token >= 0]
                for sequence, _ in new:
                    if sequence.cancelled:  # by the caller
                        scheduler.cancel(sequence)
                    elif sequence.error is not None:
                        raise sequence.error
                    elif sequence.constraint is not None and sequence.constraint.problem:
                        raise ValueError(f"prompt {sequence.index}: {sequence.constraint.problem}")
