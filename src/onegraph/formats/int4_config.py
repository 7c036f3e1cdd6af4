"""The `quantization_config` of INT4 checkpoints, as AWQ, GPTQ and compressed-tensors write it. The weights themselves:
`formats/int4.py`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.int4 import ALL, AWQ, COLUMNS, GPTQ, PACKED, int4, is_int4, layout_of
from onegraph.formats.weight import FLOATS, File, WeightFormat


@dataclass(frozen=True)
class INT4Config:
    """What a quantization_config says that tensors do not. Which layers are INT4, and in which layout, they tell.

    Args:
        method: "awq", "gptq" or "compressed-tensors".
        groups: the sizes of groups that it names, -1 for a whole row.
        symmetric: whether all layers are; None: some are.
        desc_act: whether g_idx may be out of order (GPTQ).
        less_one: whether words hold zero - 1 (GPTQ).
        ignore: names or patterns that were kept, as the file says.
    """

    method: str
    groups: tuple[int, ...]
    symmetric: bool | None = False
    desc_act: bool = False
    less_one: bool = False
    ignore: tuple[str, ...] = ()

    def format_of(self, layer: str, file: File) -> WeightFormat:
        """The format of a layer by its tensors. Raises CheckpointError that names the tensor that fits none."""
        if not is_int4(file, layer):
            return DENSE
        layout = layout_of(file, layer)
        tool = {"awq": AWQ, "gptq": GPTQ, "compressed-tensors": PACKED}
        if layout is not tool[self.method]:
            got = next(name for name, known in tool.items() if known is layout)
            raise CheckpointError(
                f"{quote(layer)} has the tensors of {got}, and config.json says {self.method}; the two disagree"
            )
        names = {key: f"{layer}.{suffix}" for key, suffix in layout.suffixes.items()}
        if names["scale"] not in file:
            raise CheckpointError(f"{quote(names['scale'])} is missing beside {quote(names['codes'])}")
        words, scale = file.info(names["codes"]), file.info(names["scale"])
        if scale.dtype not in FLOATS or len(words.shape) != 2 or len(scale.shape) != 2:
            raise CheckpointError(
                f"{quote(names['codes'])} has shape {list(words.shape)} and {quote(names['scale'])} is {scale.dtype} "
                f"{list(scale.shape)}; both have two dimensions, and scales are floats"
            )
        k = words.shape[0 if layout.turned else 1] * layout.codes[1]
        groups = scale.shape[0 if layout.turned else 1]
        columns = k // groups if groups and k % groups == 0 else 0
        if (
            not columns
            or columns % COLUMNS
            or columns not in [k if size == -1 else min(size, k) for size in self.groups]
        ):
            raise CheckpointError(
                f"{quote(names['scale'])} has {groups} groups for {k} inputs; config.json says groups of "
                f"{' or '.join(map(str, self.groups))} (-1: all), and a group is a multiple of {COLUMNS}"
            )
        return int4(
            ALL if groups == 1 else columns,
            scale.dtype,
            order=groups > 1 and (names["order"] in file if layout is PACKED else self.desc_act),
            less_one=self.less_one,
            symmetric=names["zero"] not in file if self.symmetric is None else self.symmetric,
        )

    def check_layers(self, layers: Collection[str]) -> None:
        """`ignore` may name patterns and modules that are no linears: nothing to hold against the layers."""

    def stacked(self, layer: str) -> None:
        """As the family publishes them."""

    def ignored(self, name: str) -> bool:
        """Scales of an FP8 KV cache, which ours has no use for; the zeros that older versions of AutoGPTQ write as the
        bias of linears that have none (the loader looks whether they are)."""
        return name.endswith((".k_scale", ".v_scale")) or (self.method == "gptq" and name.endswith("_proj.bias"))

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> "INT4Config":
        return self

    def to_dict(self) -> dict[str, Any]:
        """As the tool that it is of writes it."""
        size = self.groups[0]
        if self.method == "awq":
            kept = {"modules_to_not_convert": list(self.ignore)}
            return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"} | kept
        if self.method == "gptq":
            form = {"checkpoint_format": "gptq" if self.less_one else "gptq_v2"}
            other = {"dynamic": {f"group {s}": {"group_size": s} for s in self.groups[1:]}} if self.groups[1:] else {}
            told = {"desc_act": self.desc_act, "sym": bool(self.symmetric)}
            return {"quant_method": "gptq", "bits": 4, "group_size": size} | told | form | other
        kinds = (True, False) if self.symmetric is None else (self.symmetric,)
        groups: dict[str, Any] = {}
        for columns, symmetric in product(self.groups, kinds):
            weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False}
            weights |= {"strategy": "channel"} if columns == -1 else {"strategy": "group", "group_size": columns}
            groups[f"group_{len(groups)}"] = {"targets": ["Linear"], "weights": weights}
        packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        return packed | {"config_groups": groups, "ignore": list(self.ignore)}

    @staticmethod
    def matches(data: Mapping[str, Any]) -> bool:
        """Whether a quantization_config is of a method that this module reads, or refuses with a reason."""
        method = data.get("quant_method")
        return method in ("awq", "gptq") or (method == "compressed-tensors" and data.get("format") == "pack-quantized")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "INT4Config":
        """Raises ValueError for other numbers of bits and other layouts, each in one line with the reason."""
        return {"awq": _awq, "gptq": _gptq, "compressed-tensors": _packed}[data["quant_method"]](data)


def _refuse(key: str, value: object, why: str) -> ValueError:
    return ValueError(f"quantization_config.{key} is {quote(value)}; {why}")


def _size(data: Mapping[str, Any], key: str, where: str = "") -> int:
    """A size of groups: a multiple of 32, or -1; 128 where none is given, as in the tools."""
    size = data.get(key, 128)
    if type(size) is not int or (size != -1 and (size < COLUMNS or size % COLUMNS)):
        raise _refuse(where + key, size, f"a group is a multiple of {COLUMNS} inputs, or -1: all of them")
    return size


def _flag(data: Mapping[str, Any], key: str, default: bool) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise _refuse(key, value, "it must be true or false")
    return value


def _names(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    kept = data.get(key) or ()
    if not isinstance(kept, list | tuple) or not all(isinstance(name, str) for name in kept):
        raise ValueError(f"quantization_config.{key} is no list of module names")
    return tuple(kept)


def _awq(data: Mapping[str, Any]) -> INT4Config:
    key = "bits" if "bits" in data else "w_bit"
    if data.get(key, 4) != 4:
        raise _refuse(key, data[key], "AWQ is read with 4 bits, as it is published")
    if (version := str(data.get("version", "gemm")).lower()) != "gemm":
        raise _refuse(
            "version", version, "AWQ is read in the layout 'gemm'; 'gemv', 'gemv_fast', 'marlin' and others pack their "
            "words in orders of their own, so convert the model to 'gemm'"
        )  # fmt: skip
    if not _flag(data, "zero_point", True):
        raise _refuse("zero_point", False, "AWQ's gemm layout has zeros; a form of it without them is not known")
    size = _size(data, "group_size" if "group_size" in data else "q_group_size")
    return INT4Config("awq", (size,), ignore=_names(data, "modules_to_not_convert"))


def _gptq(data: Mapping[str, Any]) -> INT4Config:
    overrides = data.get("dynamic") or {}
    if not isinstance(overrides, Mapping) or not all(isinstance(value, Mapping) for value in overrides.values()):
        raise ValueError("quantization_config.dynamic is no object of overrides")
    for where, told in (("", data), *((f"dynamic[{quote(name)}].", value) for name, value in overrides.items())):
        if (bits := told.get("bits", 4)) != 4:
            raise _refuse(
                f"{where}bits", bits, "GPTQ is read with 4 bits; codes of 2, 3 and 8 bits are other words, which no "
                "kernel here takes, so take a 4-bit version of the model"
            )  # fmt: skip
    form = data.get("checkpoint_format", data.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2") or data.get("is_marlin_format"):
        raise _refuse(
            "checkpoint_format", form, "GPTQ is read as 'gptq' and 'gptq_v2'; 'marlin' and others have their words in "
            "the order of a kernel, so take the model in one of the two"
        )  # fmt: skip
    if (pack := data.get("pack_dtype", "int32")) != "int32":
        raise _refuse("pack_dtype", pack, "words are of 32 bits")
    sizes = [_size(data, "group_size")]
    sizes += [_size(value, "group_size", "dynamic.") for value in overrides.values() if "group_size" in value]
    return INT4Config(
        "gptq",
        tuple(dict.fromkeys(sizes)),
        symmetric=_flag(data, "sym", True) and not any(value.get("sym") is False for value in overrides.values()),
        # with static_groups the groups were made before the order, and g_idx is in order
        desc_act=_flag(data, "desc_act", False) and not _flag(data, "static_groups", False),
        less_one=form == "gptq",
    )


def _packed(data: Mapping[str, Any]) -> INT4Config:
    groups = data.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups.values())
    ):
        raise ValueError("quantization_config.config_groups is no object of groups of layers")
    sizes, symmetric = list[int](), set[bool]()
    for name, group in groups.items():
        where, weights = f"config_groups.{name}.", group.get("weights")
        if not isinstance(weights, Mapping):
            raise ValueError(f"quantization_config.{where}weights is no object")
        if (bits := weights.get("num_bits")) != 4 or weights.get("type", "int") != "int":
            raise _refuse(
                f"{where}weights.num_bits", bits, "pack-quantized is read with 4-bit integers; 8-bit ones are words of "
                "four codes, which no kernel here takes, so take a 4-bit or an FP8 version of the model"
            )  # fmt: skip
        if group.get("input_activations") is not None:
            raise _refuse(f"{where}input_activations", "given", "INT4 is read with activations as they are (W4A16)")
        if (strategy := weights.get("strategy", "group")) not in ("group", "channel"):
            raise _refuse(f"{where}weights.strategy", strategy, "scales are read for groups and for channels")
        sizes.append(-1 if strategy == "channel" else _size(weights, "group_size", f"{where}weights."))
        symmetric.add(_flag(weights, "symmetric", True))
    for key, plain in (("sparsity_config", "dense"), ("transform_config", None)):
        told = data.get(key)
        if told and not (isinstance(told, Mapping) and told.get("format") == plain is not None):
            raise _refuse(key, "given", "such weights are not what their codes stand for, and are not read")
    kind = symmetric.pop() if len(symmetric) == 1 else None
    return INT4Config("compressed-tensors", tuple(dict.fromkeys(sizes)), kind, ignore=_names(data, "ignore"))
