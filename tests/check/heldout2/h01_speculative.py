"""Second held-out set: speculative decoding."""

import torch

DRAFTS, VOCAB = 4, 16


def _tokens(i, shift=0):
    generator = torch.Generator().manual_seed(i + shift)
    return torch.randint(0, 3, (1, DRAFTS), generator=generator).to("cuda")


def _pair(i):
    return _tokens(i), _tokens(i, 50)


class Adaptive:
    """Drafts more after success; the window is the host's."""

    def __init__(self):
        self.length = 1

    def observe(self):
        self.length = 1 + self.length % DRAFTS


def factory_bad_accepted_prefix():  # hazard: 1
    def verify(draft, target):
        accepted = (draft == target).long().cumprod(-1).sum(-1)
        return int(accepted[0])  # expect: CG101

    def step(draft, target):
        count = verify(draft, target)
        out = torch.zeros(DRAFTS + 1, dtype=torch.long, device="cuda")
        out[:count] = draft[0, :count]  # expect: CG202 optional, CG208 optional
        return out

    return step, _pair


def factory_bad_compare_one_by_one():  # hazard: 9
    def step(draft, target):
        taken = 0
        for i in range(DRAFTS):
            if draft[0, i] != target[0, i]:  # expect: CG108
                break
            taken += 1
        return draft * taken  # expect: CG202 optional

    return step, _pair


def factory_bad_tree_of_lists():  # hazard: 3
    """The draft tree's mask from parents that the host holds."""

    def mask_of(parents):
        size = len(parents)
        rows = [[0.0] * size for _ in range(size)]
        for node in range(size):
            at = node
            while at >= 0:
                rows[node][at] = 1.0
                at = parents[at]
        return torch.tensor(rows).cuda()  # expect: CG102

    def step(x, parents):
        return mask_of(parents) @ x

    return step, lambda i: (torch.full((4,), 1.0 + i, device="cuda"), [-1, 0, 0, 1 + i % 2])


def factory_bad_adaptive_length():  # hazard: 10
    adaptive = Adaptive()
    weight = torch.full((4, 4), 0.5, device="cuda")

    def step(hidden):
        for _ in range(adaptive.length):  # expect: CG201
            hidden = torch.tanh(hidden @ weight)
        adaptive.observe()
        return hidden

    return step, lambda i: (torch.full((1, 4), 0.2 * (i + 1), device="cuda"),)


def factory_bad_positions_from_host_start():  # hazard: 11
    table = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).to("cuda")

    class Drafter:
        start = 0

        def positions(self):
            made = torch.arange(self.start, self.start + DRAFTS, device="cuda")  # expect: CG202
            self.start += 2  # expect: CG210
            return made

    drafter = Drafter()

    def step(hidden):
        return hidden + table[drafter.positions()]

    return step, lambda i: (torch.full((DRAFTS, 4), 1.0 + i, device="cuda"),)


def factory_bad_hidden_of_last_step():  # hazard: 14
    """EAGLE's drafter starts from the target's hidden state, kept by reference."""

    class Worker:
        def __init__(self):
            self.hidden = torch.zeros(1, 4, device="cuda")
            self.weight = torch.full((4, 4), 0.25, device="cuda")

        def draft(self, embedding):
            return torch.tanh(self.hidden + embedding)  # expect: CG205|CG206|CG209

        def target(self, embedding):
            self.hidden = embedding @ self.weight + 1  # expect: CG205 optional
            return self.hidden

    worker = Worker()

    def step(embedding):
        drafted = worker.draft(embedding)
        return drafted + worker.target(embedding)

    return step, lambda i: (torch.full((1, 4), 0.3 * (i + 1), device="cuda"),)


def factory_bad_rejected_rows_selected():  # hazard: 5
    def step(draft, target):
        rejected = draft != target
        return torch.masked_select(target, rejected).sum()  # expect: CG104

    return step, _pair


