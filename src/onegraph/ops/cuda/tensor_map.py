"""Tensor maps: what Hopper's copy engine has to know of a matrix of which it takes boxes."""

import ctypes
from functools import lru_cache

from onegraph.ops.cuda import build


@lru_cache(maxsize=1 << 16)
def tensor_map(pointer: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> bytes:
    """What the copy engine has to know of a matrix of bytes of which it takes boxes; beyond the matrix it reads zeros.

    `pointer` and `row_bytes` are multiples of 16. The 128 bytes go into a kernel's parameter at a multiple of 64.
    """
    return _encode(pointer, (row_bytes, rows), (row_bytes,), (box_bytes, box_rows), swizzle=False)


@lru_cache(maxsize=1 << 16)
def sliced_tensor_map(pointer: int, rows: int, row_bytes: int, box: tuple[int, int, int], *, swizzle: bool) -> bytes:
    """The same of a matrix that is seen as slices of columns one after the other, each [rows, width]. `box`: width of a
    slice in bytes (a multiple of 16), rows, slices. `swizzle`: width is 128, and row r's pieces of 16 bytes change
    places, to number ^ r % 8."""
    width = box[0]
    return _encode(pointer, (width, rows, row_bytes // width), (row_bytes, width), box, swizzle=swizzle)


@lru_cache(maxsize=1 << 16)
def edged_tensor_map(pointer: int, rows: int, row_bytes: int, box: tuple[int, int]) -> bytes:
    """The same of a matrix whose rows are no multiple of a slice: one slice of all columns, boxes of `box` (128 bytes,
    rows), swizzled; beyond a row it reads zeros."""
    return _encode(pointer, (row_bytes, rows, 1), (row_bytes, row_bytes), (*box, 1), swizzle=True)


def _encode(
    pointer: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, swizzle: bool
) -> bytes:
    driver = build.bindings()[0]
    pattern = driver.CUtensorMapSwizzle
    encoded = build.check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            pointer,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1) for _ in sizes],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            pattern.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else pattern.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)
