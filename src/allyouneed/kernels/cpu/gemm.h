// Matrix products: int8 weights with activations quantized per token (defined in nn/linear/int8.py), and float weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace {

// 0 … 255 of a quantized input, from the nearest integers.
inline void store_rounded(Digit* out, Ints whole) {
    store_digits(out, smaller(larger(whole, fill_ints(0)), fill_ints(255)));
}

void quantize_token(const float* x, int inputs, Digit* quantized, float* step, float* zero) {
    Floats low = zeros(), high = zeros();
    for (int i = 0; i < inputs; i += LANES) {
        Floats some = load(x + i, tail(inputs - i));
        low = smaller(low, some), high = larger(high, some);
    }
    float least = smallest_of(low), most = largest_of(high);
    float size = (most - least) * (1.0f / 255);
    *zero = -std::nearbyint(least / std::fmax(size, 1.17549435e-38f));
    *step = std::fmax(size, 6.1e-5f);
    Floats inverse = fill(1 / *step), origin = fill(*zero);
    for (int i = 0; i < inputs; i += LANES)
        store_rounded(quantized + i, to_ints(fmadd(load(x + i, tail(inputs - i)), inverse, origin)));
}

// BitNet (nn/linear/bitlinear.py): −128 … 127 of the largest absolute value, shifted to 0 … 255.
void quantize_symmetric(const float* x, int inputs, Digit* quantized, float* step, float* zero) {
    Floats high = fill(1e-5f);
    for (int i = 0; i < inputs; i += LANES) high = larger(high, absolute(load(x + i, tail(inputs - i))));
    const float peak = largest_of(high);
    *zero = 128, *step = peak * (1.0f / 127);
    const Floats factor = fill(127 / peak);
    for (int i = 0; i < inputs; i += LANES)
        store_rounded(quantized + i, to_ints(load(x + i, tail(inputs - i)) * factor) + fill_ints(128));
}

// A fixed scale: −127 … 127, shifted to 0 … 254.
void quantize_by_scale(const float* x, int inputs, float scale, Digit* quantized, float* step, float* zero) {
    *zero = 127, *step = 1 / scale;
    for (int i = 0; i < inputs; i += LANES) {
        const Ints whole = to_ints(load(x + i, tail(inputs - i)) * fill(scale)) + fill_ints(127);
        store_rounded(quantized + i, smaller(whole, fill_ints(254)));
    }
}

// 16 bits of the largest absolute value: x / step = 256 (high − 128) + low.
void quantize_digits(const float* x, int inputs, Digit* high, Digit* low, float* steps) {
    Floats most = fill(1e-30f);
    for (int i = 0; i < inputs; i += LANES) most = larger(most, absolute(load(x + i, tail(inputs - i))));
    const float step = largest_of(most) * (1.0f / 32767);
    steps[0] = 256 * step, steps[1] = 128, steps[2] = step, steps[3] = 0;
    const Floats inverse = fill(1 / step), middle = fill(32768);
    for (int i = 0; i < inputs; i += LANES) {
        const Floats some = fmadd(load(x + i, tail(inputs - i)), inverse, middle);
        const Ints whole = smaller(to_ints(some), fill_ints(0xffff)), upper = upper_byte(whole);
        store_digits(high + i, upper), store_digits(low + i, whole - upper * fill_ints(256));
    }
}

