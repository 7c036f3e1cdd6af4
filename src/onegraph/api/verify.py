"""Whether a checkpoint is whole: its files, headers, shapes, dtypes, values and digests; and what is inside."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from onegraph.api import Progress
from onegraph.api.size import Size, size_of
from onegraph.engine.arguments import require_path
from onegraph.formats.checkpoint import ABOUT, SIDECARS, Checkpoint, absent
from onegraph.formats.digests import SUMS, known_digest, read_sums, sha256
from onegraph.formats.files import CheckpointError, member, parse_json, read_json
from onegraph.models.load import checkpoint_config
from onegraph.models.loader import Loader

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a block or an expert; w1 is a name
FORGET = 1 << 30  # bytes read between two times that their memory is given back


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that differ only in their numbers and are stored alike. `layers` has * for each number, `blocks` says
    which numbers the first one is ("0-29", "" where there is none); `bits` a weight as stored, scales counted."""

    layers: str
    blocks: str
    count: int
    format: str
    bits: float


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found.

    Attributes:
        problems: a line for each thing that is wrong; none: the checkpoint is whole as far as `unchecked` leaves it.
        unchecked: a line for each thing that this checkpoint does not allow to check.
        notes: a line for each thing that is right and unusual.
        digests: files whose digest is the one that it should be.
        tensors, size: what is inside; size is None where config.json and tensors do not fit.
        quantization: the quantization_config, None where the weights are not quantized.
        about: the content of onegraph.json: source, recipe, versions; None where there is none.
    """

    path: str
    problems: tuple[str, ...]
    unchecked: tuple[str, ...]
    digests: int
    tensors: int
    size: Size | None
    layers: tuple[LayerGroup, ...]
    quantization: dict[str, Any] | None
    about: dict[str, Any] | None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        size = None if self.size is None else self.size.as_dict()
        return {"ok": self.ok} | asdict(self) | {"size": size, "layers": [asdict(group) for group in self.layers]}


def verify(path: str | PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Reads a whole checkpoint (a directory or a .gguf file) and checks that it is complete and valid.

    Digests are of SHA256SUMS, which `quantize` writes, or of the names in huggingface_hub's cache. Tensors are checked
    on the CPU, one layer at a time: finite, and scales within what their format allows.

    Args:
        progress: called as progress(what, done, total) with the bytes read.

    Raises ValueError where there is no such directory or file; whatever is wrong inside is in `problems`.
    """
    require_path("path", path, "a directory, or a .gguf file")
    path = Path(path)
    if not path.is_dir() and not path.is_file():
        raise absent(path)
    work = _Work(path, progress or (lambda what, done, total: None))
    return work.run()


