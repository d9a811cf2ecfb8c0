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

// BitNet (nn/linear/bitlinear.py): −128 … 127 of the largest absolute value, shifted to 0 … 255.
void quantize_symmetric(const float* x, int inputs, uint8_t* quantized, float* step, float* zero) {
    __m512 high = _mm512_set1_ps(1e-5f);
    for (int i = 0; i < inputs; i += LANES)
        high = _mm512_max_ps(high, _mm512_abs_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i)));
    const float peak = _mm512_reduce_max_ps(high);
    *zero = 128, *step = peak * (1.0f / 127);
    const __m512 factor = _mm512_set1_ps(127 / peak);
    for (int i = 0; i < inputs; i += LANES) {
        const __m512 some = _mm512_mul_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i), factor);
        __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(some), _mm512_set1_epi32(128));
        whole = _mm512_max_epi32(whole, _mm512_setzero_si512());
        _mm_storeu_si128((__m128i*)(quantized + i), _mm512_cvtusepi32_epi8(whole));
    }
}

// A fixed scale: −127 … 127, shifted to 0 … 254.
void quantize_by_scale(const float* x, int inputs, float scale, uint8_t* quantized, float* step, float* zero) {
    *zero = 127, *step = 1 / scale;
    for (int i = 0; i < inputs; i += LANES) {
        const __m512 some = _mm512_mul_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i), _mm512_set1_ps(scale));
        __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(some), _mm512_set1_epi32(127));
        whole = _mm512_min_epi32(_mm512_max_epi32(whole, _mm512_setzero_si512()), _mm512_set1_epi32(254));
        _mm_storeu_si128((__m128i*)(quantized + i), _mm512_cvtusepi32_epi8(whole));
    }
}

