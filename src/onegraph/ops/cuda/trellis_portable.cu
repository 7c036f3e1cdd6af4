// Trellis-coded linear for few tokens: `trellis_product.cuh` tells how a matrix is decoded and multiplied.

#define KERNEL trellis_portable
#define TURN trellis_portable_turn

#include "trellis_product.cuh"
