/* The kernels of few_keys_attention.cu, for each size of a head those for fewer keys first.
 *
 * SIZE: channels of a head. PIECE: keys that are scored together, a multiple of 16. PIECES: `one`, or `more` where there are as
 * many as it takes. A block has WARPS warps; each takes TILES tiles of 16 queries at a time and holds those of BUFFERS such
 * times. A multiprocessor is to have registers for BLOCKS blocks. Which is best was measured on an H200.
 */
#define FEW_KEYS_KERNELS(KERNEL) /* SIZE, PIECE, PIECES, WARPS, TILES, BUFFERS, BLOCKS */ \
    KERNEL(40, 16, one, 4, 2, 1, 3)                                                       \
    KERNEL(40, 80, one, 4, 2, 2, 3)                                                       \
    KERNEL(40, 80, more, 4, 2, 1, 2)                                                      \
    KERNEL(64, 16, one, 4, 1, 1, 5)                                                       \
    KERNEL(64, 80, one, 4, 1, 1, 6)                                                       \
    KERNEL(64, 80, more, 4, 1, 1, 4)                                                      \
    KERNEL(80, 16, one, 4, 2, 1, 3)                                                       \
    KERNEL(80, 80, one, 4, 2, 2, 2)                                                       \
    KERNEL(80, 80, more, 4, 2, 1, 2)                                                      \
    KERNEL(160, 16, one, 4, 1, 1, 3)                                                      \
    KERNEL(160, 80, one, 4, 1, 2, 2)                                                      \
    KERNEL(160, 80, more, 4, 1, 1, 2)
