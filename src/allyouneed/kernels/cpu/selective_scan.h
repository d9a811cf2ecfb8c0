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

inline Floats power_of_two(Floats x) {  // 2^n · 2^r, |r| ≤ ½, by a polynomial that is exact to 2e-8
    x = larger(fill(-150), x);  // in this order it keeps a NaN
    const Floats n = nearest(x), r = x - n;
    Floats sum = fill(1.5461445e-4f);
    for (float term : {1.3400428e-3f, 9.6180569e-3f, 5.5503272e-2f, 0.24022651f, 0.69314718f, 1.0f})
        sum = fmadd(sum, r, fill(term));
    return times_any_power(sum, n);
}

struct ScanTask {
    static constexpr int VECTORS = SCAN_FEATURES / LANES;
    struct Lines {  // one number of each feature
        Floats at[VECTORS];
    };

    const SelectiveScan& s;
    const int row, block, first, length;
    Tail inside[VECTORS];
    std::vector<float>& memory;

    ScanTask(const SelectiveScan& s, int task, std::vector<float>& memory)
        : s(s), row(task % s.rows), block(task / s.rows), first(block * SCAN_FEATURES),
          length(s.lengths ? s.lengths[row] : s.time), memory(memory) {
        for (int v = 0; v < VECTORS; v++) inside[v] = tail(std::max(0, s.width - first - v * LANES));
    }

    Lines read(const float* x) const {
        Lines found;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) found.at[v] = load(x + first + v * LANES, inside[v]);
        return found;
    }
    void write(float* x, const Lines& some) const {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(x + first + v * LANES, some.at[v], inside[v]);
    }
    Floats time_step(Floats x) const {  // a NaN stays one
        return fmadd(x, zeros(), activate(x, SOFTPLUS));
    }
    int64_t token(int t) const { return (int64_t(row) * s.time + t) * s.width; }
    int64_t state(int n) const { return (int64_t(row) * s.states + n) * s.width; }
    float* start(int segment) const { return s.starts + int64_t(segment) * s.rows * s.states * s.width; }

    // Of all states: (states, SCAN_FEATURES), in `to`.
    void gather(const float* from, float* to) const {
        for (int n = 0; n < s.states; n++) {
            const Lines some = read(from + state(n));
            for (int v = 0; v < VECTORS; v++) store(to + n * SCAN_FEATURES + v * LANES, some.at[v]);
        }
    }
    void scatter(const float* from, float* to) const {
        for (int n = 0; n < s.states; n++)
            for (int v = 0; v < VECTORS; v++)
                store(to + state(n) + first + v * LANES, load(from + n * SCAN_FEATURES + v * LANES), inside[v]);
    }
    void rates(float* to) const {  // A / ln 2
        for (int n = 0; n < s.states; n++) {
            const Lines some = read(s.a + int64_t(n) * s.width);
            for (int v = 0; v < VECTORS; v++)
                store(to + n * SCAN_FEATURES + v * LANES, some.at[v] * fill(1.44269504f));
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
                dt.at[v] = time_step(steps.at[v] + bias.at[v]);
                added.at[v] = dt.at[v] * x.at[v];
                y.at[v] = skip.at[v] * x.at[v];
            }
            for (int n = 0; n < states; n++) {
                const Floats in = fill(b[n]), seen = fill(c[n]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    const int i = n * SCAN_FEATURES + v * LANES;
                    const Floats kept = power_of_two(dt.at[v] * load(a + i));
                    const Floats now = fmadd(kept, load(h + i), added.at[v] * in);
                    store(h + i, now);
                    y.at[v] = fmadd(seen, now, y.at[v]);
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
                    dt.at[v] = load(steps + (t - begin) * SCAN_FEATURES + v * LANES);
                    added.at[v] = dt.at[v] * x.at[v];
                    on_skip.at[v] = fmadd(dy.at[v], x.at[v], on_skip.at[v]);
                }
                for (int n = 0; n < states; n += 4) {
                    Floats of_b[4], of_c[4];
                    for (int k = 0; k < 4; k++) {
                        of_b[k] = of_c[k] = zeros();
                        if (n + k >= states) continue;
                        const Floats in = fill(b[n + k]), seen = fill(c[n + k]);
#pragma GCC unroll 4
                        for (int v = 0; v < VECTORS; v++) {
                            const int i = (n + k) * SCAN_FEATURES + v * LANES;
                            const Floats slope = fmadd(seen, dy.at[v], load(g + i));
                            of_c[k] = fmadd(dy.at[v], load(now + i), of_c[k]);
                            of_b[k] = fmadd(slope, added.at[v], of_b[k]);
                            on_added.at[v] = fmadd(in, slope, on_added.at[v]);
                            const Floats passed = slope * load(fade + i);
                            store(g + i, passed);
                            const Floats log = passed * load(before + i);
                            on_log.at[v] = fmadd(log, load(a + i), on_log.at[v]);
                            store(on_a + i, fmadd(log, dt.at[v], load(on_a + i)));
                        }
                    }
                    store_four(partial(s.d_b, t) + n, four_sums(of_b[0], of_b[1], of_b[2], of_b[3]), states - n);
                    store_four(partial(s.d_c, t) + n, four_sums(of_c[0], of_c[1], of_c[2], of_c[3]), states - n);
                }
                Lines dx, d_steps;
                const Lines given = read(s.steps + token(t));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    dx.at[v] = fmadd(on_added.at[v], dt.at[v], skip.at[v] * dy.at[v]);
                    const Floats d_dt = fmadd(on_added.at[v], x.at[v], on_log.at[v] * fill(0.69314718f));
                    d_steps.at[v] = d_dt * sigmoid(given.at[v] + bias.at[v]);
                    on_bias.at[v] = on_bias.at[v] + d_steps.at[v];
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
            dt.at[v] = time_step(steps.at[v] + bias.at[v]);
            store(kept_steps + v * LANES, dt.at[v]);
            added.at[v] = dt.at[v] * x.at[v];
        }
        for (int n = 0; n < states; n++) {
            const Floats in = fill(b[n]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int i = n * SCAN_FEATURES + v * LANES;
                const Floats fade = power_of_two(dt.at[v] * load(a + i));
                store(decay + i, fade);
                const Floats now = fmadd(fade, load(h + i), added.at[v] * in);
                store(h + size + i, now);
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