def factory_bad_host_accept_limit():  # hazard: 11
    """How many tokens may still come is a number of the request, given to the step."""

    def step(draft, remaining):
        room = min(remaining, DRAFTS)
        out = torch.full((1, DRAFTS), -1, device="cuda")
        out[:, :room] = draft[:, :room]  # expect: CG202|CG208
        return out

    return step, lambda i: (_tokens(i), 5 - i if i < 5 else 1)


def factory_bad_drafter_synchronizes():  # hazard: 7
    side = torch.cuda.Stream()

    def draft(hidden):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = hidden * 2  # expect: CG305 optional
        side.synchronize()  # expect: CG106
        return out

    return (lambda hidden: draft(hidden) + 1), lambda i: (torch.full((4,), 1.0 + i, device="cuda"),)


def factory_bad_reports_acceptance():  # hazard: 2
    def step(draft, target):
        rate = (draft == target).float().mean()
        message = f"acceptance {rate:.2f}"  # expect: CG101
        return rate * len(message.split())

    return step, _pair


def factory_ok_accept_by_cumprod():
    def step(draft, target, bonus):
        length = (draft == target).long().cumprod(-1).sum(-1, keepdim=True)
        place = torch.arange(DRAFTS + 1, device="cuda")
        padded = torch.cat([target, bonus], -1)
        out = torch.where(place <= length, padded, torch.full_like(padded, -1))
        return out, length

    return step, lambda i: (*_pair(i), torch.tensor([[i]], device="cuda"))


def factory_ok_tree_attention_buffers():
    parents = torch.tensor([0, 0, 0, 1, 2], device="cuda")
    ancestors = torch.eye(5, device="cuda")
    for _ in range(3):
        ancestors = torch.maximum(ancestors, ancestors[parents])

    def step(hidden):
        scores = (hidden @ hidden.T).masked_fill(ancestors == 0, float("-inf"))
        return scores.softmax(-1) @ hidden

    return step, lambda i: (torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).to("cuda"),)


def factory_ok_ngram_lookup():
    """The tokens after the last place where the ending occurred before."""

    def step(history):
        windows = history.unfold(0, 2, 1)
        same = (windows[:-1] == windows[-1]).all(-1)
        place = torch.where(same, torch.arange(same.shape[0], device="cuda"), -1).amax()
        after = (place + 2 + torch.arange(2, device="cuda")).clamp(0, history.shape[0] - 1)
        return torch.where(place >= 0, history[after], -1)

    return step, lambda i: (torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(i)).to("cuda"),)


def factory_ok_rejection_sampling():
    def step(draft, target_probs, draft_probs, uniform):
        p = target_probs.gather(-1, draft.unsqueeze(-1)).squeeze(-1)
        q = draft_probs.gather(-1, draft.unsqueeze(-1)).squeeze(-1)
        accepted = (uniform * q <= p).long().cumprod(-1)
        residual = (target_probs - draft_probs).clamp_min(0)
        recovered = residual.argmax(-1)
        return torch.where(accepted.bool(), draft, recovered), accepted.sum(-1)

    def inputs(i):
        g = torch.Generator().manual_seed(i)
        probs = [torch.rand(1, DRAFTS, VOCAB, generator=g).softmax(-1).to("cuda") for _ in range(2)]
        return _tokens(i), *probs, torch.rand(1, DRAFTS, generator=g).to("cuda")

    return step, inputs


def factory_ok_medusa_heads():
    torch.manual_seed(0)
    heads = torch.nn.ModuleList(torch.nn.Linear(4, VOCAB) for _ in range(3)).to("cuda")

    @torch.no_grad()
    def step(hidden):
        logits = torch.stack([head(hidden) for head in heads])
        return logits.topk(2, dim=-1).indices, logits.amax(-1)

    return step, lambda i: (torch.full((1, 4), 0.3 * i, device="cuda"),)


def factory_ok_hidden_kept_in_place():
    hidden = torch.zeros(1, 4, device="cuda")
    weight = torch.full((4, 4), 0.25, device="cuda")

    def step(embedding):
        drafted = torch.tanh(hidden + embedding)
        hidden.copy_(embedding @ weight + 1)
        return drafted + hidden

    return step, lambda i: (torch.full((1, 4), 0.3 * (i + 1), device="cuda"),)
