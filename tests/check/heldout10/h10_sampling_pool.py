"""Samplers behind a request pool whose host-side flags change when late requests arrive."""
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

STEPS = 24
B, V, D = 4, 64, 32
EOS = 2


def rnd(index, *shape, salt=0):
    g = torch.Generator().manual_seed(7919 * salt + index)
    return torch.randn(*shape, generator=g).to("cuda")


def tokens(index, *shape, salt=5):
    g = torch.Generator().manual_seed(104729 * salt + index)
    return torch.randint(0, V, shape, generator=g).to("cuda")


def head(seed):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(D, V, generator=g) * 0.4).to("cuda")


# --------------------------------------------------------------- repetition penalties

@dataclass
class Request:
    name: str
    repetition_penalty: float = 1.0


class RequestPool:
    """Continuous batching: rows are replaced when a request finishes; device rows are edited in place."""

    def __init__(self):
        self.rows = [Request(f"r{i}") for i in range(B)]
        self.penalty = torch.ones(B, 1, device="cuda")
        self.seen = torch.zeros(B, V, dtype=torch.bool, device="cuda")

    def admit(self, row, request):
        self.rows[row] = request
        self.penalty[row].fill_(request.repetition_penalty)

    @property
    def any_penalty(self):
        return any(r.repetition_penalty != 1.0 for r in self.rows)

    def arrivals(self, index):
        if index >= 9:
            self.admit(2, Request("late", repetition_penalty=1.8))


def penalise(logits, seen, penalty):
    scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, scaled, logits)


class PenaltySampler:
    def __init__(self, pool):
        self.pool = pool
        self.w = head(11)

    def __call__(self, hidden, last):
        logits = hidden @ self.w
        self.pool.seen.scatter_(1, last, True)
        if self.pool.any_penalty:  # expect: CG201 @any_penalty
            logits = penalise(logits, self.pool.seen, self.pool.penalty)
        return logits


class AlwaysPenaltySampler:
    def __init__(self, pool):
        self.pool = pool
        self.w = head(11)
        self.penalised_rows = {}

    def __call__(self, hidden, last):
        logits = hidden @ self.w
        self.pool.seen.scatter_(1, last, True)
        for row in self.pool.rows:
            self.penalised_rows[row.name] = row.repetition_penalty
        return penalise(logits, self.pool.seen, self.pool.penalty)


def factory_bad_any_penalty():
    pool = RequestPool()
    sampler = PenaltySampler(pool)

    def step(hidden, last):
        return sampler(hidden, last)

    def inputs(index):
        pool.arrivals(index)
        return rnd(index, B, D), tokens(index, B, 1)

    return step, inputs


def factory_ok_neutral_penalty():
    pool = RequestPool()
    sampler = AlwaysPenaltySampler(pool)

    def step(hidden, last):
        return sampler(hidden, last)

    def inputs(index):
        pool.arrivals(index)
        return rnd(index, B, D), tokens(index, B, 1)

    return step, inputs


# --------------------------------------------------------------- optional tensors in the metadata

@dataclass
class SamplingMeta:
    temperature: torch.Tensor
    min_p: Optional[torch.Tensor] = None


class MetaRunner:
    """Rebuilds its SamplingMeta for every batch, as a model runner does."""

    def __init__(self, dense):
        self.temperature = torch.full((B, 1), 0.9, device="cuda")
        self.min_p = torch.zeros(B, 1, device="cuda")
        self.dense = dense
        self.w = head(12)
        self.meta = None

    def prepare(self, index):
        wants = index >= 11
        self.min_p.fill_(0.2 if wants else 0.0)
        self.meta = SamplingMeta(self.temperature, self.min_p if self.dense or wants else None)


def filter_min_p(probs, min_p):
    if min_p is None:  # expect: CG201 @min_p_arrives
        return probs
    keep = probs >= min_p * probs.amax(-1, keepdim=True)
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True)


def filter_min_p_dense(probs, min_p):
    keep = probs >= min_p * probs.amax(-1, keepdim=True)
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True)


