"""A draft head for one's own model: the model writes texts, a head learns from them, unseen texts say how it does.

The text is the model's own as it is served, quantized or not: heads that are trained on others' text name what the
model does not write.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from onegraph.api import Progress
from onegraph.api.device import pick_device
from onegraph.api.draft_prompts import HELD, PROMPT, Pieces, Prompts
from onegraph.api.hub import locate
from onegraph.api.llm import LLM
from onegraph.api.provenance import source_of, versions
from onegraph.api.resources import check_output
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams, Stats
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models.chain import ChainedLlama
from onegraph.models.eagle import EagleConfig, EagleHead
from onegraph.models.eagle_net import EagleNet, head_config, head_rows, head_tensors, read_net
from onegraph.models.eagle_start import start_copying
from onegraph.models.eagle_texts import Shelf, Texts, Written
from onegraph.models.eagle_training import Exam, Score, Teacher, train
from onegraph.models.llama import Llama
from onegraph.models.load import parse_config
from onegraph.models.memory import free_memory

ROWS = {"cuda": 64, "cpu": 8}  # texts that are written side by side
WAVE = {"cuda": 256, "cpu": 8}  # between two looks at the clock; of many, rows that end early are filled again
BATCH = {"cuda": 64, "cpu": 4}  # texts of a training step: a GPU is not busy with less
RATE = 1.2  # AdamW's over the width of the head: 2e-3 for 576, 3e-4 for 4,096
AGAIN = 0.4  # of it, for a head that was trained before: 8e-4 for 576, which was tried
VOCABULARY = 8192
SAMPLE = 64  # texts by which a head's beginning is fitted
EXAM = 48  # texts that are held out for the exam at most
SAMPLING = 0.35  # of the time, for texts; training then has what is left but the report's
REPORT = 0.2  # of the time, for the report's texts at most, and again for its graphs
ANSWER = 96  # tokens of each text that the report has written, or fewer, LEAST, where that would take longer
LEAST = 16

UNSEEN = {
    "code": (
        "def fibonacci(n):\n    ",
        "import csv\n\n\ndef read_rows(path):\n    ",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    ),
    "chat": (
        "What is the capital of Japan, and what is it known for?",
        "Explain in a few sentences why the sky is blue.",
        "Give me three tips for sleeping better.",
    ),
}
REPEAT = "Repeat this text word for word:\n\n"
KEEPER = (
    "The lighthouse keeper counts eleven ships before noon, writes their names into a green ledger, and feeds the "
    "seventh gull twice because it limps."
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of drafts on some unseen texts: how often the first, second, ... was right where it was read, tokens that a
    round gave on average, and how many of the texts are those without drafts."""

    accepted: tuple[float, ...]
    tokens_per_round: float
    same_texts: int
    texts: int


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """What `train_head` made: `before` and `after` are an untrained head and the trained one on held-out texts;
    `unseen` is measured in the engine, by kind of text; `coverage` the part of the texts' tokens that the head can
    name; `learnt` the tokens that it learnt from in `steps`, those of a second epoch counted again."""

    source: str
    output: str
    seconds: float
    texts: int
    tokens: int
    vocabulary: int
    coverage: float
    nbytes: int
    before: Score
    after: Score
    steps: int
    training_seconds: float
    learnt: int
    unseen: dict[str, Figures] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Head:
    """A head to train: its config.json, the layers that it taps, the tokens int64 [V'] that it names, on the host, and
    what its onegraph.json says of where it came from."""

    net: EagleNet
    config: dict[str, Any]
    layers: tuple[int, ...]
    names: torch.Tensor
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Clock:
    """What is left of `seconds`, and how fast the model writes: seconds of a decode step and of building its graphs."""

    seconds: float
    started: float = field(default_factory=time.monotonic)
    step: float = 0.0
    build: float = 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started

    def learn(self, stats: Stats) -> None:
        self.step = stats.decode_seconds / max(1, stats.decode_steps)
        self.build += stats.build_seconds

    @property
    def answer(self) -> int:
        """Tokens of each text of the report."""
        return max(LEAST, min(ANSWER, int(REPORT * self.seconds / max(1e-9, self._token))))

    @property
    def training(self) -> float:
        """Seconds that training may take from now on."""
        return max(
            1.0, self.seconds - self.spent - self.answer * self._token - min(2 * self.build, REPORT * self.seconds)
        )

    @property
    def _token(self) -> float:
        """Seconds of one more token of all texts of the report: three kinds, without drafts and, dearer, with them."""
        return 3 * 3 * self.step


