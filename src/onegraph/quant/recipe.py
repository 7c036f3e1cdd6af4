"""How to quantize: every lever by name, with what it costs and gives in docs/benchmarks/quality.md."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onegraph.formats.e8p import E8P
from onegraph.formats.rotated import KEEP, RotatedFormat
from onegraph.formats.trellis import TRELLIS

# RMS of the normalized weight in units of the codebook, by rate. Plain Gaussian data is best at GAUSSIAN_RHO; under a
# Hessian the feedback of later blocks widens the targets by some 5 per cent, so less is better (docs/log.md).
GAUSSIAN_RHO = {2: 1.03, 3: 0.98, 4: 0.88}
RHO = {2: 0.95, 3: 0.94, 4: 0.84}
# The same for the trellis, whose largest value is 3.45: the more bits, the more an outlier beyond it costs.
TRELLIS_GAUSSIAN_RHO = {1: 1.1, 2: 1.0, 3: 0.95, 4: 0.92, 5: 0.87, 6: 0.82, 7: 0.78, 8: 0.75}
TRELLIS_RHO = {1: 1.05, 2: 0.95, 3: 0.91, 4: 0.88, 5: 0.83, 6: 0.79, 7: 0.75, 8: 0.72}
# Adam's step for tuning, relative to the scales: the coarser the codes, the further the best scales lie.
TUNE_RATE = {1: 6e-3, 2: 4e-3, 3: 2e-3, 4: 5e-4, 5: 2e-4, 6: 1e-4, 7: 1e-4, 8: 1e-4}
RATES: Mapping[str, Mapping[int, RotatedFormat]] = {"e8p": E8P, "trellis": TRELLIS}


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Fine-tune in_scale and out_scale of all layers by distillation: KL to the unquantized model's logits.

    Needs the whole model in memory (float32), and gradients. Adam with a cosine schedule; `rate` None is `TUNE_RATE`,
    `batch` is in sequences. held_out: share of the calibration sequences that judge the epochs instead of being learnt
    from (of fewer than eight, none): the best epoch counts.
    """

    epochs: int = 4
    rate: float | None = None
    batch: int = 4
    held_out: float = 1 / 16

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise ValueError(f"tune: epochs is {self.epochs}, batch {self.batch}; each must be at least 1")
        if not 0 <= self.held_out <= 0.5:
            raise ValueError(f"tune: held_out is {self.held_out!r}; it must be from 0 to 0.5")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Args:
    format: "e8p" or "trellis".
    bits: rate of every linear in a block; layers: exceptions, by name or shell pattern, 16 keeps a layer.
    lm_head, embed_tokens: their rates; None leaves them alone.
    seed: of the random signs and the order of tuning.
    damping: added to the Hessian's diagonal, relative to its mean; output_damping: to that of its second factor.
    fisher: random directions a calibration token along which the model's KL is differentiated for Hessians of KL
        (`quant/fisher.py`); 0: those of a layer's output. Routed experts always have those. fisher_tokens: share of the
        moments of inputs under tokens' gradients in the first factors, 0 to 1, the rest is plain; what earlier layers'
        error is corrected under is plain. fisher_outputs: whether there are second factors, of a linear's outputs;
        without them its rows are rounded apart.
    descent: passes of coordinate descent after LDLQ, of linears without a second factor.
    wide: E8P: choose among eight first stages rather than two; a GPU hardly notices, a CPU takes three times as long.
        Trellis: find what a tile's ends have in common among 128 weights rather than 32 (1.5 per cent less error at 2
        bits, a third more time).
    channel_scale: exponent of the input channels' RMS weight in in_scale; row_scale: the same for rows. 0 is off.
    rho: see `RHO`; only rates that differ from it.
    fit_scales: least-squares out_scale under the Hessian after rounding.
    inputs: what Hessians are gathered on. "reference": the unquantized model's activations; "block": those behind the
        quantized blocks so far; "group": also behind the groups of this block that are done (one more run a group).
    correct: strength of the correction of the target for the error of earlier layers, 0 to 1.
    tune: fine-tuning at the end, None for none.
    batch_tokens: calibration tokens that run at once.
    expert_prior: how many tokens' worth of the layer's shared inputs an expert's own Hessian is mixed with, for each of
        its inputs (`quant/experts.py`).
    """

    format: str = "e8p"
    bits: int = 4
    layers: Mapping[str, int] = field(default_factory=dict)
    lm_head: int | None = None
    embed_tokens: int | None = None
    seed: int = 0
    damping: float = 0.01
    output_damping: float = 0.3
    fisher: int = 0
    fisher_tokens: float = 1.0
    fisher_outputs: bool = False
    descent: int = 2
    wide: bool = False
    channel_scale: float = 0.5
    row_scale: float = 0.75
    rho: Mapping[int, float] = field(default_factory=dict)
    fit_scales: bool = True
    inputs: Literal["reference", "block", "group"] = "block"
    correct: float = 0.0
    tune: Tune | None = None
    batch_tokens: int = 8192
    expert_prior: float = 0.25

    def __post_init__(self) -> None:
        if self.format not in RATES:
            raise ValueError(f"format is {self.format!r}; allowed: {', '.join(RATES)}")
        rates = RATES[self.format]
        allowed = ", ".join(map(str, rates))
        for name in ("bits", "lm_head", "embed_tokens"):
            value = getattr(self, name)
            if value not in rates and not (value is None and name != "bits"):
                raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
        for pattern, rate in self.layers.items():
            if rate not in (*rates, KEEP):
                raise ValueError(f"layers has {rate!r} for {pattern!r}; allowed: {allowed}, or 16 to keep it")
        bounds = {
            "damping": (1e-8, 10),
            "output_damping": (1e-8, 10),
            "correct": (0, 1),
            "channel_scale": (0, 2),
            "row_scale": (0, 2),
        }
        bounds |= {"expert_prior": (0, 1000), "fisher_tokens": (0, 1)}
        for name, (low, high) in bounds.items():
            if not (math.isfinite(getattr(self, name)) and low <= getattr(self, name) <= high):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be from {low} to {high}")
        if not 0 <= self.fisher <= 100:
            raise ValueError(f"fisher is {self.fisher!r} directions; it must be from 0 to 100")
        if not 0 <= self.descent <= 100:
            raise ValueError(f"descent is {self.descent!r} passes; it must be from 0 to 100")
        if self.inputs not in ("reference", "block", "group"):
            raise ValueError(f"inputs is {self.inputs!r}; allowed: reference, block, group")
        if self.correct and self.inputs == "reference":
            raise ValueError("correct asks for the quantized model's inputs; set inputs to block or group")
        if self.fisher and self.inputs == "reference":
            raise ValueError("fisher weighs the quantized model's inputs; set inputs to block or group")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens is {self.batch_tokens}; it must be at least 1")

    def rho_of(self, bits: int) -> float:
        return self.rho.get(bits, (RHO if self.format == "e8p" else TRELLIS_RHO)[bits])

    def gaussian_rho_of(self, bits: int) -> float:
        return (GAUSSIAN_RHO if self.format == "e8p" else TRELLIS_GAUSSIAN_RHO)[bits]

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return dataclasses.asdict(self)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "Recipe":
        """`quick`: two CPU cores, one pass. `good`: a GPU, or patience; Hessians of the model's KL, by backward passes.
        `best`: scales are tuned as well."""
        presets: dict[str, dict[str, Any]] = {
            "quick": {"descent": 0, "inputs": "reference"},
            "good": {"wide": True, "inputs": "group", "correct": 0.5, "fisher": 2, "fisher_outputs": True},
        }
        presets["best"] = presets["good"] | {"tune": Tune()}
        if name not in presets:
            raise ValueError(f"there is no recipe {name!r}; recipes: {', '.join(presets)}")
        return cls(**(presets[name] | changes))
