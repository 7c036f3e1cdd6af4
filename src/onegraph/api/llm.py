"""A model that answers: load it, give it text, get text back. No torch in sight."""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, Literal, cast, overload

import torch

from onegraph.api import Progress
from onegraph.api.chat import EFFORTS, Thinking
from onegraph.api.completion import AnswerText, Completion, expand_n, for_engine
from onegraph.api.constraint import Constraints
from onegraph.api.defaults import SamplingDefaults
from onegraph.api.deprecated import public_names, renamed, warn
from onegraph.api.device import pick_device
from onegraph.api.drafting import ALLOWED, MTP, drafters
from onegraph.api.hub import locate
from onegraph.api.memory import Memory, check_share, filling_tokens, plan_load, size_bytes
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import (
    is_index,
    is_number,
    require,
    require_callable,
    require_count,
    require_flag,
    require_path,
)
from onegraph.engine.engine import Engine
from onegraph.engine.exact_window import page_size_of
from onegraph.engine.params import SamplingParams, Stats
from onegraph.engine.sequence import Sequence as EngineSequence
from onegraph.engine.speculate import DraftTokens, check_draft_tokens
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.models.load import Split, load_decoder
from onegraph.models.wrapper import skipped

# Arguments of the engine and the loader -> those of LLM, for errors
PUBLIC = {
    "gpus": "tensor_parallel_size",
    "kv": "kv_cache_dtype",
    "max_batch": "max_num_seqs",
    "max_context": "max_model_len",
    "draft": "speculative",
    "draft_tokens": "num_speculative_tokens",
}
Prompt = str | Sequence[int]  # a text, or its token ids
Pieces = Generator[str, None, None]  # text as it is written; `close()` stops the model
OnDone = Callable[[int, Completion], object]
Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": a text}


def _parallel(tensor: int, pipeline: int, gpus: int | None, split: Split | None) -> tuple[int, Split | None]:
    """The number of GPUs, and how they split the model: "tensor", "layer", or None for the model's own. Raises
    ValueError."""
    require_count("tensor_parallel_size", tensor)
    require_count("pipeline_parallel_size", pipeline)
    if gpus is not None or split is not None:
        require_count("gpus", gpus, none="one")
        require("split", split, split in (None, "tensor", "layer"), "'tensor', 'layer', or None for the model's own")
        if max(tensor, pipeline) > 1:
            raise TypeError(
                "gpus and split are the old names of tensor_parallel_size and pipeline_parallel_size; give one"
            )
        warn("gpus, split", "tensor_parallel_size or pipeline_parallel_size", stacklevel=5)
        return gpus or 1, split
    if tensor > 1 and pipeline > 1:
        raise ValueError(
            f"tensor_parallel_size and pipeline_parallel_size: got {tensor} and {pipeline}; one of them must be 1"
        )
    return max(tensor, pipeline), "layer" if pipeline > 1 else "tensor" if tensor > 1 else None


