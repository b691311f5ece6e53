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

typedef struct {
    const void *states;      // (rows, depth), contiguous
    const void *weights;     // in panels
    const void *bias;        // (outputs,) or NULL
    void *out;               // (rows, outputs), contiguous
    float *wide;             // (rows, depth) states in float32, for WIDENED
    int64_t rows, depth, outputs;
    int32_t kind;
} Product;

#endif
