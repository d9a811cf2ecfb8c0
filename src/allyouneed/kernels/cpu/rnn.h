// LSTM and GRU over whole rows, with gradients (nn/ops/rnn.py has the definition). What the gates get from the inputs is
// computed before, and the gradient of the weights after it, each as one product of all tokens; here is only what
// depends on the token before. A step of all rows is the product of their states with the weights, some features at a
// time, and the gates of these features. Walking back, it is the product of the next token's gradients with the weights,
// and the gradients of the gates.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "pool.h"
#include "simd.h"

namespace {

// A gate that is not a number stays one.
inline __m512 gate_of(__m512 x, __m512 found) {
    return _mm512_mask_mov_ps(found, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
inline __m512 soft_gate(__m512 x) { return gate_of(x, sigmoid(x)); }
inline __m512 soft_value(__m512 x) { return gate_of(x, tanh_(x)); }
inline __m512 sigmoid_slope(__m512 y) { return _mm512_fnmadd_ps(y, y, y); }
inline __m512 tanh_slope(__m512 y) { return _mm512_fnmadd_ps(y, y, _mm512_set1_ps(1)); }

// Some features of some rows: those of a block, at most TILE_TOKENS of these.
struct RnnTile {
    const RnnLayer& l;
    const int begin, count, first;  // of the rows, and of the features
    const float* panels;            // the weights of this block
    const int64_t time, hidden, gates;

    RnnTile(const RnnLayer& l, int begin, int end, int block)
        : l(l), begin(begin), count(end - begin), first(block * RNN_FEATURES), time(l.time), hidden(l.hidden),
          gates(l.cell == LSTM_CELL ? 4 : 3) {
        panels = l.weight + block * gates * hidden * RNN_FEATURES;
    }

    // x (inputs, `step` from row to row) times the rows of the weights from `line` on: (count, RNN_FEATURES).
    void product(int64_t line, int64_t inputs, const float* x, int64_t step, float* out) const {
        in_tiles(count, [&](auto rows) {
            column_sums<decltype(rows)::value>(panels + line * RNN_FEATURES, int(inputs), RNN_FEATURES, x, step, out,
                                               RNN_FEATURES, RNN_FEATURES);
        });
    }

    int64_t token(int64_t row, int64_t t) const { return row * time + t; }
    bool is_real(int64_t row, int64_t t) const { return t < (l.lengths ? l.lengths[row] : time); }
    const float* before(const float* start, const float* all, int64_t row, int64_t t) const {  // of h or c
        return t ? all + token(row, t - 1) * hidden : start + row * hidden;
    }
    int64_t step_before(int64_t t) const { return t ? time * hidden : hidden; }

    // Calls `change` with the row, the index of some features, which of them are inside, and their index in a product.
    template <typename Change>
    void each(Change change) const {
        for (int row = 0; row < count; row++)
            for (int i = 0; i < RNN_FEATURES && first + i < hidden; i += LANES)
                change(int64_t(begin + row), int64_t(first + i), tail(int(hidden) - first - i), row * RNN_FEATURES + i);
    }

    __m512 seen(int64_t row, int64_t t, int gate, int64_t i, __mmask16 inside) const {
        return load(l.seen + (token(row, t) * gates + gate) * hidden + i, inside);
    }
    float* kept(int64_t row, int64_t t, int gate, int64_t i) const {
        return l.gates + (token(row, t) * 4 + gate) * hidden + i;
    }
    void zero(float* x, int64_t row, int64_t t, int64_t i, __mmask16 inside) const {
        if (x) _mm512_mask_storeu_ps(x + token(row, t) * hidden + i, inside, _mm512_setzero_ps());
    }

    // --- forward ------------------------------------------------------------------------------------------------------

    // GRU_RESET_FIRST has two stages: r and z, then the rest.
    void forward(int64_t t, int stage) const {
        bool any = false;
        for (int row = begin; row < begin + count; row++) any |= is_real(row, t);
        float sums[4][TILE_TOKENS * RNN_FEATURES];
        const bool split = l.cell == GRU_RESET_FIRST;
        if (any && stage) {
            product(2 * hidden, hidden, kept(begin, t, 3, 0), time * 4 * hidden, sums[2]);
        } else if (any) {
            const float* h = before(l.h, l.y, begin, t);
            for (int g = 0; g < (split ? 2 : gates); g++) product(g * hidden, hidden, h, step_before(t), sums[g]);
        }
        each([&](int64_t row, int64_t i, __mmask16 inside, int at) {
            if (!is_real(row, t)) {
                if (split) _mm512_mask_storeu_ps(kept(row, t, 3, i), inside, _mm512_setzero_ps());
                return zero(l.y, row, t, i, inside), zero(l.cells, row, t, i, inside);
            }
            const auto gate = [&](int g) {
                return _mm512_add_ps(seen(row, t, g, i, inside), _mm512_loadu_ps(sums[g] + at));
            };
            const auto keep = [&](int g, __m512 x) { _mm512_mask_storeu_ps(kept(row, t, g, i), inside, x); };
            const int64_t now = token(row, t) * hidden + i;
            if (l.cell == LSTM_CELL) {
                const __m512 in = soft_gate(gate(0)), forget = soft_gate(gate(1));
                const __m512 value = soft_value(gate(2)), out = soft_gate(gate(3));
                const __m512 old = load(before(l.c, l.cells, row, t) + i, inside);
                const __m512 c = _mm512_fmadd_ps(in, value, _mm512_mul_ps(forget, old));
                keep(0, in), keep(1, forget), keep(2, value), keep(3, out);
                _mm512_mask_storeu_ps(l.cells + now, inside, c);
                _mm512_mask_storeu_ps(l.y + now, inside, _mm512_mul_ps(out, soft_value(c)));
                return;
            }
            const __m512 old = load(before(l.h, l.y, row, t) + i, inside);
            __m512 z, n;
            if (!stage) {
                const __m512 r = soft_gate(gate(0));
                z = soft_gate(gate(1));
                keep(0, r), keep(1, z);
                if (split) return keep(3, _mm512_mul_ps(r, old));
                __m512 own = _mm512_loadu_ps(sums[2] + at);
                if (l.bias) own = _mm512_add_ps(own, load(l.bias + i, inside));
                n = soft_value(_mm512_fmadd_ps(r, own, seen(row, t, 2, i, inside)));
                keep(3, own);
            } else {
                z = load(kept(row, t, 1, i), inside), n = soft_value(gate(2));
            }
            keep(2, n);
            _mm512_mask_storeu_ps(l.y + now, inside, _mm512_fmadd_ps(z, _mm512_sub_ps(old, n), n));
        });
    }

    // --- backward -----------------------------------------------------------------------------------------------------

    // What the state before token t gets from the gradients of its gates, without the part of n that GRU_RESET_FIRST
    // has by itself.
    void passed_back(int64_t t, float* sums) const {
        const int64_t lines = l.cell == LSTM_CELL ? 4 * hidden : 2 * hidden;
        product(0, lines, l.d_seen + token(begin, t) * gates * hidden, time * gates * hidden, sums);
        if (l.cell != GRU_CELL) return;
        float own[TILE_TOKENS * RNN_FEATURES];
        product(2 * hidden, hidden, l.d_own + token(begin, t) * hidden, time * hidden, own);
        for (int i = 0; i < count * RNN_FEATURES; i++) sums[i] += own[i];
    }

    // d_h and d_c hold what later tokens pass to h and c after token t; at t = −1, to those before the first.
    void backward(int64_t t, int stage) const {
        float sums[TILE_TOKENS * RNN_FEATURES] = {};
        if (stage && t < 0) return;
        if (stage) product(2 * hidden, hidden, l.d_seen + (token(begin, t) * 3 + 2) * hidden, time * 3 * hidden, sums);
        else if (t + 1 < time) passed_back(t + 1, sums);
        each([&](int64_t row, int64_t i, __mmask16 inside, int at) {
            float* carry = l.d_h + row * hidden + i;
            const __m512 back = _mm512_loadu_ps(sums + at);
            if (t < 0) return _mm512_mask_storeu_ps(carry, inside, _mm512_add_ps(load(carry, inside), back));
            float* d_seen = l.d_seen + token(row, t) * gates * hidden + i;
            const auto write = [&](int g, __m512 x) { _mm512_mask_storeu_ps(d_seen + g * hidden, inside, x); };
            const auto gate = [&](int g) { return load(kept(row, t, g, i), inside); };
            if (!is_real(row, t)) {
                for (int g = 0; g < gates; g++) write(g, _mm512_setzero_ps());
                return zero(l.d_own, row, t, i, inside);
            }
            const __m512 one = _mm512_set1_ps(1);
            if (stage) {  // back: the gradient of r ⊙ h
                const __m512 r = gate(0), old = load(before(l.h, l.y, row, t) + i, inside);
                write(0, _mm512_mul_ps(_mm512_mul_ps(back, old), sigmoid_slope(r)));
                return _mm512_mask_storeu_ps(carry, inside, _mm512_fmadd_ps(back, r, load(carry, inside)));
            }
            const int64_t now = token(row, t) * hidden + i;
            const __m512 dh = _mm512_add_ps(_mm512_add_ps(load(l.dy + now, inside), load(carry, inside)), back);
            if (l.cell == LSTM_CELL) {
                float* c_carry = l.d_c + row * hidden + i;
                const __m512 in = gate(0), forget = gate(1), value = gate(2), out = gate(3);
                const __m512 shown = soft_value(load(l.cells + now, inside));
                const __m512 old = load(before(l.c, l.cells, row, t) + i, inside);
                __m512 dc = _mm512_fmadd_ps(_mm512_mul_ps(dh, out), tanh_slope(shown), load(c_carry, inside));
                if (l.d_cells) dc = _mm512_add_ps(dc, load(l.d_cells + now, inside));
                write(0, _mm512_mul_ps(_mm512_mul_ps(dc, value), sigmoid_slope(in)));
                write(1, _mm512_mul_ps(_mm512_mul_ps(dc, old), sigmoid_slope(forget)));
                write(2, _mm512_mul_ps(_mm512_mul_ps(dc, in), tanh_slope(value)));
                write(3, _mm512_mul_ps(_mm512_mul_ps(dh, shown), sigmoid_slope(out)));
                return _mm512_mask_storeu_ps(c_carry, inside, _mm512_mul_ps(dc, forget));
            }
            const __m512 z = gate(1), n = gate(2), old = load(before(l.h, l.y, row, t) + i, inside);
            const __m512 dn = _mm512_mul_ps(_mm512_mul_ps(dh, _mm512_sub_ps(one, z)), tanh_slope(n));
            write(1, _mm512_mul_ps(_mm512_mul_ps(dh, _mm512_sub_ps(old, n)), sigmoid_slope(z)));
            write(2, dn);
            _mm512_mask_storeu_ps(carry, inside, _mm512_mul_ps(dh, z));
            if (l.cell == GRU_RESET_FIRST) return;
            const __m512 r = gate(0);
            write(0, _mm512_mul_ps(_mm512_mul_ps(dn, gate(3)), sigmoid_slope(r)));
            _mm512_mask_storeu_ps(l.d_own + now, inside, _mm512_mul_ps(dn, r));
        });
    }
};

// With many rows, each thread walks through the text with some of them; with few, all threads share the features of
// each step.
struct RnnWork : Work {
    const RnnLayer& layer;
    int tile, tiles, blocks, stages, steps;
    bool shared;

    explicit RnnWork(const RnnLayer& given) : layer(given) {
        const int threads = std::max(1, layer.threads);
        blocks = (layer.hidden + RNN_FEATURES - 1) / RNN_FEATURES;
        tiles = (layer.rows + TILE_TOKENS - 1) / TILE_TOKENS;
        if (layer.rows >= 2 * threads) tiles = std::min(layer.rows, (tiles + threads - 1) / threads * threads);
        tile = (layer.rows + tiles - 1) / tiles, tiles = (layer.rows + tile - 1) / tile;
        shared = tiles < threads;
        stages = layer.cell == GRU_RESET_FIRST ? 2 : 1, steps = (layer.time + bool(layer.dy)) * stages;
        phases = shared ? steps : 1, chunks = count_chunks, run = run_chunk;
    }

    void step(int number, int which, int block) const {
        const int begin = which * tile, stage = number % stages, t = number / stages;
        const RnnTile some(layer, begin, std::min(layer.rows, begin + tile), block);
        if (layer.dy) some.backward(layer.time - 1 - t, stage);
        else some.forward(t, stage);
    }
    static int count_chunks(const Work& work, int) {
        const RnnWork& self = static_cast<const RnnWork&>(work);
        return std::min(self.shared ? self.tiles * self.blocks : self.tiles, MAX_CHUNKS);
    }
    static void run_chunk(const Work& work, int phase, int chunk, int) {
        const RnnWork& self = static_cast<const RnnWork&>(work);
        if (self.shared) {
            for (int n = chunk; n < self.tiles * self.blocks; n += MAX_CHUNKS)
                self.step(phase, n / self.blocks, n % self.blocks);
            return;
        }
        for (int n = chunk; n < self.tiles; n += MAX_CHUNKS)
            for (int number = 0; number < self.steps; number++)
                for (int block = 0; block < self.blocks; block++) self.step(number, n, block);
    }
};

}  // namespace
