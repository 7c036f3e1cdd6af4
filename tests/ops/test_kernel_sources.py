"""Every .cu through NVRTC, without a GPU: for each compute capability that it is for, as its launcher declares it, but
for those that are like another one.

What compiles has the launcher's parameter too: `build.Arguments` is compared with the struct by the compiler.
"""

import re
import sys
import zlib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import kernel_spills
import kernel_table
from h200 import H200, PLAIN
from onegraph.ops import family
from onegraph.ops.cuda import (
    build,
    decode_portable,
    decode_round,
    e8p_experts,
    fp8,
    int4,
    nvfp4,
    nvfp4_one,
    turboquant_attention,
)
from onegraph.ops.cuda.stream import DOWN, GATE_UP, LINEAR, Variant

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux alone")
FOLDER = Path(build.__file__).parent
for path in FOLDER.glob("*.py"):
    import_module(f"onegraph.ops.cuda.{path.stem}")
SOURCES = {source.path.stem: source for source in build.Source.every}
CLAIMS = [(name, capability) for name, source in SOURCES.items() for capability in source.capabilities]
LIKE = {(8, 6): (8, 9), (12, 1): (12, 0)}  # ptxas makes the same of both, but for what the page says
CELLS = kernel_table.written()[1]
COMPILED = [(name, capability) for name, capability in CLAIMS if capability not in LIKE
            or CELLS.get((f"{name}.cu", capability)) != CELLS.get((f"{name}.cu", LIKE[capability]))]  # fmt: skip
REFUSED = [(name, capability) for name, source in SOURCES.items() if source.capabilities == build.HOPPER
           for capability in ((10, 0), (12, 0))]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cubin of another run: what compiles here is compiled here, or was of the same bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", kernel_table.compiled_once)


def test_every_file_is_declared() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(SOURCES)
    assert all((9, 0) in source.capabilities for source in SOURCES.values())


def test_a_card_that_is_not_compiled_for_is_like_one_that_is() -> None:
    """It has no text of its own. Where it takes other registers on the page, which is written with each compiled, it is
    compiled for here too."""
    texts = [path.read_text() for path in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh"))]
    conditions = {condition for text in texts for condition in re.findall(r"__CUDA_ARCH__( *\S+ *\w*)", text)}
    assert conditions == {" >= 890", " >= 900", " >= 1000"}  # so 8.6 reads what 8.0 does, and 12.1 what 12.0 does
    unlike = [each for each in COMPILED if each[1] in LIKE]
    assert len(unlike) <= 3, "which would be most of them"


@pytest.mark.parametrize(("name", "capability"), COMPILED)
def test_a_source_compiles_for_what_it_is_for(name: str, capability: tuple[int, int]) -> None:
    """Within what the GPU has; `python -m tests.ops.kernel_table` updates docs/how-it-works/kernels.md."""
    source = SOURCES[name]
    found = kernel_table.usage(source, capability)
    assert found.registers <= kernel_table.REGISTERS
    assert source.shared + found.shared <= kernel_table.room(capability)
    if not source.form(capability).portable:
        assert_spilled(found, kernel_spills.of_example(source, capability))
    else:
        assert not found.spilled
        assert source.shared + found.shared <= build.PORTABLE_SHARED
    version, cells = kernel_table.written()
    if version == kernel_table.version() and source.ops:
        assert cells[source.path.name, capability] == kernel_table.cell(found)


SAMPLE = [each for each in COMPILED if zlib.crc32(str(each).encode()) % 12 == 0]


@pytest.mark.parametrize(("name", "capability"), SAMPLE)
def test_what_is_recorded_is_what_the_compiler_says(name: str, capability: tuple[int, int]) -> None:
    source = SOURCES[name]
    assert kernel_table.usage(source, capability) == kernel_table.compiled(source, capability)


def test_what_the_page_has_is_recorded() -> None:
    """Else each run of the tests compiles it."""
    assert len(SAMPLE) > 9
    if kernel_table.written()[0] != kernel_table.version():
        pytest.skip("the page is of another NVRTC")
    kernels = {each: kernel_table.compilation(SOURCES[each[0]], each[1]) for each in COMPILED}
    missing = [each for each, made in kernels.items() if kernel_table.digest(made) not in kernel_table.recorded()]
    assert not missing, "python -m tests.ops.kernel_table"


def assert_spilled(found: kernel_table.Usage, bytes: int) -> None:
    """Exactly so many bytes; of another NVRTC than the page's none where there are none."""
    same = kernel_table.written()[0] == kernel_table.version()
    assert found.spilled == bytes if same else bytes or not found.spilled


@pytest.mark.parametrize("capability", kernel_spills.CARDS, ids=str)
@pytest.mark.parametrize("form", kernel_spills.FORMS, ids=lambda form: f"{form.source.path.stem}: {form.name}")
def test_a_form_of_hoppers_spills_what_is_known(form: kernel_spills.Form, capability: tuple[int, int]) -> None:
    assert form.source.path.stem in kernel_spills.REASONS
    assert not form.source.form(capability).portable
    if form.defines != form.source.example:  # which is compiled above
        assert_spilled(kernel_table.usage(form.source, capability, form.defines), form.cells[capability])


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if "portable" in source.families])
def test_a_portable_source_compiles_to_stand_in_for_hoppers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To PTX of 8.0, which `ONEGRAPH_KERNELS=portable` hands to the driver of a newer card."""
    monkeypatch.setattr(family, "FORCED", "portable")
    source = SOURCES[name]
    ptx = source.cubin(source.example, (9, 0), source.arguments.checks if source.arguments else "").decode()
    assert re.findall(r"\.target (\w+)", ptx) == ["sm_80"]
    assert sorted(re.findall(r"\.visible \.entry (\w+)\(", ptx)) == sorted(source.form((9, 0)).functions)
    assert "griddepcontrol" not in ptx


def test_a_compiler_that_has_nothing_to_say_leaves_bytes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is one byte then, the end of the text, and Python has each bytes object of length one but once."""
    monkeypatch.setattr(build, "_compile", kernel_table.COMPILE)
    source = tmp_path / "silent.cu"
    source.write_text('extern "C" __global__ void nothing() {}\n')
    assert build.compile_cubin(source, {}, (8, 0))
    assert [bytes.fromhex(f"{value:02x}")[0] for value in range(256)] == list(range(256))


