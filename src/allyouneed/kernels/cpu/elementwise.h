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
            const Tail inside = tail(width - i);
            const int64_t at = token * width + i;
            const Floats some = args.format == FLOAT32 ? load((const float*)args.weight + at, inside)
                                                       : load((const uint16_t*)args.weight + at, inside);
            store(out + i, some, inside);
        }
    }
    for (int i = 0; i < width; i++) out[i] = out[i] * args.scale + (added ? added[i] : 0);
}

void norm_group(const NormArgs& args, const float* x, float* out, int width) {
    const float *weight = args.weight, *bias = args.bias;
    float mean = 0, square = 0;
    if (args.centred) {
        Floats sum = zeros();
        for (int i = 0; i < width; i += LANES) sum = sum + load(x + i, tail(width - i));
        mean = sum_of(sum) / width;
    }
    Floats sum = zeros(), middle = fill(mean);
    for (int i = 0; i < width; i += LANES) {
        Tail inside = tail(width - i);
        Floats some = keep(load(x + i, inside) - middle, inside);
        sum = fmadd(some, some, sum);
    }
    square = sum_of(sum) / width;
    Floats scale = fill(1 / std::sqrt(square + args.eps)), offset = fill(args.offset);
    for (int i = 0; i < width; i += LANES) {
        Tail inside = tail(width - i);
        Floats some = (load(x + i, inside) - middle) * scale;
        if (weight) some = some * (load(weight + i, inside) + offset);
        if (bias) some = some + load(bias + i, inside);
        store(out + i, some, inside);
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
        Floats high = fill(-INFINITY), total = zeros();
        for (int i = 0; i < width; i += LANES)
            high = larger(high, load(x + i, tail(width - i), high));
        const Floats top = fill(largest_of(high));
        for (int i = 0; i < width; i += LANES) {
            const Tail inside = tail(width - i);
            const Floats some = exponential(load(x + i, inside) - top);
            total = total + keep(some, inside);
            store(out + i, some, inside);
        }
        const float share = 1 / sum_of(total);
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
        Tail inside = tail(width - i);
        Floats x = load(a + i, inside);
        if (o.kind == ADD) {
            x = x + load(b + i, inside);
        } else if (o.kind == SCALE) {
            const float *factors = o.scale.factors, *added = o.scale.added;
            x = x * (factors ? load(factors + i, inside) : fill(o.scale.factor));
            if (added) x = x + load(added + i, inside);
        } else if (o.kind == ACTIVATE) {
            x = activate(x, o.activate.activation);
        } else if (o.kind == GATE) {
            x = activate(x, o.activate.activation) * load(b + i, inside);
        } else if (o.kind == LERP) {  // from `other` to `input`
            const Floats y = load(b + i, inside);
            x = fmadd(load(o.scale.factors + i, inside), x - y, y);
        }  // COPY: as it is
        store(out + i, x, inside);
    }
}

}  // namespace
