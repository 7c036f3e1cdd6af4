"""CUDA C++ on the user's machine: compiled by NVRTC (no nvcc), cached as a cubin, launched through the driver.

NVRTC and the driver come through `cuda.bindings`, which CUDA builds of torch bring along. A cubin is cached by the hash
of source, options, architecture and NVRTC version, so that only the first process compiles (a second or two a
variant, several at once: `ops/ahead.py`); of several that ask at once the others wait. Nothing here may run for
the first time inside a capture: loading a module is not allowed there.
"""

import ctypes
import fcntl
import hashlib
import os
import struct
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch

from onegraph.ops import family
from onegraph.ops.cuda.arguments import Arguments as Arguments
from onegraph.ops.family import Family


class BuildError(RuntimeError):
    """The kernel cannot be had on this machine: no NVRTC, an old GPU, or a compiler that refuses the source."""


def cache_dir() -> Path:
    """Where cubins are kept: $XDG_CACHE_HOME/onegraph/cuda or ~/.cache/onegraph/cuda."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onegraph" / "cuda"


def bindings() -> tuple[Any, Any]:
    """The driver's and NVRTC's. Raises BuildError where they are not installed."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise BuildError("the package cuda-bindings is missing: pip install cuda-bindings") from error
    return driver, nvrtc


def check(result: tuple[Any, ...]) -> Any:
    """The value of a `cuda.bindings` call, or RuntimeError with the name of its error code."""
    code, *values = result
    if int(code):
        raise RuntimeError(f"CUDA call failed: {code!r}")
    return values[0] if len(values) == 1 else values


def architecture(capability: tuple[int, int]) -> str:
    """What NVRTC calls the code of this compute capability alone."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability[0] >= 9 else "")


@dataclass(frozen=True)
class Compilation:
    """What NVRTC makes a cubin of, and the file that caches it, which ends with the digest of the rest."""

    name: str
    text: bytes
    options: tuple[str, ...]
    headers: Mapping[str, bytes]
    file: Path

    @classmethod
    def of(
        cls, source: Path, defines: Mapping[str, int], capability: tuple[int, int], checks: str = "", arch: str = ""
    ) -> "Compilation":
        """Arguments as those of `compile_cubin`."""
        _, nvrtc = bindings()
        arch = arch or architecture(capability)
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space"]
        options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
        text = source.read_bytes() + checks.encode()
        headers = {path.name: path.read_bytes() for path in sorted(source.parent.glob("*.cuh"))}
        try:
            version = check(nvrtc.nvrtcVersion())
        except (
            Exception
        ) as error:  # the library behind the binding is loaded here, and each version fails in its own way
            raise BuildError(f"NVRTC cannot be loaded: {error}") from error
        key = hashlib.sha256(
            "\0".join([*options, repr(version)]).encode() + b"\0".join([text, *headers.values()])
        ).hexdigest()[:32]
        suffix = "ptx" if arch.startswith("compute") else "cubin"
        return cls(source.name, text, tuple(options), headers, cache_dir() / f"{source.stem}-{key}.{suffix}")

    def cached(self) -> bytes | None:
        """None where the file is missing, or is not as it was written."""
        try:
            data = self.file.read_bytes()
        except OSError:
            return None
        made, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        return made if hashlib.sha256(made).digest() == digest else None

    def compiled(self) -> bytes:
        """From the cache, or from NVRTC. Raises BuildError where it refuses."""
        if (found := self.cached()) is not None:
            return found
        number = int(self.file.stem[-32:-24], 16)
        with _alone(self.file.parent, number):  # threads, ranks and test workers need the same variant at once
            if (found := self.cached()) is not None:
                return found
            nvrtc, options = bindings()[1], [option.encode() for option in self.options]
            made, _ = _compile(nvrtc, self.text, self.name, options, self.headers)
            self._keep(made + hashlib.sha256(made).digest())
        return made

    def _keep(self, data: bytes) -> None:
        """Whole or not at all; a home that is read-only or full costs the compilation each time, nothing else."""
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.file.parent, delete=False) as file:
                try:
                    file.write(data)
                    file.flush()
                    os.replace(file.name, self.file)  # where locks are none, two processes write the same bytes
                except OSError:
                    os.unlink(file.name)


DIGEST_BYTES = hashlib.sha256().digest_size


def compile_cubin(
    source: Path, defines: Mapping[str, int], capability: tuple[int, int], checks: str = "", arch: str = ""
) -> bytes:
    """The cubin of `source` for compute capability `capability`, from the cache or from NVRTC.

    `source` may include the .cuh files beside it. `checks`: C++ that must compile behind it. `arch`: another one than
    what is of this capability alone; of a virtual one ("compute_80") it is PTX, for the driver to compile.
    Raises BuildError where there is no NVRTC or it refuses; its log is in the message.
    """
    return Compilation.of(source, defines, capability, checks, arch).compiled()


@contextmanager
def _alone(folder: Path, number: int) -> Iterator[None]:
    """Other threads and processes wait here for this number until the context ends; where files cannot be locked, they
    do not."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "lock").open("ab"))
            # A byte of the file for each number, locked by the open file: a process's own lock holds no thread of its
            # own up, and is lost with the first of its files that is closed. Closing this one unlocks.
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
            fcntl.fcntl(file, fcntl.F_OFD_SETLKW, lock)
        except OSError:
            pass
        yield


