"""Block Hadamard rotation: orthonormal, its own inverse, and local to its block."""

import pytest
import torch

from onegraph.formats.rotated import MAX_BLOCK, hadamard_block
from onegraph.ops import hadamard as hadamard_module
from onegraph.ops.hadamard import hadamard, rotate_integers, rotate_rows


def sylvester(block: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < block:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h * block**-0.5


@pytest.mark.parametrize(
    ("size", "block"), [(1, 1), (7, 1), (192, 64), (576, 64), (1536, 128), (11008, 128), (1000, 8), (4096, 128)]
)
def test_block_of_a_dimension(size: int, block: int) -> None:
    assert hadamard_block(size) == block
    assert size % block == 0


def test_no_block_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        hadamard_block(0)


@pytest.mark.parametrize("block", [2**i for i in range(8)])
def test_is_sylvesters_matrix_in_every_block(block: int) -> None:
    x = torch.randn(3, 5 * block, generator=torch.Generator().manual_seed(block))
    truth = (x.double().view(3, 5, block) @ sylvester(block)).view(3, -1)
    out = hadamard(x, block)
    assert (out - truth).norm() <= 1e-6 * truth.norm()
    assert (hadamard(out, block) - x).norm() <= 1e-6 * x.norm()


def test_blocks_do_not_mix() -> None:
    x = torch.zeros(1, 4 * MAX_BLOCK)
    x[0, MAX_BLOCK + 3] = 1.0
    assert hadamard(x, MAX_BLOCK)[0].nonzero()[:, 0].tolist() == list(range(MAX_BLOCK, 2 * MAX_BLOCK))


@pytest.mark.parametrize(
    ("x", "block", "message"),
    [
        (torch.zeros(2, 96), 3, "power of two"),
        (torch.zeros(2, 256), 256, "at most 128"),
        (torch.zeros(2, 256), 0, "power of two"),
        (torch.zeros(2, 96), 64, "multiple of block"),
        (torch.zeros(()), 1, "last dimension"),
        (torch.zeros(2, 64, dtype=torch.float64), 64, "allowed: float32"),
        (torch.zeros(64, 2).T, 64, "contiguous"),
    ],
)
def test_arguments_that_are_refused(x: torch.Tensor, block: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hadamard(x, block)


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize(("n", "k"), [(49, 200), (192, 576), (256, 1024)])
def test_a_decoded_layer_is_rotated_to_the_same_bits_faster(
    n: int, k: int, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as columns of the transpose, and integers by a product with the matrix, of either type."""
    monkeypatch.setattr(hadamard_module, "_MULTIPLIES_INT8", int8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, k, generator=generator)
    assert torch.equal(rotate_rows(x, hadamard_block(n)), hadamard(x.t().contiguous(), hadamard_block(n)).t())
    for dtype, most in ((torch.int8, 1 << 7), (torch.int16, 1 << 15)):
        q = torch.randint(-most, most, (n, k), generator=generator).to(dtype)
        assert torch.equal(rotate_integers(q, hadamard_block(k)), hadamard(q.float(), hadamard_block(k)))
