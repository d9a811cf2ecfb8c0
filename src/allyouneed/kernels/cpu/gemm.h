// Matrix products: int8 weights with activations quantized per token (defined in nn/linear/int8.py), and float weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace {

void quantize_token(const float* x, int inputs, uint8_t* quantized, float* step, float* zero) {
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
        _mm_storeu_si128((__m128i*)(quantized + i), _mm512_cvtusepi32_epi8(whole));
    }
}

// Integer dot products of ROWS tokens with TILE_OUTPUTS outputs. Weights are packed: (outputs / TILE_OUTPUTS,
// inputs / QUAD, TILE_OUTPUTS, QUAD). Not inlined: the compiler would spill the sums for what follows the call.
template <int ROWS>
__attribute__((noinline)) void int8_dot(const int8_t* weights, int quads, const uint8_t* quantized, int64_t stride,
                                        __m512i* result) {
    __m512i sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_si512();
    for (int k = 0; k < quads; k++, weights += QUAD * TILE_OUTPUTS, quantized += QUAD) {
        __m512i some[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) some[j] = _mm512_loadu_si512(weights + j * 64);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, quantized + r * stride, 4);
            __m512i token = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_dpbusd_epi32(sums[r][j], token, some[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_si512(result + 4 * r + j, sums[r][j]);
}

template <int ROWS>
inline void int8_tile(const LinearArgs& args, int block, const uint8_t* quantized, int64_t stride, const float* steps,
                      float* out) {
    const int quads = (args.inputs + QUAD - 1) / QUAD;
    __m512i sums[ROWS * 4];
    const int8_t* weights = (const int8_t*)args.weight + int64_t(block) * quads * QUAD * TILE_OUTPUTS;
    int8_dot<ROWS>(weights, quads, quantized, stride, sums);
    for (int j = 0; j < 4; j++) {
        int n = block * TILE_OUTPUTS + j * LANES;
        if (n >= args.outputs) break;
        __mmask16 inside = tail(args.outputs - n);
        __m512i row_sums = _mm512_maskz_loadu_epi32(inside, args.sums + n);
        __m512 step = _mm512_maskz_loadu_ps(inside, args.step + n);
        __m512 bias = args.bias ? _mm512_maskz_loadu_ps(inside, args.bias + n) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; r++) {
            __m512i zeros = _mm512_mullo_epi32(row_sums, _mm512_set1_epi32(int(steps[2 * r + 1])));
            __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[4 * r + j], zeros));
            __m512 result = _mm512_fmadd_ps(sum, _mm512_mul_ps(step, _mm512_set1_ps(steps[2 * r])), bias);
            _mm512_mask_storeu_ps(out + int64_t(r) * args.outputs + n, inside, activate(result, args.activation));
        }
    }
}

// Splits tokens into tiles; calls `next` with the size of each as a compile-time constant.
template <typename Next>
inline void in_tiles(int tokens, Next next) {
    for (int left = tokens; left;) {
        const int rows = left == 7 || left == 8 ? 4 : std::min(left, TILE_TOKENS);  // tiles of one or two are slow
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

void int8_linear(const Instruction& o, const Pass& pass, int thread) {
    const LinearArgs& args = o.linear;
    const int tokens = pass.rows * pass.time, width = pass.widths[o.input];
    const float* x = pass.registers[o.input];
    float *out = pass.registers[o.output], *steps = pass.scratch;
    const int stride = (args.inputs + QUAD - 1) / QUAD * QUAD + SLACK;
    Share mine(tokens, thread, pass.threads);
    for (int t = mine.begin; t < mine.end; t++)
        quantize_token(x + int64_t(t) * width, args.inputs, pass.quantized + int64_t(t) * stride, steps + 2 * t,
                       steps + 2 * t + 1);
#pragma omp barrier
    Share blocks((args.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, thread, pass.threads);
    for (int block = blocks.begin; block < blocks.end; block++) {
        int t = 0;
        in_tiles(tokens, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            int8_tile<ROWS>(args, block, pass.quantized + int64_t(t) * stride, stride, steps + 2 * t,
                            out + int64_t(t) * args.outputs);
            t += ROWS;
        });
    }
}

// --- float weights: four outputs and a few tokens at a time -----------------------------------------------------------

template <int ROWS, typename Number>
__attribute__((noinline)) void float_dot(const Number* const* weights, int inputs, const float* x, int64_t stride,
                                         __m128* result) {
    __m512 sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_ps();
    for (int i = 0; i < inputs; i += LANES) {
        const __mmask16 inside = tail(inputs - i);
        __m512 some[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) some[j] = load(weights[j] + i, inside);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m512 token = _mm512_maskz_loadu_ps(inside, x + r * stride + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_fmadd_ps(token, some[j], sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) result[r] = four_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

template <typename Number>
void float_linear(const Instruction& o, const Pass& pass, int thread) {
    const int inputs = o.linear.inputs, outputs = o.linear.outputs, tokens = pass.rows * pass.time;
    const Number* weights = (const Number*)o.linear.weight;
    const float *bias = o.linear.bias, *x = pass.registers[o.input];
    const int64_t stride = pass.widths[o.input];
    float* out = pass.registers[o.output];
    Share mine((outputs + 3) / 4, thread, pass.threads);
    for (int n = 4 * mine.begin; n < std::min(outputs, 4 * mine.end); n += 4) {
        const Number* weight_rows[4];
        for (int j = 0; j < 4; j++) weight_rows[j] = weights + int64_t(std::min(n + j, outputs - 1)) * inputs;
        const __mmask8 inside = tail(std::min(4, outputs - n));
        const __m128 added = bias ? _mm_maskz_loadu_ps(inside, bias + n) : _mm_setzero_ps();
        int t = 0;
        in_tiles(tokens, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            __m128 sums[ROWS];
            float_dot<ROWS>(weight_rows, inputs, x + int64_t(t) * stride, stride, sums);
            for (int r = 0; r < ROWS; r++) {
                __m512 all = activate(_mm512_castps128_ps512(_mm_add_ps(sums[r], added)), o.linear.activation);
                _mm_mask_storeu_ps(out + int64_t(t + r) * outputs + n, inside, _mm512_castps512_ps128(all));
            }
            t += ROWS;
        });
    }
}

}  // namespace