def experts(tokens: int, bits: int) -> e8p_experts.ExpertVariant:
    found = e8p_experts.way(tokens, 8, 128, 2048, 768, bits, PLAIN, portable=True)
    assert found is not None
    return found


def test_experts_in_clusters_compile() -> None:
    way = e8p_experts.way(1, 8, 128, 2048, 768, 2, H200)
    assert way is not None
    for cut in way:
        assert cut.cluster > 1
        assert e8p_experts.KERNELS.cubin(cut.defines(2, False), (9, 0)).startswith(b"\x7fELF")


def fp4(variant: Variant, half: int, group: int, depth: int = 2, wide: int = 0) -> dict[str, int]:
    return replace(variant, warps=((nvfp4.PLAIN_WARPS,),)).defines(depth) | {
        "HALF": half,
        "GROUP": group,
        "FLOAT": wide,
    }


def tight() -> list[tuple[build.Source, dict[str, int]]]:
    """Forms of the portable kernels that hold the most in registers."""
    four = {"SCALE_BF16": 1, "FLOAT32": 1, "DEPTH": 2}
    heads = replace(decode_portable.EXAMPLE, half=True, group=8, norm=True, size=16, window=64)
    eight = replace(decode_round.EXAMPLE, half=True, group=8, slices=2, norm=True, size=16, window=64)
    return [
        (nvfp4.STREAM.source, fp4(Variant(LINEAR, 2), 1, 16)),
        (nvfp4.STREAM.source, fp4(Variant(DOWN, together=True), 0, 32)),
        (nvfp4.SHORT, {"HALF": 0, "TILES": 2, "WARPS": 2, "GROUP": 32, "FLOAT": 1}),
        (int4.BATCH, four | {"HALF": 0, "GROUP": 32, "TILES": 2}),
        (fp8.STREAM.source, fp8.LINEARS[fp8.MAX_TOKENS][1].defines(2) | {"HALF": 1, "GRAIN": 32}),
        (turboquant_attention.KERNELS, turboquant_attention.AttentionTiling(256, 4, 4, 8, 0, 1).defines(1)),
        (turboquant_attention.KERNELS, turboquant_attention.AttentionTiling(128, 3, 3, 8, 1, 1).defines(1)),
        (decode_portable.KERNEL, heads.defines),
        (decode_round.KERNEL, eight.defines),
        *((e8p_experts.KERNELS, cut.defines(bits, False)) for bits in (2, 3) for cut in experts(64, bits)),
    ]


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
@pytest.mark.parametrize(
    ("source", "defines"), tight(), ids=lambda value: getattr(value, "path", None) and value.path.stem
)
def test_no_form_of_a_portable_kernel_spills(
    source: build.Source, defines: dict[str, int], capability: tuple[int, int]
) -> None:
    assert kernel_table.usage(source, capability, defines).spilled == 0