// Integer dot products of ROWS tokens with TILE_OUTPUTS outputs: (ROWS, TILE_OUTPUTS). Weights are packed: (outputs /
// TILE_OUTPUTS, inputs / QUAD, TILE_OUTPUTS, QUAD). Not inlined: the compiler would spill the sums for what follows.
template <int ROWS>
__attribute__((noinline)) void int8_dot(const int8_t* weights, int quads, const Digit* quantized, int64_t stride,
                                        int32_t* result) {
    constexpr int COLUMNS = columns(SUMS / ROWS, TILE_OUTPUTS / LEAF);
    for (int first = 0; first < TILE_OUTPUTS; first += COLUMNS * LEAF) {
        const int8_t* line = weights + first * QUAD;
        const Digit* digits = quantized;
        LeafInts sums[ROWS][COLUMNS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
            for (int j = 0; j < COLUMNS; j++) sums[r][j] = LeafInts{};
        for (int k = 0; k < quads; k++, line += QUAD * TILE_OUTPUTS, digits += QUAD) {
            Weights some[COLUMNS];
#pragma GCC unroll 16
            for (int j = 0; j < COLUMNS; j++) some[j] = weights_of_leaf(line + j * QUAD * LEAF);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const Token token = token_of(digits + r * stride);
#pragma GCC unroll 16
                for (int j = 0; j < COLUMNS; j++) sums[r][j] = add_dots(sums[r][j], token, some[j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
            for (int j = 0; j < COLUMNS; j++)
                std::memcpy(result + r * TILE_OUTPUTS + first + j * LEAF, &sums[r][j], sizeof(LeafInts));
    }
}

template <int ROWS>
inline void int8_tile(const LinearArgs& args, int block, const Digit* quantized, int64_t stride, const float* steps,
                      float* out, int64_t out_stride) {
    const int quads = (args.inputs + QUAD - 1) / QUAD;
    int32_t sums[ROWS * TILE_OUTPUTS];
    const int8_t* weights = (const int8_t*)args.weight + int64_t(block) * quads * QUAD * TILE_OUTPUTS;
    int8_dot<ROWS>(weights, quads, quantized, stride, sums);
    for (int j = 0; j < TILE_OUTPUTS; j += LANES) {
        int n = block * TILE_OUTPUTS + j;
        if (n >= args.outputs) break;
        Tail inside = tail(args.outputs - n);
        Ints row_sums = load(args.sums + n, inside);
        Floats step = load(args.step + n, inside);
        Floats bias = args.bias ? load(args.bias + n, inside) : zeros();
        for (int r = 0; r < ROWS; r++) {
            const Ints zero = row_sums * fill_ints(int(steps[2 * r + 1]) - DIGIT_ZERO);
            Floats sum = to_floats(as<Ints>(sums + r * TILE_OUTPUTS + j) - zero);
            Floats result = fmadd(sum, step * fill(steps[2 * r]), bias);
            store(out + r * out_stride + n, activate(result, args.activation), inside);
        }
    }
}

// Splits tokens into tiles; calls `next` with the size of each as a compile-time constant.
template <typename Next>
inline void in_tiles(int tokens, Next next) {
    for (int left = tokens; left;) {
        const bool split = left > TILE_TOKENS && left < TILE_TOKENS + 3;  // tiles of one or two are slow
        const int rows = split ? (left + 1) / 2 : std::min(left, TILE_TOKENS);
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
        Digit* high = (Digit*)pass.quantized + 2 * t * stride;
        return quantize_digits(input_of(o, pass, t), args.inputs, high, high + stride, pass.scratch + 4 * int64_t(t));
    }
    const int rows = args.experts ? args.top : 1;
    for (int k = 0; k < rows; k++) {
        const int64_t row = int64_t(t) * rows + k;
        const float* x = input_of(o, pass, t) + k * args.inputs;
        Digit* quantized = (Digit*)pass.quantized + row * stride;
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
            int8_tile<ROWS>(args, block, (const Digit*)pass.quantized + t * stride, stride, pass.scratch + 2 * t,
                            out + t * out_stride, out_stride);
            t += ROWS;
        });
    }
}

// --- float weights: four outputs and a few tokens at a time -----------------------------------------------------------

template <int ROWS, typename Number>
__attribute__((noinline)) void float_dot(const Number* const* weights, int inputs, const float* x, int64_t stride,
                                         Four* result) {
    constexpr int COLUMNS = columns(SUMS / COPIES / ROWS, 4);
    Floats all[ROWS][4];
    for (int first = 0; first < 4; first += COLUMNS) {
        Floats sums[ROWS][COLUMNS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) sums[r][j] = zeros();
        for (int i = 0; i < inputs; i += LANES) {
            const Tail inside = tail(inputs - i);
            Floats some[COLUMNS];
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) some[j] = load(weights[first + j] + i, inside);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const Floats token = load(x + r * stride + i, inside);
#pragma GCC unroll 4
                for (int j = 0; j < COLUMNS; j++) sums[r][j] = fmadd(token, some[j], sums[r][j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) all[r][first + j] = sums[r][j];
    }
    for (int r = 0; r < ROWS; r++) result[r] = four_sums(all[r][0], all[r][1], all[r][2], all[r][3]);
}

template <typename Number>
void float_product(const LinearArgs& args, int first, int last, int begin, int end, const float* x, int64_t stride,
                   float* out, int64_t out_stride) {
    const int inputs = args.inputs, outputs = args.outputs;
    const Number* weights = (const Number*)args.weight;
    for (int n = 4 * first; n < std::min(outputs, 4 * last); n += 4) {
        const Number* weight_rows[4];
        for (int j = 0; j < 4; j++) weight_rows[j] = weights + int64_t(std::min(n + j, outputs - 1)) * inputs;
        const int count = std::min(4, outputs - n);
        const Four added = args.bias ? load_four(args.bias + n, count) : Four{};
        int t = begin;
        in_tiles(end - begin, [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            Four sums[ROWS];
            float_dot<ROWS>(weight_rows, inputs, x + t * stride, stride, sums);
            for (int r = 0; r < ROWS; r++) {
                float all[LANES] = {};
                store_four(all, sums[r] + added);
                if (args.activation != IDENTITY) store(all, activate(load(all), args.activation));
                store_four(out + (t + r) * out_stride + n, load_four(all), count);
            }
            t += ROWS;
        });
    }
}

// Small maps that all groups of a token share: sums of columns of weights (inputs, outputs), for many outputs at a time.
template <int ROWS>
__attribute__((noinline)) void column_sums(const float* weights, int inputs, int outputs, const float* x, int64_t step,
                                           float* out, int64_t out_step, int left) {
    constexpr int COLUMNS = columns(SUMS / COPIES / ROWS, 4);
    for (int first = 0; first < 4 * LANES && first < left; first += COLUMNS * LANES) {
        Floats sums[ROWS][COLUMNS];
        Tail inside[COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) {
            inside[j] = tail(std::max(0, left - first - j * LANES));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][j] = zeros();
        }
        const float* line = weights + first;
        for (int i = 0; i < inputs; i++, line += outputs) {
            Floats some[COLUMNS];
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) some[j] = load(line + j * LANES, inside[j]);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const Floats one = fill(x[r * step + i]);
#pragma GCC unroll 4
                for (int j = 0; j < COLUMNS; j++) sums[r][j] = fmadd(one, some[j], sums[r][j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) store(out + r * out_step + first + j * LANES, sums[r][j], inside[j]);
    }
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
