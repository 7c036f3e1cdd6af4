"""What Triton has compiled and tuned so far: what the captured step is the first to need is compiled in the capture."""

import inspect
import weakref
from typing import Any

from torch import Tensor

from onegraph.check.report import Severity
from onegraph.check.rules.errors import NOT_PERMITTED
from onegraph.check.simulate import frames
from onegraph.check.simulate.device import plain_of
from onegraph.check.simulate.interpret import constexprs
from onegraph.check.simulate.machine import Machine

LOADS = "no error with CUDA 13's driver; older ones refuse to load a module while a stream is capturing"
"""Measured on an H200 with driver 580, torch 2.11 and Triton 3.6: captures and replays well."""

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")

Key = tuple[tuple[str, str], ...]


class Compiled:
    """Kernels by what they were compiled for, autotuners by the keys that they were tuned for."""

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[Any, list[Key]]] = {}  # by `id`, see `Kernels`; the kernel is kept for its `id`
        self.tuned: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def launched(
        self, world: Machine, kernel: Any, name: str, arguments: dict[str, Any], options: dict[str, Any],
        chain: frames.Chain,
    ) -> None:  # fmt: skip
        """Note a launch; a finding where the captured step is the first to want this code."""
        key = specialization(kernel, arguments, options)
        _, known = self.kernels.setdefault(id(kernel), (kernel, []))
        if key in known:
            return
        short = name.removeprefix("triton:")
        if world.phase == "step" and world.step == world.captured_step:
            text = f"Triton kernel {short} is compiled and loaded inside the capture: "
            if not known:
                text += "no earlier step launches it"
                world.see("CG307", text, LOADS, chain=chain, severity=Severity.WARNING)
            else:
                parts = _difference(known[-1], key)
                text += f"no earlier step launches it with {', '.join(f'{n} {new}' for n, _, new in parts)}"
                values = tuple(f"{n}: {old}, now {new}" for n, old, new in parts)
                world.see("CG307", text, LOADS, chain=chain, severity=Severity.WARNING, values=values)
        known.append(key)


def _difference(old: Key, new: Key) -> list[tuple[str, str, str]]:
    before = dict(old)
    return [(name, before.get(name, "(absent)"), value) for name, value in new if before.get(name) != value]


def specialization(kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> Key:
    """What Triton compiles for: constants by value, tensors by dtype and alignment, integers by width and whether they
    are 1 or divisible by 16, unless the kernel asks it not to."""
    constants = constexprs(kernel.fn)
    parameters = {p.name: p for p in getattr(kernel, "params", ())}
    key = [(name, _kind(name in constants, value, parameters.get(name))) for name, value in arguments.items()]
    key += [(name, repr(value)) for name, value in options.items() if name in _OPTIONS]
    return tuple(key)


def _kind(constant: bool, value: Any, parameter: Any) -> str:
    if type(value).__name__ == "constexpr":
        constant, value = True, value.value
    if constant or value is None:
        return f"= {getattr(value, '__name__', value)}"
    loose = getattr(parameter, "do_not_specialize", False)
    unaligned = loose or getattr(parameter, "do_not_specialize_on_alignment", False)
    if isinstance(value, Tensor):
        inner = plain_of(value)
        aligned = unaligned or inner.storage_offset() * inner.element_size() % 16 == 0
        return f"of {str(value.dtype).removeprefix('torch.')}" + ("" if aligned else ", not aligned to 16 bytes")
    if isinstance(value, tuple):
        return f"({', '.join(_kind(False, v, parameter) for v in value)})"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"of type {type(value).__name__}"
    width = "32 bits" if -(2**31) <= value < 2**31 else "64 bits"
    if loose:
        return f"of {width}"
    if value == 1:
        return "= 1"
    return f"of {width}" + (", divisible by 16" if value % 16 == 0 and not unaligned else ", not divisible by 16")


def tune(world: Machine, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Autotuner.run` without a GPU to time on: the first config that its pruning keeps stands for the fastest.

    The arguments are left as tuning leaves them (`reset_to_zero`), without the runs in between.
    """
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    config = tuner.configs[0]
    if len(tuner.configs) > 1:
        config = _tuned(world, tuner, kwargs)
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    out = tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    tuner.nargs = None
    return out


def _tuned(world: Machine, tuner: Any, kwargs: dict[str, Any]) -> Any:
    key = _tuning_key(tuner, kwargs)
    if key in tuner.cache:  # as the user filled it
        return tuner.cache[key]
    known = world.kernels.books.tuned.setdefault(tuner, {})
    if key in known:
        return known[key]
    config = tuner.prune_configs(kwargs)[0]
    twice = kwargs.keys() & config.kwargs.keys()
    if twice:
        raise ValueError(
            f"Conflicting meta-parameters: {', '.join(twice)}. Make sure that you don't re-define auto-tuned symbols."
        )
    if world.phase == "step" and world.step >= world.captured_step:
        _tuned_in_capture(world, tuner, key, list(known))
    known[key] = config
    full = {**tuner.nargs, **kwargs, **config.all_kwargs()}
    if "reset_only" in inspect.signature(tuner.pre_hook).parameters:
        tuner.pre_hook(full, reset_only=True)
    else:
        tuner.pre_hook(full)
    return config


def _tuning_key(tuner: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    given = {name: value for name, value in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
    names = getattr(tuner, "keys", None) or [tuner.arg_names[i] for i in getattr(tuner, "key_idx", ())]
    key = [given[name] for name in names if name in given]
    return (*key, *(str(value.dtype) for value in given.values() if hasattr(value, "dtype")))


def _tuned_in_capture(world: Machine, tuner: Any, key: tuple[Any, ...], known: list[tuple[Any, ...]]) -> None:
    name = tuner.base_fn.__name__
    why = "no earlier step launches it" if not known else "its key is not one that an earlier step had"
    values = (f"key: {known[-1]}, now {key}",) if known else ()
    text = f"Triton kernel {name} is tuned inside the capture: {why}; tuning waits for the device"
    if world.step > world.captured_step:
        text = f"Triton kernel {name} is tuned again in step {world.step}: a replay launches what was captured"
    world.see("CG307", text, NOT_PERMITTED, chain=world.chain(4), values=values)
