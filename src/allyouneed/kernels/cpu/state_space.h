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
        const __mmask16 inside = tail(width - i);
        const __m512 now = _mm512_maskz_loadu_ps(inside, x + i);
        __m512 sum = args.bias ? _mm512_maskz_loadu_ps(inside, args.bias + i) : _mm512_setzero_ps();
        for (int j = 0; j < before; j++) {
            float* at = seen + int64_t(j) * width + i;
            const __m512 some = _mm512_maskz_loadu_ps(inside, at);
            sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(inside, args.weight + int64_t(j) * width + i), some, sum);
            if (j) _mm512_mask_storeu_ps(at - width, inside, some);
        }
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(inside, args.weight + int64_t(before) * width + i), now, sum);
        if (before) _mm512_mask_storeu_ps(seen + int64_t(before - 1) * width + i, inside, now);
        _mm512_mask_storeu_ps(out + i, inside, activate(sum, args.activation));
    }
}

// Mamba (nn/ops/selective_scan.py)
void scan(const Instruction& o, const Pass& pass, int row, int first, int last) {
    const ScanArgs& args = o.scan;
    const int width = o.width, states = args.states;
    const float *x = input_of(o, pass, row), *b = other_of(o, pass, row), *c = b + states;
    float *h = carry_of(pass.memories[args.memory], args.part, row), *out = output_of(o, pass, row);
    __m512 dt[4], added[4], y[4];
    __mmask16 inside[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        const int i = first + n * LANES;
        inside[n] = tail(std::max(0, last - i));
        const __m512 some = _mm512_maskz_loadu_ps(inside[n], x + i);
        dt[n] = activate(_mm512_maskz_loadu_ps(inside[n], x + width + i), SOFTPLUS);
        added[n] = _mm512_mul_ps(dt[n], some);
        y[n] = _mm512_mul_ps(_mm512_maskz_loadu_ps(inside[n], args.skip + i), some);
    }
    for (int k = 0; k < states; k++) {
        const float* decay = args.decay + int64_t(k) * width + first;
        float* line = h + int64_t(k) * width + first;
        const __m512 in = _mm512_set1_ps(b[k]), seen = _mm512_set1_ps(c[k]);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            const __m512 kept = exponential(_mm512_mul_ps(dt[n], _mm512_maskz_loadu_ps(inside[n], decay + n * LANES)));
            const __m512 old = _mm512_maskz_loadu_ps(inside[n], line + n * LANES);
            const __m512 now = _mm512_fmadd_ps(kept, old, _mm512_mul_ps(added[n], in));
            _mm512_mask_storeu_ps(line + n * LANES, inside[n], now);
            y[n] = _mm512_fmadd_ps(seen, now, y[n]);
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) _mm512_mask_storeu_ps(out + first + n * LANES, inside[n], y[n]);
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
        const __m512 u = _mm512_set1_ps(x[f]), back = _mm512_set1_ps(args.low_rank ? -dot(g, h, size) : 0);
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < n; i += LANES) {
            const __mmask16 inside = tail(n - i);
            const __m512 re = load(h + i, inside), im = load(h + n + i, inside);
            const __m512 turn = load(a + i, inside), cross = load(a + n + i, inside);
            __m512 new_re = _mm512_fmadd_ps(load(b + i, inside), u, _mm512_mul_ps(turn, re));
            __m512 new_im = _mm512_fmadd_ps(load(b + n + i, inside), u, _mm512_mul_ps(turn, im));
            new_re = _mm512_fnmadd_ps(cross, im, new_re), new_im = _mm512_fmadd_ps(cross, re, new_im);
            if (args.low_rank) {
                new_re = _mm512_fmadd_ps(load(w + i, inside), back, new_re);
                new_im = _mm512_fmadd_ps(load(w + n + i, inside), back, new_im);
            }
            _mm512_mask_storeu_ps(h + i, inside, new_re);
            _mm512_mask_storeu_ps(h + n + i, inside, new_im);
            sum = _mm512_fmadd_ps(load(c + i, inside), new_re, sum);
            sum = _mm512_fmadd_ps(load(c + n + i, inside), new_im, sum);
        }
        out[f] = _mm512_reduce_add_ps(sum) + args.skip[f] * x[f];
    }
}

}  // namespace