// 16 bits of the largest absolute value: x / step = 256 (high − 128) + low.
void quantize_digits(const float* x, int inputs, uint8_t* high, uint8_t* low, float* steps) {
    __m512 most = _mm512_set1_ps(1e-30f);
    for (int i = 0; i < inputs; i += LANES)
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i)));
    const float step = _mm512_reduce_max_ps(most) * (1.0f / 32767);
    steps[0] = 256 * step, steps[1] = 128, steps[2] = step, steps[3] = 0;
    const __m512 inverse = _mm512_set1_ps(1 / step), middle = _mm512_set1_ps(32768);
    for (int i = 0; i < inputs; i += LANES) {
        const __m512 some = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i), inverse, middle);
        const __m512i whole = _mm512_min_epi32(_mm512_cvtps_epi32(some), _mm512_set1_epi32(0xffff));
        _mm_storeu_si128((__m128i*)(high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
        _mm_storeu_si128((__m128i*)(low + i), _mm512_cvtepi32_epi8(whole));
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
                      float* out, int64_t out_stride) {
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
            _mm512_mask_storeu_ps(out + r * out_stride + n, inside, activate(result, args.activation));
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

inline int64_t quantized_stride(const LinearArgs& args) { return (args.inputs + QUAD - 1) / QUAD * QUAD + SLACK; }

// The input of an INT8 product, of one token; of experts, of the rows that stand in its register.
void quantize(const Instruction& o, const Pass& pass, int t) {
    const LinearArgs& args = o.linear;
    const int64_t stride = quantized_stride(args);
    if (args.digits) {
        uint8_t* high = pass.quantized + 2 * t * stride;
        return quantize_digits(input_of(o, pass, t), args.inputs, high, high + stride, pass.scratch + 4 * int64_t(t));
    }
    const int rows = args.experts ? args.top : 1;
    for (int k = 0; k < rows; k++) {
        const int64_t row = int64_t(t) * rows + k;
        const float* x = input_of(o, pass, t) + k * args.inputs;
        uint8_t* quantized = pass.quantized + row * stride;
        float *step = pass.scratch + 2 * row, *zero = step + 1;
        if (args.input_scale > 0)
            quantize_by_scale(x, args.inputs, args.input_scale, quantized, step, zero);
        else
            (args.symmetric ? quantize_symmetric : quantize_token)(x, args.inputs, quantized, step, zero);
    }
}

// `blocks` of outputs of the tokens from `begin` to `end`.
void int8_product(const LinearArgs& args, const Pass& pass, int first, int last, int begin, int end, float* out,
                  int64_t out_stride) {
    const int64_t stride = quantized_stride(args);
    for (int block = first; block < last; block++) {
        int t = begin;
        in_tiles(end - begin, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            int8_tile<ROWS>(args, block, pass.quantized + t * stride, stride, pass.scratch + 2 * t,
                            out + t * out_stride, out_stride);
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
void float_product(const LinearArgs& args, int first, int last, int begin, int end, const float* x, int64_t stride,
                   float* out, int64_t out_stride) {
    const int inputs = args.inputs, outputs = args.outputs;
    const Number* weights = (const Number*)args.weight;
    for (int n = 4 * first; n < std::min(outputs, 4 * last); n += 4) {
        const Number* weight_rows[4];
        for (int j = 0; j < 4; j++) weight_rows[j] = weights + int64_t(std::min(n + j, outputs - 1)) * inputs;
        const __mmask8 inside = tail(std::min(4, outputs - n));
        const __m128 added = args.bias ? _mm_maskz_loadu_ps(inside, args.bias + n) : _mm_setzero_ps();
        int t = begin;
        in_tiles(end - begin, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            __m128 sums[ROWS];
            float_dot<ROWS>(weight_rows, inputs, x + t * stride, stride, sums);
            for (int r = 0; r < ROWS; r++) {
                __m512 all = activate(_mm512_castps128_ps512(_mm_add_ps(sums[r], added)), args.activation);
                _mm_mask_storeu_ps(out + (t + r) * out_stride + n, inside, _mm512_castps512_ps128(all));
            }
            t += ROWS;
        });
    }
}

// Small maps that all groups of a token share: sums of columns of weights (inputs, outputs), for many outputs at a time.
template <int ROWS>
__attribute__((noinline)) void column_sums(const float* weights, int inputs, int outputs, const float* x, int64_t step,
                                           float* out, int64_t out_step, int left) {
    __m512 sums[ROWS][4];
    __mmask16 inside[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        inside[j] = tail(std::max(0, left - j * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][j] = _mm512_setzero_ps();
    }
    for (int i = 0; i < inputs; i++, weights += outputs) {
        __m512 some[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) some[j] = _mm512_maskz_loadu_ps(inside[j], weights + j * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m512 one = _mm512_set1_ps(x[r * step + i]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_fmadd_ps(one, some[j], sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_mask_storeu_ps(out + r * out_step + j * LANES, inside[j], sums[r][j]);
}

void shared_product(const LinearArgs& args, int first, int last, int tokens, const float* x, int64_t stride, float* out,
                    int64_t out_stride) {
    for (int n = first * TILE_OUTPUTS; n < std::min(args.outputs, last * TILE_OUTPUTS); n += TILE_OUTPUTS)
        for (int t = 0; t < tokens; t++) {
            int group = 0;
            in_tiles(args.groups, [&](auto rows) {
                constexpr int ROWS = decltype(rows)::value;
                column_sums<ROWS>((const float*)args.weight + n, args.inputs, args.outputs,
                                  x + t * stride + group * args.input_step, args.input_step,
                                  out + t * out_stride + group * args.output_step + n, args.output_step,
                                  args.outputs - n);
                group += ROWS;
            });
        }
}

// --- a product in chunks ----------------------------------------------------------------------------------------------

struct LinearChunks {  // of `per` blocks of outputs each, in every group or expert
    int blocks, per, chunks, parts;

    LinearChunks(const LinearArgs& args, int tokens) {
        const int size = args.format == INT8 || args.shared ? TILE_OUTPUTS : 4;  // outputs of a block
        const int64_t bytes = args.format == INT8 ? 1 : args.format == FLOAT32 ? 4 : 2;
        parts = args.shared ? 1 : std::max(1, std::max(args.groups, args.experts));
        blocks = (args.outputs + size - 1) / size;
        const int64_t rows = args.shared ? int64_t(tokens) * args.groups : tokens;
        const int64_t work = size * args.inputs * (bytes + rows / 8) + 1;  // of a block, about, in bytes read
        per = std::max<int64_t>(1, (48 << 10) / work);
        per = std::max(per, (blocks + 255) / 256);  // a chunk's number has 16 bits, and there may be many parts
        chunks = (blocks + per - 1) / per;
    }
    int total() const { return std::min(chunks * parts, 0xffff); }
};

// The weights, steps and biases of one group or expert.
inline LinearArgs part_of(const LinearArgs& args, int part) {
    LinearArgs one = args;
    const int64_t outputs = args.outputs;
    const int64_t inputs = args.format == INT8 ? (args.inputs + QUAD - 1) / QUAD * QUAD : args.inputs;
    const int64_t padded = args.format == INT8 ? (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS * TILE_OUTPUTS : outputs;
    const int64_t bytes = args.format == INT8 ? 1 : args.format == FLOAT32 ? 4 : 2;
    if (args.experts && args.format != INT8) one.weight = ((const void* const*)args.weight)[part];
    else one.weight = (const char*)args.weight + part * padded * inputs * bytes;
    if (args.step) one.step = args.step + part * outputs;
    if (args.sums) one.sums = args.sums + part * outputs;
    if (args.bias) one.bias = args.bias + part * outputs;
    return one;
}

inline const int32_t* first_rows(const Instruction& o, const Pass& pass) {  // of each expert, as ROUTE wrote them
    return (const int32_t*)pass.registers[o.other] + 2 * o.linear.top;
}

void linear_blocks(const Instruction& o, const Pass& pass, const LinearArgs& args, int part, int first, int last) {
    const int tokens = pass.rows * pass.time;
    const float* x = pass.registers[o.input] + o.input_at + int64_t(part) * args.input_step;
    float* out = pass.registers[o.output] + o.output_at + int64_t(part) * args.output_step;
    int64_t stride = pass.widths[o.input], out_stride = pass.widths[o.output];
    int begin = 0, end = tokens;
    if (args.digits) out_stride = args.outputs, end = 2 * tokens;
    if (args.experts) {
        stride = args.inputs, out_stride = args.outputs;
        begin = first_rows(o, pass)[part], end = first_rows(o, pass)[part + 1];
        if (begin == end) return;
    }
    if (args.shared) return shared_product(args, first, last, tokens, x, stride, out, out_stride);
    if (args.format == INT8) int8_product(args, pass, first, last, begin, end, out, out_stride);
    else if (args.format == FLOAT32) float_product<float>(args, first, last, begin, end, x, stride, out, out_stride);
    else float_product<uint16_t>(args, first, last, begin, end, x, stride, out, out_stride);
}

void linear(const Instruction& o, const Pass& pass, int chunk) {
    const LinearChunks plan(o.linear, pass.rows * pass.time);
    const int total = plan.total();
    for (int n = chunk; n < plan.chunks * plan.parts; n += total) {
        const int part = n / plan.chunks, first = n % plan.chunks * plan.per;
        const int last = std::min(plan.blocks, first + plan.per);
        if (plan.parts == 1) linear_blocks(o, pass, o.linear, 0, first, last);
        else linear_blocks(o, pass, part_of(o.linear, part), part, first, last);
    }
}

}  // namespace
