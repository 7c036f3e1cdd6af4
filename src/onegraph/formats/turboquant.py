"""TurboQuant (arXiv 2504.19874): what a quantized key or value means, and how a KV cache is set up with it.

A vector x [d] of a head is stored as its norm and the codes of its direction after a random rotation P,

    y = P x,   x~ = P^T (scale * codebook[codes]),   codes_j = the centroid nearest to y_j / ||y||

Every coordinate of a rotated unit vector has the same law, density proportional to (1 - t^2)^((d-3)/2), whatever x was.
So one Lloyd-Max codebook a dimension and rate is optimal for all data, and needs no calibration. The tables below are
exact for that law (tests/formats/test_turboquant.py recomputes them), in units of 1 / sqrt(d).

**prod** spends one bit of the rate on the residual r = y - y~: the signs of S r for a random orthogonal S. Inner
products with it are unbiased:

    y~_prod = y~ + ||r|| / (d E|t|) S^T sign(S r)        E|t| = Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))

(the paper's i.i.d. normal S has the factor sqrt(pi/2)/d and a variance of pi/2 ||r||^2/d; an orthogonal one, pi/2 - 1).

**Which scale** (ours): `norm` stores ||x||, as the paper does. With u = y / ||y|| and c its centroids, `matched` stores
||x|| / ||c||, so that the norm is kept; `unbiased` stores ||x|| / <u, c>, so that inner products are unbiased over
rotations without a bit spent on signs (RaBitQ, arXiv 2405.12497).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.suggestion import closest, suggestion
from onegraph.formats.turboquant_layout import BLOCK, VARIANTS, TurboQuantLayout

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
BITS = (1, 2, 3, 4)
EXACT = 16  # as a layer's rate: the model's own dtype
ROTATIONS = ("hadamard", "qr")
MODES = ("hybrid", "full", "shadow")
SCALES = ("norm", "matched", "unbiased")
DRAFTS = 8  # tokens a row that a decode step may bring; more are a prefill chunk
_OF_VLLM = {"auto": "exact", "bfloat16": "exact", "float16": "exact", "fp8_e4m3": "fp8"}  # its --kv-cache-dtype
SHORT = 1024  # tokens from which on codes are worth it on a GPU

# Positive centroids times sqrt(d), ascending; the negative ones mirror them.
_CENTROIDS: dict[int, tuple[tuple[float, ...], ...]] = {
    64: (
        (0.80100727,),
        (0.45211895, 1.49997480),
        (0.24375343, 0.75065811, 1.32934287, 2.11131145),
        (0.12735218, 0.38471827, 0.65049415, 0.93189402, 1.23940422, 1.59084913, 2.02330983, 2.64637049),
    ),
    80: (
        (0.80038178,),
        (0.45225357, 1.50206127),
        (0.24402225, 0.75172653, 1.33223873, 2.11933756),
        (0.12756045, 0.38538273, 0.65174218, 0.93397033, 1.24273937, 1.59622145, 2.03229946, 2.66321928),
    ),
    96: (
        (0.79996506,),
        (0.45234265, 1.50345285),
        (0.24420129, 0.75243911, 1.33417415, 2.12471615),
        (0.12769939, 0.38582615, 0.65257561, 0.93535816, 1.24497121, 1.59982156, 2.03833438, 2.67456014),
    ),
    128: (
        (0.79944444,),
        (0.45245325, 1.50519298),
        (0.24442487, 0.75333016, 1.33659889, 2.13147084),
        (0.12787315, 0.38638092, 0.65361895, 0.93709702, 1.24777046, 1.60434266, 2.04592538, 2.68885926),
    ),
    192: (
        (0.79892414,),
        (0.45256301, 1.50693383),
        (0.24464822, 0.75422155, 1.33902966, 2.13826059),
        (0.12804702, 0.38693621, 0.65466400, 0.93884037, 1.25058021, 1.60888711, 2.05356930, 2.70329632),
    ),
    256: (
        (0.79866412,),
        (0.45261758, 1.50780451),
        (0.24475980, 0.75466737, 1.34024731, 2.14166864),
        (0.12813399, 0.38721404, 0.65518715, 0.93971372, 1.25198902, 1.61116812, 2.05741121, 2.71056700),
    ),
    512: (
        (0.79827425,),
        (0.45269904, 1.50911087),
        (0.24492706, 0.75533624, 1.34207660, 2.14679724),
        (0.12826448, 0.38763103, 0.65597267, 0.94102584, 1.25410716, 1.61460064, 2.06319913, 2.72153865),
    ),
}


def codebook(head_dim: int, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 [2^bits]: what the codes of a unit vector of `head_dim` mean, in the order of `turboquant_layout`:
    c0, -c0, c1, -c1, ... with c ascending. `bits` 0 (prod at 1 bit) gives [0.]."""
    check_head_dim(head_dim)
    if bits not in (0, *BITS):
        raise ValueError(f"a codebook of {bits} bits does not exist; allowed are {_list(BITS)}")
    half = _CENTROIDS[head_dim][bits - 1] if bits else ()
    table = torch.tensor([s * c for c in half for s in (1, -1)] or [0.0], dtype=torch.float64)
    return (table / math.sqrt(head_dim)).float().to(device)


