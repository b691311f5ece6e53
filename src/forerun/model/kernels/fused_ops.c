// Fused kernels: RMSNorm, RoPE with the write to the KV cache, the gated activation (SwiGLU), argmax of the logits. bf16,
// AVX-512; every intermediate value is rounded where transformers' modules round it.
//
// What a token gets depends on that token alone, to the bit. Knows pointers; everything is contiguous, widths are
// multiples of 16, a head's of 32; a vocabulary is as large as it likes. Slots that are not there are refused before
// anything is written.

#include <math.h>

#include "lanes.h"

enum { WORTH = 1 << 15, MOST_DEPTH = 512 };    // entries from which on several threads share the work; of a head

// (rows, width) / root mean square of each row * weight (width,).
INLINE void norm(const uint16_t *in, const uint16_t *weight, uint16_t *out, int64_t width, float epsilon) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += LANES) {
        __m512 values = load(in + at);
        sum = _mm512_fmadd_ps(values, values, sum);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)width + epsilon));
    for (int64_t at = 0; at < width; at += LANES)
        store(out + at, _mm512_mul_ps(load(weight + at), rounded(_mm512_mul_ps(load(in + at), scale))));
}

void forerun_norm(
    const uint16_t *in, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t width, float epsilon, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width >= WORTH)
    for (int64_t row = 0; row < rows; row++) norm(in + row * width, weight, out + row * width, width, epsilon);
}

// silu(first half of a row) * second half: (rows, 2 * width) -> (rows, width).
void forerun_gate(const uint16_t *both, uint16_t *out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width >= WORTH)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *gate = both + row * 2 * width, *up = gate + width;
        for (int64_t at = 0; at < width; at += LANES) {
            __m512 x = load(gate + at), one = _mm512_set1_ps(1.0f);
            __m512 shrunk = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
            __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
            __m512 above = _mm512_mask_blend_ps(negative, one, shrunk);
            __m512 silu = _mm512_mul_ps(x, _mm512_div_ps(above, _mm512_add_ps(one, shrunk)));
            store(out + row * width + at, _mm512_mul_ps(rounded(silu), load(up + at)));
        }
    }
}

typedef struct {
    const uint16_t *states;                    // (tokens, (heads + 2 * key_heads) * depth): queries, keys, values
    const uint16_t *cosine, *sine;             // (tokens, depth)
    const uint16_t *query_norm, *key_norm;     // (depth,) weights, or NULL
    const int64_t *places;                     // (tokens,) slots of the cache, counted through all its rows
    uint16_t *query;                           // (tokens, heads, depth)
    uint16_t *keys, *values;                   // (slots, key_heads, depth)
    int64_t tokens, slots, heads, key_heads, depth;
    float query_epsilon, key_epsilon;
    int32_t threads;
} Placing;

INLINE void rotate(const uint16_t *in, const uint16_t *cosine, const uint16_t *sine, uint16_t *out, int64_t depth) {
    int64_t half = depth / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        __m512 low = load(in + at), high = load(in + half + at), zero = _mm512_setzero_ps();
        __m512 turned = rounded(_mm512_mul_ps(_mm512_sub_ps(zero, high), load(sine + at)));
        store(out + at, _mm512_add_ps(rounded(_mm512_mul_ps(low, load(cosine + at))), turned));
        turned = rounded(_mm512_mul_ps(low, load(sine + half + at)));
        store(out + half + at, _mm512_add_ps(rounded(_mm512_mul_ps(high, load(cosine + half + at))), turned));
    }
}

static void place(const Placing *p, int64_t token) {
    const uint16_t *cosine = p->cosine + token * p->depth, *sine = p->sine + token * p->depth;
    const uint16_t *in = p->states + token * (p->heads + 2 * p->key_heads) * p->depth;
    uint16_t *query = p->query + token * p->heads * p->depth;
    uint16_t *key = p->keys + p->places[token] * p->key_heads * p->depth;
    uint16_t *value = p->values + p->places[token] * p->key_heads * p->depth;
    uint16_t normed[MOST_DEPTH];
    for (int64_t head = 0; head < p->heads + p->key_heads; head++, in += p->depth) {
        int asks = head < p->heads;
        const uint16_t *weight = asks ? p->query_norm : p->key_norm;
        uint16_t *out = asks ? query + head * p->depth : key + (head - p->heads) * p->depth;
        if (weight) norm(in, weight, normed, p->depth, asks ? p->query_epsilon : p->key_epsilon);
        rotate(weight ? normed : in, cosine, sine, out, p->depth);
    }
    for (int64_t at = 0; at < p->key_heads * p->depth; at += LANES) store(value + at, load(in + at));
}

int64_t forerun_placing_size(void) { return sizeof(Placing); }

// 0, or 1 where sizes or places are out of range.
int32_t forerun_place(const Placing *p) {
    if (p->heads < 1 || p->key_heads < 1 || p->depth < 32 || p->depth > MOST_DEPTH || p->depth % 32) return 1;
    for (int64_t token = 0; token < p->tokens; token++)
        if (p->places[token] < 0 || p->places[token] >= p->slots) return 1;
    int64_t entries = (p->heads + 2 * p->key_heads) * p->depth;
#pragma omp parallel for num_threads(p->threads) if (p->tokens > 1 && p->tokens * entries >= WORTH)
    for (int64_t token = 0; token < p->tokens; token++) place(p, token);
    return 0;
}

INLINE __m512 load_some(const uint16_t *from, int64_t left) {
    if (left >= LANES) return load(from);
    uint16_t padded[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) padded[lane] = lane < left ? from[lane] : 0xFF80;  // minus infinity
    return load(padded);
}

// The first place of the largest of (width,); -1 where there is NaN.
static int64_t largest(const uint16_t *in, int64_t width) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __mmask16 unordered = 0;
    for (int64_t at = 0; at < width; at += LANES) {
        __m512 values = load_some(in + at, width - at);
        unordered |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, values);
    }
    if (unordered) return -1;
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t at = 0; at < width; at += LANES) {
        __mmask16 equal = _mm512_cmp_ps_mask(load_some(in + at, width - at), most, _CMP_EQ_OQ);
        if (equal) return at + __builtin_ctz(equal);
    }
    return -1;
}

// (rows, width) -> (rows,) by `largest`.
void forerun_largest(const uint16_t *in, int64_t *out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width >= 32 * WORTH)
    for (int64_t row = 0; row < rows; row++) out[row] = largest(in + row * width, width);
}
