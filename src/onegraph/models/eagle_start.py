"""Where the training of a head begins: it copies.

A text that repeats itself is what a drafter gains most on, and what a new head of one layer learns last: query, key and
value must fit each other before any of them helps. So a head begins with an induction head (Olsson et al., arXiv
2209.11895) written into its attention, from a sample of texts, by least squares:

    query   from the embedding of the newest token
    key     from the hidden states of a token, which still tell what token it is
    value   from the embedding of the token behind that one, turned to where the output head names it

A query thus finds where the text had its token before, and names what came next there. All of it is trained on.
"""

import torch
from torch import Tensor
from torch.nn import functional

from onegraph.models.eagle_net import EagleNet

FOUND = 10.0  # of a query's product with the key of its own token; with other tokens' it is about 0
RIDGE = 1e-2  # of the mean of a covariance's diagonal, added to it


@torch.no_grad()
def start_copying(net: EagleNet, embedded: Tensor, hidden: Tensor, named: Tensor, norm: Tensor) -> None:
    """Writes an induction head into the attention of `net`, one query head of each kv head's.

    Args:
        net: a head as `EagleNet.start_from` left it. embedded: [N, D] of a sample's tokens. hidden: [N, L D], what the
            head gets of the same tokens. named: [V', D], embeddings of the tokens that it names. norm: [D], the
            model's final one.
    """
    c, own = net.config.layer, net.layer.self_attn
    d, size, group = c.hidden_size, c.head_dim, c.heads // c.kv_heads
    hidden = hidden.float()
    low, last = hidden[:, :d], hidden[:, -d:]
    # The first tapped layer knows its token best; the last one's states are far larger.
    net.fc.weight[:, :d] += torch.eye(d, device=low.device) * (last.abs().median() / low.abs().median())
    features = net.fc(hidden)
    spread = features.square().mean().sqrt()
    embedded, features, named = (_normed(t.float(), c.eps) for t in (embedded, features, named))

    values, basis = torch.linalg.eigh(named.t() @ named / len(named))
    whiten = basis * (values + RIDGE * values.mean()).rsqrt() @ basis.t()
    rows = net.lm_head.weight.float() * norm
    naming = _fitted(named, d**0.5 * rows / rows.norm(dim=1, keepdim=True), 0.1 * RIDGE)
    main = torch.linalg.svd(naming @ (basis * values.clamp(min=0).sqrt()))[0][:, : c.kv_heads * size]
    main = functional.pad(main, (0, c.kv_heads * size - main.shape[1]))  # of a model narrower than its values
    told = main.t() @ naming

    # RoPE hardly turns the slower half of a head's pairs within a text.
    slow = torch.arange(size, device=low.device).view(2, -1)[:, size // 4 :].flatten()
    draw = torch.Generator().manual_seed(0)
    for i in range(c.kv_heads):
        probe = torch.randn(len(slow), d, generator=draw).to(low.device) / d**0.5 @ whiten
        key, query = (slice(size * j, size * (j + 1)) for j in (i, i * group))
        for weight in (own.q_proj.weight[query], own.k_proj.weight[key], own.v_proj.weight[key]):
            weight.zero_()
        own.q_proj.weight[query][slow, :d] = probe * FOUND / (len(slow) * c.scale)
        own.k_proj.weight[key][slow, d:] = _fitted(features, embedded @ probe.t(), RIDGE)
        own.v_proj.weight[key, :d] = told[key]
        own.o_proj.weight[:, query] = spread * main[:, key]


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _fitted(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """The matrix [E, D] that makes y [N, E] of x [N, D] with the least squares."""
    product = x.t() @ x
    product.diagonal().add_(ridge * product.diagonal().mean())
    result: Tensor = torch.linalg.solve(product, x.t() @ y).t()
    return result
