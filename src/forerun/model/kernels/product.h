// A matrix product with packed weights, see `product.c`.

#ifndef FORERUN_PRODUCT_H
#define FORERUN_PRODUCT_H

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

#ifndef FORERUN_LANES_H
#define INLINE static inline __attribute__((always_inline))
enum { LANES = 16 };
#endif

enum { STEP = 32 };    // The depth of bf16 is a multiple of it
enum { FLOAT32, WIDENED, DOTS, TILES_OF_AMX };
enum { IN_PANELS, IN_BLOCKS, IN_BLOCKS_READING };    // The last: of a prompt's tokens, where tiles multiply in bf16

typedef struct {
    const void *states;      // (rows, depth), contiguous
    const void *weights;     // in panels
    const void *bias;        // (outputs,) or NULL
    void *out;               // (rows, outputs), contiguous
    float *wide;             // (rows, depth) states in float32, for WIDENED
    int64_t rows, depth, outputs;
    int32_t kind;
    int32_t blocks;    // How the weights lie, `IN_PANELS` or as in `blocks.h`
} Product;

// One thread's share of a product; `wide` has been filled.
typedef void (*Multiply)(const Product *, int64_t thread, int64_t threads);

// Its share of filling `wide`, where that is needed.
INLINE void widen_states(const Product *p, int64_t thread, int64_t threads) {
    if (p->kind != WIDENED) return;
    int64_t count = p->rows * p->depth;
    for (int64_t at = count * thread / threads; at < count * (thread + 1) / threads; at++)
        ((uint32_t *)p->wide)[at] = (uint32_t)((const uint16_t *)p->states)[at] << 16;
}

#endif
