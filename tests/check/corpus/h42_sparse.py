"""Sparse and nested tensors: what they are made of is counted on the host."""

import torch
from torch import nn

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def _inputs(i):
    return (torch.arange(16.0, device="cuda").view(4, 4).sub(3 * i),)


def factory_bad_dense_to_sparse():  # hazard: 5
    def step(x):
        return torch.sparse.mm(x.to_sparse(), x)  # expect: CG104|CG105

    return step, _inputs


def factory_bad_coalesces():  # hazard: 6
    ring = RING.to("cuda")

    def step(x):
        return torch.sparse_coo_tensor(ring, x[0], (4, 4)).coalesce().values() * 2  # expect: CG105

    return step, _inputs


def factory_bad_product_with_an_uncoalesced_matrix():  # hazard: 6
    ring = RING.to("cuda")

    def step(x):
        return torch.sparse.mm(torch.sparse_coo_tensor(ring, x[0], (4, 4)), x)  # expect: CG105

    return step, _inputs


def factory_bad_nested_padding():  # hazard: 6
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).to("cuda").eval()
    padding = (torch.arange(4) >= torch.tensor([[4], [2]])).to("cuda")

    @torch.no_grad()
    def step(x):
        return encoder(torch.stack([x, x]), src_key_padding_mask=padding)  # expect: CG105

    return step, _inputs


def factory_ok_graph_convolution():  # hazard: 6
    graph = torch.sparse_coo_tensor(RING, torch.ones(4), (4, 4)).coalesce().to("cuda")
    layer = nn.Linear(4, 4).to("cuda")
    return torch.no_grad()(lambda x: (graph @ layer(x)).relu()), _inputs


def factory_ok_rows_compressed():  # hazard: 6
    matrix = torch.sparse_coo_tensor(RING, torch.arange(1.0, 5.0), (4, 4)).to_sparse_csr().to("cuda")
    return (lambda x: matrix @ x), _inputs


def factory_ok_values_written_in_place():  # hazard: 6
    matrix = torch.sparse_coo_tensor(RING, torch.ones(4), (4, 4)).to_sparse_csr().to("cuda")

    def step(x):
        matrix.values().copy_(x.diagonal())
        return matrix @ x

    return step, _inputs
