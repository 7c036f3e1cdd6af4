// The attention of a decode step without clusters: as decode_attention.cu, which tells how, but for how blocks meet.
//
// SIZE blocks of one row and kv head leave their results in memory, from where the last of them adds up what all left, in a
// fixed order, so that the bits do not depend on who that is. It also sets their counter back to zero.
//
// Set when compiled: as decode_attention.cu; SIZE is not of a cluster, and may be 1.

#include "decode_attention.cuh"
