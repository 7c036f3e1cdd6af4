"""Training an EAGLE-3 head: it learns the model's probabilities of each token, over the tokens that it may name.

Logits of some thousand places over as many tokens are the largest thing that training would keep, five times over. So
the loss is computed some places at a time, and its gradient with it, as Liger's fused linear cross-entropy does (Hsu et
al., arXiv 2410.10989): no logits are kept for the way back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.models.chain import ChainedLlama
from onegraph.models.eagle_net import EagleNet, head_rows
from onegraph.models.eagle_texts import Batch, Texts
from onegraph.models.llama import Llama, bounded

FADE = 0.8  # weight of a step's loss beside that of the step before
LOGITS = 1 << 26  # numbers of logits at once
WARM = 20, 0.05  # steps until the rate is at its highest, or this part of all where that is sooner


@dataclass(frozen=True, kw_only=True)
class Score:
    """How a head fares on texts: its loss, and at each step how often the model agrees with it where it agreed with all
    steps before."""

    loss: float
    accepted: tuple[float, ...]

    @property
    def tokens(self) -> float:
        """Of a round with as many drafts as there are steps, on average."""
        return 1 + sum(math.prod(self.accepted[: i + 1]) for i in range(len(self.accepted)))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training did: the scores before it and of what it left, the steps and seconds that it took, and the tokens
    that it learnt from, those of a second epoch counted again."""

    before: Score
    after: Score
    steps: int
    seconds: float
    tokens: int