class _Work:
    def __init__(self, path: Path, progress: Progress) -> None:
        self.path, self.progress = path, progress
        self.problems: list[str] = []
        self.unchecked: list[str] = []
        self.notes: list[str] = []

    def run(self) -> Verification:
        about = size = None
        layers: tuple[LayerGroup, ...] = ()
        found: dict[str, Any] = {"tensors": 0, "quantization": None}
        weights: set[Path] = set()
        try:
            if self.path.is_dir():
                about = self._about()
            with Checkpoint.open(self.path) as checkpoint:
                weights = {checkpoint.info(name).file for name in checkpoint.names}
                quantization = checkpoint.config.get("quantization_config")
                found["quantization"] = quantization if isinstance(quantization, dict) else None
                found["tensors"] = len(checkpoint.names)
                loader = self._loader(checkpoint)
                self._values(checkpoint, loader)
                if loader is not None:
                    size, layers = size_of(checkpoint), tuple(groups_of(loader))
                for name in SIDECARS:
                    content = checkpoint.sidecar(name)
                    if content is not None and name.endswith(".json"):
                        parse_json(content, str(self.path / name))
        except ValueError as error:  # CheckpointError among them
            self._wrong(error)
        digests = self._digests(weights)
        return Verification(
            path=str(self.path), problems=tuple(self.problems), unchecked=tuple(self.unchecked), digests=digests,
            size=size, layers=layers, about=about, notes=tuple(self.notes), **found,
        )  # fmt: skip

    def _wrong(self, error: Exception) -> None:
        line = " ".join(str(error).split())
        if line not in self.problems:
            self.problems.append(line)

    # -------------------------------------------------------------------------------------------------------- digests

    def _sums(self) -> tuple[dict[Path, str], bool]:
        """The digests that SHA256SUMS gives, by file; and whether there is one."""
        if not self.path.is_dir():
            return {}, False
        try:
            sums = read_sums(self.path)
        except CheckpointError as error:
            self._wrong(error)
            return {}, True
        found = {}
        for name, digest in (sums or {}).items():
            try:
                file = member(self.path, name)
                if file is None:
                    raise CheckpointError(f"{self.path / name}: is missing, {SUMS} names it")
                found[file] = digest
            except CheckpointError as error:
                self._wrong(error)
        return found, sums is not None

    def _digests(self, weights: set[Path]) -> int:
        """Compares every file that has a digest; how many are as they should be."""
        sums, given = self._sums()
        without = sorted(file.name for file in weights - sums.keys() if known_digest(file) is None)
        if without and given and not self.problems:
            self.problems.append(f"{self.path / SUMS}: has no digest of {', '.join(without[:5])}")
        elif without and not given:
            self.unchecked.append(f"no digests ({SUMS}): flipped bits in weights cannot be found")
        known = {file: digest for file in weights if (digest := known_digest(file)) is not None}
        right = done = 0
        sizes = {file: file.stat().st_size for file in sorted({*sums, *known})}
        for file, size in sizes.items():
            self.progress("reading digests", done, sum(sizes.values()))
            try:
                right += self._compare(file, sums.get(file) or known[file])
            except CheckpointError as error:
                self._wrong(error)
            done += size
            self.progress("reading digests", done, sum(sizes.values()))
        return right

    def _compare(self, file: Path, digest: str) -> bool:
        if (got := sha256(file)) != digest:
            self.problems.append(
                f"{file}: its SHA-256 is {got[:16]}..., it should be {digest[:16]}...; the file is not as it was "
                "written, fetch or make it again"
            )
        return got == digest

    def _about(self) -> dict[str, Any] | None:
        try:
            file = member(self.path, ABOUT)
            if file is not None:
                return read_json(file)
            self.unchecked.append(f"no {ABOUT}: nothing says what it was made from")
        except CheckpointError as error:
            self._wrong(error)
        return None

    # ------------------------------------------------------------------------------------------------ shapes and values

    def _loader(self, checkpoint: Checkpoint) -> Loader | None:
        """The checkpoint as layers, None where it does not fit its config or is of another family."""
        try:
            config = checkpoint_config(checkpoint)
        except ValueError as error:
            self.unchecked.append(f"shapes and scales, since onegraph cannot run this model: {error}")
            return None
        try:
            loader = Loader(checkpoint, config, torch.float32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loader.check()
            if loader.own_head:
                self.notes.append(loader.about_head)
            return loader
        except ValueError as error:
            self._wrong(error)
            return None

    def _values(self, checkpoint: Checkpoint, loader: Loader | None) -> None:
        """Reads every tensor, layer by layer where it is known which belong together."""
        cpu, total = torch.device("cpu"), checkpoint.nbytes
        left, done, kept = set(checkpoint.names), 0, 0

        def count(names: set[str]) -> None:
            nonlocal done, kept
            left.difference_update(names)
            size = sum(checkpoint.info(name).nbytes for name in names)
            done, kept = done + size, kept + size
            if kept >= FORGET:
                checkpoint.forget()
                kept = 0
            self.progress("checking values", done, total)

        for layer in loader.layers() if loader is not None else ():
            assert loader is not None
            names = {loader.stored[name] for name in loader.format_of(layer).names(loader, layer).values()}
            try:
                loader.weight(layer, cpu)
            except ValueError as error:
                self._wrong(error)
            count(names)
        for name, stack in loader.parts.stacks.items() if loader is not None else ():
            assert loader is not None
            try:
                for _ in loader.matrices(name, cpu, stack.transposed):
                    pass
            except ValueError as error:
                self._wrong(error)
            count({loader.stored[each] for each in loader.stack(name)[1].values()})
        for name in sorted(left):
            try:
                checkpoint.unrounded(name)
            except CheckpointError as error:
                self._wrong(error)
            count({name})


# ------------------------------------------------------------------------------------------------------- what is inside


def groups_of(loader: Loader) -> Iterator[LayerGroup]:
    """The layers of a checkpoint that fits its config, in the order of the model."""
    found: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for layer, (n, k, _) in loader.layers().items():
        format = loader.format_of(layer)
        stored = sum(loader.info(name).nbytes for name in format.names(loader, layer).values())
        kind = _dense(loader, f"{layer}.weight") if not format.coded else str(format)
        found.setdefault((NUMBER.sub("*", layer), kind), []).append((layer, 8 * stored, n * k))
    for name, stack in loader.parts.stacks.items():
        format, names = loader.stack(name)
        stored = sum(loader.info(each).nbytes for each in names.values())
        kind = str(format) if format.coded else _dense(loader, name)
        entry = name, 8 * stored, stack.experts * stack.n * stack.k
        found.setdefault((NUMBER.sub("*", name), kind), []).append(entry)
    for (pattern, kind), group in found.items():
        numbers = [NUMBER.search(layer) for layer, _, _ in group]
        yield LayerGroup(
            layers=pattern,
            blocks=_ranges(sorted({int(number[0]) for number in numbers if number is not None})),
            count=len(group),
            format=kind,
            bits=round(sum(bits for _, bits, _ in group) / sum(count for _, _, count in group), 3),
        )


def _dense(loader: Loader, name: str) -> str:
    """A dense layer by its dtype; the block formats of a GGUF file count as the dtype that they are decoded to."""
    info = loader.info(name)
    dtype = str(info.dtype).removeprefix("torch.")
    return dtype if info.nbytes == math.prod(info.shape) * info.dtype.itemsize else f"GGUF blocks, as {dtype}"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