def _compile(
    nvrtc: Any, text: bytes, name: str, options: list[bytes], headers: Mapping[str, bytes]
) -> tuple[bytes, str]:
    """What is made of it, and the compiler's log."""
    names = [header.encode() for header in headers]
    program = check(nvrtc.nvrtcCreateProgram(text, name.encode(), len(names), list(headers.values()), names))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        told = log.decode(errors="replace").strip("\0 \n")
        if int(code):
            raise BuildError(f"NVRTC refused {name}: {told}")
        kind = "PTX" if b"=compute_" in options[0] else "CUBIN"
        made = bytearray(check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
        check(getattr(nvrtc, f"nvrtcGet{kind}")(program, made))
        return bytes(made), told
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))


@dataclass(frozen=True)
class Kernel:
    """A function of a loaded module. `overlaps`: it waits for the launch before it by itself, and may begin earlier."""

    function: Any
    device: int
    overlaps: bool = True

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        """Launches, with programmatic dependent launch if it `overlaps`. `arguments`: the bytes of the kernel's one
        parameter."""
        driver = bindings()[0]
        config = _config(grid, threads, shared, cluster, stream, self.overlaps)
        pointer = ctypes.c_char_p(arguments)  # the launch copies the bytes before it returns
        check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointer), 0))


def clusters(kernel: Kernel, threads: int, shared: int, size: int) -> int:
    """How many clusters of `size` blocks the kernel's GPU holds at a time; 0 where it holds none so large."""
    config = _config((size, 1, 1), threads, shared, size, 0, True)
    code, value = bindings()[0].cuOccupancyMaxActiveClusters(kernel.function, config)
    return 0 if int(code) else int(value)


@lru_cache(maxsize=4096)
def _config(grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, overlaps: bool) -> Any:
    driver = bindings()[0]
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = stream
    attributes = []
    if overlaps:
        follow = driver.CUlaunchAttribute()
        follow.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        follow.value.programmaticStreamSerializationAllowed = 1
        attributes.append(follow)
    if cluster > 1:
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
        attributes.append(together)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


HOPPER = ((9, 0),)  # wgmma
CLUSTERS = ((9, 0), (10, 0), (10, 3))  # clusters of 16 blocks, 227 KB of shared memory a block
EVERY = (*CLUSTERS, (12, 0), (12, 1))
PORTABLE = ((8, 0), (8, 6), (8, 9), *EVERY)  # no clusters, 99 KB of shared memory a block
PORTABLE_SHARED, PORTABLE_SM = 99 << 10, 100 << 10  # of a block, of an SM
VIRTUAL = "compute_80"  # what portable kernels are compiled for where they stand in for a newer card's own