class Teacher:
    """The loss of a head of `model` that names the tokens `vocabulary` int64 [V'], over `steps` of its own outputs: the
    Kullback-Leibler divergence of its probabilities from the model's, in nats."""

    def __init__(self, model: Llama | ChainedLlama, net: EagleNet, vocabulary: Tensor, steps: int) -> None:
        self.model, self.net, self.vocabulary, self.steps = model, net, vocabulary, steps
        self.rows = head_rows(model, vocabulary).to(model.dtype)
        total = sum(FADE**step for step in range(steps))
        self.weights = [FADE**step / total for step in range(steps)]

    def __call__(self, batch: Batch) -> tuple[Tensor, int]:
        """The loss, whose gradient goes to the net, and how many tokens it is of."""
        at = batch.told(self.steps)
        loss = _Divergence.apply(  # type: ignore[no-untyped-call]  # torch's own
            self.features(batch, at), self.net.lm_head.weight, self, batch.final.flatten(0, 1)[at]
        )
        return loss, len(at)

    def features(self, batch: Batch, at: Tensor) -> Tensor:
        """What the head's output head reads [S, N, d] to name, at each step, the token behind each place of `at`."""
        tokens = nn.functional.pad(batch.tokens, (0, self.steps))
        with torch.no_grad():
            embedded = self.model.embed(tokens)
        # A GPU computes in its own dtype, a CPU in the net's, or in autocast's from there.
        embedded, hidden = (t if t.is_cuda else t.float() for t in (embedded, batch.hidden))
        unrolled = self.net.unroll(embedded, hidden, self.steps)
        return torch.stack([made.flatten(0, 1)[at - 1 - step] for step, made in enumerate(unrolled)])

    def compared(self, features: Tensor, weight: Tensor, final: Tensor) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """(step, places, the model's probabilities [n, V'] there, logarithms of the head's), some places at a time.

        features: [S, N, d]. weight: [V', d]. final: [N, D], what the model's output head reads there.
        """
        places = max(1, LOGITS // len(weight))
        for start in range(0, len(final), places):
            here = slice(start, start + places)
            truth = bounded(self.model.config, (final[here] @ self.rows.t()).float()).softmax(-1)
            for step in range(len(features)):
                yield step, here, truth, (features[step, here] @ weight.t()).float().log_softmax(-1)


class _Divergence(torch.autograd.Function):
    """The loss of features [S, N, d] through the output head [V', d], final [N, D]."""

    @staticmethod  # torch declares ctx as Any
    def forward(ctx: Any, features: Tensor, weight: Tensor, teacher: Teacher, final: Tensor) -> Tensor:
        cast, loss = weight.to(features.dtype), final.new_zeros((), dtype=torch.float32)
        by_features, by_weight = torch.empty_like(features), torch.zeros_like(weight)
        for step, here, truth, found in teacher.compared(features, cast, final):
            share = teacher.weights[step] / len(final)
            loss += share * _divergence(truth, found).sum()
            slope = found.exp_().sub_(truth).mul_(share).to(features.dtype)
            by_features[step, here] = slope @ cast
            by_weight += slope.t() @ features[step, here]
        ctx.save_for_backward(by_features, by_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        by_features, by_weight = ctx.saved_tensors
        return by_features * given[0].to(by_features.dtype), by_weight * given[0], None, None


def _divergence(truth: Tensor, found: Tensor) -> Tensor:
    """Of each place [n], in nats: of the head's probabilities, given as logarithms, from the model's."""
    result: Tensor = (torch.special.xlogy(truth, truth) - truth * found).sum(-1)
    return result


class Exam:
    """Texts that a head does not learn from, and what the model makes of them, so many texts at a time."""

    @torch.no_grad()
    def __init__(self, teacher: Teacher, texts: Texts, size: int) -> None:
        self._teacher = teacher
        self._asked: list[tuple[Batch, Tensor, Tensor, Tensor]] = []
        for first in range(0, len(texts), size):
            batch = texts.batch(range(first, min(first + size, len(texts))))
            at = batch.told(teacher.steps)
            final = batch.final.flatten(0, 1)[at]
            best = torch.cat([teacher.model.logits(part).argmax(-1) for part in final.split(256)])
            self._asked.append((batch, at, final, best))

    @torch.no_grad()
    def __call__(self) -> Score:
        """How the head fares now; waits for the device once."""
        teacher, steps = self._teacher, self._teacher.steps
        device = teacher.vocabulary.device
        loss, counts = torch.zeros((), device=device), torch.zeros(2, steps, dtype=torch.int64, device=device)
        with _products(teacher.model):
            for batch, at, final, best in self._asked:
                features, cells = teacher.features(batch, at), batch.tokens.numel()
                asked, right = (torch.zeros(steps, cells, dtype=torch.bool, device=device) for _ in range(2))
                weight = teacher.net.lm_head.weight.to(features.dtype)
                for step, here, truth, found in teacher.compared(features, weight, final):
                    loss += teacher.weights[step] * _divergence(truth, found).sum()
                    begun = at[here] - 1 - step
                    asked[step, begun] = True
                    right[step, begun] = teacher.vocabulary[found.argmax(-1)] == best[here]
                read = torch.cat((asked[:1], asked[1:] & right[:-1].cummin(0).values))
                counts += torch.stack((read.sum(1), (read & right).sum(1)))
        total, (read_at, kept_at) = sum(len(best) for *_, best in self._asked), counts.tolist()
        rates = tuple(k / max(1, n) for k, n in zip(kept_at, read_at, strict=True))
        return Score(loss=loss.item() / max(1, total), accepted=rates)


def train(
    teacher: Teacher,
    texts: Texts,
    exam: Exam,
    *,
    batch: int,
    rate: float,
    steps: int | None,
    seconds: float,
    seed: int,
    looks: int = 20,
    every: int = 10,
    patience: int = 6,
    told: Callable[[int, float, Score], object] | None = None,
) -> Trained:
    """Trains `teacher.net` until `steps` are done, `seconds` are over, or its loss in `exam` has not fallen for
    `patience` looks; the best of these stays. AdamW, whose rate falls to nothing by the last step, or where `steps` is
    None by the clock; matrix products in bfloat16 on a GPU, which the host waits for at each look alone, and for a
    model in bfloat16. With `steps`, the same seed gives the same head on a CPU unless the clock ended it; on a GPU
    attention's gradient may be added up in another order.

    looks: at the exam, evenly over steps or time, though no two within `every` steps.
    told: called as told(step, loss, score) at each look.
    """
    net, device, started = teacher.net, texts.model.device, monotonic()
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    before, kept, losses = exam(), _copy(net), []
    best, looked, last, stale, tokens = before, 0, 0, 0, 0
    if told is not None:
        told(0, before.loss, before)
    rows = _rows([len(text.tokens) for text in texts.texts], batch, torch.Generator().manual_seed(seed))
    for step in count(1):
        done = (monotonic() - started) / seconds if steps is None else (step - 1) / steps
        for group in optimizer.param_groups:
            group["lr"] = (
                rate * min(1.0, max(step / WARM[0], done / WARM[1])) * (1 + math.cos(math.pi * min(1.0, done))) / 2
            )
        some = texts.batch(next(rows))
        with _products(teacher.model):
            loss, learnt = teacher(some)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        tokens += learnt
        gone = monotonic() - started
        over = gone >= seconds or step == steps
        look = int(looks * (gone / seconds if steps is None else step / steps))
        if (look > looked and step - last >= every) or over:
            looked, last, now = look, step, exam()
            if told is not None:
                told(step, float(torch.stack(losses).mean()), now)
            losses, stale = [], stale + 1
            if now.loss < best.loss:
                best, kept, stale = now, _copy(net), 0
            if over or stale >= patience:
                break
    net.load_state_dict(kept)
    return Trained(before=before, after=best, steps=step, seconds=monotonic() - started, tokens=tokens)


def _rows(lengths: Sequence[int], size: int, order: torch.Generator) -> Iterator[list[int]]:
    """The texts of one batch after another, without end: all in random order, then all again; those of like length
    side by side, so that little is padded."""
    while True:
        shuffled = torch.randperm(len(lengths), generator=order).tolist()
        for start in range(0, len(shuffled), 8 * size):
            some = sorted(shuffled[start : start + 8 * size], key=lengths.__getitem__)
            first = range(0, len(some), size)
            for i in torch.randperm(len(first), generator=order).tolist():
                yield some[first[i] : first[i] + size]


def _products(model: Llama | ChainedLlama) -> torch.autocast:
    """Matrix products in bfloat16 on a GPU, and on a CPU where the model computes in it: with AVX512-BF16 a step takes
    0.4 of the time."""
    device = model.device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda" or model.dtype is torch.bfloat16)


def _copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
