// What the kernels share: 16 floats at a time, bf16 in memory; float32 where FLOAT32_ELEMENTS is defined.

#ifndef FORERUN_LANES_H
#define FORERUN_LANES_H

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 16 };

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }

#ifdef FLOAT32_ELEMENTS

typedef float Element;

INLINE __m512 load(const float *from) { return _mm512_loadu_ps(from); }

INLINE void store(float *to, __m512 values) { _mm512_storeu_ps(to, values); }

INLINE __m512 rounded(__m512 values) { return values; }

#else

typedef uint16_t Element;

// The nearest bf16.
INLINE __m256i narrowed(__m512 values) {
#if defined(__AVX512BF16__) || defined(FORERUN_EMULATED)
    return (__m256i)_mm512_cvtneps_pbh(values);
#else
    __m512i bits = _mm512_castps_si512(values), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 unordered = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    near = _mm512_mask_or_epi32(near, unordered, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
#endif
}

INLINE __m512 load(const uint16_t *from) { return widen(_mm256_loadu_si256((const __m256i *)from)); }

INLINE void store(uint16_t *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, narrowed(values)); }

// To the nearest bf16.
INLINE __m512 rounded(__m512 values) { return widen(narrowed(values)); }

#endif

// exp of x <= 0; of NaN, which the second operand of max keeps, NaN.
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 series = _mm512_set1_ps(1.0f / 720);
    const float terms[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int term = 0; term < 6; term++) series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(terms[term]));
    return _mm512_scalef_ps(series, power);
}

#endif
