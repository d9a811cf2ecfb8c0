// State spaces (nn/mixers/state_space): one new token of every row.
#pragma once

#include <algorithm>
#include <cstring>

#include "recurrent.h"

namespace {

// Features are independent of each other: a task is some of them in some rows, which share the parameters it reads.
struct FeatureTasks {
    static constexpr int FEATURES = 4 * LANES, ROWS = 8;
    const Instruction& o;
    const Pass& pass;
    int blocks, groups;

    FeatureTasks(const Instruction& o, const Pass& pass)
        : o(o), pass(pass), blocks((o.width + FEATURES - 1) / FEATURES), groups((pass.rows + ROWS - 1) / ROWS) {}
    int64_t count() const { return int64_t(blocks) * groups; }
    void run(int task, void (*step)(const Instruction&, const Pass&, int row, int first, int last)) const {
        const int first = task % blocks * FEATURES, begin = task / blocks * ROWS;
        for (int row = begin; row < std::min(pass.rows, begin + ROWS); row++)
            step(o, pass, row, first, std::min(o.width, first + FEATURES));
    }
};

// The short convolution: the last inputs are a part of the carry (size − 1, width), which moves on by one.
void slide(const Instruction& o, const Pass& pass, int row) {
    const StateArgs& args = o.state;
    const int width = o.width, before = args.size - 1;
    const float* x = input_of(o, pass, row);
    float *seen = carry_of(pass.memories[args.memory], args.part, row), *out = output_of(o, pass, row);
    for (int i = 0; i < width; i += LANES) {
        const Tail inside = tail(width - i);
        const Floats now = load(x + i, inside);
        Floats sum = args.bias ? load(args.bias + i, inside) : zeros();
        for (int j = 0; j < before; j++) {
            float* at = seen + int64_t(j) * width + i;
            const Floats some = load(at, inside);
            sum = fmadd(load(args.weight + int64_t(j) * width + i, inside), some, sum);
            if (j) store(at - width, some, inside);
        }
        sum = fmadd(load(args.weight + int64_t(before) * width + i, inside), now, sum);
        if (before) store(seen + int64_t(before - 1) * width + i, now, inside);
        store(out + i, activate(sum, args.activation), inside);
    }
}

// Mamba (nn/ops/selective_scan.py)
void scan(const Instruction& o, const Pass& pass, int row, int first, int last) {
    const ScanArgs& args = o.scan;
    const int width = o.width, states = args.states;
    const float *x = input_of(o, pass, row), *b = other_of(o, pass, row), *c = b + states;
    float *h = carry_of(pass.memories[args.memory], args.part, row), *out = output_of(o, pass, row);
    Floats dt[4], added[4], y[4];
    Tail inside[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        const int i = first + n * LANES;
        inside[n] = tail(std::max(0, last - i));
        const Floats some = load(x + i, inside[n]);
        dt[n] = activate(load(x + width + i, inside[n]), SOFTPLUS);
        added[n] = dt[n] * some;
        y[n] = load(args.skip + i, inside[n]) * some;
    }
    for (int k = 0; k < states; k++) {
        const float* decay = args.decay + int64_t(k) * width + first;
        float* line = h + int64_t(k) * width + first;
        const Floats in = fill(b[k]), seen = fill(c[k]);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            const Floats kept = exponential(dt[n] * load(decay + n * LANES, inside[n]));
            const Floats old = load(line + n * LANES, inside[n]);
            const Floats now = fmadd(kept, old, added[n] * in);
            store(line + n * LANES, now, inside[n]);
            y[n] = fmadd(seen, now, y[n]);
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) store(out + first + n * LANES, y[n], inside[n]);
}

// S4 (nn/ops/state_space.py)
void state_space(const Instruction& o, const Pass& pass, int row, int first, int last) {
    const StateSpaceArgs& args = o.state_space;
    const int n = args.pairs, size = 2 * n;
    const float* x = input_of(o, pass, row);
    float *carry = carry_of(pass.memories[args.memory], args.part, row), *out = output_of(o, pass, row);
    for (int f = first; f < last; f++) {
        const float *a = args.weight + int64_t(f) * (args.low_rank ? 5 : 3) * size, *b = a + size, *c = b + size;
        const float *w = c + size, *g = w + size;
        float* h = carry + int64_t(f) * size;
        const Floats u = fill(x[f]), back = fill(args.low_rank ? -dot(g, h, size) : 0);
        Floats sum = zeros();
        for (int i = 0; i < n; i += LANES) {
            const Tail inside = tail(n - i);
            const Floats re = load(h + i, inside), im = load(h + n + i, inside);
            const Floats turn = load(a + i, inside), cross = load(a + n + i, inside);
            Floats new_re = fmadd(load(b + i, inside), u, turn * re);
            Floats new_im = fmadd(load(b + n + i, inside), u, turn * im);
            new_re = fnmadd(cross, im, new_re), new_im = fmadd(cross, re, new_im);
            if (args.low_rank) {
                new_re = fmadd(load(w + i, inside), back, new_re);
                new_im = fmadd(load(w + n + i, inside), back, new_im);
            }
            store(h + i, new_re, inside);
            store(h + n + i, new_im, inside);
            sum = fmadd(load(c + i, inside), new_re, sum);
            sum = fmadd(load(c + n + i, inside), new_im, sum);
        }
        out[f] = sum_of(sum) + args.skip[f] * x[f];
    }
}

}  // namespace
