// Instructions that read one token at a time.
#pragma once

#include <cmath>
#include <cstring>

#include "simd.h"

namespace {

inline int position_of(const Pass& pass, int t) {  // 0 of padding
    const int row = t / pass.time, i = t % pass.time;
    return i < pass.lengths[row] ? pass.starts[row] + i : 0;
}

void embed(const Instruction& o, const Pass& pass, int t) {
    const EmbedArgs& args = o.embed;
    const int width = o.width;
    const int64_t token = pass.tokens[t];
    const float* added =
        args.positions < 0 ? nullptr : pass.tables[args.positions] + int64_t(position_of(pass, t)) * width;
    float* out = output_of(o, pass, t);
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

void norm_group(const NormArgs& args, const float* x, float* out, int width) {
    const float *weight = args.weight, *bias = args.bias;
    float mean = 0, square = 0;
    if (args.centred) {
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
    __m512 scale = _mm512_set1_ps(1 / std::sqrt(square + args.eps)), offset = _mm512_set1_ps(args.offset);
    for (int i = 0; i < width; i += LANES) {
        __mmask16 inside = tail(width - i);
        __m512 some = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(inside, x + i), middle), scale);
        if (weight) some = _mm512_mul_ps(some, _mm512_add_ps(_mm512_maskz_loadu_ps(inside, weight + i), offset));
        if (bias) some = _mm512_add_ps(some, _mm512_maskz_loadu_ps(inside, bias + i));
        _mm512_mask_storeu_ps(out + i, inside, some);
    }
}

void norm(const Instruction& o, const Pass& pass, int t) {
    const float* x = input_of(o, pass, t);
    float* out = output_of(o, pass, t);
    const int width = o.width / o.norm.groups;
    for (int group = 0; group < o.norm.groups; group++) norm_group(o.norm, x + group * width, out + group * width, width);
}

void softmax(const Instruction& o, const Pass& pass, int t) {
    const int width = o.width / o.softmax.groups;
    for (int group = 0; group < o.softmax.groups; group++) {
        const float* x = input_of(o, pass, t) + group * width;
        float* out = output_of(o, pass, t) + group * width;
        __m512 high = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int i = 0; i < width; i += LANES)
            high = _mm512_max_ps(high, _mm512_mask_loadu_ps(high, tail(width - i), x + i));
        const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(high));
        for (int i = 0; i < width; i += LANES) {
            const __mmask16 inside = tail(width - i);
            const __m512 some = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(inside, x + i), top));
            total = _mm512_mask_add_ps(total, inside, total, some);
            _mm512_mask_storeu_ps(out + i, inside, some);
        }
        const float share = 1 / _mm512_reduce_add_ps(total);
        for (int i = 0; i < width; i++) out[i] *= share;
    }
}

// One head (nn/positions/rotary.py), in place; the sines stand after the cosines.
inline void turn(float* __restrict x, const float* __restrict cosines, int planes, bool interleaved) {
    const float* __restrict sines = cosines + planes;
    const auto plane = [&](int i, int first, int second) {
        const float a = x[first], b = x[second];
        x[first] = a * cosines[i] - b * sines[i];
        x[second] = b * cosines[i] + a * sines[i];
    };
    if (interleaved)
        for (int i = 0; i < planes; i++) plane(i, 2 * i, 2 * i + 1);
    else
        for (int i = 0; i < planes; i++) plane(i, i, planes + i);
}

void rotate(const Instruction& o, const Pass& pass, int t) {
    const RotateArgs& args = o.rotate;
    const float* table = pass.tables[args.table] + int64_t(position_of(pass, t)) * 2 * args.planes;
    for (int head = 0; head < args.heads; head++)
        turn(output_of(o, pass, t) + head * args.head_width, table, args.planes, args.interleaved);
}

void elementwise(const Instruction& o, const Pass& pass, int t) {
    const int width = o.width;
    const float *a = input_of(o, pass, t), *b = o.other < 0 ? nullptr : other_of(o, pass, t);
    float* out = output_of(o, pass, t);
    for (int i = 0; i < width; i += LANES) {
        __mmask16 inside = tail(width - i);
        __m512 x = _mm512_maskz_loadu_ps(inside, a + i);
        if (o.kind == ADD) {
            x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(inside, b + i));
        } else if (o.kind == SCALE) {
            const float *factors = o.scale.factors, *added = o.scale.added;
            x = _mm512_mul_ps(x, factors ? _mm512_maskz_loadu_ps(inside, factors + i) : _mm512_set1_ps(o.scale.factor));
            if (added) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(inside, added + i));
        } else if (o.kind == ACTIVATE) {
            x = activate(x, o.activate.activation);
        } else if (o.kind == GATE) {
            x = _mm512_mul_ps(activate(x, o.activate.activation), _mm512_maskz_loadu_ps(inside, b + i));
        } else if (o.kind == LERP) {  // from `other` to `input`
            const __m512 y = _mm512_maskz_loadu_ps(inside, b + i);
            x = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(inside, o.scale.factors + i), _mm512_sub_ps(x, y), y);
        }  // COPY: as it is
        _mm512_mask_storeu_ps(out + i, inside, x);
    }
}

}  // namespace