@dataclass(frozen=True)
class Form:
    """What GPUs of a compute capability run of a source.

    Attributes:
        portable: the form that uses nothing that 8.0 lacks: PORTABLE and START are set when compiled. Else Hopper's.
        arch: what it is compiled for: a card's own code, or PTX of `VIRTUAL` where it stands in for a newer card's own.
        defines: that the form adds to those of a variant.
        functions: names of its kernels.
        overlaps: they wait for the launch before them by themselves, and may begin earlier.
    """

    portable: bool
    arch: str
    defines: Mapping[str, int]
    functions: tuple[str, ...]
    overlaps: bool


class Ahead(Protocol):
    """What compiles in threads: `ops/ahead.py`."""

    @property
    def is_dry(self) -> bool:
        """Whether what is launched is to be compiled, and not to run."""

    def want(self, source: "Source", defines: Mapping[str, int], device: int) -> None:
        """Begins to compile a variant for a GPU."""

    def cubin(self, source: "Source", defines: Mapping[str, int], device: int) -> bytes:
        """`Source.cubin`, waited for."""


AHEAD: ContextVar[Ahead | None] = ContextVar("onegraph_ahead", default=None)


class Source:
    """A file of kernels, `name`.cu beside this one: what it defines, what its kernels are given, which GPUs it is for.

    Attributes:
        ops: names of the ops that run it.
        functions: names of its kernels, which share one parameter, `arguments`; None of kernels without one. Some
            variants lack some of them.
        capabilities: compute capabilities that it is for; CI compiles the variant that `example` defines for those that
            differ.
        families: that it belongs to: "portable" what every one of `PORTABLE` runs, "hopper" what Hopper runs best; none
            of what is no kernel of an op. Of both: which form of it a GPU runs `form` tells.
        own: of a source of both, which compute capabilities run Hopper's form: those of the source of its ops that few
            tokens run.
        clustered: those of `functions` that the portable form lacks, since they run in clusters.
        shared: bytes of shared memory that a block takes of the launch whatever its plan; 0 where plans fit any card.
        sole: nothing else computes its ops on a GPU (`registry.Op.sole`): it runs whichever family is forced.
        otherwise: what happens where it cannot be built, for the warning.
    """

    every: ClassVar[list["Source"]] = []

    def __init__(
        self,
        name: str,
        *,
        functions: tuple[str, ...],
        ops: tuple[str, ...] = (),
        arguments: Arguments | None = None,
        capabilities: tuple[tuple[int, int], ...],
        example: Mapping[str, int] = MappingProxyType({}),
        families: tuple[Family, ...] = ("hopper",),
        own: tuple[tuple[int, int], ...] = EVERY,
        clustered: tuple[str, ...] = (),
        shared: int = 0,
        sole: bool = False,
        otherwise: str = "another kernel runs",
    ) -> None:
        self.path = Path(__file__).with_name(f"{name}.cu")
        self.functions, self.arguments, self.capabilities, self.example = functions, arguments, capabilities, example
        self.ops, self.families, self.own, self.clustered, self.shared = ops, families, own, clustered, shared
        self.sole, self.otherwise = sole, otherwise
        self._refused: set[int] = set()  # GPUs that it could not be built for
        Source.every.append(self)

    def form(self, capability: tuple[int, int]) -> Form:
        """The form that a GPU of this compute capability runs, where it is `_permitted`."""
        newer, forced = capability >= (9, 0), family.FORCED == "portable"
        own = "hopper" in self.families and capability in self.own
        if "portable" not in self.families or (own and not forced):
            return Form(False, architecture(capability), {}, self.functions, newer)
        start = 1024 if newer else 0  # of a block's shared memory, which the source cannot need
        functions = tuple(name for name in self.functions if name not in self.clustered)
        arch = VIRTUAL if forced and newer else "sm_{}{}".format(*capability)
        return Form(True, arch, {"START": start, "PORTABLE": 1}, functions, newer and not forced)

    @cache  # noqa: B019 - sources live as long as the process
    def is_portable(self, device: int) -> bool:
        """Whether GPU number `device` runs the portable form."""
        return self.form(torch.cuda.get_device_capability(device)).portable

    def _permitted(self, capability: tuple[int, int]) -> bool:
        """Whether `ONEGRAPH_KERNELS` lets a GPU of this compute capability run it."""
        if self.sole or not self.families:
            return True
        return family.allowed("portable" if self.form(capability).portable else "hopper")

    def unavailable_reason(self, gpu: int | tuple[int, int]) -> str:
        """Why GPU number `gpu` does not run it, as far as that is known without building it; empty where it does.

        Of a compute capability in place of a number: why such GPUs do not, whatever is installed.
        """
        capability = gpu if isinstance(gpu, tuple) else torch.cuda.get_device_capability(gpu)
        if not self._permitted(capability):
            return f"{family.VARIABLE} is {family.FORCED}"
        if capability[0] not in {major for major, _ in self.capabilities}:
            known = ", ".join(f"{major}.{minor}" for major, minor in self.capabilities)
            got = "{}.{}".format(*capability)
            return f"it is written for compute capability {known}; this GPU has {got}"
        if isinstance(gpu, int):
            try:
                device(gpu)
            except BuildError as error:
                return str(error)
        return ""

    def compilation(self, defines: Mapping[str, int], capability: tuple[int, int], checks: str = "") -> Compilation:
        """Of a variant. BuildError for a GPU that the source is not for, and where there is no NVRTC."""
        if why := self.unavailable_reason(capability):
            raise BuildError(f"{self.path.name} is not for this GPU: {why}")
        form = self.form(capability)
        return Compilation.of(self.path, {**defines, **form.defines}, capability, checks, form.arch)

    def cubin(self, defines: Mapping[str, int], capability: tuple[int, int], checks: str = "") -> bytes:
        """See `compile_cubin`. BuildError as `compilation`."""
        return self.compilation(defines, capability, checks).compiled()

    def is_built(self, device: int) -> bool:
        """Whether GPU number `device` can have its kernels. Not for the first time inside a capture.

        Where it cannot, warns once of what happens `otherwise`: but where that was asked for, or the GPU is one that
        they are not written for and another source of the same ops is. In a dry run (`ops/ahead.py`) it is
        expected to.
        """
        ahead = AHEAD.get()
        if ahead is not None and ahead.is_dry and device not in self._refused and not self.unavailable_reason(device):
            ahead.want(self, self.example, device)
            return True
        return self._is_built(device)

    @cache  # noqa: B019
    def _is_built(self, device: int) -> bool:
        capability = torch.cuda.get_device_capability(device)
        others = (each for each in Source.every if each is not self and set(each.ops) & set(self.ops))
        if not self._permitted(capability) or (
            self.unavailable_reason(capability) and any(not each.unavailable_reason(capability) for each in others)
        ):
            return False
        try:
            load(self, self.example, device)
        except BuildError as error:
            message = f"{self.path.name} cannot be built for GPU {device}, {self.otherwise}: {error}"
            warnings.warn(message, stacklevel=2)
            self._refused.add(device)
            return False
        return True