def check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"TurboQuant has no codebooks for a head size of {head_dim}; it has them for {_list(HEAD_DIMS)}"
        )


def mean_abs_coordinate(d: int) -> float:
    """E|t| of a coordinate of a random unit vector in d dimensions."""
    return math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)


def rotation(head_dim: int, kind: str = "hadamard", seed: int = 0) -> Tensor:
    """float32 [d, d], sqrt(d) times a random orthogonal matrix: y = x @ R.T / sqrt(d) turns x, y @ R / sqrt(d) back.

    `hadamard`: H D, a Hadamard matrix of order d with random signs on its columns, so entries are +-1 and exact in any
    dtype; orders that are no power of two are Sylvester's times Paley's of order 12 or 20. `qr`: a Haar-random matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "hadamard":
        signs = torch.randint(0, 2, (head_dim,), generator=generator) * 2 - 1
        return hadamard_matrix(head_dim).float() * signs
    if kind != "qr":
        raise ValueError(f"rotation is {kind!r}; allowed are {_list(ROTATIONS)}")
    return (_haar(head_dim, generator) * math.sqrt(head_dim)).float()


def projection(head_dim: int, seed: int = 0) -> Tensor:
    """float32 [d, d]: the orthogonal S of `prod`, Haar-random and independent of any `rotation`."""
    return _haar(head_dim, torch.Generator().manual_seed(seed + 0x5EED)).float()


def _haar(d: int, generator: torch.Generator) -> Tensor:
    """QR of a Gaussian matrix with the signs of R's diagonal moved into Q is Haar-distributed (Mezzadri 2007)."""
    q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    result: Tensor = (q * r.diagonal().sign()).contiguous()
    return result