def train_head(
    path: str | PathLike[str],
    output: str | PathLike[str],
    *,
    init: str | PathLike[str] | None = None,
    text: Sequence[str | PathLike[str]] = (),
    minutes: float = 10.0,
    texts: int = 32768,
    length: int = 192,
    vocabulary: int | None = None,
    ahead: int = 5,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    memory: int = 4 << 30,
    seed: int = 0,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> DraftHead:
    """Trains an EAGLE-3 head for the model at `path`, and writes it to the directory `output`, for `draft="eagle:..."`.

    Args:
        init: a head's directory, of which weights, vocabulary and tapped layers are the beginning: one that was trained
            before the model was quantized again needs fewer texts than a new one.
        text: UTF-8 files, of which pieces become prompts (default: the texts of the calibration corpus).
        minutes: that all of it takes: sampling, training and report share them.
        texts: that the model writes at most, of `length` tokens each; half of them greedily.
        vocabulary: tokens that the head may name: those that the texts have most often; None for 8,192, or those of
            `init`.
        ahead: outputs of its own that the head learns to go on from; 1 to 7.
        steps: of training, at most; None for as many as the time allows. batch: texts a step; None for as many
            as keep the device busy, fewer where its memory is small. rate: AdamW's highest; None for
            one by the head's width, a part of it with `init`.
        memory: bytes of hidden states to keep on the host, beside those for which a GPU has room; those of more texts
            are computed again each time.
        seed: of everything; the same seed gives the same head with `steps`, unless the clock ended sampling or them.
        progress: called as progress("sampling", texts, texts that are expected). log: takes a line now and then.

    Raises ValueError for a model that heads cannot go on from, an `init` that is no head for it, too little text, and
    an output that exists or cannot be written.
    """
    clock, target = _Clock(60 * minutes), Path(output)
    check_output(target)
    if not 1 <= ahead <= 7:
        raise ValueError(f"ahead: got {ahead}; allowed is 1 to 7")
    if init is not None and vocabulary is not None:
        raise ValueError(
            f"vocabulary: got {vocabulary} with init; a trained head keeps its vocabulary: omit one of the two"
        )
    pieces, place = Pieces(text, seed), pick_device(device)
    context = _context(path, length)
    with LLM(path, device=place, dtype=dtype, max_num_seqs=ROWS[place.type], max_model_len=context) as llm:
        model = llm.engine.model
        if not isinstance(model, Llama | ChainedLlama):
            raise ValueError("draft-head: EAGLE heads go on from models of the Llama kind; DeepSeek-V4 has its own")
        positions = llm.max_model_len + ahead
        head = None if init is None else _continued(init, model, positions)
        written = list(_written(llm, pieces, texts, WAVE[place.type], length, seed, clock, progress))
        seen, kept = _split(written, ahead)
        counts = Counter(token for text in seen for token in text.tokens)
        if head is None:
            names = _vocabulary(counts, model.config.vocab_size, vocabulary or VOCABULARY)
            head = _new(model, str(path), names, positions, seed)
        net, names = head.net, head.names
        coverage = sum(counts[token] for token in names.tolist()) / max(1, counts.total())
        tokens = sum(len(each.tokens) for each in (*seen, *kept))
        named = f"the head names {100 * coverage:.1f} % of them"
        log(f"{len(written)} texts, {tokens} tokens, after {clock.spent:.0f} s; {named}")
        longest = max(len(each.tokens) for each in (*seen, *kept))
        free = _free(net, model.device)
        size = batch or _batch(model, longest * ahead, free)
        read = Texts(model, seen, head.layers, _shelves(model.device, memory, free))
        if init is None:
            _begin(net, model, read, names.to(model.device))
        teacher = Teacher(model, net, names.to(model.device), ahead)
        exam = Exam(teacher, Texts(model, kept[:EXAM], head.layers), size)

        def told(step: int, loss: float, score: Score) -> None:
            log(f"step {step}: loss {loss:.3f}; held out {score.loss:.3f}, {score.tokens:.2f} tokens per verify pass")

        usual = min(3e-3, RATE / model.config.hidden_size) * (1 if init is None else AGAIN)
        done = train(
            teacher, read, exam, batch=size, rate=rate or usual, steps=steps, seconds=clock.training, seed=seed,
            told=told,
        )  # fmt: skip
        log(
            f"{done.steps} steps of {size} texts in {done.seconds:.0f} s, {done.steps / done.seconds:.1f} a second; "
            f"learnt from {done.tokens} tokens"
        )
        about = {"trained for": str(path), **head.about, "seed": seed, "texts": len(seen), "versions": versions()}
        write_checkpoint(target, head.config, head_tensors(net, names, torch.bfloat16).items(), about=about)
        with Checkpoint.open(target) as checkpoint:
            drafter, nbytes = EagleHead.load(checkpoint, model), checkpoint.nbytes
        found = _report(llm, drafter, ahead, clock.answer)
        return DraftHead(
            source=str(path), output=str(target), seconds=clock.spent, texts=len(written), tokens=tokens,
            vocabulary=len(names), coverage=coverage, nbytes=nbytes, before=done.before, after=done.after,
            steps=done.steps, training_seconds=done.seconds, learnt=done.tokens, unseen=found,
        )  # fmt: skip


def _split(written: Sequence[tuple[bool, Written]], ahead: int) -> tuple[list[Written], list[Written]]:
    """The texts to learn from and those held out, of those that have a token to learn."""
    told = [(held, text) for held, text in written if len(text.tokens) - 1 > max(text.prompt, ahead)]
    seen, kept = ([text for held, text in told if held is part] for part in (False, True))
    if not seen or not kept:
        raise ValueError(f"draft-head: the model wrote {len(written)} texts; give more text, or more minutes")
    return seen, kept


def _free(net: EagleNet, device: torch.device) -> int:
    """Bytes of the device that training has besides `net`, its gradients, AdamW's two moments and two copies."""
    return max(0, free_memory(device) - 5 * sum(p.nbytes for p in net.parameters()))


def _batch(model: Llama | ChainedLlama, places: int, free: int) -> int:
    """Texts of a step, each of so many places in all steps of its head: those for whose activations a quarter of the
    free memory has room, in two or four bytes each."""
    each = 3 * places * (16 * model.config.hidden_size + 4 * model.config.intermediate_size)
    return max(1, min(BATCH[model.device.type], free // 4 // each))


def _shelves(device: torch.device, memory: int, free: int) -> list[Shelf]:
    """Where hidden states are kept: on a GPU in a quarter of what is free, then on the host within `memory` bytes."""
    host = Shelf(torch.device("cpu"), memory)
    return [Shelf(device, free // 4), host] if device.type == "cuda" else [host]


def _new(model: Llama | ChainedLlama, verifier: str, names: torch.Tensor, positions: int, seed: int) -> _Head:
    """One that names `names`, untrained, for texts of so many tokens."""
    torch.manual_seed(seed)
    layers = tapped(model.config.layers)
    config = head_config(model.config, layers, len(names), verifier)
    net = EagleNet(EagleConfig.from_dict(config), len(layers), positions).to(model.device)
    net.start_from(model.norm.float(), head_rows(model, names.to(model.device)))
    return _Head(net=net, config=config, layers=layers, names=names)


def _continued(path: str | PathLike[str], model: Llama | ChainedLlama, positions: int) -> _Head:
    """The one at `path`, for texts of so many tokens."""
    try:
        with Checkpoint.open(path) as checkpoint:
            net, layers, names = read_net(checkpoint, model, positions)
            about = {"init": source_of(checkpoint)}
            return _Head(net=net, config=checkpoint.config, layers=layers, names=names, about=about)
    except ValueError as error:
        raise ValueError(f"init: {error}") from None


@torch.no_grad()
def _begin(net: EagleNet, model: Llama | ChainedLlama, texts: Texts, names: torch.Tensor) -> None:
    """Has `net` begin as a head that copies, by the first of `texts`."""
    batch = texts.batch(range(min(SAMPLE, len(texts))))
    real = torch.zeros_like(batch.tokens, dtype=torch.bool)
    for row, text in zip(real, batch.texts, strict=True):
        row[1 : len(text.tokens)] = True  # a text's first token has states like no other's
    start_copying(net, model.embed(batch.tokens[real]), batch.hidden[real], model.embed(names), model.norm.float())


def tapped(depth: int) -> tuple[int, ...]:
    """Low, middle and high: the layers of a model of so many behind which a new head takes hidden states."""
    return (1, depth // 2 - 1, depth - 4) if depth >= 8 else (0, (depth - 1) // 2, depth - 1)


def _context(path: str | PathLike[str], length: int) -> int:
    """Tokens of the longest text that the model writes. Raises ValueError where the model has fewer positions."""
    longest = PROMPT + max(length, ANSWER)
    with Checkpoint.open(locate(path).path) as checkpoint:
        allowed = parse_config(checkpoint.config).max_positions
    if longest > allowed:
        cure = f"give {allowed - PROMPT} or less" if allowed >= PROMPT + ANSWER else "it is too short for a draft head"
        raise ValueError(
            f"length: got {length}; with the prompt a text has up to {longest} tokens, and the model's context is "
            f"{allowed}: {cure}"
        )
    return longest


def _written(
    llm: LLM, pieces: Pieces, count: int, wave: int, length: int, seed: int, clock: _Clock, progress: Progress | None
) -> Iterator[tuple[bool, Written]]:  # fmt: skip
    """The model's own texts, and which are held out: a few batches at least, then until their part of the time is
    over."""
    prompts, done = Prompts(llm, pieces, length, seed, clock.learn), 0
    while done < count and (clock.spent < SAMPLING * clock.seconds or done < 2 * HELD):
        some = min(wave, count - done)
        yield from prompts.answered(some)
        done += some
        if progress is not None:  # most often the clock is what ends it
            progress("sampling", done, min(count, max(done, int(done * SAMPLING * clock.seconds / clock.spent))))


def _vocabulary(counts: Counter[int], size: int, most: int) -> torch.Tensor:
    """The tokens int64 [V'] of a vocabulary of `size` that texts have most often, in their own order."""
    order = sorted(range(size), key=lambda token: (-counts[token], token))[:most]
    return torch.tensor(sorted(order))


def unseen(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Prompts that no head was trained on, token ids by kind."""

    def asked(question: str) -> list[int]:
        return tokenizer.chat([{"role": "user", "content": question}])

    chat = tokenizer.template is not None
    code = [tokenizer.encode(prompt) for prompt in UNSEEN["code"]]
    talk = [asked(prompt) if chat else tokenizer.encode(prompt) for prompt in UNSEEN["chat"]]
    repeat = asked(REPEAT + KEEPER) if chat else tokenizer.encode(f"{KEEPER}\n\n{KEEPER}\n\n{KEEPER[:40]}")
    return {"code": code, "chat": talk, "repetition": [repeat]}


def _report(llm: LLM, head: EagleHead, drafts: int, answer: int) -> dict[str, Figures]:
    """Greedily, the prompts of a kind beside each other, `answer` tokens behind each."""
    model, plain, longest = llm.engine.model, llm.engine, llm.max_model_len - answer
    asked = unseen(llm.tokenizer)
    engine = Engine(
        model, max_batch=max(map(len, asked.values())), max_context=llm.max_model_len,
        draft=partial(HeadDrafter, head), draft_tokens=drafts,
    )  # fmt: skip
    params, found = SamplingParams(max_tokens=answer, stop=tuple(llm.tokenizer.stops)), {}
    for kind, prompts in asked.items():
        some = [prompt[:longest] for prompt in prompts]
        texts = engine.generate(some, params)
        same = sum(a == b for a, b in zip(plain.generate(some, params), texts, strict=True))
        stats = engine.stats
        rounds, right = stats.drafted_at[0], [stats.accepted_at[i] for i in range(drafts)]
        found[kind] = Figures(
            accepted=tuple(k / max(1, n) for k, n in zip(right, [rounds, *right[:-1]], strict=True)),
            tokens_per_round=1 + sum(right) / max(1, rounds),
            same_texts=same,
            texts=len(texts),
        )
    return found
