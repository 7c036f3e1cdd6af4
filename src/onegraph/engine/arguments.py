"""What callers give, held to what is allowed before anything is read or computed: one line that says both."""

import math
import operator
import os


class ArgumentError(ValueError):
    """An argument that is not allowed; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


def require(name: str, value: object, fine: bool, allowed: str) -> None:
    """Raises ArgumentError for an argument that is not `fine`. allowed: how the line ends behind "allowed is"."""
    if not fine:
        shown = " ".join(repr(value).split())
        shown = shown if len(shown) <= 100 else f"{shown[:96]}..."
        raise ArgumentError(name, f"{name}: got {shown}; allowed is {allowed}")


def require_path(name: str, value: object, allowed: str) -> None:
    """A path, or a text that is not blank: "" would be the current directory."""
    require(name, value, isinstance(value, str | os.PathLike) and str(value).strip() != "", allowed)


def is_index(value: object) -> bool:
    """Whether it is a whole number, NumPy's among them; True and False are none."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]  # whether it is one is asked
    except TypeError:
        return False
    return True


def is_number(value: object) -> bool:
    """Whether it is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_count(name: str, value: object, *, none: str | None = None) -> None:
    """A whole number from 1 on; or None, where `none` says what that stands for."""
    fine = is_index(value) and value >= 1  # type: ignore[operator]
    allowed = "a count of 1 and more"
    if none is not None:
        fine, allowed = fine or value is None, f"{allowed}, or None for {none}"
    require(name, value, fine, allowed)


def require_flag(name: str, value: object, *, none: str | None = None) -> None:
    """True or False; or None, where `none` says what that stands for."""
    fine, allowed = isinstance(value, bool), "True or False"
    if none is not None:
        fine, allowed = fine or value is None, f"True, False, or None for {none}"
    require(name, value, fine, allowed)


def require_callable(name: str, value: object) -> None:
    """What is called back, or None."""
    require(name, value, value is None or callable(value), "what can be called, or None")
