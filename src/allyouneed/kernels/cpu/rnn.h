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
inline Floats gate_of(Floats x, Floats found) { return select(is_nan(x), x, found); }
inline Floats soft_gate(Floats x) { return gate_of(x, sigmoid(x)); }
inline Floats soft_value(Floats x) { return gate_of(x, tanh_(x)); }
inline Floats sigmoid_slope(Floats y) { return fnmadd(y, y, y); }
inline Floats tanh_slope(Floats y) { return fnmadd(y, y, fill(1)); }

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

    Floats seen(int64_t row, int64_t t, int gate, int64_t i, Tail inside) const {
        return load(l.seen + (token(row, t) * gates + gate) * hidden + i, inside);
    }
    float* kept(int64_t row, int64_t t, int gate, int64_t i) const {
        return l.gates + (token(row, t) * 4 + gate) * hidden + i;
    }
    void zero(float* x, int64_t row, int64_t t, int64_t i, Tail inside) const {
        if (x) store(x + token(row, t) * hidden + i, zeros(), inside);
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
        each([&](int64_t row, int64_t i, Tail inside, int at) {
            if (!is_real(row, t)) {
                if (split) store(kept(row, t, 3, i), zeros(), inside);
                return zero(l.y, row, t, i, inside), zero(l.cells, row, t, i, inside);
            }
            const auto gate = [&](int g) {
                return seen(row, t, g, i, inside) + load(sums[g] + at);
            };
            const auto keep = [&](int g, Floats x) { store(kept(row, t, g, i), x, inside); };
            const int64_t now = token(row, t) * hidden + i;
            if (l.cell == LSTM_CELL) {
                const Floats in = soft_gate(gate(0)), forget = soft_gate(gate(1));
                const Floats value = soft_value(gate(2)), out = soft_gate(gate(3));
                const Floats old = load(before(l.c, l.cells, row, t) + i, inside);
                const Floats c = fmadd(in, value, forget * old);
                keep(0, in), keep(1, forget), keep(2, value), keep(3, out);
                store(l.cells + now, c, inside);
                store(l.y + now, out * soft_value(c), inside);
                return;
            }
            const Floats old = load(before(l.h, l.y, row, t) + i, inside);
            Floats z, n;
            if (!stage) {
                const Floats r = soft_gate(gate(0));
                z = soft_gate(gate(1));
                keep(0, r), keep(1, z);
                if (split) return keep(3, r * old);
                Floats own = load(sums[2] + at);
                if (l.bias) own = own + load(l.bias + i, inside);
                n = soft_value(fmadd(r, own, seen(row, t, 2, i, inside)));
                keep(3, own);
            } else {
                z = load(kept(row, t, 1, i), inside), n = soft_value(gate(2));
            }
            keep(2, n);
            store(l.y + now, fmadd(z, old - n, n), inside);
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
        each([&](int64_t row, int64_t i, Tail inside, int at) {
            float* carry = l.d_h + row * hidden + i;
            const Floats back = load(sums + at);
            if (t < 0) return store(carry, load(carry, inside) + back, inside);
            float* d_seen = l.d_seen + token(row, t) * gates * hidden + i;
            const auto write = [&](int g, Floats x) { store(d_seen + g * hidden, x, inside); };
            const auto gate = [&](int g) { return load(kept(row, t, g, i), inside); };
            if (!is_real(row, t)) {
                for (int g = 0; g < gates; g++) write(g, zeros());
                return zero(l.d_own, row, t, i, inside);
            }
            const Floats one = fill(1);
            if (stage) {  // back: the gradient of r ⊙ h
                const Floats r = gate(0), old = load(before(l.h, l.y, row, t) + i, inside);
                write(0, back * old * sigmoid_slope(r));
                return store(carry, fmadd(back, r, load(carry, inside)), inside);
            }
            const int64_t now = token(row, t) * hidden + i;
            const Floats dh = load(l.dy + now, inside) + load(carry, inside) + back;
            if (l.cell == LSTM_CELL) {
                float* c_carry = l.d_c + row * hidden + i;
                const Floats in = gate(0), forget = gate(1), value = gate(2), out = gate(3);
                const Floats shown = soft_value(load(l.cells + now, inside));
                const Floats old = load(before(l.c, l.cells, row, t) + i, inside);
                Floats dc = fmadd(dh * out, tanh_slope(shown), load(c_carry, inside));
                if (l.d_cells) dc = dc + load(l.d_cells + now, inside);
                write(0, dc * value * sigmoid_slope(in));
                write(1, dc * old * sigmoid_slope(forget));
                write(2, dc * in * tanh_slope(value));
                write(3, dh * shown * sigmoid_slope(out));
                return store(c_carry, dc * forget, inside);
            }
            const Floats z = gate(1), n = gate(2), old = load(before(l.h, l.y, row, t) + i, inside);
            const Floats dn = dh * (one - z) * tanh_slope(n);
            write(1, dh * (old - n) * sigmoid_slope(z));
            write(2, dn);
            store(carry, dh * z, inside);
            if (l.cell == GRU_RESET_FIRST) return;
            const Floats r = gate(0);
            write(0, dn * gate(3) * sigmoid_slope(r));
            store(l.d_own + now, dn * r, inside);
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
