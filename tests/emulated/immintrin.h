// Stands for the compiler's header of that name: the AVX-512 that the kernels use, lane by lane in plain C, so that their
// tests run on a processor without it. Slow. Where the processor rounds sums in another order, so does this.

#ifndef FORERUN_EMULATED
#define FORERUN_EMULATED

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64)));
typedef uint32_t __m512i __attribute__((vector_size(64)));
typedef uint16_t __m512bh __attribute__((vector_size(64))), Words __attribute__((vector_size(64)));
typedef uint64_t Quads __attribute__((vector_size(64)));
typedef uint16_t __m256i __attribute__((vector_size(32))), __m256bh __attribute__((vector_size(32)));
typedef uint16_t __mmask16;

enum { _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_GT_OQ, _CMP_UNORD_Q, _CMP_NEQ_UQ };

#define EACH for (int i = 0; i < 16; i++)
#define MADE(type, name, arguments, body) \
    static inline type name arguments { type r; body; return r; }
#define LANE(name, arguments, value) MADE(__m512, name, arguments, EACH r[i] = (value))

// Memory.
MADE(__m512, _mm512_load_ps, (const void *from), memcpy(&r, from, 64))
MADE(__m512i, _mm512_load_si512, (const void *from), memcpy(&r, from, 64))
MADE(__m512i, _mm512_loadu_si512, (const void *from), memcpy(&r, from, 64))
MADE(__m256i, _mm256_loadu_si256, (const __m256i *from), memcpy(&r, from, 32))
MADE(__m256i, _mm256_maskz_loadu_epi16, (__mmask16 k, const uint16_t *from), EACH r[i] = k >> i & 1 ? from[i] : 0)
static inline void _mm512_store_ps(void *to, __m512 a) { memcpy(to, &a, 64); }
static inline void _mm512_store_si512(void *to, __m512i a) { memcpy(to, &a, 64); }
static inline void _mm256_store_si256(__m256i *to, __m256i a) { memcpy(to, &a, 32); }
static inline void _mm256_storeu_si256(__m256i *to, __m256i a) { memcpy(to, &a, 32); }

// Lanes of 32 bits.
LANE(_mm512_setzero_ps, (void), 0.0f)
LANE(_mm512_set1_ps, (float a), a)
LANE(_mm512_abs_ps, (__m512 a), fabsf(a[i]))
LANE(_mm512_add_ps, (__m512 a, __m512 b), a[i] + b[i])
LANE(_mm512_sub_ps, (__m512 a, __m512 b), a[i] - b[i])
LANE(_mm512_mul_ps, (__m512 a, __m512 b), a[i] * b[i])
LANE(_mm512_div_ps, (__m512 a, __m512 b), a[i] / b[i])
LANE(_mm512_max_ps, (__m512 a, __m512 b), a[i] > b[i] ? a[i] : b[i])
LANE(_mm512_fmadd_ps, (__m512 a, __m512 b, __m512 c), fmaf(a[i], b[i], c[i]))
LANE(_mm512_fnmadd_ps, (__m512 a, __m512 b, __m512 c), fmaf(-a[i], b[i], c[i]))
LANE(_mm512_roundscale_ps, (__m512 a, int how), how & 8 ? nearbyintf(a[i]) : a[i])
LANE(_mm512_scalef_ps, (__m512 a, __m512 b), ldexpf(a[i], (int)floorf(b[i])))
LANE(_mm512_mask_blend_ps, (__mmask16 k, __m512 a, __m512 b), k >> i & 1 ? b[i] : a[i])
LANE(_mm512_maskz_mov_ps, (__mmask16 k, __m512 a), k >> i & 1 ? a[i] : 0.0f)
MADE(__m512i, _mm512_setzero_si512, (void), EACH r[i] = 0)
MADE(__m512i, _mm512_set1_epi32, (int a), EACH r[i] = (uint32_t)a)
MADE(__m512i, _mm512_slli_epi32, (__m512i a, int by), EACH r[i] = a[i] << by)
MADE(__m512i, _mm512_cvtepu16_epi32, (__m256i a), EACH r[i] = a[i])
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_cvtss_f32(a) ((a)[0])

static inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    __mmask16 found = 0;
    EACH {
        int unordered = isnan(a[i]) || isnan(b[i]);
        int ordered = how == _CMP_EQ_OQ ? a[i] == b[i] : how == _CMP_LT_OQ ? a[i] < b[i] : a[i] > b[i];
        int holds = how == _CMP_UNORD_Q ? unordered : how == _CMP_NEQ_UQ ? a[i] != b[i] : ordered;
        found |= (__mmask16)(holds << i);
    }
    return found;
}

static inline float _mm512_reduce_add_ps(__m512 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}

static inline float _mm512_reduce_max_ps(__m512 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
}

// bfloat16.
static inline float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t nearest(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(isnan(value) ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

MADE(__m256bh, _mm512_cvtneps_pbh, (__m512 a), EACH r[i] = nearest(a[i]))
LANE(_mm512_dpbf16_ps, (__m512 c, __m512bh a, __m512bh b),
     fmaf(widened(a[2 * i]), widened(b[2 * i]), fmaf(widened(a[2 * i + 1]), widened(b[2 * i + 1]), c[i])))

// Lanes that change places.
static inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i order, __m512i b) {
    Words first = (Words)a, second = (Words)b, places = (Words)order, r;
    for (int i = 0; i < 32; i++) r[i] = places[i] & 32 ? second[places[i] & 31] : first[places[i] & 31];
    return (__m512i)r;
}

static inline __m512i interleaved(__m512i a, __m512i b, int high, int size) {
    __m512i r;
    EACH {
        int from = i / 4 * 4 + high * 2 + (size == 1 ? i % 4 / 2 : i % 2);
        r[i] = (size == 1 ? i % 2 : i % 4 / 2) ? b[from] : a[from];
    }
    return r;
}
#define _mm512_unpacklo_epi32(a, b) interleaved(a, b, 0, 1)
#define _mm512_unpackhi_epi32(a, b) interleaved(a, b, 1, 1)
#define _mm512_unpacklo_epi64(a, b) interleaved(a, b, 0, 2)
#define _mm512_unpackhi_epi64(a, b) interleaved(a, b, 1, 2)

static inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int how) {
    __m512i r;
    EACH {
        int from = (how >> (i / 4 * 2) & 3) * 4 + i % 4;
        r[i] = i < 8 ? a[from] : b[from];
    }
    return r;
}

#endif