@lru_cache(maxsize=8)
def hadamard_matrix(order: int) -> Tensor:
    """int8 [order, order] of +-1 with orthogonal rows, for order 2^k, 12 * 2^k and 20 * 2^k."""
    power = order & -order
    core, steps = {1: (1, power), 3: (12, power // 4), 5: (20, power // 4)}.get(order // power, (0, 0))
    if not core or not steps:
        raise ValueError(f"no Hadamard matrix of order {order} here; allowed are 2^k, 12 * 2^k and 20 * 2^k")
    matrix = torch.ones(1, 1, dtype=torch.int8) if core == 1 else _paley(core - 1)
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    for _ in range(steps.bit_length() - 1):
        matrix = torch.kron(pair, matrix)
    return matrix


def _paley(q: int) -> Tensor:
    """Paley's first construction, order q + 1 for a prime q = 3 mod 4: I + a skew matrix of quadratic residues."""
    residues = {i * i % q for i in range(1, q)}
    jacobsthal = [[0 if i == j else 1 if (i - j) % q in residues else -1 for j in range(q)] for i in range(q)]
    skew = torch.tensor([[0] + [1] * q, *([-1, *row] for row in jacobsthal)], dtype=torch.int8)
    return skew + torch.eye(q + 1, dtype=torch.int8)


# ------------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True, kw_only=True)
class TurboQuantConfig:
    """How a KV cache is quantized; `parse_kv` reads one from a string, `str()` writes it back.

    Args:
        k_bits, v_bits: rates of keys and values, 1 to 4.
        mode: `hybrid` attends on exact vectors for the latest `window` tokens and on codes before them; `full` on codes
            alone; `shadow` on the exact cache, storing codes beside it, to report the error that they would have
            made.
        window: exact tokens of `hybrid`.
        first, last: how many layers at either end take the rate `edge` in place of k_bits and v_bits.
        edge: `16` (the model's dtype), `4`, `k4v4`, ...
        exact: numbers of further layers that stay in the model's dtype.
        biased: `exact` or `coded`: layers whose keys are mostly a bias (`models.llama.biased_layers`); shadow: coded.
        keys, values: `mse` or `prod`.
        scale: `norm`, `matched` or `unbiased` (see above); for `mse`.
        rotation, seed: the random rotation; one for all layers.
        short: of `hybrid` in onegraph's engine: a sequence is exact while it has fewer tokens, in the pages that are to
            hold its codes. None: SHORT on a GPU, 0 on a CPU, where codes cost no time.
    """

    k_bits: int
    v_bits: int
    mode: str = "hybrid"
    window: int = 64
    first: int = 0
    last: int = 0
    edge: str = "16"
    exact: tuple[int, ...] = ()
    biased: str = "exact"
    keys: str = "mse"
    values: str = "mse"
    scale: str = "matched"
    rotation: str = "hadamard"
    seed: int = 0
    short: int | None = None

    def __post_init__(self) -> None:
        _check_rate(self.k_bits, self.v_bits)
        for name, allowed in _CHOICES.items():
            if (got := getattr(self, name)) not in allowed:
                raise ValueError(f"turboquant: {name} is {got!r}; allowed are {_list(allowed)}")
        limits = ("window", 1 << 20), ("first", 1 << 10), ("last", 1 << 10), ("seed", 1 << 31), ("short", 1 << 20)
        for name, most in limits:
            if (number := getattr(self, name)) is not None and not 0 <= number <= most:
                raise ValueError(f"turboquant: {name} is {number}; allowed is 0 to {most}")
        if list(self.exact) != sorted(set(self.exact)) or any(not 0 <= i < 1 << 10 for i in self.exact):
            raise ValueError(
                f"turboquant: exact is {'+'.join(map(str, self.exact))}; it must be numbers of layers from 0 on, "
                "each once and in order"
            )
        if (self.mode == "hybrid") != (self.window > 0):
            raise ValueError(
                f"turboquant: mode is {self.mode} and window {self.window}; mode=hybrid needs a window of exact tokens "
                "(window=64, say), the others have none (window=0)"
            )
        if self.short and self.mode != "hybrid":
            raise ValueError(
                f"turboquant: short is {self.short} and mode {self.mode}; sequences turn from exact into codes in "
                "mode=hybrid alone (leave short out)"
            )
        self._edge_rate()

    def rate(self, layer: int, layers: int) -> tuple[int, int]:
        """(bits of keys, bits of values) of a layer; (16, 16) where it stays in the model's dtype."""
        if self.exact and self.exact[-1] >= layers:
            raise ValueError(f"turboquant: exact names layer {self.exact[-1]}; the model has layers 0 to {layers - 1}")
        if layer in self.exact:
            return EXACT, EXACT
        inner = self.first <= layer < layers - self.last
        return (self.k_bits, self.v_bits) if inner else self._edge_rate()

    @property
    def ring(self) -> int:
        """Places of a sequence's ring: the window, and room for drafts of two steps, so that none is overwritten."""
        return self.window + 2 * DRAFTS if self.mode == "hybrid" else 0

    def short_on(self, device: str) -> int:
        """`short` on a device of this type ("cuda", "cpu")."""
        if self.short is not None:
            return self.short
        return SHORT if self.mode == "hybrid" and device == "cuda" else 0

    def exact_places(self, page_size: int, exact_bytes: int) -> int:
        """Tokens that fit exactly into the bytes of a page's codes, in every coded layer: a multiple of BLOCK, as
        kernels read them."""
        return page_size * self._least_bits // (16 * exact_bytes) // BLOCK * BLOCK

    def page_size(self, exact_bytes: int) -> int:
        """The smallest page with such places."""
        return -(-16 * exact_bytes // self._least_bits) * BLOCK

    @property
    def _least_bits(self) -> int:
        """Of a coordinate's key and value, in the coded layer that has the fewest."""
        rates = [(self.k_bits, self.v_bits)]
        if self.first or self.last:
            rates.append(self._edge_rate())
        return min(sum(rate) for rate in rates)

    def token_bytes(self, *, layers: int, kv_heads: int, head_dim: int, exact_bytes: int = 2) -> int:
        """Bytes that a token takes in the pages of all layers, norms and layers that stay exact counted."""
        return self.token_bytes_of([(kv_heads, head_dim)] * layers, exact_bytes)

    def token_bytes_of(self, shapes: Sequence[tuple[int, int]], exact_bytes: int = 2) -> int:
        """`token_bytes` of layers with (kv heads, head_dim) of their own."""
        total = 0
        for i, (kv_heads, head_dim) in enumerate(shapes):
            exact, rate = 2 * head_dim * exact_bytes, self.rate(i, len(shapes))
            if rate == (EXACT, EXACT):
                total += kv_heads * exact
            else:
                layout = TurboQuantLayout(head_dim, *rate, self.keys, self.values)
                total += kv_heads * (layout.bytes_per_token_head + (exact if self.mode == "shadow" else 0))
        return total

    def sequence_bytes(self, *, layers: int, kv_heads: int, head_dim: int, exact_bytes: int = 2) -> int:
        """Bytes that a sequence takes besides its pages: the rings of its coded layers."""
        return self.sequence_bytes_of([(kv_heads, head_dim)] * layers, exact_bytes)

    def sequence_bytes_of(self, shapes: Sequence[tuple[int, int]], exact_bytes: int = 2) -> int:
        """`sequence_bytes` of layers with (kv heads, head_dim) of their own."""
        coded = (n * dim for i, (n, dim) in enumerate(shapes) if self.rate(i, len(shapes)) != (EXACT, EXACT))
        return sum(coded) * self.ring * 2 * exact_bytes

    def _edge_rate(self) -> tuple[int, int]:
        return (EXACT, EXACT) if self.edge == str(EXACT) else _parse_rate(self.edge, "edge")

    def __str__(self) -> str:
        rate = str(self.k_bits) if self.k_bits == self.v_bits else f"k{self.k_bits}v{self.v_bits}"
        given = {f.name: getattr(self, f.name) for f in _OPTIONS.values() if getattr(self, f.name) != f.default}
        text = {name: "+".join(map(str, value)) if name == "exact" else value for name, value in given.items()}
        return ",".join([f"turboquant:{rate}", *(f"{name}={value}" for name, value in text.items())])


_CHOICES = {"mode": MODES, "biased": ("exact", "coded"), "keys": VARIANTS, "values": VARIANTS, "scale": SCALES}
_CHOICES |= {"rotation": ROTATIONS}
_OPTIONS = {f.name: f for f in fields(TurboQuantConfig) if f.name not in ("k_bits", "v_bits")}
_NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("window", "first", "last", "seed", "short"), int),
    "exact": lambda text: tuple(map(int, text.split("+"))),
}


def parse_kv(text: str) -> TurboQuantConfig | None:
    """A KV cache's setting: `exact` (the model's dtype, None), or `turboquant:RATE[,OPTION=VALUE]...`.

    RATE is `4` or `k3v4`; the options are the fields of `TurboQuantConfig`. Raises ValueError, one line that begins
    with "kv".
    """
    if text == "exact":
        return None
    kind, _, rest = text.partition(":")
    if kind != "turboquant" or not rest:
        raise ValueError(
            f"kv is {_short(text)}; allowed are exact, turboquant:4, turboquant:k3v4 (any of {_list(BITS)} bits), and "
            "options behind these, like turboquant:4,window=128 (docs/guides/long-context.md, Settings)"
            + _meant(kind, rest)
        )
    try:
        return _parse_codes(rest)
    except ValueError as error:
        raise ValueError(f"kv: {str(error).removeprefix('turboquant: ')}") from None


def _meant(kind: str, rest: str) -> str:
    """The setting that somebody may mean who wrote `kind`:`rest`, vLLM's names among them."""
    name = _OF_VLLM.get(kind) or closest(kind.lower(), ("exact", "turboquant"))
    if name == "turboquant":
        name += f":{rest if rest and len(rest) <= 40 and rest.isprintable() else 4}"
    return "" if name is None else f"; did you mean {name}?"


def _parse_codes(text: str) -> TurboQuantConfig:
    """RATE[,OPTION=VALUE]..."""
    rate, *options = text.split(",")
    k_bits, v_bits = _parse_rate(rate, "the rate")
    found: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in _OPTIONS or not equals or not value:
            raise ValueError(
                f"turboquant: option {_short(option)} is not understood; allowed are name=value with {_list(_OPTIONS)}"
                + suggestion(name, _OPTIONS.keys() - {name})
            )
        if name in found:
            raise ValueError(f"turboquant: option {name} is given twice")
        numbers = value.split("+") if name == "exact" else [value]
        if name in _NUMBERS and not all(n.isascii() and n.isdigit() and len(n) < 12 for n in numbers):
            wanted = "numbers with + between them" if name == "exact" else "a number"
            raise ValueError(f"turboquant: {name} is {_short(value)}; it must be {wanted}")
        found[name] = _NUMBERS.get(name, str)(value)
    if found.get("mode", "hybrid") != "hybrid":
        found.setdefault("window", 0)
    return TurboQuantConfig(k_bits=k_bits, v_bits=v_bits, **found)


def _parse_rate(text: str, what: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,3})|k([0-9]{1,3})v([0-9]{1,3})", text, re.ASCII)
    if match is None:
        raise ValueError(f"turboquant: {what} is {_short(text)}; it is written like 4 or k3v4")
    both, keys, values = match.groups()
    rate = int(both or keys), int(both or values)
    _check_rate(*rate)
    return rate


def _check_rate(k_bits: int, v_bits: int) -> None:
    for name, bits in (("keys", k_bits), ("values", v_bits)):
        if bits not in BITS:
            raise ValueError(f"turboquant: {bits} bits for {name}; allowed are {_list(BITS)}")


def _list(items: Any) -> str:
    *head, last = map(str, items)
    return f"{', '.join(head)} and {last}" if head else last


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
