"""Samplers: temperatures, top-k and top-p, penalties, seeds, bad words, grammar masks, stop checks."""
from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

VOCAB = 40


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


def gumbel(seed, *shape):
    u = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).clamp_(1e-6, 1 - 1e-6)
    return (-(-u.log()).log()).to("cuda")


def tokens(seed, *shape, high=VOCAB):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


# --------------------------------------------------------------------------- sampling tensors rebuilt each step
@dataclass
class SamplingParams:
    temperature: float
    decay: float = 0.7

    def at(self, step):
        return max(self.temperature * self.decay ** step, 0.05)


@dataclass
class SamplingTensors:
    temperatures: torch.Tensor

    @classmethod
    def from_lists(cls, temperatures, device, pin_memory=True):
        t = torch.tensor(temperatures, dtype=torch.float32)
        if pin_memory:
            t = t.pin_memory()  # expect: CG107|CG207|CG204 @sampling_tensors_pinned_each_step
        return cls(t.to(device, non_blocking=True))  # expect: CG204|CG207|CG102 @sampling_tensors_pinned_each_step optional


class AnnealedSampler:
    def __init__(self, params):
        self.params, self.n = params, 0

    def __call__(self, logits):
        temps = [p.at(self.n) for p in self.params]
        meta = SamplingTensors.from_lists(temps, logits.device)
        self.n += 1
        return torch.softmax(logits / meta.temperatures[:, None], -1)


def factory_bad_sampling_tensors_pinned_each_step():  # hazard: 16
    sampler = AnnealedSampler([SamplingParams(1.0), SamplingParams(0.6, 0.9), SamplingParams(2.0)])
    return sampler, lambda i: (randn(100 + i, 3, VOCAB),)


# --------------------------------------------------------------------------- top-k
class TopKTopPSampler(torch.nn.Module):
    """k and p differ by request."""

    def __init__(self, on_host):
        super().__init__()
        self.forward = self.forward_trimmed if on_host else self.forward_sorted

    @staticmethod
    def _pick(logits, noise):
        return (logits + noise).argmax(-1)

    def forward_trimmed(self, logits, noise, k, p):
        top = logits.topk(int(k.max()), dim=-1)  # expect: CG101 @top_k_trimmed_to_max
        kth = top.values.gather(1, (k - 1)[:, None])
        kept = torch.where(logits < kth, -1e4, logits)
        return kept, self._pick(kept, noise)

    def forward_sorted(self, logits, noise, k, p):
        srt, idx = logits.sort(dim=-1)
        kth = srt.gather(1, (logits.shape[-1] - k)[:, None])
        srt = srt.masked_fill(srt < kth, -1e4)
        cum = srt.softmax(-1).cumsum(-1)
        drop = cum <= 1 - p[:, None]
        drop[:, -1:].fill_(False)
        srt = srt.masked_fill(drop, -1e4)
        kept = torch.empty_like(srt).scatter_(1, idx, srt)
        return kept, self._pick(kept, noise)


def topk_inputs(i):
    return randn(200 + i, 4, VOCAB), gumbel(250 + i, 4, VOCAB), tokens(270 + i, 4, high=9) + 2, torch.full((4,), 0.5 + 0.05 * i, device="cuda")


def factory_bad_top_k_trimmed_to_max():  # hazard: 1
    return TopKTopPSampler(on_host=True), topk_inputs


def factory_ok_top_k_top_p_sorted():  # hazard: 1
    return TopKTopPSampler(on_host=False), topk_inputs


# --------------------------------------------------------------------------- penalties
class PenaltyState:
    def __init__(self, batch):
        self.output = torch.full((batch, 8), VOCAB, dtype=torch.int64, device="cuda")  # VOCAB is the padding token
        self.at = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.repetition = torch.full((batch, 1), 1.3, device="cuda")
        self.frequency, self.presence = 0.4, 0.2

    def push(self, toks):
        self.output.index_copy_(1, self.at, toks[:, None])
        self.at += 1


def counts_by_bincount(out):
    rows = [torch.bincount(r, minlength=VOCAB + 1)[:VOCAB] for r in out]  # expect: CG104 @penalty_counts_bincount
    return torch.stack(rows)


def counts_by_scatter(out):
    c = torch.zeros(out.shape[0], VOCAB + 1, dtype=torch.int64, device=out.device)
    c.scatter_add_(1, out, torch.ones_like(out))
    return c[:, :VOCAB]