@pytest.mark.skipif(not (kernel_table.TOOLS / "cuobjdump").exists(), reason="this Triton brings no cuobjdump")
def test_the_page_counts_the_loop_of_the_portable_linear() -> None:
    if kernel_table.written()[0] != kernel_table.version():
        pytest.skip("the page is of another NVRTC")
    assert kernel_table.between(kernel_table.PAGE.read_text(), kernel_table.LOOP) == kernel_table.loops()


def test_the_page_has_every_source_and_card() -> None:
    claimed = {(SOURCES[name].path.name, capability) for name, capability in CLAIMS if SOURCES[name].ops}
    assert set(kernel_table.written()[1]) == claimed


@pytest.mark.parametrize(("name", "capability"), REFUSED)
def test_what_needs_wgmma_is_refused_elsewhere(name: str, capability: tuple[int, int]) -> None:
    """By us, before anything is compiled; and NVRTC would, so that claiming less than could be had is noticed."""
    source = SOURCES[name]
    major, minor = capability
    with pytest.raises(build.BuildError, match=rf"compute capability 9\.0; this GPU has {major}\.{minor}"):
        source.cubin(source.example, capability)
    with pytest.raises(build.BuildError, match=r"wgmma"):
        build.compile_cubin(source.path, source.example, capability)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"pointers": ("to", "from_"), "ints": ("count",)}, "from_"),  # another name
        ({"pointers": ("from", "to"), "ints": ("count",)}, "differ"),  # another order
        ({"pointers": ("to", "from"), "floats": ("count",)}, "differ"),  # another type
        ({"pointers": ("to", "from")}, "differ"),  # one less
        ({"pointers": ("to", "from"), "ints": ("count", "more")}, "more"),  # one more
    ],
)
def test_a_launcher_that_differs_from_its_struct_is_refused(tmp_path: Path, wrong: dict, why: str) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        "struct Arguments { int* to; const int* from; int count; };\n"
        'extern "C" __global__ void k(const __grid_constant__ Arguments p) { *p.to = *p.from + p.count; }\n'
    )
    right = build.Arguments(pointers=("to", "from"), ints=("count",))
    assert build.compile_cubin(source, {}, (9, 0), right.checks).startswith(b"\x7fELF")
    assert right.pack(count=3, to=1, **{"from": 2}).hex() == "01".ljust(16, "0") + "02".ljust(16, "0") + "03".ljust(
        16, "0"
    )
    with pytest.raises(build.BuildError, match=why):
        build.compile_cubin(source, {}, (9, 0), build.Arguments(**wrong).checks)


def test_fields_are_packed_by_name() -> None:
    arguments = build.Arguments(maps=("map",), pointers=("x",), ints=("n",), floats=("eps",))
    packed = arguments.pack(eps=0.5, n=-1, x=7, map=bytes(range(128)))
    assert packed == bytes(range(128)) + (7).to_bytes(8, "little") + b"\xff" * 4 + b"\0\0\0\x3f" + bytes(48)
    with pytest.raises(AssertionError, match="fields are"):
        arguments.pack(x=7, map=bytes(128), n=1, eps=0.0, silu=1)
    with pytest.raises(KeyError, match="eps"):
        arguments.pack(x=7, map=bytes(128), n=1, silu=1)


def test_ptx_stands_in_one_place() -> None:
    """An instruction that two files write out is one that a fix would reach in one of them."""
    found: dict[str, set[str]] = {}
    for path in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")):
        for instruction in re.findall(
            r'asm(?: volatile)?\(\s*"(?:\{[^"]*?;)?\s*(?:\\n)?([a-z][\w.:]+)', path.read_text()
        ):
            found.setdefault(instruction, set()).add(path.name)
    shared = {instruction: files for instruction, files in found.items() if len(files) > 1}
    assert not shared


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("mode", [LINEAR, GATE_UP, DOWN])
def test_mxfp4_compiles_from_the_sources_of_nvfp4(mode: int, half: int) -> None:
    wide = mode == LINEAR
    made = [
        (nvfp4.STREAM.source, fp4(Variant(mode, together=mode == DOWN), half, 32, 4, int(wide))),
        (nvfp4_one.KERNEL, nvfp4_one._defines(mode, bool(half), 4, 32, edge=True, wide=wide)),
    ]
    if wide:
        made.append((nvfp4.SHORT, nvfp4.SHORT.example | {"HALF": half, "GROUP": 32, "FLOAT": 1}))
        made.append((nvfp4.STREAM.dequantizer, {"HALF": half, "GROUP": 32}))
    for source, defines in made:
        assert source.arguments is not None
        assert kernel_table.usage(source, (9, 0), defines).registers <= kernel_table.REGISTERS
