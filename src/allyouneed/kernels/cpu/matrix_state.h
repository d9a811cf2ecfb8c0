// States that are a matrix per head, updated by outer products: one new token of one row and head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "recurrent.h"

namespace {

// S = a S + kᵀ v (UPDATE) and o = q S, for S (keys, values) whose lines are `stride` apart. COLUMN: each line has one more
// number, for which v is 1; its o is returned.
template <bool UPDATE, bool COLUMN>
float multiply_state(float* s, int stride, int keys, int values, float decay, const float* q, const float* k,
                     const float* v, float* out) {
    const Floats fading = fill(decay);
    float weight = 0;
    for (int j = 0; j < values; j += GROUP * LANES) {
        Floats sums[GROUP], some_v[GROUP];
        Tail inside[GROUP];
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) {
            inside[n] = tail(std::max(0, values - j - n * LANES));
            sums[n] = zeros();
            if (UPDATE) some_v[n] = load(v + j + n * LANES, inside[n]);
        }
        for (int i = 0; i < keys; i++) {
            float* line = s + int64_t(i) * stride + j;
            const Floats query = fill(q[i]);
            if (COLUMN && j == 0) {
                float& last = line[values];
                if (UPDATE) last = last * decay + k[i];
                weight += q[i] * last;
            }
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++) {
                Floats now = load(line + n * LANES, inside[n]);
                if (UPDATE) {
                    now = fmadd(fill(k[i]), some_v[n], now * fading);
                    store(line + n * LANES, now, inside[n]);
                }
                sums[n] = fmadd(query, now, sums[n]);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) store(out + j + n * LANES, sums[n], inside[n]);
    }
    return weight;
}

// Retention (nn/mixers/retention.py): divided by max(|q·z|, √Σ a^n), z = a z + k, if `normalised`. Mamba-2 (nn/ops/ssd.py).
void retain(const Instruction& o, const Pass& pass, int row, int head) {
    const RetainArgs& args = o.retain;
    const Memory& memory = pass.memories[args.memory];
    const int keys = args.keys, values = args.values, group = head / (args.heads / args.groups);
    const float* x = input_of(o, pass, row);
    const float *q = x + args.query_at + group * keys, *k = x + args.key_at + group * keys;
    const float* v = x + args.value_at + head * values;
    const float log = args.decay ? args.decay[head] : other_of(o, pass, row)[head], decay = std::exp(log);
    float *s = carry_of(memory, args.part, row) + int64_t(head) * keys * values;
    float *out = output_of(o, pass, row) + head * values, sum = 0;
    if (args.sums >= 0) {
        float* z = carry_of(memory, args.sums, row) + head * keys;
        for (int i = 0; i < keys; i++) z[i] = z[i] * decay + k[i], sum += q[i] * z[i];
    }
    if (args.weighted) {  // `out` holds the weighted values until they have been read
        const float factor = other_of(o, pass, row)[args.heads + head];
        for (int j = 0; j < values; j++) out[j] = v[j] * factor;
    }
    multiply_state<true, false>(s, values, keys, values, decay, q, k, args.weighted ? out : v, out);
    if (args.skip) add_scaled(out, v, args.skip[head], values);
    if (!args.normalised) return;
    const double steps = pass.starts[row] + 1;
    const float mass = float(std::expm1(steps * log) / std::expm1(double(log)));
    const float share = 1 / std::max(std::fabs(sum), std::sqrt(mass));
    for (int j = 0; j < values; j++) out[j] *= share;
}

// --- linear attention (nn/mixers/performer.py, nn/mixers/attention/infini.py) -----------------------------------------

inline float largest(const float* x, int count) {
    Floats high = fill(-INFINITY);
    for (int i = 0; i < count; i += LANES) high = larger(high, load(x + i, tail(count - i), high));
    return largest_of(high);
}

// φ in place; of EXPONENTIAL e^{x − less}.
void map_features(int which, float* x, int count, float less) {
    const Floats zero = zeros(), one = fill(1), lower = fill(less);
    for (int i = 0; i < count; i += LANES) {
        const Tail inside = tail(count - i);
        Floats some = load(x + i, inside);
        if (which == EXPONENTIAL) {
            some = exponential(some - lower);
        } else if (which == RECTIFIED) {
            some = larger(some, zero) + fill(1e-3f);
        } else {
            some = select(is_less(zero, some), some + one, exponential(some));
        }
        store(x + i, some, inside);
    }
}

// In `input`, which is overwritten: q and, with `update`, k, before φ. In `other` with `update`: queries, keys, values.
void associate(const Instruction& o, const Pass& pass, int row, int head) {
    const AssociateArgs& args = o.associate;
    const Memory& memory = pass.memories[args.memory];
    const int keys = args.keys, values = args.values, stride = values + 1;
    float* out = output_of(o, pass, row) + head * values;
    if (!args.update && pass.starts[row] < args.first) {
        std::memcpy(out, other_of(o, pass, row) + head * values, values * sizeof(float));
        return;
    }
    float *q = (float*)input_of(o, pass, row) + head * keys, *s = carry_of(memory, 0, row) + int64_t(head) * keys * stride;
    map_features(args.features, q, keys, args.features == EXPONENTIAL ? largest(q, keys) : 0);
    float weight;
    if (args.update) {
        float *k = q + args.heads * keys, decay = 1, less = 0;
        const float *given = other_of(o, pass, row), *key = given + (args.heads + head) * args.width;
        if (args.features == EXPONENTIAL) {
            const float norm = dot(key, key, args.width) * args.scale;
            float& top = carry_of(memory, 1, row)[head];
            const float now = std::max(top, largest(k, keys) - norm);
            decay = std::exp(top - now), less = norm + now, top = now;
        }
        map_features(args.features, k, keys, less);
        const float* v = given + 2 * args.heads * args.width + head * values;
        weight = multiply_state<true, true>(s, stride, keys, values, decay, q, k, v, out);
    } else {
        weight = multiply_state<false, true>(s, stride, keys, values, 1, q, nullptr, nullptr, out);
    }
    const float share = 1 / std::max(weight, 1e-30f);
    for (int j = 0; j < values; j++) out[j] *= share;
}

// Keys and values (heads, width each) of the new token, after those that are cached: parts 3 and 4 of the carry.
void remember(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    const int heads = o.state.heads, width = o.width / heads;
    const int64_t slot = memory.lengths[row]++ - memory.since[row];
    for (int which = 0; which < 2; which++)
        for (int head = 0; head < heads; head++) {
            float* cache = carry_of(memory, 3 + which, row) + (int64_t(head) * o.state.size + slot) * width;
            std::memcpy(cache, input_of(o, pass, row) + which * o.width + head * width, width * sizeof(float));
        }
}

}  // namespace
