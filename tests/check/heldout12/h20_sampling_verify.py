"""Samplers, grammars, overlap scheduling and draft-verify loops."""
import math
from dataclasses import dataclass

import torch

STEPS = 9

VOCAB, HID = 64, 32


def _rand(shape, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to("cuda")


def _randint(high, shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=g).to("cuda")


def _pinned(shape, dtype):
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


# ---------------------------------------------------------------- penalties, biases, truncation
@dataclass
class SamplingParams:
    frequency: float
    presence: float
    max_tokens: int


class SamplingBatchInfo:
    """Rows of running requests; finished ones make place for the next of the waiting queue."""

    def __init__(self, running, waiting):
        self.running, self.waiting = running, waiting
        self.counts = torch.zeros(len(running), VOCAB, device="cuda")
        self.refresh()

    def refresh(self):
        self.needs_penalties = any(p.frequency or p.presence for p in self.running)

    def retire(self):
        for i, p in enumerate(self.running):
            p.max_tokens -= 1
            if p.max_tokens == 0 and self.waiting:
                self.running[i] = self.waiting.pop(0)
        self.refresh()


def factory_bad_penalty_fast_path():
    plain = SamplingParams(0.0, 0.0, 99)
    info = SamplingBatchInfo(
        [SamplingParams(0.0, 0.0, 50), SamplingParams(1.5, 0.7, 5)],
        [plain],
    )
    head = _rand((HID, VOCAB), 1, 0.3)

    def apply_penalties(logits):
        freq = info.counts.new_full((2, 1), 1.5)
        pres = info.counts.new_full((2, 1), 0.7)
        return logits - freq * info.counts - pres * (info.counts > 0)

    def step(hidden):
        logits = hidden @ head
        if info.needs_penalties:  # expect: CG201
            logits = apply_penalties(logits)
        token = logits.argmax(-1)
        info.counts.scatter_add_(1, token[:, None], torch.ones_like(logits[:, :1]))
        info.retire()
        return logits.log_softmax(-1), token

    def inputs(index):
        return (_rand((2, HID), 50 + index // 3),)

    return step, inputs


class DeviceSampler:
    """Every feature is always on; neutral values switch it off per row."""

    def __init__(self, batch):
        dev = "cuda"
        self.counts = torch.zeros(batch, VOCAB, device=dev)
        self.freq = torch.tensor([0.0, 0.8, 1.5], device=dev)[:, None]
        self.top_k = torch.tensor([VOCAB, 8, 20], device=dev)[:, None]
        self.top_p = torch.tensor([1.0, 0.9, 0.7], device=dev)[:, None]
        self.min_p = torch.tensor([0.05, 0.0, 0.02], device=dev)[:, None]
        self.bias_ids = torch.tensor([[3, 7, 0], [5, 0, 0], [0, 0, 0]], device=dev)
        self.bias_val = torch.tensor([[1.0, -2.0, 0.0], [4.0, 0.0, 0.0], [0.0] * 3], device=dev)
        self.draw = torch.zeros((), dtype=torch.int64, device=dev)
        self.lane = torch.arange(batch, device=dev)

    def uniform(self):
        """A counter-based generator: state is one int64 on the device."""
        z = (self.draw * 1103515245 + self.lane * 12345 + 987) % 2147483647
        z = (z * 48271 + 11) % 2147483647
        z = (z * 16807 + 7) % 2147483647
        self.draw.add_(1)
        return z.to(torch.float32)[:, None] / 2147483647.0

    def __call__(self, logits, fresh):
        self.counts.masked_fill_(fresh[:, None], 0.0)
        logits = logits - self.freq * self.counts
        logits = logits.scatter_add(1, self.bias_ids, self.bias_val)
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
        rank = torch.arange(VOCAB, device=logits.device)[None]
        before = probs.cumsum(-1) - probs
        drop = (rank >= self.top_k) | (before > self.top_p) | (probs < self.min_p * probs[:, :1])
        probs = probs.masked_fill(drop, 0.0)
        cdf = probs.cumsum(-1)
        u = self.uniform() * cdf[:, -1:]
        pick = torch.searchsorted(cdf, u, right=True).clamp_(max=VOCAB - 1)
        token = order.gather(1, pick)
        self.counts.scatter_add_(1, token, torch.ones_like(token, dtype=torch.float32))
        return token[:, 0], probs.gather(1, pick)[:, 0]


def factory_ok_sampler_all_features():
    sampler = DeviceSampler(3)
    head = _rand((HID, VOCAB), 1, 0.3)

    def step(hidden, fresh):
        return sampler(hidden @ head, fresh)

    def inputs(index):
        fresh = torch.tensor([index == 4, False, index % 3 == 2], device="cuda")
        return _rand((3, HID), 50 + index // 2), fresh

    return step, inputs


# ---------------------------------------------------------------- grammar bitmasks
class CpuGrammar:
    """A cyclic automaton advanced on the CPU; bit t of word t // 32 allows token t."""

    def __init__(self, states):
        g = torch.Generator().manual_seed(9)
        self.masks = torch.randint(-(2**31), 2**31 - 1, (states, VOCAB // 32), generator=g, dtype=torch.int64)
        self.state = 0

    def fill_next_token_bitmask(self, out):
        out.copy_(self.masks[self.state].to(torch.int32))
        self.state = (self.state + 1) % self.masks.shape[0]


class StructuredOutputManager:
    def __init__(self, grammar, depth=16):
        self.grammar = grammar
        self.ring = [_pinned((VOCAB // 32,), torch.int32) for _ in range(depth)]
        self.turn = 0
        self.device_mask = torch.zeros(VOCAB // 32, dtype=torch.int32, device="cuda")

    def upload(self):
        host = self.ring[self.turn % len(self.ring)]
        self.turn += 1
        self.grammar.fill_next_token_bitmask(host)  # expect: CG204 optional @grammar_pinned_upload
        self.device_mask.copy_(host, non_blocking=True)  # expect: CG204|CG207|CG202 @grammar_pinned_upload


def _apply_bitmask(logits, words):
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((words[..., None] >> bits) & 1).flatten(-2).bool()
    return logits.masked_fill(~allowed, -1e4)


def factory_bad_grammar_pinned_upload():
    manager = StructuredOutputManager(CpuGrammar(5))
    head = _rand((HID, VOCAB), 2, 0.3)

    def step(hidden):
        manager.upload()
        logits = _apply_bitmask(hidden @ head, manager.device_mask)
        return logits.argmax(-1), logits.softmax(-1)

    def inputs(index):
        return (_rand((3, HID), 80 + index),)

    return step, inputs


def factory_ok_grammar_device_automaton():
    states = 6
    g = torch.Generator().manual_seed(9)
    masks = torch.randint(-(2**31), 2**31 - 1, (states, VOCAB // 32), generator=g, dtype=torch.int64)
    masks = masks.to(torch.int32).to("cuda")
    goto = _randint(states, (states, VOCAB), 10)
    state = torch.zeros(3, dtype=torch.int64, device="cuda")
    head = _rand((HID, VOCAB), 2, 0.3)

    def step(hidden, restart):
        state.masked_fill_(restart, 0)
        logits = _apply_bitmask(hidden @ head, masks[state])
        token = logits.argmax(-1)
        state.copy_(goto[state, token])
        return token, logits.softmax(-1), state.clone()

    def inputs(index):
        restart = torch.tensor([index % 4 == 3, False, index == 6], device="cuda")
        return _rand((3, HID), 80 + index), restart

    return step, inputs


# ---------------------------------------------------------------- overlap scheduling: future token ids
class FutureMap:
    """Negative input ids refer to tokens that an earlier step left in the map."""

    def __init__(self, limit):
        self.limit = limit
        self.tokens = torch.zeros(limit + 8, dtype=torch.int64, device="cuda")

    def resolve(self, ids):
        return torch.where(ids < 0, self.tokens[(-ids).clamp(min=0)], ids)


class HostCountedMap(FutureMap):
    def __init__(self, limit):
        super().__init__(limit)
        self.ct = 0

    def publish(self, token):
        n = token.shape[0]
        self.tokens[self.ct + 1 : self.ct + 1 + n] = token  # expect: CG202 @future_map_host_ct
        self.ct = (self.ct + n) % self.limit


class DeviceCountedMap(FutureMap):
    def __init__(self, limit):
        super().__init__(limit)
        self.ct = torch.zeros((), dtype=torch.int64, device="cuda")

    def publish(self, token):
        n = token.shape[0]
        self.tokens.index_copy_(0, self.ct + 1 + torch.arange(n, device=token.device), token)
        self.ct.add_(n).remainder_(self.limit)


class OverlapWorker:
    def __init__(self, futures):
        self.futures = futures
        self.emb = _rand((VOCAB, HID), 21)
        self.head = _rand((HID, VOCAB), 22, 0.4)

    def forward(self, ids, noise):
        ids = self.futures.resolve(ids)
        logits = torch.tanh(self.emb[ids] + noise) @ self.head
        token = logits.argmax(-1)
        self.futures.publish(token)
        return token, logits


def _future_inputs(index, n=4, limit=24):
    if index == 0:
        ids = torch.arange(n) + 5
    else:
        ids = -(((index - 1) * n) % limit + 1 + torch.arange(n))
    return ids.to("cuda"), _rand((n, HID), 120 + index, 0.5)


def factory_bad_future_map_host_ct():
    worker = OverlapWorker(HostCountedMap(24))

    def step(ids, noise):
        return worker.forward(ids, noise)

    return step, _future_inputs


def factory_ok_future_map_device_ct():
    worker = OverlapWorker(DeviceCountedMap(24))

    def step(ids, noise):
        return worker.forward(ids, noise)

    return step, _future_inputs


# ---------------------------------------------------------------- EAGLE: tree draft and verify
PARENT = (-1, 0, 0, 1, 1, 2, 2)  # node 0 is the root (last accepted token)
DEPTH = (0, 1, 1, 2, 2, 2, 2)


class TreeDrafter:
    def __init__(self):
        self.emb = _rand((VOCAB, HID), 31)
        self.draft_head = _rand((HID, VOCAB), 32, 0.4)
        self.target_head = self.draft_head + _rand((HID, VOCAB), 33, 0.12)
        n = len(PARENT)
        anc = torch.eye(n, dtype=torch.bool)
        for i, p in enumerate(PARENT):
            if p >= 0:
                anc[i] |= anc[p]
        self.tree_mask = anc.to("cuda")
        self.parent = torch.tensor([max(p, 0) for p in PARENT], device="cuda")

    def draft(self, root, feat):
        """root (B,), feat (B, HID) -> (B, 7) tokens of a binary tree with two levels"""
        first = (torch.tanh(self.emb[root] + feat) @ self.draft_head).topk(2).indices
        second = (torch.tanh(self.emb[first] + feat[:, None]) @ self.draft_head).topk(2).indices
        return torch.cat([root[:, None], first, second.flatten(1)], dim=1)

    def target(self, tree, feat):
        x = self.emb[tree]
        s = (x @ x.mT) / math.sqrt(HID)
        s = s.masked_fill(~self.tree_mask, -1e9).softmax(-1)
        h = torch.tanh(x + 0.05 * (s @ x) + feat[:, None])
        return (h @ self.target_head).argmax(-1)

    def node_ok(self, tree, want):
        """Is this node what the target would have emitted after the node's parent?"""
        ok = tree == want[:, self.parent]
        ok[:, 0] = True
        ok[:, 1:3] &= ok[:, :1]
        return ok & ok[:, self.parent]


def factory_bad_eagle_compact_accepted():
    drafter = TreeDrafter()
    root = torch.tensor([3, 9, 27], device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")

    def commit(tree, ok):
        accepted = tree[ok]  # expect: CG104
        total.add_(accepted.numel())
        flat = torch.zeros(tree.numel(), dtype=tree.dtype, device=tree.device)
        flat[: accepted.numel()] = accepted
        return flat

    def step(feat):
        tree = drafter.draft(root, feat)
        want = drafter.target(tree, feat)
        flat = commit(tree, drafter.node_ok(tree, want))
        root.copy_(want[:, 0])
        return flat, total.clone()

    def inputs(index):
        return (_rand((3, HID), 160 + index, 0.5),)

    return step, inputs


def factory_ok_eagle_padded_accept():
    """Longest accepted path per row by a masked depth; rejected places hold -1."""
    drafter = TreeDrafter()
    depth = torch.tensor(DEPTH, device="cuda")
    root = torch.tensor([3, 9, 27], device="cuda")
    accepted_total = torch.zeros(3, dtype=torch.int64, device="cuda")

    def step(feat):
        tree = drafter.draft(root, feat)
        want = drafter.target(tree, feat)
        ok = drafter.node_ok(tree, want)
        score = torch.where(ok, depth, torch.full_like(depth, -1)) * 8 - torch.arange(7, device=feat.device)
        last = score.argmax(1, keepdim=True)
        path = drafter.tree_mask[last[:, 0]]
        out = torch.where(path, tree, torch.full_like(tree, -1))
        bonus = want.gather(1, last)[:, 0]
        accepted_total.add_(path.sum(1) - 1)
        root.copy_(bonus)
        return out, bonus, accepted_total.clone()

    def inputs(index):
        return (_rand((3, HID), 160 + index, 0.5),)

    return step, inputs


# ---------------------------------------------------------------- n-gram (prompt lookup) drafts
class History:
    """A sliding window of the last tokens, newest at the end."""

    def __init__(self, seed, length=24):
        self.tokens = _randint(4, (length,), seed)

    def push(self, token):
        self.tokens.copy_(torch.cat([self.tokens[1:], token.view(1)]))


class EagerNgramProposer:
    def __init__(self, history, k):
        self.history, self.k = history, k

    def propose(self):
        h = self.history.tokens
        best = h[: self.k]
        for n in (4, 3, 2):
            windows = h.unfold(0, n, 1)[: -self.k]
            hit = (windows == h[-n:]).all(1)
            if hit.any():  # expect: CG108|CG101 @ngram_first_match
                start = hit.to(torch.int64).argmax() + n
                return h[start + torch.arange(self.k, device=h.device)]
        return best


class MaskedNgramProposer:
    """All orders are tried; the longest that matches wins by torch.where."""

    def __init__(self, history, k):
        self.history, self.k = history, k

    def propose(self):
        h = self.history.tokens
        best = h[: self.k]
        for n in (2, 3, 4):
            windows = h.unfold(0, n, 1)[: -self.k]
            hit = (windows == h[-n:]).all(1)
            start = hit.to(torch.int64).argmax() + n
            best = torch.where(hit.any(), h[start + torch.arange(self.k, device=h.device)], best)
        return best


def _ngram_loop(make):
    history = History(44)
    proposer = make(history, 3)
    table = _rand((4, 4), 45)

    def step(noise):
        draft = proposer.propose()
        prev = torch.cat([history.tokens[-1:], draft[:-1]])
        want = (table[prev] + noise).argmax(-1)
        run = (want == draft).to(torch.int64).cumprod(0)
        history.push(want.gather(0, run.sum().clamp(max=2).view(1)))
        return draft, run, history.tokens.clone()

    def inputs(index):
        return (_rand((3, 4), 200 + index, 1.0),)

    return step, inputs


def factory_bad_ngram_first_match():
    return _ngram_loop(EagerNgramProposer)


def factory_ok_ngram_all_orders():
    return _ngram_loop(MaskedNgramProposer)