def load(source: Source, defines: Mapping[str, int], device: int) -> dict[str, Kernel]:
    """The kernels of a variant by name, whose blocks may take all shared memory, `source.shared` bytes at least, and
    whose clusters may be of 16.

    Raises BuildError where they cannot be had, RuntimeError inside a capture.
    """
    _refuse_capture(f"{source.path.name} {dict(defines)} would be compiled")
    driver, _ = bindings()
    capability = torch.cuda.get_device_capability(device)
    ahead, form = AHEAD.get(), source.form(capability)
    cubin = source.cubin(defines, capability) if ahead is None else ahead.cubin(source, defines, device)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        optin = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        most = check(driver.cuDeviceGetAttribute(optin, check(driver.cuCtxGetDevice())))
        if most < source.shared:
            raise BuildError(
                f"a block has {most} bytes of shared memory on this GPU; {source.path.name} takes {source.shared}"
            )
        try:
            module = check(driver.cuModuleLoadData(cubin))
        except RuntimeError as error:  # of PTX, where the driver is older than NVRTC
            raise BuildError(f"the driver does not take what NVRTC made of {source.path.name}: {error}") from error
        kernels = {}
        for name in form.functions:
            code, function = driver.cuModuleGetFunction(module, name.encode())
            if code == driver.CUresult.CUDA_ERROR_NOT_FOUND:  # this variant lacks it
                continue
            check((code,))
            about = driver.CUfunction_attribute
            static = check(driver.cuFuncGetAttribute(about.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
            limit = about.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, limit, most - static))
            if capability >= (9, 0):
                check(driver.cuFuncSetAttribute(function, about.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
            kernels[name] = Kernel(function, device, form.overlaps)
    return kernels


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} inside a CUDA-graph capture; run the step once before")


@dataclass(frozen=True, eq=False)
class Device:
    """What kernels are planned for, as the driver tells it.

    Attributes:
        sms: streaming multiprocessors.
        shared: bytes of shared memory that a block can take; sm_shared: that an SM has, `RESERVED` a block.
        clusters: how many clusters of 1, 2, .. 16 blocks it holds at a time where each block takes an SM; 0: none.
    """

    sms: int
    shared: int
    sm_shared: int
    clusters: tuple[int, ...]

    def at_once(self, size: int, per_sm: int = 1) -> int:
        """Clusters of `size` blocks that run at once, `per_sm` blocks an SM, where an SM is lost to none of them.

        A cluster lies in one GPC, and one of 16 blocks takes it whole, so there are as many GPCs as those; the SMs that
        a GPC has beyond the others' are left to what runs beside.
        """
        gpcs = self.clusters[-1]
        return gpcs * (self.sms // gpcs * per_sm // size) if gpcs else self.clusters[size - 1] * per_sm


RESERVED = 1024  # bytes of an SM's shared memory that the driver takes of each block


OCCUPANCY = Source("occupancy", functions=("occupancy",), capabilities=PORTABLE, families=())


@cache
def device(index: int) -> Device:
    """The GPU of this number. Not for the first time inside a capture. BuildError where nothing can be built for it."""
    probe = load(OCCUPANCY, {}, index)["occupancy"]
    driver, about = bindings()[0], bindings()[0].CUdevice_attribute
    sms, shared, sm_shared = (
        check(driver.cuDeviceGetAttribute(getattr(about, f"CU_DEVICE_ATTRIBUTE_{name}"), index))
        for name in (
            "MULTIPROCESSOR_COUNT", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
        )
    )  # fmt: skip
    if family.FORCED == "portable":  # as cards have it that its kernels are for
        shared, sm_shared = min(shared, PORTABLE_SHARED), min(sm_shared, PORTABLE_SM)
    if torch.cuda.get_device_capability(index) < (9, 0) or family.FORCED == "portable":
        return Device(sms, shared, sm_shared, (sms,) + (0,) * 15)
    return Device(sms, shared, sm_shared, (sms, *(clusters(probe, 32, shared, size) for size in range(2, 17))))


def capture_id(stream: int) -> int:
    """What tells the capture of a stream, which is being captured, from all others of the process."""
    _, number, *_ = check(bindings()[0].cuStreamGetCaptureInfo(stream))
    return int(number)


def resident(data: torch.Tensor, device: int) -> int:
    """Address of a copy of `data`, a CPU tensor, on `device`, which stays there for as long as the process lives and
    belongs to no memory pool of torch's (one that vLLM puts to sleep would be emptied).

    RuntimeError inside a capture.
    """
    _refuse_capture("what kernels keep on a GPU would be allocated")
    driver, _ = bindings()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        size = data.numel() * data.element_size()
        address = check(driver.cuMemAlloc(size))
        check(driver.cuMemcpyHtoD(address, data.data_ptr(), size))
        check(driver.cuStreamSynchronize(0))  # from pageable memory the copy may return before its end
    return int(address)


def host_copy(data: torch.Tensor) -> torch.Tensor:
    """A GPU's contiguous tensor in host memory, copied by the driver: what a kernel has to know once is no host read of
    the step, which a dispatch mode or torch's sync debugging would report. Not inside a capture."""
    driver, _ = bindings()
    copy = torch.empty_like(data, device="cpu")
    with torch.cuda.device(data.device):
        torch.cuda.current_stream().synchronize()
        check(driver.cuMemcpyDtoH(copy.data_ptr(), data.data_ptr(), data.numel() * data.element_size()))
    return copy
