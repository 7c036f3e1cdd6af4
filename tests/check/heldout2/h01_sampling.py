"""Second held-out set: samplers and logits processors."""

import random

import torch
import torch.nn.functional as F

VOCAB = 16


def _logits(i, rows=2):
    generator = torch.Generator().manual_seed(i)
    return (torch.randn(rows, VOCAB, generator=generator) * 3).to("cuda")


def _only(i):
    return (_logits(i),)


class MinNewTokens:
    """Forbids the end of text until enough tokens came; stop ids were left on the host."""

    def __init__(self, minimum, stop_ids):
        self.minimum = minimum
        self.stop_ids = torch.tensor(stop_ids)

    def __call__(self, logits):
        logits[:, self.stop_ids] = -float("inf")  # expect: CG103 @stop_ids_on_the_host
        return logits


class MinNewTokensCounted:
    def __init__(self, minimum, stop_ids):
        self.minimum = minimum
        self.seen = 0
        self.stop_ids = torch.tensor(stop_ids, device="cuda")

    def __call__(self, logits):
        self.seen += 1  # expect: CG210 @counted_minimum
        if self.seen < self.minimum:  # expect: CG201 @counted_minimum
            logits = logits.index_fill(-1, self.stop_ids, -float("inf"))
        return logits


class Penalties:
    """Counts live on the device; presence and frequency as tensors of the batch."""

    def __init__(self, rows):
        self.counts = torch.zeros(rows, VOCAB, device="cuda")

    def apply(self, logits, presence, frequency):
        logits = logits - frequency.unsqueeze(1) * self.counts
        return logits - presence.unsqueeze(1) * (self.counts > 0)

    def observe(self, token):
        self.counts.scatter_add_(1, token.unsqueeze(1), torch.ones_like(token, dtype=self.counts.dtype).unsqueeze(1))


def factory_bad_stop_ids_on_the_host():  # hazard: 4
    processor = MinNewTokens(3, [2, 5])
    return (lambda logits: processor(logits * 1.0).argmax(-1)), _only


def factory_bad_counted_minimum():  # hazard: 10
    processor = MinNewTokensCounted(3, [2, 5, 7, 9, 11, 13])
    return (lambda logits: processor(logits).softmax(-1)), _only


def factory_ok_penalties():
    penalties = Penalties(2)

    def step(logits, presence, frequency):
        token = penalties.apply(logits, presence, frequency).argmax(-1)
        penalties.observe(token)
        return token

    return step, lambda i: (_logits(i), torch.full((2,), 0.5, device="cuda"), torch.full((2,), 0.1 * i, device="cuda"))


def factory_bad_repetition_from_list():  # hazard: 3
    history = [[1, 2], [3]]

    def penalize(logits, rows):
        for row, tokens in enumerate(rows):
            seen = torch.tensor(sorted(set(tokens)), device=logits.device, dtype=torch.long)  # expect: CG102
            logits[row].index_fill_(0, seen, 0.0)
        return logits

    def step(logits):
        return penalize(logits.clone(), history).argmax(-1)

    return step, _only


def factory_bad_greedy_or_random():  # hazard: 9
    """One branch for rows at temperature zero."""

    def sample(logits, temperature):
        greedy = logits.argmax(-1)
        if torch.all(temperature == 0):  # expect: CG108
            return greedy
        return torch.where(temperature == 0, greedy, (logits / temperature.clamp_min(1e-3).unsqueeze(1)).argmin(-1))

    return sample, lambda i: (_logits(i), torch.tensor([0.0, float(i % 2)], device="cuda"))


def factory_bad_annealed_temperature():  # hazard: 11
    class Annealed:
        def __init__(self):
            self.temperature = 1.0

        def __call__(self, logits):
            probabilities = F.softmax(logits / self.temperature, dim=-1)  # expect: CG202
            self.temperature *= 0.7  # expect: CG210
            return probabilities

    annealed = Annealed()
    return (lambda logits: annealed(logits)), _only


def factory_bad_nucleus_by_nonzero():  # hazard: 5
    def step(logits):
        probabilities, order = logits.softmax(-1).sort(descending=True)
        cut = (probabilities[0].cumsum(0) > 0.8).nonzero()[0]  # expect: CG104
        kept = torch.arange(VOCAB, device="cuda") <= cut
        return (probabilities[0] * kept).sum(), order[0]

    return step, _only


def factory_bad_bad_words_loop():  # hazard: 9
    words = [(3, 7), (1, 2)]

    def step(last, logits):
        for first, banned in words:
            if last[0] == first:  # expect: CG108
                logits = logits.index_fill(-1, torch.full((1,), banned, device="cuda"), -100.0)
        return logits.softmax(-1)

    return step, lambda i: (torch.tensor([i], device="cuda"), _logits(i))