class LLM:
    """A model on a GPU (or a CPU) that generates text.

    Args:
        model: a directory with config.json, safetensors and tokenizer.json, a .gguf file, or a name on the Hugging Face
            hub ("org/name", "org/name@revision"); quantized or not.
        tensor_parallel_size: number of GPUs that share every layer (docs/guides/several-gpus.md).
        pipeline_parallel_size: number of GPUs that each hold some of the layers; DeepSeek-V4 only.
        max_model_len: maximum number of tokens of a prompt and its answer (default: the model's, at most 4096).
        max_num_seqs: maximum number of sequences in a batch; further prompts wait.
        kv_cache_dtype: "exact", "turboquant:4", "turboquant:k3v4", ... (docs/guides/long-context.md), or "fp8" for
            DeepSeek-V4 and models with one latent for all heads.
        kv_cache_tokens: number of tokens in the KV cache, which is allocated now (default: max_num_seqs x
            max_model_len, and more for short sequences of a quantized cache; fewer, at least max_model_len, where
            those would take more than 90 % of the GPU memory that the weights leave free, or an eighth of a CPU's).
            If they run out, the youngest sequence is preempted.
        gpu_memory_utilization: share of a GPU's memory that weights and KV cache fill, with 750 MB for CUDA, in place
            of kv_cache_tokens: above 0 to 1 (default: the cache has the size above). What is more than a full context
            of each sequence serves the prefix cache. Not for DeepSeek-V4.
        kv_offloading_size: GiB of host memory for what the prefix cache evicts, allocated now, of all GPUs together
            (default: none). For exact caches; of use to a server (docs/guides/serve.md#prefix-cache-in-host-memory).
        speculative: method that proposes draft tokens: "ngram", "eagle:PATH" (an EAGLE-3 head), "mtp" (the draft
            layers of DeepSeek, GLM, Nemotron 3, Qwen3-Next or Qwen3.5), or the path of a draft model. The text stays
            the same, up to near-ties of rounding (docs/guides/speculative-decoding.md).
        num_speculative_tokens: number of drafts per verify pass, 1 to 7, or "auto".
        seed: base seed for requests without a seed of their own: the same calls in the same order give the same texts.
        dtype: of activations and unquantized weights: "bfloat16", "float16", "float32", or "auto" for bfloat16 on a GPU
            and float32 on a CPU, where linears are held in float16 if that loses nothing. On a CPU "float16" holds all
            linears so, "int8" those of blocks in int8 by row.
        device: "cpu", "cuda", "cuda:N", or "auto" for the GPU if there is one.
        batch_invariant: the text is the same bit by bit in any batch and with any drafts; steps take longer. For dense
            Llama-like models on one device with an exact cache.
        capture: True runs the decode step as one CUDA graph, False eagerly, "split" breaks the graph around attention;
            None captures on a GPU.
        expert_memory: GB of GPU memory for routed experts; the others stay in host memory, and a step copies those
            that it needs (docs/guides/fit-your-gpu.md). None: all are on the GPU. For models of the Llama kind on one
            GPU.
        adapters: directories of LoRA adapters by name, as peft saves them; `SamplingParams.adapter` chooses one for a
            request. For models of the Llama kind on one device.
        tokenizer: the checkpoint's own, if it was read already.
        progress: called as progress("loading", bytes read, total bytes). on_memory: called with the `Memory` that
            weights and cache will take, before they are loaded (not for DeepSeek-V4).
        gpus, split: deprecated: tensor_parallel_size, pipeline_parallel_size.

    Attributes:
        dtype: of activations. weights: of the linears of blocks that are not quantized: the name of that dtype, or
            "int8". sampling_defaults: values for sampling fields that a request leaves open. skipped: tensors of other
            modalities and of layers that predict further tokens, which are not read, counted by module.

    Use it in a `with` block, or call `close`: both free the GPU's memory. One call at a time: not thread-safe.

    Raises ValueError (CheckpointError among them) that names what is wrong with the checkpoint, an argument or this
    machine.
    """

    @renamed(
        path="model",
        kv="kv_cache_dtype",
        max_batch="max_num_seqs",
        max_context="max_model_len",
        cache_tokens="kv_cache_tokens",
        draft="speculative",
        draft_tokens="num_speculative_tokens",
    )
    def __init__(
        self,
        model: str | PathLike[str],
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        kv_cache_dtype: str = "exact",
        kv_cache_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_offloading_size: float | None = None,
        speculative: str | PathLike[str] | None = None,
        num_speculative_tokens: DraftTokens = "auto",
        seed: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        batch_invariant: bool = False,
        capture: bool | Literal["split"] | None = None,
        expert_memory: float | None = None,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
        on_memory: Callable[[Memory], object] | None = None,
        gpus: int | None = None,
        split: Split | None = None,
    ) -> None:
        gpus, split = _parallel(tensor_parallel_size, pipeline_parallel_size, gpus, split)
        fine = isinstance(kv_cache_dtype, str)
        require("kv_cache_dtype", kv_cache_dtype, fine, "a text, such as 'exact' or 'turboquant:4'")
        require_count("max_num_seqs", max_num_seqs)
        require_count("max_model_len", max_model_len, none="the model's own")
        require_count("kv_cache_tokens", kv_cache_tokens, none="max_num_seqs x max_model_len")
        share = gpu_memory_utilization
        fine = share is None or (is_number(share) and 0 < share <= 1)
        require("gpu_memory_utilization", share, fine, "a number above 0, at most 1, or None for the default cache")
        size = kv_offloading_size
        fine = size is None or (is_number(size) and size > 0)
        require("kv_offloading_size", size, fine, "a number of GiB above 0, or None for none")
        with public_names(PUBLIC):
            check_draft_tokens(num_speculative_tokens)
        if not isinstance(speculative, str | PathLike | None):
            raise ValueError(f"speculative: got {speculative!r}; {ALLOWED}")
        fine = seed is None or is_index(seed)
        require("seed", seed, fine, "a whole number, or None for a random one")
        require_flag("batch_invariant", batch_invariant)
        fine = capture is None or isinstance(capture, bool) or capture == "split"
        require("capture", capture, fine, "True, False, 'split', or None for a graph where there is a GPU")
        fine = expert_memory is None or (is_number(expert_memory) and expert_memory > 0)
        require("expert_memory", expert_memory, fine, "GB above 0, or None for all experts on the GPU")
        fine = adapters is None or isinstance(adapters, Mapping)
        require("adapters", adapters, fine, "directories by name, or None")
        for name, folder in (adapters or {}).items():
            require("adapters", name, isinstance(name, str), "texts as names, {'NAME': 'DIRECTORY'}")
            require_path(f"adapters[{name!r}]", folder, "the directory of an adapter")
        fine = tokenizer is None or isinstance(tokenizer, Tokenizer)
        require("tokenizer", tokenizer, fine, "a Tokenizer, or None for the checkpoint's own")
        require_callable("progress", progress)
        require_callable("on_memory", on_memory)
        if speculative is None and num_speculative_tokens != "auto":
            raise ValueError(
                f"num_speculative_tokens: got {num_speculative_tokens} without speculative; give a method, such as "
                "speculative='ngram'"
            )
        if gpus > 1 and str(device) not in ("auto", "cuda"):
            name = "pipeline_parallel_size" if split == "layer" else "tensor_parallel_size"
            cure = "leave it out: a CPU runs the whole model" if str(device) == "cpu" else "allowed is auto or cuda"
            raise ValueError(f"{name}: got {gpus} on the device {device}; {cure}; GPUs are counted from cuda:0 on")
        paths = {name: Path(folder) for name, folder in (adapters or {}).items()}
        located = locate(model, option="model")
        self.path = located.name
        self.device = pick_device(device)
        self.random = None if seed is None else Random(seed)
        with Checkpoint.open(located.path) as checkpoint, public_names(PUBLIC):
            plan = plan_load(
                checkpoint, self.device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_num_seqs=max_num_seqs,
                max_model_len=max_model_len, kv_cache_tokens=kv_cache_tokens, gpus=gpus,
                gpu_memory_utilization=share, kv_offloading_size=kv_offloading_size, adapters=paths,
                expert_memory=expert_memory, speculative=None if speculative is None else str(speculative),
                batch_invariant=batch_invariant,
            )  # fmt: skip
            self.skipped = skipped(checkpoint.names)
            self.dtype, held, max_model_len = plan.dtype, plan.held, plan.max_model_len
            self.weights = held or str(self.dtype).removeprefix("torch.")
            self.tokenizer = Tokenizer(checkpoint) if tokenizer is None else tokenizer
            self.sampling_defaults = SamplingDefaults.of(checkpoint)
            if plan.memory is not None:
                if on_memory is not None:
                    on_memory(plan.memory)
                if share is not None:
                    check_share(plan.memory, share)
                if plan.memory.tokens < max_num_seqs * max_model_len:
                    kv_cache_tokens = plan.memory.tokens
            decoder = load_decoder(
                checkpoint,
                self.device,
                self.dtype,
                max_context=max_model_len,
                gpus=gpus if gpus > 1 else None,
                split=split,
                fp8_kv=kv_cache_dtype == "fp8",
                drafts=speculative == MTP,
                held=held,
                adapters=paths,
                expert_memory=size_bytes(expert_memory),
                progress=None if progress is None else partial(progress, "loading"),
            )
        if plan.memory is not None and share is not None:
            rank = cast(Llama, decoder.ranks[0])
            kv_cache_tokens = filling_tokens(
                plan.memory, rank, plan.kv, rows=max_num_seqs, context=max_model_len, share=share
            )
        drafting = None
        with public_names(PUBLIC):
            if speculative is not None:
                penalty = self.sampling_defaults.model.get("repetition_penalty", 1.0)
                if penalty != 1:
                    warnings.warn(
                        f"generation_config.json sets repetition_penalty {penalty}, and sequences with a penalty use "
                        "no drafts: give repetition_penalty=1 to use speculative decoding",
                        stacklevel=2,
                    )
                drafting = drafters(
                    str(speculative),
                    self.tokenizer,
                    decoder,
                    located.path,
                    held=held,
                    max_context=max_model_len,
                    progress=progress,
                )
            pages = None if kv_cache_tokens is None else 1 + -(-kv_cache_tokens // page_size_of(decoder, plan.kv))
            self._engine: Engine | None = Engine(
                decoder,
                max_batch=max_num_seqs,
                max_context=max_model_len,
                pages=pages,
                kv=plan.kv,
                draft=drafting,
                draft_tokens=num_speculative_tokens,
                capture=capture,
                batch_invariant=batch_invariant,
                kv_offloading_size=kv_offloading_size,
            )
        self._engine.constrain = Constraints(self.tokenizer, decoder.config.vocab_size)
        self.max_model_len, self._process = self._engine.max_context, os.getpid()
        self._streams: weakref.WeakSet[Generator[tuple[int, int], None, None]] = weakref.WeakSet()

    @property
    def max_context(self) -> int:
        """Deprecated: `max_model_len`."""
        warn("LLM.max_context", "max_model_len")
        return self.max_model_len

    @property
    def engine(self) -> Engine:
        """What runs it. Raises ValueError once closed, and in a process forked from the one that made it."""
        if self._process != os.getpid():
            raise ValueError(
                f"this LLM of {self.path} was made in another process; a fork has neither its threads nor its GPU; "
                "make it in the child, or start the child with multiprocessing's 'spawn'"
            )
        if self._engine is None:
            raise ValueError(f"this LLM of {self.path} is closed; make a new one")
        return self._engine

    @property
    def stats(self) -> Stats:
        """Tokens and seconds of the last call."""
        return self.engine.stats

    # ------------------------------------------------------------------------------------------------ text in, text out

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None, **sampling: Any) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_done: OnDone | None = None,
        **sampling: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_done: OnDone | None = None,
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """Continue a text unchanged, or each text of a list; a list of token ids may stand for a text in a list.

        Args:
            params: for all prompts, or one for each.
            on_done: called as on_done(prompt's number, completion) as soon as that prompt's answers are done, while the
                others go on: in the order in which they end. It may not call the LLM.
            sampling: fields of SamplingParams by name (max_tokens, temperature, top_p, seed, stop, ...), which go over
                those of `params`.

        The model's own stop tokens always end a text. A prompt's completion is its first answer; `outputs` has all `n`.
        Raises ValueError for invalid arguments, FloatingPointError if the model gives NaN.
        """
        require_callable("on_done", on_done)
        if isinstance(prompts, str):
            (completion,) = self._complete([self._encode(prompts)], params, sampling, on_done)
            return completion
        fine = isinstance(prompts, Sequence) and not any(map(is_index, prompts))
        require("prompts", prompts, fine, "a text, or a list of texts; one prompt of token ids is [[1, 2, 3]]")
        return self._complete([self._encode(prompt) for prompt in prompts], params, sampling, on_done)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        **sampling: Any,
    ) -> Pieces:
        """`generate` for one text, piece by piece while the model writes; text alone, so without `n` and `logprobs`.

        Closed early (`close()` of what is returned, or leaving a loop over it), it stops the model. `cancelled` is
        asked before each step of the model, also while a long prompt is read and no piece comes: True ends the text
        there. Until it has ended, no other call may begin.
        """
        return self._stream(self._encode(prompt), params, sampling, cancelled)

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        thinking: Thinking = None,
        **sampling: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: Thinking = None,
        **sampling: Any,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: Thinking = None,
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """The answer to a conversation, or to each of a list of them, in the model's chat template.

        messages: [{"role": "user", "content": "Hi"}, ...]; a text is one message of the user. A control token's name in
        a content is text, not a control token. thinking: on or off, of a model whose template has a switch for it, or
        an effort ("low", "medium", "high"; for gpt-oss and others); None leaves it to the template. The rest as
        `generate`.
        """
        if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
            prompts = [self._conversation(each, thinking) for each in messages]
            return self._complete(prompts, params, sampling, fill=True)
        (completion,) = self._complete([self._conversation(messages, thinking)], params, sampling, fill=True)
        return completion

    def chat_stream(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        thinking: Thinking = None,
        cancelled: Callable[[], bool] | None = None,
        **sampling: Any,
    ) -> Pieces:
        """`chat` for one conversation, piece by piece as `stream`."""
        return self._stream(self._conversation(messages, thinking), params, sampling, cancelled, fill=True)

    # ------------------------------------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Give back what it holds of the GPU: graphs, KV cache and weights. An open stream ends with an error. Raises
        ValueError while another thread reads a stream."""
        if self._engine is None:
            return
        for stream in list(self._streams):
            try:
                stream.close()
            except ValueError:  # Python's, of a generator that runs
                raise ValueError(
                    f"this LLM of {self.path} cannot be closed while another thread reads its stream; end that first"
                ) from None
        self._engine = None
        gc.collect()  # a graph and the engine that runs it refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------- within

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        fine = isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(map(is_index, prompt))
        require("prompt", prompt, fine, "one text, or one list of token ids")
        return list(prompt)

    def _conversation(self, messages: Any, thinking: Thinking) -> list[int]:
        fine = thinking is None or isinstance(thinking, bool) or thinking in EFFORTS
        allowed = f"True, False, or None for what the chat template does, or an effort: {', '.join(EFFORTS)}"
        require("thinking", thinking, fine, allowed)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        fine = isinstance(messages, Sequence) and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
        if not fine or not messages:
            shown = repr(messages)
            raise ValueError(
                f"messages: got {shown if len(shown) < 100 else shown[:97] + '...'}; allowed is a text, a list of "
                '{"role": ..., "content": ...}, or a list of such lists'
            )
        if self.tokenizer.template is None:
            raise ValueError(f"{self.path}: has no chat template; generate continues a text unchanged")
        return self.tokenizer.chat(messages, thinking)

    def _params(
        self, prompts: list[list[int]], params: Any, sampling: dict[str, Any], fill: bool
    ) -> list[SamplingParams]:
        """One for each prompt, with the model's stop tokens and sampling defaults. fill: without max_tokens, an answer
        may fill the context."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        if unknown := sorted(set(sampling) - set(names)):
            raise ValueError(f"sampling: got {', '.join(unknown)}; allowed are {', '.join(names)}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        fine = isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)
        require("params", params, fine, "SamplingParams, or a list of them; their fields may be given by name instead")
        if len(params) != len(prompts):
            raise ValueError(f"params: got {len(params)} for {len(prompts)} prompts; give one for each, or one for all")
        found = []
        for prompt, asked in zip(prompts, params, strict=True):
            wanted = self.sampling_defaults.fill(dataclasses.replace(asked, **sampling))
            if fill and wanted.max_tokens is None:
                wanted = dataclasses.replace(wanted, max_tokens=max(1, self.max_model_len - len(prompt)))
            ids = sorted({*wanted.stop_tokens, *self.tokenizer.stops})
            found.append(dataclasses.replace(wanted, stop=[*ids, *wanted.stop_texts]))
        return found

    def _complete(
        self,
        prompts: list[list[int]],
        params: Any,
        sampling: dict[str, Any],
        on_done: OnDone | None = None,
        *,
        fill: bool = False,
    ) -> list[Completion]:
        asked = [expand_n(each, self.random) for each in self._params(prompts, params, sampling, fill)]
        rows = [(prompt, each) for prompt, several in zip(prompts, asked, strict=True) for each in several]
        owner = [number for number, several in enumerate(asked) for _ in several]
        watched = {
            i: AnswerText(self.tokenizer.stream(), each.stop_texts, each.min_tokens) for i, (_, each) in enumerate(rows)
        }
        watched = {i: text for i, text in watched.items() if rows[i][1].stop_texts}
        shown = {i: list[str]() for i in watched}
        ready: list[list[EngineSequence]] = [[] for _ in prompts]
        found: dict[int, Completion] = {}

        def watch(index: int, token: int) -> bool:
            if index in watched:
                shown[index].append(watched[index].push(token))
            return index in watched and watched[index].ended

        def answered(made: Sequence[EngineSequence]) -> list[Completion]:
            texts = self.tokenizer.decode_all([[] if each.index in watched else each.output for each in made])
            for at, i in enumerate(each.index for each in made):
                if i in watched:
                    texts[at] = "".join(shown[i]) + watched[i].finish()
            ended = [each.index in watched and watched[each.index].ended for each in made]
            return list(map(_completion, made, texts, ended))

        def done(sequence: EngineSequence) -> None:
            number = owner[sequence.index]
            ready[number].append(sequence)
            if len(ready[number]) == len(asked[number]):
                found[number] = _joined(answered(sorted(ready[number], key=lambda each: each.index)))
                assert on_done is not None
                on_done(number, found[number])

        made = self.engine.complete(
            [prompt for prompt, _ in rows],
            [for_engine(each) for _, each in rows],
            watch,
            None if on_done is None else done,
        )
        if on_done is not None:
            return [found[number] for number in range(len(prompts))]
        answers = iter(answered(made))  # in one go: a call of the tokenizer's process takes time
        return [_joined([next(answers) for _ in several]) for several in asked]

    def _stream(
        self,
        prompt: list[int],
        params: Any,
        sampling: dict[str, Any],
        cancelled: Callable[[], bool] | None,
        *,
        fill: bool = False,
    ) -> Pieces:
        require_callable("cancelled", cancelled)
        (asked,) = self._params([prompt], params, sampling, fill)
        off = {"n": 1, "logprobs": None, "prompt_logprobs": None}
        if name := next((name for name, value in off.items() if getattr(asked, name) != value), ""):
            raise ValueError(f"{name}: got {getattr(asked, name)}; a stream is one answer's text: use generate or chat")
        steps = self.engine.stream([prompt], [for_engine(asked)], cancelled)
        self._streams.add(steps)
        return self._pieces(steps, AnswerText(self.tokenizer.stream(), asked.stop_texts, asked.min_tokens))

    def _pieces(self, steps: Generator[tuple[int, int], None, None], text: AnswerText) -> Pieces:
        with closing(steps):
            for _, token in steps:
                if piece := text.push(token):
                    yield piece
                if text.ended:
                    return
        if self._engine is None:  # a mere end would look like the end of the text
            raise ValueError(f"this LLM of {self.path} is closed, which ended the stream; its text is not complete")
        if piece := text.finish():
            yield piece


def _joined(answers: list[Completion]) -> Completion:
    """The first, with all of them in `outputs`."""
    return dataclasses.replace(answers[0], further=tuple(answers[1:]))


def _completion(made: EngineSequence, text: str, ended: bool) -> Completion:
    """Of a sequence that is done. `ended`: at a stop text."""
    constraint = made.constraint
    stopped = ended or made.output[-1] in made.params.stop or (constraint is not None and constraint.done)
    return Completion(
        text=text,
        token_ids=made.output,
        finish_reason="stop" if stopped else "length",
        prompt_tokens=len(made.prompt),
        seed=made.seed if made.params.sampling else None,
        logprobs=made.logprobs if made.params.logprobs is not None else None,
        prompt_logprobs=made.prompt_logprobs if made.params.prompt_logprobs is not None else None,
    )
