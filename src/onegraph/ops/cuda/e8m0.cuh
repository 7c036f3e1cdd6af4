// A byte of E8M0 as a float: 2^(byte - 127), the smallest of which is subnormal. 255 is not a number, and no weight has it.
#pragma once

__device__ __forceinline__ float e8m0_to_float(u32 byte) { return as_float(byte ? byte << 23 : 1u << 22); }