def apply_penalties(logits, st: PenaltyState, count_fn):
    counts = count_fn(st.output)
    seen = counts > 0
    rep = torch.where(seen, st.repetition, torch.ones_like(st.repetition))
    logits = torch.where(logits > 0, logits / rep, logits * rep)
    return logits - st.frequency * counts - st.presence * seen


def make_penalty_step(count_fn):
    st = PenaltyState(3)

    @torch.inference_mode()
    def step(logits):
        logits = apply_penalties(logits, st, count_fn)
        nxt = logits.argmax(-1)
        st.push(nxt)
        return nxt, logits

    return step, lambda i: (randn(300 + i // 2, 3, VOCAB),)


def factory_bad_penalty_counts_bincount():  # hazard: 5
    return make_penalty_step(counts_by_bincount)


def factory_ok_penalty_counts_scatter():  # hazard: 5
    return make_penalty_step(counts_by_scatter)


# --------------------------------------------------------------------------- bad words
class BadWordsProcessor:
    def __init__(self, per_request):
        self.per_request = per_request

    def __call__(self, logits, history):
        for row, words in enumerate(self.per_request):
            singles = [w[0] for w in words if len(w) == 1]
            if singles:
                logits[row, singles] = -50.0  # expect: CG103 @bad_words_list_index
        return logits


class CompiledBadWords:
    """Words of two tokens: banned where the last token is the prefix."""

    def __init__(self, per_request):
        rows, pre, last = zip(*[(r, w[0], w[1]) for r, ws in enumerate(per_request) for w in ws if len(w) == 2])
        self.rows, self.pre, self.last = (torch.tensor(x).to("cuda") for x in (rows, pre, last))
        self.always = [(r, torch.tensor([w[0] for w in ws if len(w) == 1]).to("cuda")) for r, ws in enumerate(per_request) if any(len(w) == 1 for w in ws)]

    def __call__(self, logits, history):
        for row, ids in self.always:
            logits[row].index_fill_(0, ids, -50.0)
        hit = history[:, -1].index_select(0, self.rows) == self.pre
        pen = torch.where(hit, -50.0, 0.0).to(logits.dtype)
        logits.index_put_((self.rows, self.last), pen, accumulate=True)
        return logits


WORDS = [[[3], [7, 9], [11]], [[5, 6]], [[1], [2, 30]]]


def make_bad_words(proc):
    def step(logits, history):
        return proc(logits.clone(), history).log_softmax(-1)

    def inputs(i):
        h = tokens(410 + i, 3, 5)
        h[:, -1] = torch.tensor([7, 5, 2]) if i % 2 else torch.tensor([1, 1, 2])
        return randn(400 + i, 3, VOCAB), h

    return step, inputs


def factory_bad_bad_words_list_index():  # hazard: 4
    return make_bad_words(BadWordsProcessor(WORDS))


def factory_ok_bad_words_compiled():  # hazard: 4
    return make_bad_words(CompiledBadWords(WORDS))


# --------------------------------------------------------------------------- grammars
class HostGrammar:
    """A tiny regular grammar kept by the host; the mask goes over packed in 32-bit words."""

    def __init__(self, n_states=4):
        self.state = 0
        rng = np.random.default_rng(8)
        self.allowed = rng.random((n_states, VOCAB)) < 0.5
        self.n = n_states

    def fill_next_token_bitmask(self, bitmask):
        bits = np.zeros(((VOCAB + 31) // 32, 32), dtype=np.int64)
        bits.reshape(-1)[:VOCAB] = self.allowed[self.state]
        bitmask[:] = (bits << np.arange(32)).sum(1)

    def accept(self):
        self.state = (self.state + 1) % self.n


def apply_token_bitmask(logits, bitmask):
    shifts = torch.arange(32, device=logits.device)
    bits = (bitmask[:, None] >> shifts) & 1
    return logits.masked_fill(bits.reshape(-1)[:VOCAB] == 0, -30.0)


class StructuredOutputManager:
    def __init__(self):
        self.grammar = HostGrammar()
        self._bitmask = np.zeros(2, dtype=np.int64)

    def grammar_bitmask(self):
        self.grammar.fill_next_token_bitmask(self._bitmask)
        self.grammar.accept()
        return self._bitmask


def factory_bad_grammar_bitmask_from_numpy():  # hazard: 3
    manager = StructuredOutputManager()

    def step(logits):
        packed = torch.from_numpy(manager.grammar_bitmask()).to(logits.device, non_blocking=True)  # expect: CG102|CG204
        return apply_token_bitmask(logits, packed)

    return step, lambda i: (randn(500 + i, 2, VOCAB),)


class DeviceGrammar:
    def __init__(self, batch, n_states=5):
        g = torch.Generator().manual_seed(17)
        self.next = torch.randint(0, n_states, (n_states, VOCAB), generator=g).to("cuda")
        self.masks = torch.randint(0, 2 ** 31, (n_states, 2), generator=g).to("cuda")
        self.state = torch.zeros(batch, dtype=torch.int64, device="cuda")

    def mask(self, logits):
        shifts = torch.arange(31, device=logits.device)
        bits = (self.masks[self.state][..., None] >> shifts) & 1
        return logits.masked_fill(bits.flatten(1)[:, :VOCAB] == 0, -30.0)

    def accept(self, toks):
        torch.where(toks >= 0, self.next[self.state, toks], self.state, out=self.state)


def factory_ok_grammar_on_device():  # hazard: 13
    grammar = DeviceGrammar(3)

    @torch.no_grad()
    def step(logits):
        masked = grammar.mask(logits)
        picked = masked.argmax(-1)
        grammar.accept(picked)
        return {"tokens": picked, "logits": masked, "state": grammar.state.clone()}

    return step, lambda i: (randn(550 + i, 3, VOCAB),)


# --------------------------------------------------------------------------- seeds
class SeededSampler:
    """Requests that bring a seed get their own generator."""

    def __init__(self, seeds):
        self.generators = {i: torch.Generator(device="cuda").manual_seed(s) for i, s in enumerate(seeds) if s is not None}

    def exponential(self, probs, noise):
        q = noise.clone()
        for i, gen in self.generators.items():
            q[i].exponential_(generator=gen)  # expect: CG301 @per_request_generators
        return q

    def sample(self, logits, noise):
        probs = logits.softmax(-1)
        return probs.div(self.exponential(probs, noise)).argmax(-1)


def factory_bad_per_request_generators():  # hazard: 21
    sampler = SeededSampler([None, 11, None, 12])

    def step(logits, noise):
        return sampler.sample(logits, noise)

    return step, lambda i: (randn(600 + i, 4, VOCAB), gumbel(650 + i, 4, VOCAB).exp())


def reseeded(fn):
    """Makes a sampling function reproducible: every call has a seed of its own."""
    calls = 0

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        nonlocal calls
        torch.manual_seed(1234 + calls)  # expect: CG302 @reseed_each_call
        calls += 1
        return fn(*args, **kwargs)

    return wrapper


def factory_bad_reseed_each_call():  # hazard: 22
    @reseeded
    def typical_sample(logits):
        logp = logits.log_softmax(-1)
        ent = -(logp.exp() * logp).sum(-1, keepdim=True)
        kept = torch.where((-logp - ent).abs() < 1.0, logp, -20.0)
        u = torch.rand(kept.shape, device=kept.device)
        return kept, (kept - (-u.clamp(1e-6, 1 - 1e-6).log()).log()).argmax(-1)

    return typical_sample, lambda i: (randn(680 + i, 3, VOCAB),)


# --------------------------------------------------------------------------- stop checks
class SamplerOutput(NamedTuple):
    token_ids: torch.Tensor
    done: torch.Tensor


class StopChecker:
    def __init__(self, eos, batch):
        self.eos = eos
        self.finished = torch.zeros(batch, dtype=torch.bool, device="cuda")

    def update(self, toks):
        if self.eos in toks:  # expect: CG101|CG108 @eos_in_tokens
            self.finished |= toks == self.eos
        return torch.where(self.finished, torch.full_like(toks, VOCAB), toks)


def make_stop(checker):
    def step(logits, noise):
        with torch.no_grad():
            toks = checker.update((logits + noise).argmax(-1))
        return SamplerOutput(toks, checker.finished.clone())

    def inputs(i):
        logits = randn(700 + i, 4, VOCAB)
        logits[i % 4, 6] += 10.0 * (i % 2)
        return logits, gumbel(720 + i, 4, VOCAB)

    return step, inputs


def factory_bad_eos_in_tokens():  # hazard: 1
    return make_stop(StopChecker(6, 4))


class MaskedStopChecker(StopChecker):
    def __init__(self, eos, batch):
        super().__init__(eos, batch)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.host_batch = batch

    def update(self, toks):
        assert toks.shape[0] == self.host_batch
        self.lengths += ~self.finished
        out = toks.masked_fill(self.finished, VOCAB)
        self.finished.logical_or_((toks == self.eos) | (self.lengths >= 5))
        return out


def factory_ok_masked_stop():  # hazard: 9
    return make_stop(MaskedStopChecker(6, 4))


# --------------------------------------------------------------------------- min tokens
class MinTokensProcessor:
    def __init__(self, min_tokens, eos, requests):
        self.min_tokens, self.eos = min_tokens, torch.tensor([eos]).to("cuda")
        self.output_ids = {r: [] for r in range(requests)}

    def apply(self, logits):
        pending = [r for r, out in self.output_ids.items() if len(out) < self.min_tokens + r]
        for r in pending:  # expect: CG201 @min_tokens_pending
            logits[r].index_fill_(0, self.eos, -25.0)  # expect: CG201 @min_tokens_pending optional
        return logits

    def update_state(self):
        for out in self.output_ids.values():
            out.append(-1)


def factory_bad_min_tokens_pending():  # hazard: 10
    proc = MinTokensProcessor(2, eos=4, requests=3)

    def step(logits):
        logits = proc.apply(logits.float() * 1.0)
        proc.update_state()
        return logits.softmax(-1), logits

    return step, lambda i: (randn(800 + i, 3, VOCAB),)


# --------------------------------------------------------------------------- schedules of scalars
class CpuSchedule:
    """Entropy-driven temperature, kept as a scalar tensor where the scheduler lives."""

    def __init__(self, start, factor):
        self.value = torch.tensor(start)
        self.factor = factor

    def tick(self):
        self.value.mul_(self.factor)
        return self.value


class Contrastive:
    def __init__(self, schedule):
        self.alpha = schedule

    def __call__(self, expert, amateur):
        a = self.alpha.tick()
        return torch.log_softmax(expert - a * amateur, dim=-1)  # expect: CG203 @contrastive_cpu_alpha


def factory_bad_contrastive_cpu_alpha():  # hazard: 12
    decoder = Contrastive(CpuSchedule(0.9, 0.6))
    return decoder, lambda i: (randn(900 + i, 2, VOCAB), randn(950 + i, 2, VOCAB))


class DeviceSchedule:
    def __init__(self, start, factor):
        self.value = torch.full((), start, device="cuda")
        self.floor = torch.full((), 0.2, device="cuda")
        self.factor = factor

    def tick(self):
        torch.maximum(self.value * self.factor, self.floor, out=self.value)
        return self.value


class DeviceContrastive:
    def __init__(self, schedule):
        self.alpha = schedule
        self.plausible = 0.1

    def __call__(self, expert, amateur):
        logp = expert.log_softmax(-1)
        keep = logp > logp.amax(-1, keepdim=True) + np.log(self.plausible)
        score = logp - self.alpha.tick() * amateur.log_softmax(-1)
        return torch.where(keep, score, -40.0)


def factory_ok_contrastive_device_alpha():  # hazard: 12
    decoder = DeviceContrastive(DeviceSchedule(0.9, 0.6))
    return decoder, lambda i: (randn(910 + i, 2, VOCAB), randn(960 + i, 2, VOCAB))


# --------------------------------------------------------------------------- metrics beside the sampler
@dataclass
class SamplerStats:
    calls: int = 0
    rows: int = 0
    by_mode: dict = field(default_factory=lambda: defaultdict(int))


class MinPSampler:
    def __init__(self, min_p):
        self.min_p = min_p
        self.stats = SamplerStats()

    def observe(self, logits):
        self.stats.calls += 1  # expect: CG210 @sampler_stats
        self.stats.rows += logits.shape[0]  # expect: CG210 @sampler_stats optional
        self.stats.by_mode["min_p"] += 1  # expect: CG210 @sampler_stats optional

    def __call__(self, logits):
        self.observe(logits)
        probs = logits.softmax(-1)
        probs = probs * (probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs / probs.sum(-1, keepdim=True)


def factory_quiet_sampler_stats():  # hazard: 32
    return MinPSampler(0.1), lambda i: (randn(990 + i, 3, VOCAB),)
