// Mixed chunk attention (nn/mixers/gau.py): one new token of every row.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "matrix_state.h"

namespace {

constexpr int TOGETHER = 4;  // keys that are made, then read
constexpr int AHEAD = 8;     // tokens whose Z is fetched before: the processor does not, with V between them

// Z and V of a row's current chunk. Its keys are made of Z when they are read: they are few, and all else that is kept is
// the plain state.
struct ChunkTokens {
    const ChunkArgs& args;
    float *lines, *made;
    const float* table;  // of the chunk's first position
    int inside;          // tokens before the new one

    ChunkTokens(const ChunkArgs& args, const Pass& pass, int row) : args(args) {
        static thread_local std::vector<float> room;
        room.resize(std::max<size_t>(room.size(), TOGETHER * args.keys));
        lines = carry_of(pass.memories[args.memory], 1, row), made = room.data();
        inside = pass.starts[row] % args.size;
        const int64_t first = pass.starts[row] - inside;
        table = args.table < 0 ? nullptr : pass.tables[args.table] + first * 2 * args.planes;
    }
    float* line(int64_t p) const { return lines + p * (args.keys + args.values); }
    const float* value(int64_t p) const { return line(p) + args.keys; }
    const float* key(int64_t p) const {  // until `TOGETHER` others have been made
        const float* z = line(p);
        float* out = made + p % TOGETHER * args.keys;
        for (int i = 0; i < args.keys; i += LANES) {
            const Tail inside = tail(args.keys - i);
            const Floats gain = load(args.gains + i, inside), offset = load(args.offsets + i, inside);
            store(out + i, fmadd(load(z + i, inside), gain, offset), inside);
            __builtin_prefetch(z + i + AHEAD * (args.keys + args.values));
        }
        if (table) turn(out, table + p * 2 * args.planes, args.planes, args.interleaved);
        return out;
    }
};

// V_quad. The query in `input`; V and Z of the new token, which join the chunk, in `other`.
void chunk_attention(const Instruction& o, const Pass& pass, int row, int thread) {
    const ChunkArgs& args = o.chunk;
    const ChunkTokens at(args, pass, row);
    const float* token = other_of(o, pass, row);
    std::memcpy(at.line(at.inside), token + args.values, args.keys * sizeof(float));
    std::memcpy(at.line(at.inside) + args.keys, token, args.values * sizeof(float));
    ScoreTerms terms;
    terms.squared = true;
    if (args.bias >= 0) terms.bias = pass.tables[args.bias] + args.size - 1 - at.inside;
    const Seen seen{at.inside + 1, 0, 0, nullptr};
    attend(input_of(o, pass, row), at, seen, args.keys, args.values, args.scale, terms, weights_of(pass, thread),
           output_of(o, pass, row));
}

// S += Σ kᵀ v of four tokens, for S (keys, values) whose lines are `stride` apart, and at most 4 · LANES values.
inline void add_products(float* s, int stride, int keys, int values, const float* const* k, const float* const* v) {
    Floats known[4][4];
    Tail inside[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        inside[n] = tail(std::max(0, values - n * LANES));
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) known[t][n] = load(v[t] + n * LANES, inside[n]);
    }
    for (int i = 0; i < keys; i++) {
        float* line = s + int64_t(i) * stride;
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            Floats sum = load(line + n * LANES, inside[n]);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) sum = fmadd(fill(k[t][i]), known[t][n], sum);
            store(line + n * LANES, sum, inside[n]);
        }
    }
}

// V_quad, in `other`, + V_lin, from the query in `input`: some features. The last token of a chunk then adds it to the
// sums. Lines of the chunk after its last token are not read by anyone, and stay.
void chunk_sums(const Instruction& o, const Pass& pass, int row, int first, int last) {
    const ChunkArgs& args = o.chunk;
    const Memory& memory = pass.memories[args.memory];
    const ChunkTokens at(args, pass, row);
    const int keys = args.keys, values = args.values, count = last - first, before = pass.starts[row] - at.inside;
    const float* near = other_of(o, pass, row) + first;
    float *sums = carry_of(memory, 2, row) + first, *out = output_of(o, pass, row) + first;
    if (before) {
        multiply_state<false, false>(sums, values, keys, count, 1, input_of(o, pass, row), nullptr, nullptr, out);
        const float share = args.scale == 0 ? 1.0f / before : args.scale;
        for (int j = 0; j < count; j++) out[j] = out[j] * share + near[j];
    } else {
        std::memcpy(out, near, count * sizeof(float));
    }
    if (!first) *(int32_t*)carry_of(memory, 0, row) = pass.starts[row] + 1;
    if (at.inside + 1 < args.size) return;
    const std::vector<float> none(keys);
    for (int p = 0; p < args.size; p += TOGETHER) {
        const float *k[TOGETHER], *v[TOGETHER];
        for (int n = 0; n < TOGETHER; n++) {
            const bool real = p + n < args.size;
            k[n] = real ? at.key(p + n) : none.data(), v[n] = at.value(real ? p + n : p) + first;
        }
        add_products(sums, values, keys, count, k, v);
    }
}

}  // namespace
