// The attention of a decode step: RMSNorm and RoPE of q and k, the cache write, attention over the pages, one launch.
//
// A cluster of blocks owns one row and kv head, so the heads of a group share every load. Warps take tiles of 16 keys in
// turn. Keys of a tile are fetched into shared memory (cp.async) before the wait for the linear that makes q, k and v, since
// those of earlier tokens, positions and the block table change between steps only. After the wait each warp makes the
// operand of all heads of the group by itself, so nothing synchronises before the products: scores = keys (16 a tile) x
// heads (8), result = dimensions x heads, both on tensor cores, softmax between them in registers. Keys are replaced by
// those of the warp's next tile as soon as they were read, and so are values.
// Partial results meet in shared memory, then across the cluster, where each block receives its share of the outputs as
// bytes that a barrier of its own counts: added in a fixed order, the same bits whatever the timing. A context that the
// warps of one block hold is left to the first block alone.
// Instructions are run once and come from far each time, so what a model fixes is known when compiled: 1950 of them for
// 3200 (16 warps). With that, and the rest of this order, a launch adds 4.2 us to a layer of 8B at 1k keys (B = 1), not 5.8.
//
// The kernel: decode_attention.cuh, which decode_portable.cu has too.
//
// Set when compiled: HALF (1: float16, 0: bfloat16), DIM (64 or 128), GROUP (1 to 8 heads a kv head), PAGE (tokens),
// NORM, ROPE (DIM, or 0: none), EARLY, WARPS (of a block), SIZE (blocks of a cluster), KV_HEADS, WINDOW (0: none), and
// strides of the cache and of the angles: PAGE_STRIDE, PLACE_STRIDE, HEAD_STRIDE (units of DIM), TURN_STRIDE.

#include "decode_attention.cuh"
