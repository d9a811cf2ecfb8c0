// Products: of 8-bit numbers (nn/linear/int8.py has the definition), and of floats as they lie.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace {

void round_token(const float* x, int inputs, uint8_t* numbers, float* step, float* zero) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int i = 0; i < inputs; i += LANES) {
        __m512 some = _mm512_maskz_loadu_ps(tail(inputs - i), x + i);
        low = _mm512_min_ps(low, some), high = _mm512_max_ps(high, some);
    }
    float least = _mm512_reduce_min_ps(low), most = _mm512_reduce_max_ps(high);
    float size = (most - least) * (1.0f / 255);
    *zero = -std::nearbyint(least / std::fmax(size, 1.17549435e-38f));
    *step = std::fmax(size, 6.1e-5f);
    __m512 inverse = _mm512_set1_ps(1 / *step), origin = _mm512_set1_ps(*zero);
    for (int i = 0; i < inputs; i += LANES) {
        __m512 some = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i), inverse, origin);
        __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32(some), _mm512_setzero_si512());
        _mm_storeu_si128((__m128i*)(numbers + i), _mm512_cvtusepi32_epi8(whole));
    }
}

struct Map {  // codes are packed: (outputs / WIDE, inputs / 4, WIDE, 4)
    const int8_t* codes;
    const float *step, *bias;
    const int32_t* sums;
    int inputs, outputs, activation;
    explicit Map(const Order& o)
        : codes((const int8_t*)o.places[0]), step((const float*)o.places[1]), bias((const float*)o.places[3]),
          sums((const int32_t*)o.places[2]), inputs(o.numbers[0]), outputs(o.numbers[1]), activation(o.numbers[2]) {}
};

// Sums for ROWS tokens and WIDE outputs. By itself, or the compiler keeps what comes after in the registers it needs.
template <int ROWS>
__attribute__((noinline)) void sum_up(const int8_t* codes, int quads, const uint8_t* numbers, int64_t stride,
                                      __m512i* found) {
    __m512i sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_si512();
    for (int k = 0; k < quads; k++, codes += 4 * WIDE, numbers += 4) {
        __m512i some[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) some[j] = _mm512_loadu_si512(codes + j * 64);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, numbers + r * stride, 4);
            __m512i token = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_dpbusd_epi32(sums[r][j], token, some[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_si512(found + 4 * r + j, sums[r][j]);
}

template <int ROWS>
inline void tile(const Map& map, int block, const uint8_t* numbers, int64_t stride, const float* steps, float* out) {
    const int quads = (map.inputs + 3) / 4;
    __m512i sums[ROWS * 4];
    sum_up<ROWS>(map.codes + int64_t(block) * quads * 4 * WIDE, quads, numbers, stride, sums);
    for (int j = 0; j < 4; j++) {
        int n = block * WIDE + j * LANES;
        if (n >= map.outputs) break;
        __mmask16 there = tail(map.outputs - n);
        __m512i own = _mm512_maskz_loadu_epi32(there, map.sums + n);
        __m512 worth = _mm512_maskz_loadu_ps(there, map.step + n);
        __m512 bias = map.bias ? _mm512_maskz_loadu_ps(there, map.bias + n) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; r++) {
            __m512i zeros = _mm512_mullo_epi32(own, _mm512_set1_epi32(int(steps[2 * r + 1])));
            __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[4 * r + j], zeros));
            __m512 found = _mm512_fmadd_ps(sum, _mm512_mul_ps(worth, _mm512_set1_ps(steps[2 * r])), bias);
            _mm512_mask_storeu_ps(out + int64_t(r) * map.outputs + n, there, activated(found, map.activation));
        }
    }
}

// Calls `next` with each number of tokens that are taken at once, as a type.
template <typename Next>
inline void in_tiles(int tokens, Next next) {
    for (int left = tokens; left;) {
        const int rows = left == 7 || left == 8 ? 4 : std::min(left, TALL);  // one or two alone are slow
        switch (rows) {
            case 6: next(std::integral_constant<int, 6>()); break;
            case 5: next(std::integral_constant<int, 5>()); break;
            case 4: next(std::integral_constant<int, 4>()); break;
            case 3: next(std::integral_constant<int, 3>()); break;
            case 2: next(std::integral_constant<int, 2>()); break;
            default: next(std::integral_constant<int, 1>());
        }
        left -= rows;
    }
}

void product(const Order& o, const Pass& pass, int number) {
    const Map map(o);
    const int tokens = pass.rows * pass.time, width = pass.widths[o.input];
    const float* x = pass.registers[o.input];
    float *out = pass.registers[o.output], *steps = pass.scratch;
    const int stride = (map.inputs + 3) / 4 * 4 + 64;
    Share mine(tokens, number, pass.threads);
    for (int t = mine.begin; t < mine.end; t++)
        round_token(x + int64_t(t) * width, map.inputs, pass.rounded + int64_t(t) * stride, steps + 2 * t,
                    steps + 2 * t + 1);
#pragma omp barrier
    Share blocks((map.outputs + WIDE - 1) / WIDE, number, pass.threads);
    for (int block = blocks.begin; block < blocks.end; block++) {
        int t = 0;
        in_tiles(tokens, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            tile<ROWS>(map, block, pass.rounded + int64_t(t) * stride, stride, steps + 2 * t,
                       out + int64_t(t) * map.outputs);
            t += ROWS;
        });
    }
}

// --- products of floats: four outputs and a few tokens at a time -----------------------------------------------------

template <int ROWS, typename Number>
__attribute__((noinline)) void dot_up(const Number* const* weights, int inputs, const float* x, int64_t stride,
                                      __m128* found) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_ps();
    for (int i = 0; i < inputs; i += LANES) {
        const __mmask16 there = tail(inputs - i);
        __m512 some[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) some[j] = wide(weights[j] + i, there);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m512 token = _mm512_maskz_loadu_ps(there, x + r * stride + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_fmadd_ps(token, some[j], sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) found[r] = four_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

template <typename Number>
void float_product(const Order& o, const Pass& pass, int number) {
    const int inputs = o.numbers[0], outputs = o.numbers[1], tokens = pass.rows * pass.time;
    const Number* weights = (const Number*)o.places[0];
    const float *bias = (const float*)o.places[3], *x = pass.registers[o.input];
    const int64_t stride = pass.widths[o.input];
    float* out = pass.registers[o.output];
    Share mine((outputs + 3) / 4, number, pass.threads);
    for (int n = 4 * mine.begin; n < std::min(outputs, 4 * mine.end); n += 4) {
        const Number* rows_of[4];
        for (int j = 0; j < 4; j++) rows_of[j] = weights + int64_t(std::min(n + j, outputs - 1)) * inputs;
        const __mmask8 there = tail(std::min(4, outputs - n));
        const __m128 added = bias ? _mm_maskz_loadu_ps(there, bias + n) : _mm_setzero_ps();
        int t = 0;
        in_tiles(tokens, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            __m128 found[ROWS];
            dot_up<ROWS>(rows_of, inputs, x + int64_t(t) * stride, stride, found);
            for (int r = 0; r < ROWS; r++) {
                __m512 all = activated(_mm512_castps128_ps512(_mm_add_ps(found[r], added)), o.numbers[2]);
                _mm_mask_storeu_ps(out + int64_t(t + r) * outputs + n, there, _mm512_castps512_ps128(all));
            }
            t += ROWS;
        });
    }
}

}  // namespace
