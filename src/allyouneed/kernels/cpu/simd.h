// Functions of a vector of floats.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "vector.h"

namespace {

inline Floats exponential(Floats x) {  // 2^n · e^r, |r| ≤ ln 2 / 2, by its series
    x = smaller(larger(x, fill(-87.3f)), fill(88.3f));
    Floats n = nearest(x * fill(1.44269504f));
    Floats r = fnmadd(n, fill(0.693359375f), x);
    r = fnmadd(n, fill(-2.12194440e-4f), r);
    Floats sum = fill(1.0f / 5040);
    for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = fmadd(sum, r, fill(term));
    return times_power(sum, n);
}

inline Floats sigmoid(Floats x) { return fill(1) / (fill(1) + exponential(-x)); }

inline Floats tanh_(Floats x) { return fmsub(fill(2), sigmoid(x + x), fill(1)); }  // tanh x = 2 σ(2x) − 1

inline Floats log1p_of_exp(Floats x) {  // log(1 + y), y = e^−|x|, as 2 artanh(y / (2 + y)): precise for small y too
    const Floats y = exponential(-absolute(x));
    const Floats s = y / (y + fill(2)), square = s * s;
    Floats sum = fill(2.0f / 15);
    for (float term : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f})
        sum = fmadd(sum, square, fill(term));
    return sum * s;
}

inline Floats erf_(Floats x) {  // Abramowitz, Stegun 1964, 7.1.26
    Floats a = absolute(x), one = fill(1);
    Floats t = one / fmadd(a, fill(0.3275911f), one);
    Floats sum = fill(1.061405429f);
    for (float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.0f})
        sum = fmadd(sum, t, fill(term));
    Floats result = fnmadd(sum, exponential(-(a * a)), one);
    return select(is_less(x, zeros()), -result, result);
}

inline Floats activate(Floats x, int which) {
    switch (which) {
        case RELU: return larger(x, zeros());
        case RELU_SQUARED: x = larger(x, zeros()); return x * x;
        case GELU: {
            Floats half = x * fill(0.5f);
            return fmadd(half, erf_(x * fill(0.70710678f)), half);
        }
        case GELU_TANH: {
            Floats cube = x * x * x, half = x * fill(0.5f);
            Floats inner = fmadd(cube, fill(0.044715f), x);
            return fmadd(half, tanh_(inner * fill(0.79788456f)), half);
        }
        case QUICK_GELU: return x * sigmoid(x * fill(1.702f));
        case SILU: return x * sigmoid(x);
        case SIGMOID: return sigmoid(x);
        case TANH: return tanh_(x);
        case LOG_SIGMOID: return smaller(x, zeros()) - log1p_of_exp(x);
        case SOFTPLUS: return larger(x, zeros()) + log1p_of_exp(x);
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
    Floats sum = zeros();
    for (int i = 0; i < width; i += LANES) {
        const Tail inside = tail(width - i);
        sum = fmadd(load(a + i, inside), load(b + i, inside), sum);
    }
    return sum_of(sum);
}

inline void add_scaled(float* out, const float* x, float factor, int width) {
    const Floats by = fill(factor);
    for (int i = 0; i < width; i += LANES) {
        const Tail inside = tail(width - i);
        const Floats sum = fmadd(by, load(x + i, inside), load(out + i, inside));
        store(out + i, sum, inside);
    }
}

inline uint16_t to_bfloat16(float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

}  // namespace
