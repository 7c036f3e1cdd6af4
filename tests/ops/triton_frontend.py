"""Every Triton kernel, with the arguments of its op's records, through Triton's front end for Hopper with PDL: no GPU.

Run by test_triton_frontend.py in a process of its own, since the rest of a CPU session interprets kernels. Neither what
only the compiler refuses (a range whose size is no power of two) nor what stands behind `if PDL` meets the interpreter.
Prints what was compiled, or the first refusal and exits with 1.
"""

import itertools
import sys
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.compiler.compiler import make_backend

TARGET = GPUTarget("cuda", 90, 32)
compiled: set[str] = set()
seen: set[tuple[Any, str]] = set()
preloading: list[Any] = []


class NoDriver:
    """What a launch asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


def front_end(
    self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> None:
    """In place of compiling: Triton's IR is made, verified and dropped; without a kernel nothing is launched.

    Once for each key, which is what Triton compiles by: without a kernel it keeps nothing of its own. What a thread of
    `onegraph.ops.ahead` compiles in its place is the same.
    """
    if preloading:
        preloading.append((signature, constexprs, options, attrs))
        return
    if (self, key) in seen:
        return
    seen.add((self, key))
    preloading.append(None)
    self._call_hook(preload, key, signature, device, constexprs, options, [attrs], False)
    assert preloading[1:] == [(signature, constexprs, options, attrs)], self
    preloading.clear()
    backend, context = make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(self, signature, constexprs, attrs)
    module = source.make_ir(
        TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    assert module.verify()
    compiled.add(self.__name__)


def preload(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
    fn.jit_function.preload(compile["specialization_data"])


def main() -> int:
    triton.runtime.driver.set_active(NoDriver())
    triton.runtime.jit.JITFunction._do_compile = front_end
    from onegraph.ops.triton import launch

    launch.options = lambda x: {"PDL": True, "launch_pdl": True}  # before the kernels' modules import it
    from onegraph.ops.gated_delta import gated_delta
    from onegraph.ops.mamba2 import mamba2
    from test_gated_delta_chunk import CASES, chunk, kernels
    from test_triton import DTYPES, kernel_of, parameters

    every = [(each.id, kernel_of(each.values[0]), *each.values[1:]) for each in parameters(interpreted=False)]
    for op, kernel, cases in ((gated_delta, chunk, CASES), (mamba2, kernels.chunk, mamba2.cases[-2:])):
        chunks = itertools.product(cases, DTYPES)
        every += [(f"{op.name}-{case.name}", op.unpacked(kernel), case, dtype) for case, dtype in chunks]
    halves: set[str] = set()
    for name, kernel, case, dtype in every:
        op = name.partition("-")[0]
        if dtype == torch.float16 and op in halves:  # a type that is checked as bfloat16 is: once for each op
            continue
        halves |= {op} if dtype == torch.float16 else set()
        try:
            kernel(*case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0)))
        except CompilationError as error:
            print(f"{name}: {error}")
            return 1
    print(*sorted(compiled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
