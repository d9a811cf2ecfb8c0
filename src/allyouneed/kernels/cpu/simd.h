// Functions of one 512-bit register of floats.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "program.h"

namespace {

inline __mmask16 tail(int left) { return left >= LANES ? 0xffff : (1u << left) - 1; }  // lanes that are inside

inline __m512 exponential(__m512 x) {  // 2^n · e^r, |r| ≤ ln 2 / 2, by its series
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
    return _mm512_scalef_ps(sum, n);
}

inline __m512 reciprocal(__m512 x) {  // a step of Newton's method; half the time of a division
    const __m512 about = _mm512_rcp14_ps(x);
    return _mm512_fmadd_ps(about, _mm512_fnmadd_ps(x, about, _mm512_set1_ps(1)), about);
}

inline __m512 sigmoid(__m512 x) {
    return reciprocal(_mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 tanh_(__m512 x) {  // tanh x = 2 σ(2x) − 1
    return _mm512_fmsub_ps(_mm512_set1_ps(2), sigmoid(_mm512_add_ps(x, x)), _mm512_set1_ps(1));
}

inline __m512 log1p_of_exp(__m512 x) {  // log(1 + y), y = e^−|x|, as 2 artanh(y / (2 + y)): precise for small y too
    const __m512 y = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    const __m512 s = _mm512_div_ps(y, _mm512_add_ps(y, _mm512_set1_ps(2))), square = _mm512_mul_ps(s, s);
    __m512 sum = _mm512_set1_ps(2.0f / 15);
    for (float term : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f})
        sum = _mm512_fmadd_ps(sum, square, _mm512_set1_ps(term));
    return _mm512_mul_ps(sum, s);
}

inline __m512 erf_(__m512 x) {  // Abramowitz, Stegun 1964, 7.1.26
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 a = _mm512_abs_ps(x), one = _mm512_set1_ps(1);
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(a, _mm512_set1_ps(0.3275911f), one));
    __m512 sum = _mm512_set1_ps(1.061405429f);
    for (float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.0f})
        sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(term));
    __m512 result = _mm512_fnmadd_ps(sum, exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(a, a))), one);
    return _mm512_mask_sub_ps(result, below, _mm512_setzero_ps(), result);
}

inline __m512 activate(__m512 x, int which) {
    switch (which) {
        case RELU: return _mm512_max_ps(x, _mm512_setzero_ps());
        case RELU_SQUARED: x = _mm512_max_ps(x, _mm512_setzero_ps()); return _mm512_mul_ps(x, x);
        case GELU: {
            __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
            return _mm512_fmadd_ps(half, erf_(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678f))), half);
        }
        case GELU_TANH: {
            __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x), half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
            __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
            return _mm512_fmadd_ps(half, tanh_(_mm512_mul_ps(inner, _mm512_set1_ps(0.79788456f))), half);
        }
        case QUICK_GELU: return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, _mm512_set1_ps(1.702f))));
        case SILU: return _mm512_mul_ps(x, sigmoid(x));
        case SIGMOID: return sigmoid(x);
        case TANH: return tanh_(x);
        case LOG_SIGMOID: return _mm512_sub_ps(_mm512_min_ps(x, _mm512_setzero_ps()), log1p_of_exp(x));
        case SOFTPLUS: return _mm512_add_ps(_mm512_max_ps(x, _mm512_setzero_ps()), log1p_of_exp(x));
        default: return x;
    }
}

// The features that an instruction reads and writes of one token.
inline const float* input_of(const Instruction& o, const Pass& pass, int64_t t) {
    return pass.registers[o.input] + t * pass.widths[o.input] + o.input_at;
}
inline const float* other_of(const Instruction& o, const Pass& pass, int64_t t) {
    return pass.registers[o.other] + t * pass.widths[o.other] + o.other_at;
}
inline float* output_of(const Instruction& o, const Pass& pass, int64_t t) {
    return pass.registers[o.output] + t * pass.widths[o.output] + o.output_at;
}

inline float dot(const float* a, const float* b, int width) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < width; i += LANES) {
        const __mmask16 inside = tail(width - i);
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(inside, a + i), _mm512_maskz_loadu_ps(inside, b + i), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

inline void add_scaled(float* out, const float* x, float factor, int width) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int i = 0; i < width; i += LANES) {
        const __mmask16 inside = tail(width - i);
        const __m512 sum = _mm512_fmadd_ps(by, _mm512_maskz_loadu_ps(inside, x + i), _mm512_maskz_loadu_ps(inside, out + i));
        _mm512_mask_storeu_ps(out + i, inside, sum);
    }
}

// The sums of four registers, each added up in the same order.
inline __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d first = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d second = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(first), _mm512_castpd_ps(second));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline __m512 load(const float* x, __mmask16 inside) { return _mm512_maskz_loadu_ps(inside, x); }

inline uint16_t to_bfloat16(float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

inline __m512 load(const uint16_t* x, __mmask16 inside) {  // bfloat16 is the upper half of float32
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, x)), 16));
}

}  // namespace
