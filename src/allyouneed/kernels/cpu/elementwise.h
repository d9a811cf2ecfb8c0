// Instructions that read one token at a time.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

void embed(const Instruction& o, const Pass& pass, int t) {
    const EmbedArgs& args = o.embed;
    const int width = args.width;
    const int64_t token = pass.tokens[t];
    const int position = pass.starts[t / pass.time] + t % pass.time;
    const bool padding = t % pass.time >= pass.lengths[t / pass.time];
    const float* added =
        args.positions < 0 ? nullptr : pass.tables[args.positions] + int64_t(padding ? 0 : position) * width;
    float* out = pass.registers[o.output] + int64_t(t) * width;
    if (args.format == INT8) {
        const int8_t* weight = (const int8_t*)args.weight + token * width;
        const float step = args.step[token];
        for (int i = 0; i < width; i++) out[i] = weight[i] * step;
    } else {
        for (int i = 0; i < width; i += LANES) {
            const __mmask16 inside = tail(width - i);
            const int64_t at = token * width + i;
            const __m512 some = args.format == FLOAT32 ? load((const float*)args.weight + at, inside)
                                                       : load((const uint16_t*)args.weight + at, inside);
            _mm512_mask_storeu_ps(out + i, inside, some);
        }
    }
    for (int i = 0; i < width; i++) out[i] = out[i] * args.scale + (added ? added[i] : 0);
}

void norm(const Instruction& o, const Pass& pass, int t) {
    const int width = o.norm.width;
    const float* x = pass.registers[o.input] + int64_t(t) * width;
    float* out = pass.registers[o.output] + int64_t(t) * width;
    const float *weight = o.norm.weight, *bias = o.norm.bias;
    float mean = 0, square = 0;
    if (o.norm.centred) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < width; i += LANES) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(tail(width - i), x + i));
        mean = _mm512_reduce_add_ps(sum) / width;
    }
    __m512 sum = _mm512_setzero_ps(), middle = _mm512_set1_ps(mean);
    for (int i = 0; i < width; i += LANES) {
        __mmask16 inside = tail(width - i);
        __m512 some = _mm512_maskz_sub_ps(inside, _mm512_maskz_loadu_ps(inside, x + i), middle);
        sum = _mm512_fmadd_ps(some, some, sum);
    }
    square = _mm512_reduce_add_ps(sum) / width;
    __m512 scale = _mm512_set1_ps(1 / std::sqrt(square + o.norm.eps)), offset = _mm512_set1_ps(o.norm.offset);
    for (int i = 0; i < width; i += LANES) {
        __mmask16 inside = tail(width - i);
        __m512 some = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(inside, x + i), middle), scale);
        if (weight) some = _mm512_mul_ps(some, _mm512_add_ps(_mm512_maskz_loadu_ps(inside, weight + i), offset));
        if (bias) some = _mm512_add_ps(some, _mm512_maskz_loadu_ps(inside, bias + i));
        _mm512_mask_storeu_ps(out + i, inside, some);
    }
}

void elementwise(const Instruction& o, const Pass& pass, int t) {
    const int width = pass.widths[o.output];
    const float* a = pass.registers[o.input] + int64_t(t) * pass.widths[o.input];
    float* out = pass.registers[o.output] + int64_t(t) * width;
    for (int i = 0; i < width; i += LANES) {
        __mmask16 inside = tail(width - i);
        __m512 x = _mm512_maskz_loadu_ps(inside, a + i);
        if (o.kind == ADD) {
            const float* b = pass.registers[o.other] + int64_t(t) * width;
            x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(inside, b + i));
        } else if (o.kind == SCALE) {
            const float* factors = o.scale.factors;
            x = _mm512_mul_ps(x, factors ? _mm512_maskz_loadu_ps(inside, factors + i) : _mm512_set1_ps(o.scale.factor));
        } else if (o.kind == ACTIVATE) {
            x = activate(x, o.activate.activation);
        } else {  // GATE: activation(first half) * second half
            x = _mm512_mul_ps(activate(x, o.activate.activation), _mm512_maskz_loadu_ps(inside, a + width + i));
        }
        _mm512_mask_storeu_ps(out + i, inside, x);
    }
}

// A thread runs consecutive instructions of this kind without waiting for the others.
bool is_tokenwise(const Instruction& o) { return o.kind != LINEAR && o.kind != ATTENTION; }

}  // namespace