def factory_bad_min_p_arrives():
    runner = MetaRunner(dense=False)

    def step(hidden):
        meta = runner.meta
        probs = torch.softmax((hidden @ runner.w) / meta.temperature, -1)
        return filter_min_p(probs, meta.min_p)

    def inputs(index):
        runner.prepare(index)
        return (rnd(index, B, D, salt=1),)

    return step, inputs


def factory_ok_min_p_zero():
    runner = MetaRunner(dense=True)

    def step(hidden):
        meta = runner.meta
        probs = torch.softmax((hidden @ runner.w) / meta.temperature, -1)
        return filter_min_p_dense(probs, meta.min_p)

    def inputs(index):
        runner.prepare(index)
        return (rnd(index, B, D, salt=1),)

    return step, inputs


# --------------------------------------------------------------- speculative decoding backs off

ACCEPTANCE = [0.9] * 8 + [0.3] * 3 + [0.8] * 6 + [0.2] * 3 + [0.7] * 10
K_MAX = 4


class DraftController:
    """Halves the draft length after three poor rounds in a row."""

    def __init__(self):
        self.k = K_MAX
        self.k_dev = torch.full((1,), K_MAX, dtype=torch.long, device="cuda")

    def observe(self, index):
        k, low = K_MAX, 0
        for rate in ACCEPTANCE[:index]:
            low = low + 1 if rate < 0.5 else 0
            if low == 3:
                k, low = max(1, k // 2), 0
        self.k = k
        self.k_dev.fill_(k)


class DraftHead:
    def __init__(self):
        g = torch.Generator().manual_seed(13)
        self.w = (torch.randn(D, D, generator=g) / D**0.5).to("cuda")
        self.out = head(14)

    def propose(self, hidden, ctl):
        total = torch.zeros(B, V, device="cuda")
        for j in range(ctl.k):  # expect: CG201 @draft_backoff
            hidden = torch.tanh(hidden @ self.w) + 0.1 * j
            total = total + hidden @ self.out
        return total

    def propose_masked(self, hidden, ctl):
        total = torch.zeros(B, V, device="cuda")
        live = torch.arange(K_MAX, device="cuda") < ctl.k_dev
        for j in range(K_MAX):
            hidden = torch.tanh(hidden @ self.w) + 0.1 * j
            total = total + (hidden @ self.out) * live[j]
        return total


def factory_bad_draft_backoff():
    ctl, draft = DraftController(), DraftHead()

    def step(hidden):
        return draft.propose(hidden, ctl)

    def inputs(index):
        ctl.observe(index)
        return (rnd(index, B, D, salt=2),)

    return step, inputs


def factory_ok_draft_masked():
    ctl, draft = DraftController(), DraftHead()

    def step(hidden):
        return draft.propose_masked(hidden, ctl)

    def inputs(index):
        ctl.observe(index)
        return (rnd(index, B, D, salt=2),)

    return step, inputs


# --------------------------------------------------------------- min_tokens forbids EOS at first

def factory_bad_min_tokens():
    w = head(15)
    generated = 0
    min_tokens = 12

    def step(hidden):
        nonlocal generated
        logits = hidden @ w
        if generated < min_tokens:  # expect: CG201
            logits[:, EOS].fill_(-1e4)
        generated += 1  # expect: CG210 optional
        return F.log_softmax(logits, -1).clamp_min(-50.0)

    def inputs(index):
        return (rnd(index, B, D, salt=3),)

    return step, inputs


def factory_ok_min_tokens_device():
    w = head(15)
    generated = torch.zeros(B, 1, dtype=torch.long, device="cuda")
    min_tokens = 12
    is_eos = (torch.arange(V) == EOS).to("cuda")

    def step(hidden):
        logits = hidden @ w
        logits = logits.masked_fill((generated < min_tokens) & is_eos, -1e4)
        generated.add_(1)
        return F.log_softmax(logits, -1).clamp_min(-50.0)

    def inputs(index):
        return (rnd(index, B, D, salt=3),)

    return step, inputs