def factory_bad_grammar_mask_from_host():  # hazard: 3
    """A grammar fills a bitmask on the host in the step and sends it over."""

    class Matcher:
        def __init__(self):
            self.bitmask = torch.zeros(1, VOCAB, dtype=torch.bool)

        def fill(self):
            self.bitmask[:] = torch.arange(VOCAB) % 2 == 0

    matcher = Matcher()

    def step(logits):
        matcher.fill()
        mask = matcher.bitmask.to(logits.device, non_blocking=True)  # expect: CG102
        return logits.masked_fill(mask, float("-inf")).argmax(-1)

    return step, _only


def factory_bad_seed_of_the_request():  # hazard: 22
    generator = torch.Generator(device="cuda")

    def step(logits):
        generator.manual_seed(1234)  # expect: CG302|CG301 optional
        noise = torch.empty_like(logits).exponential_(generator=generator)  # expect: CG301
        return (logits.softmax(-1) / noise).argmax(-1)

    return step, _only


def factory_bad_until_finished():  # hazard: 9
    def step(token):
        rounds = 0
        while not (token >= 8).all():  # expect: CG108
            token = token * 2
            rounds += 1
        return token

    return step, lambda i: (torch.tensor([1 + i, 2], device="cuda"),)


def factory_bad_top_logprobs_as_numpy():  # hazard: 2
    def top(logprobs, count):
        values, ids = logprobs.topk(count)
        return ids.cpu().numpy(), values  # expect: CG101

    def step(logits):
        ids, values = top(logits.log_softmax(-1), 3)
        return values + ids.shape[0]

    return step, _only


def factory_bad_stop_set():  # hazard: 1
    """Membership of a token in a set of host integers."""
    stop = {2, 5, 11}

    def step(logits):
        token = logits[0].argmax()
        done = token.item() in stop  # expect: CG101
        return logits.sum(0) * (0.0 if done else 1.0)  # expect: CG202 optional

    return step, lambda i: (F.one_hot(torch.tensor([i, i]), VOCAB).float().to("cuda"),)


def factory_bad_min_p_changes_its_input():  # hazard: 17
    """`unsqueeze_` on what the caller holds: its static buffer has another shape after capture."""

    def step(logits, min_p):
        probabilities = logits.softmax(-1)
        limit = min_p.unsqueeze_(1) * probabilities.amax(-1, keepdim=True)  # expect: CG205|CG208|CG212
        return logits.masked_fill(probabilities < limit, float("-inf")).argmax(-1)

    return step, lambda i: (_logits(i), torch.full((2,), 0.1 * i, device="cuda"))


def factory_bad_random_choice_of_processor():  # hazard: 10
    dice = random.Random(3)

    def step(logits):
        if dice.random() < 0.5:  # expect: CG201
            logits = logits * 0.5
        return logits.softmax(-1)

    return step, _only


def factory_ok_stop_ids_isin():
    stop = torch.tensor([2, 5, 11], device="cuda")

    def step(logits):
        token = logits.argmax(-1)
        return torch.isin(token, stop)

    return step, _only


def factory_ok_multinomial_of_one():
    def step(logits):
        return torch.multinomial(logits.softmax(-1), num_samples=1)

    return step, _only


def factory_ok_exponential_race():
    def step(logits):
        probabilities = logits.softmax(-1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_(1)).argmax(-1)

    return step, _only


def factory_ok_top_k_top_p_rows():
    def step(logits, k, p):
        ordered, index = logits.sort(dim=-1, descending=True)
        rank = torch.arange(VOCAB, device=logits.device)
        ordered = ordered.masked_fill(rank >= k.unsqueeze(1), float("-inf"))
        probabilities = ordered.softmax(-1)
        ordered = ordered.masked_fill(probabilities.cumsum(-1) - probabilities > p.unsqueeze(1), float("-inf"))
        return torch.empty_like(logits).scatter_(-1, index, ordered)

    def inputs(i):
        return _logits(i), torch.tensor([4, 1 + i], device="cuda"), torch.tensor([0.9, 0.5], device="cuda")

    return step, inputs


def factory_ok_grammar_mask_given():
    """The caller fills a pinned bitmask before each replay; the step sends it over."""

    def step(logits, bitmask):
        mask = bitmask.to(logits.device, non_blocking=True)
        return logits.masked_fill(mask, float("-inf")).argmax(-1)

    def inputs(i):
        return _logits(i), (torch.arange(VOCAB) % (2 + i) == 0).unsqueeze(0).pin_memory()

    return step, inputs


def factory_ok_bias_written_by_slice():
    allowed = torch.zeros(2, VOCAB, device="cuda")

    def step(logits):
        allowed.zero_()
        allowed[:, :4].fill_(float("-inf"))
        allowed[:, 0] += 1.0
        return (logits + allowed).softmax(-1)

    return step, _only


def factory_quiet_tokens_counted():
    class Metrics:
        def __init__(self):
            self.tokens = 0

    metrics = Metrics()

    def step(logits):
        metrics.tokens += logits.shape[0]  # expect: CG210
        return logits.argmax(-1)

    return step, _only
