// What the kernels share: 16 floats at a time, bf16 in memory.

#ifndef FORERUN_LANES_H
#define FORERUN_LANES_H

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 16 };

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }

INLINE __m512 load(const uint16_t *from) { return widen(_mm256_loadu_si256((const __m256i *)from)); }

INLINE void store(uint16_t *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values)); }

// To the nearest bf16.
INLINE __m512 rounded(__m512 values) { return widen((__m256i)_mm512_cvtneps_pbh(values)); }

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
