// The selective state space of Mamba over whole rows, with gradients (nn/ops/selective_scan.py has the definition).
//
// Features are independent of each other: a task is SCAN_FEATURES of them in one row, token after token, and their h
// stays in the first cache. The forward pass stores h before every SCAN_SEGMENT tokens; the backward pass recomputes
// the h of a segment from there, and walks through it from its end.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace {

inline __m512 power_of_two(__m512 x) {  // 2^n · 2^r, |r| ≤ ½, by a polynomial that is exact to 2e-8
    x = _mm512_max_ps(_mm512_set1_ps(-150), x);  // in this order it keeps a NaN
    const __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
    __m512 sum = _mm512_set1_ps(1.5461445e-4f);
    for (float term : {1.3400428e-3f, 9.6180569e-3f, 5.5503272e-2f, 0.24022651f, 0.69314718f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
    return _mm512_scalef_ps(sum, n);
}

struct ScanTask {
    static constexpr int VECTORS = SCAN_FEATURES / LANES;
    struct Lines {  // one number of each feature
        __m512 at[VECTORS];
    };

    const SelectiveScan& s;
    const int row, block, first, length;
    __mmask16 inside[VECTORS];
    std::vector<float>& memory;

    ScanTask(const SelectiveScan& s, int task, std::vector<float>& memory)
        : s(s), row(task % s.rows), block(task / s.rows), first(block * SCAN_FEATURES),
          length(s.lengths ? s.lengths[row] : s.time), memory(memory) {
        for (int v = 0; v < VECTORS; v++) inside[v] = tail(std::max(0, s.width - first - v * LANES));
    }

    Lines read(const float* x) const {
        Lines found;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found.at[v] = _mm512_maskz_loadu_ps(inside[v], x + first + v * LANES);
        return found;
    }
    void write(float* x, const Lines& some) const {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) _mm512_mask_storeu_ps(x + first + v * LANES, inside[v], some.at[v]);
    }
    __m512 time_step(__m512 x) const {  // a NaN stays one
        return _mm512_fmadd_ps(x, _mm512_setzero_ps(), activate(x, SOFTPLUS));
    }
    int64_t token(int t) const { return (int64_t(row) * s.time + t) * s.width; }
    int64_t state(int n) const { return (int64_t(row) * s.states + n) * s.width; }
    float* start(int segment) const { return s.starts + int64_t(segment) * s.rows * s.states * s.width; }

    // Of all states: (states, SCAN_FEATURES), in `to`.
    void gather(const float* from, float* to) const {
        for (int n = 0; n < s.states; n++) {
            const Lines some = read(from + state(n));
            for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(to + n * SCAN_FEATURES + v * LANES, some.at[v]);
        }
    }
    void scatter(const float* from, float* to) const {
        for (int n = 0; n < s.states; n++)
            for (int v = 0; v < VECTORS; v++)
                _mm512_mask_storeu_ps(to + state(n) + first + v * LANES, inside[v],
                                      _mm512_loadu_ps(from + n * SCAN_FEATURES + v * LANES));
    }
    void rates(float* to) const {  // A / ln 2
        for (int n = 0; n < s.states; n++) {
            const Lines some = read(s.a + int64_t(n) * s.width);
            for (int v = 0; v < VECTORS; v++)
                _mm512_storeu_ps(to + n * SCAN_FEATURES + v * LANES,
                                 _mm512_mul_ps(some.at[v], _mm512_set1_ps(1.44269504f)));
        }
    }

    void forward() {
        const int states = s.states, size = states * SCAN_FEATURES;
        memory.resize(2 * size);
        float *h = memory.data(), *a = h + size;
        gather(s.state, h), rates(a);
        const Lines skip = read(s.skip), bias = read(s.bias), none = {};
        for (int t = 0; t < s.time; t++) {
            if (s.starts && t % SCAN_SEGMENT == 0) scatter(h, start(t / SCAN_SEGMENT));
            if (t >= length) {
                write(s.y + token(t), none);
                continue;
            }
            const Lines x = read(s.x + token(t)), steps = read(s.steps + token(t));
            const float *b = s.b + (int64_t(row) * s.time + t) * states, *c = s.c + (int64_t(row) * s.time + t) * states;
            Lines dt, added, y;
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                dt.at[v] = time_step(_mm512_add_ps(steps.at[v], bias.at[v]));
                added.at[v] = _mm512_mul_ps(dt.at[v], x.at[v]);
                y.at[v] = _mm512_mul_ps(skip.at[v], x.at[v]);
            }
            for (int n = 0; n < states; n++) {
                const __m512 in = _mm512_set1_ps(b[n]), seen = _mm512_set1_ps(c[n]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    const int i = n * SCAN_FEATURES + v * LANES;
                    const __m512 kept = power_of_two(_mm512_mul_ps(dt.at[v], _mm512_loadu_ps(a + i)));
                    const __m512 now = _mm512_fmadd_ps(kept, _mm512_loadu_ps(h + i), _mm512_mul_ps(added.at[v], in));
                    _mm512_storeu_ps(h + i, now);
                    y.at[v] = _mm512_fmadd_ps(seen, now, y.at[v]);
                }
            }
            write(s.y + token(t), y);
        }
        scatter(h, s.last);
    }

    // The gradient g of h_t follows the recurrence from the end: g_t = C_t ∂y_t + e^{Δ_{t+1} A} g_{t+1}.
    void backward() {
        const int states = s.states, size = states * SCAN_FEATURES;
        memory.resize((2 * SCAN_SEGMENT + 4) * size + SCAN_SEGMENT * SCAN_FEATURES);
        float *g = memory.data(), *a = g + size, *on_a = a + size;
        float *h = on_a + size, *decay = h + (SCAN_SEGMENT + 1) * size, *steps = decay + SCAN_SEGMENT * size;
        gather(s.d_last, g), rates(a);
        std::memset(on_a, 0, size * sizeof(float));
        const Lines skip = read(s.skip), bias = read(s.bias), none = {};
        Lines on_bias = {}, on_skip = {};
        for (int t = length; t < s.time; t++) {
            write(s.dx + token(t), none), write(s.d_steps + token(t), none);
            std::memset(partial(s.d_b, t), 0, states * sizeof(float));
            std::memset(partial(s.d_c, t), 0, states * sizeof(float));
        }
        for (int segment = (length - 1) / SCAN_SEGMENT; segment >= 0 && length; segment--) {
            const int begin = segment * SCAN_SEGMENT, end = std::min(length, begin + SCAN_SEGMENT);
            gather(start(segment), h);
            for (int t = begin, k = 0; t < end; t++, k++)
                recompute(t, bias, a, h + k * size, decay + k * size, steps + k * SCAN_FEATURES);
            for (int t = end - 1; t >= begin; t--) {
                const float *before = h + (t - begin) * size, *now = before + size, *fade = decay + (t - begin) * size;
                const Lines x = read(s.x + token(t)), dy = read(s.dy + token(t));
                const float* b = s.b + (int64_t(row) * s.time + t) * states;
                const float* c = s.c + (int64_t(row) * s.time + t) * states;
                Lines dt, added, on_added = {}, on_log = {};  // Δ x; the latter of Δ / ln 2
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    dt.at[v] = _mm512_loadu_ps(steps + (t - begin) * SCAN_FEATURES + v * LANES);
                    added.at[v] = _mm512_mul_ps(dt.at[v], x.at[v]);
                    on_skip.at[v] = _mm512_fmadd_ps(dy.at[v], x.at[v], on_skip.at[v]);
                }
                for (int n = 0; n < states; n += 4) {
                    __m512 of_b[4], of_c[4];
                    for (int k = 0; k < 4; k++) {
                        of_b[k] = of_c[k] = _mm512_setzero_ps();
                        if (n + k >= states) continue;
                        const __m512 in = _mm512_set1_ps(b[n + k]), seen = _mm512_set1_ps(c[n + k]);
#pragma GCC unroll 4
                        for (int v = 0; v < VECTORS; v++) {
                            const int i = (n + k) * SCAN_FEATURES + v * LANES;
                            const __m512 slope = _mm512_fmadd_ps(seen, dy.at[v], _mm512_loadu_ps(g + i));
                            of_c[k] = _mm512_fmadd_ps(dy.at[v], _mm512_loadu_ps(now + i), of_c[k]);
                            of_b[k] = _mm512_fmadd_ps(slope, added.at[v], of_b[k]);
                            on_added.at[v] = _mm512_fmadd_ps(in, slope, on_added.at[v]);
                            const __m512 passed = _mm512_mul_ps(slope, _mm512_loadu_ps(fade + i));
                            _mm512_storeu_ps(g + i, passed);
                            const __m512 log = _mm512_mul_ps(passed, _mm512_loadu_ps(before + i));
                            on_log.at[v] = _mm512_fmadd_ps(log, _mm512_loadu_ps(a + i), on_log.at[v]);
                            _mm512_storeu_ps(on_a + i, _mm512_fmadd_ps(log, dt.at[v], _mm512_loadu_ps(on_a + i)));
                        }
                    }
                    const __mmask8 some = states - n >= 4 ? 15 : (1 << (states - n)) - 1;
                    _mm_mask_storeu_ps(partial(s.d_b, t) + n, some, four_sums(of_b[0], of_b[1], of_b[2], of_b[3]));
                    _mm_mask_storeu_ps(partial(s.d_c, t) + n, some, four_sums(of_c[0], of_c[1], of_c[2], of_c[3]));
                }
                Lines dx, d_steps;
                const Lines given = read(s.steps + token(t));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    dx.at[v] = _mm512_fmadd_ps(on_added.at[v], dt.at[v], _mm512_mul_ps(skip.at[v], dy.at[v]));
                    const __m512 d_dt = _mm512_fmadd_ps(on_added.at[v], x.at[v],
                                                        _mm512_mul_ps(on_log.at[v], _mm512_set1_ps(0.69314718f)));
                    d_steps.at[v] = _mm512_mul_ps(d_dt, sigmoid(_mm512_add_ps(given.at[v], bias.at[v])));
                    on_bias.at[v] = _mm512_add_ps(on_bias.at[v], d_steps.at[v]);
                }
                write(s.dx + token(t), dx), write(s.d_steps + token(t), d_steps);
            }
        }
        scatter(g, s.d_state), scatter(on_a, s.d_a);
        write(s.d_bias + int64_t(row) * s.width, on_bias), write(s.d_skip + int64_t(row) * s.width, on_skip);
    }

   private:
    float* partial(float* of, int t) const {  // (blocks, rows, time, states): sums over the features of a block
        return of + ((int64_t(block) * s.rows + row) * s.time + t) * s.states;
    }

    // h after a token follows h before it.
    void recompute(int t, const Lines& bias, const float* a, float* h, float* decay, float* kept_steps) const {
        const int states = s.states, size = states * SCAN_FEATURES;
        const Lines x = read(s.x + token(t)), steps = read(s.steps + token(t));
        const float* b = s.b + (int64_t(row) * s.time + t) * states;
        Lines dt, added;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            dt.at[v] = time_step(_mm512_add_ps(steps.at[v], bias.at[v]));
            _mm512_storeu_ps(kept_steps + v * LANES, dt.at[v]);
            added.at[v] = _mm512_mul_ps(dt.at[v], x.at[v]);
        }
        for (int n = 0; n < states; n++) {
            const __m512 in = _mm512_set1_ps(b[n]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int i = n * SCAN_FEATURES + v * LANES;
                const __m512 fade = power_of_two(_mm512_mul_ps(dt.at[v], _mm512_loadu_ps(a + i)));
                _mm512_storeu_ps(decay + i, fade);
                const __m512 now = _mm512_fmadd_ps(fade, _mm512_loadu_ps(h + i), _mm512_mul_ps(added.at[v], in));
                _mm512_storeu_ps(h + size + i, now);
            }
        }
    }
};

struct ScanWork : Work {
    const SelectiveScan& scan;
    std::vector<std::vector<float>> memory;  // of each thread

    ScanWork(const SelectiveScan& given) : scan(given), memory(std::max(1, given.threads)) {
        phases = 1, chunks = count_chunks, run = run_chunk;
    }
    int64_t tasks() const { return int64_t(scan.rows) * ((scan.width + SCAN_FEATURES - 1) / SCAN_FEATURES); }
    static int count_chunks(const Work& work, int) {
        return int(std::min<int64_t>(static_cast<const ScanWork&>(work).tasks(), MAX_CHUNKS));
    }
    static void run_chunk(const Work& work, int, int chunk, int thread) {
        ScanWork& self = const_cast<ScanWork&>(static_cast<const ScanWork&>(work));
        for (int64_t task = chunk; task < self.tasks(); task += MAX_CHUNKS) {
            ScanTask one(self.scan, int(task), self.memory[thread]);
            if (self.scan.dy) one.backward();
            else one.forward();
        }
    }
};

}  // namespace
