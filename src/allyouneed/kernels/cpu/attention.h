// Softmax attention over a KV cache, over a source, or over the tokens of the pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "recurrent.h"
#include "simd.h"

namespace {

// Where the keys and values of one row and head are, by position.
struct Contiguous {
    float *keys, *values;
    int64_t key_time, value_time;
    float* key(int64_t p) const { return keys + p * key_time; }
    float* value(int64_t p) const { return values + p * value_time; }
};

struct Ring {  // nn/states/window.py: the first positions, then the most recent ones
    float *keys, *values;
    int64_t key_time, value_time, first, ring;
    int64_t slot(int64_t p) const { return p < first ? p : first + (p - first) % ring; }
    float* key(int64_t p) const { return keys + slot(p) * key_time; }
    float* value(int64_t p) const { return values + slot(p) * value_time; }
};

struct Paged {
    float *keys, *values;
    const int32_t* table;
    int64_t block, key_time, value_block, value_time;
    int shift;
    int64_t inside(int64_t p) const { return p & ((int64_t(1) << shift) - 1); }
    float* key(int64_t p) const { return keys + table[p >> shift] * block + inside(p) * key_time; }
    float* value(int64_t p) const { return values + table[p >> shift] * value_block + inside(p) * value_time; }
};

struct Seen {  // the positions that a query sees: those of a list, or all up to `first`, then a gap
    int count, first, gap;
    const int32_t* list;
    int64_t operator()(int i) const { return list ? list[i] : i < first ? i : i + gap; }
};

// What is added to q·k of one head and query at `position`, before the softmax.
struct ScoreTerms {
    const float* bias = nullptr;  // by key position
    const uint8_t* mask = nullptr;
    const float *relative_keys = nullptr, *relative_values = nullptr;
    const float* vectors = nullptr;   // by distance
    const float *placed = nullptr, *place_bias = nullptr;  // by key position
    const float* factors = nullptr;   // of scores by key position: `rows`, then `columns`
    const float* additive = nullptr;  // instead of q·k
    int distance = 0, position = 0, ahead = 0, rows = 0, columns = 0;
    float cap = 0;
    bool squared = false;  // and after it
    bool any() const { return bias || mask || relative_keys || vectors || placed || place_bias || factors || cap != 0; }
    bool allows(int64_t p) const { return !(bias && bias[p] == -INFINITY) && !(mask && !mask[p]); }
    int vector_of(int64_t p) const {
        return int(std::clamp<int64_t>(p - position, -distance, distance)) + distance;
    }
};

// Σ_i term(q_i, k_i) · scale of so many keys, four at a time, written to `out` or added to it.
template <typename KeyOf, typename Term>
inline void score_keys(const float* q, int keys, int width, float scale, KeyOf key, Term term, bool added, float* out) {
    for (int t = 0; t < keys; t += 4) {
        const float* k[4];
        for (int n = 0; n < 4; n++) k[n] = key(std::min(t + n, keys - 1));
        Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
        for (int i = 0; i < width; i += LANES) {
            const Tail inside = tail(width - i);
            const Floats some = load(q + i, inside);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) sums[n] = term(some, load(k[n] + i, inside), sums[n], i);
        }
        const Four dots = four_sums(sums[0], sums[1], sums[2], sums[3]) * scale;
        store_four(out + t, added ? load_four(out + t) + dots : dots);
    }
}

inline Floats product(Floats q, Floats k, Floats sum, int) { return fmadd(q, k, sum); }

void add_terms(const ScoreTerms& terms, const Seen& seen, const float* q, int width, float scale, float* scores) {
    if (terms.relative_keys) {
        float dots[2 * MAX_DISTANCE + 1];
        for (int n = 0; n <= 2 * terms.distance; n++) dots[n] = dot(q, terms.relative_keys + n * width, width) * scale;
        for (int i = 0; i < seen.count; i++) scores[i] += dots[terms.vector_of(seen(i))];
    }
    if (terms.vectors) {
        const auto vector = [&](int i) { return terms.vectors + (terms.position - seen(i)) * width; };
        score_keys(q, seen.count, width, scale, vector, product, true, scores);
    }
    if (terms.placed) {
        const auto vector = [&](int i) { return terms.placed + seen(i) * terms.ahead; };
        score_keys(q, seen.count, terms.ahead, 1, vector, product, true, scores);
    }
    if (terms.place_bias)
        for (int i = 0; i < seen.count; i++) scores[i] += terms.place_bias[seen(i)];
    if (terms.factors)
        for (int i = 0; i < seen.count; i++) {
            const int p = int(seen(i));
            scores[i] += terms.factors[p / terms.columns] * terms.factors[terms.rows + p % terms.columns];
        }
    if (terms.bias)
        for (int i = 0; i < seen.count; i++) scores[i] += terms.bias[seen(i)];
    if (terms.cap != 0)
        for (int i = 0; i < seen.count; i += LANES) {
            const Tail inside = tail(seen.count - i);
            const Floats cap = fill(terms.cap), some = load(scores + i, inside);
            const Floats none = fill(-INFINITY);  // of a pattern, stays
            store(scores + i, select(is_equal(some, none), some, cap * tanh_(some / cap)), inside);
        }
    if (terms.mask)
        for (int i = 0; i < seen.count; i++)
            if (!terms.mask[seen(i)]) scores[i] = -INFINITY;
}

inline int allowed_keys(const ScoreTerms& terms, const Seen& seen) {
    if (!terms.bias && !terms.mask) return seen.count;
    int count = 0;
    for (int i = 0; i < seen.count; i++) count += terms.allows(seen(i));
    return count;
}

// The scores to weights; their sum, or 0 where no key is allowed.
inline float softmax_weights(int keys, float* weights) {
    Floats high = fill(-INFINITY), total = zeros();
    for (int t = 0; t < keys; t += LANES)
        high = larger(high, load(weights + t, tail(keys - t), high));
    const float most = largest_of(high);
    if (most == -INFINITY) return 0;
    const Floats top = fill(most);
    for (int t = 0; t < keys; t += LANES) {
        Tail inside = tail(keys - t);
        Floats some = exponential(load(weights + t, inside) - top);
        total = total + keep(some, inside);
        store(weights + t, some, inside);
    }
    return sum_of(total);
}

// softmax(q·k · scale + …) v of one query; `weights` has room for four more keys.
template <typename Place>
void attend(const float* q, const Place& at, const Seen& seen, int width, int value_width, float scale,
            const ScoreTerms& terms, float* weights, float* out) {
    const int keys = seen.count;
    if (scale == 0) scale = 1.0f / std::max(1, allowed_keys(terms, seen));
    const auto key = [&](int i) { return terms.ahead == width ? q : at.key(seen(i)); };  // there may be none
    if (terms.additive) {
        const auto term = [&](Floats q, Floats k, Floats sum, int i) {
            const Floats weight = load(terms.additive + i, tail(width - i));
            return fmadd(weight, tanh_(q + k), sum);
        };
        score_keys(q, keys, width, scale, key, term, false, weights);
    } else {
        const int ahead = terms.ahead;
        score_keys(q + ahead, keys, width - ahead, scale, key, product, false, weights);
    }
    if (terms.any()) add_terms(terms, seen, q, width, scale, weights);
    float share = 1;
    if (terms.squared) {
        for (int t = 0; t < keys; t++) weights[t] = std::max(weights[t], 0.0f) * std::max(weights[t], 0.0f);
    } else {
        const float sum = softmax_weights(keys, weights);
        if (sum == 0) {
            std::memset(out, 0, value_width * sizeof(float));
            return;
        }
        share = 1 / sum;
    }
    for (int i = 0; i < value_width; i += GROUP * LANES) {  // odd and even keys apart
        Tail inside[GROUP];
        Floats even[GROUP], odd[GROUP];
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) {
            inside[n] = tail(std::max(0, value_width - i - n * LANES));
            even[n] = odd[n] = zeros();
        }
        for (int t = 0; t < keys; t += 2) {
            const float* v = at.value(seen(t)) + i;
            const Floats one = fill(weights[t]);
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++)
                even[n] = fmadd(one, load(v + n * LANES, inside[n]), even[n]);
            if (t + 1 == keys) break;
            v = at.value(seen(t + 1)) + i;
            const Floats next = fill(weights[t + 1]);
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++)
                odd[n] = fmadd(next, load(v + n * LANES, inside[n]), odd[n]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) {
            Floats sum = (even[n] + odd[n]) * fill(share);
            store(out + i + n * LANES, sum, inside[n]);
        }
    }
    if (!terms.relative_values) return;
    float by_vector[2 * MAX_DISTANCE + 1] = {};
    for (int t = 0; t < keys; t++) by_vector[terms.vector_of(seen(t))] += weights[t];
    for (int n = 0; n <= 2 * terms.distance; n++)
        if (by_vector[n] != 0)
            add_scaled(out, terms.relative_values + int64_t(n) * value_width, by_vector[n] * share, value_width);
}

// Σ q k v of every two keys, 0 where one is not seen (tensorized attention): out (length, length) by their positions.
template <typename Place>
void combine_pairs(const float* q, const Place& at, const Seen& seen, int width, int length, const ScoreTerms& terms,
                   float* sums, float* out) {
    std::memset(out, 0, int64_t(length) * length * sizeof(float));
    const auto value = [&](int i) { return at.value(seen(i)); };
    const auto term = [&](Floats k, Floats v, Floats sum, int i) {
        return fmadd(load(q + i, tail(width - i)) * k, v, sum);
    };
    for (int j = 0; j < seen.count; j++) {
        if (!terms.allows(seen(j))) continue;
        score_keys(at.key(seen(j)), seen.count, width, 1, value, term, false, sums);
        for (int i = 0; i < seen.count; i++)
            if (terms.allows(seen(i))) out[seen(j) * length + seen(i)] = sums[i];
    }
}

// The keys that a query of LongNet sees: every `dilation`-th one of its segment, if it is one of them, in each branch.
// What two branches see counts twice.
inline int keys_of_branches(const AttentionArgs& args, int head, int position, int32_t* list) {
    int count = 0;
    for (int branch = 0; branch < args.branches; branch++) {
        const int32_t* each = args.segments + 3 * (branch * args.heads + head);
        const int start = position - position % each[0];
        if ((position - start) % each[1] != each[2]) continue;
        for (int p = start + each[2]; p <= position; p += each[1]) list[count++] = p;
    }
    return count;
}

// The buckets of a token's key: in each round the direction of the largest product, or its opposite.
inline void hash_key(const AttentionArgs& args, const float* products, int32_t* buckets) {
    const int half = args.buckets / 2;
    for (int round = 0; round < args.rounds; round++, products += half) {
        float best = -INFINITY;
        buckets[round] = 0;
        for (int n = 0; n < 2 * half; n++) {
            const float product = n < half ? products[n] : -products[n - half];
            if (product > best) best = product, buckets[round] = n;
        }
    }
}

// The earlier keys that share a bucket with a query in some round; itself, if there is none.
inline int keys_of_buckets(const AttentionArgs& args, const int32_t* buckets, int64_t time, int position, int32_t* list) {
    int count = 0;
    const int32_t* own = buckets + position * time;
    for (int p = 0; p < position; p++) {
        bool met = position < args.whole;
        for (int round = 0; round < args.rounds; round++) met |= buckets[p * time + round] == own[round];
        list[count] = p;
        count += met;
    }
    if (!count) list[count++] = position;
    return count;
}

// The tokens of one row, for the query heads that share a key head. The register holds queries, keys and values.
template <typename Place>
void attend_row(const Instruction& o, const Pass& pass, const Place& at, int row, int head, float* weights) {
    const AttentionArgs& args = o.attention;
    int32_t* list = (int32_t*)(weights + pass.longest);
    const int heads = args.heads, kv_heads = args.kv_heads, width = args.head_width, values = args.value_width;
    const int key_width = width - args.ahead;
    const int shared = heads / kv_heads, from = args.keys;  // query heads per key head
    const bool cached = from == CACHED || from == SEGMENT;
    const int start = from == CACHED ? pass.starts[row] : from == SEGMENT ? pass.starts[row] % args.segment : 0;
    if (cached)
        for (int i = 0; i < pass.lengths[row]; i++) {
            const float* token = input_of(o, pass, int64_t(row) * pass.time + i);
            const float *k = token + heads * width + head * key_width;
            const float* v = token + heads * width + kv_heads * key_width + head * values;
            if (key_width) std::memcpy(at.key(start + i), k, key_width * sizeof(float));
            if (at.keys != at.values) std::memcpy(at.value(start + i), v, values * sizeof(float));
        }
    int32_t* buckets = nullptr;
    const int64_t bucket_time = args.rounds ? pass.caches[args.cache].bucket_time : 0;
    if (args.rounds) {
        const Cache& cache = pass.caches[args.cache];
        buckets = cache.buckets + row * cache.bucket_row + head * cache.bucket_head;
        for (int i = 0; i < pass.lengths[row]; i++) {
            const float* products = args.buckets < 2 ? nullptr : other_of(o, pass, int64_t(row) * pass.time + i);
            hash_key(args, products + int64_t(head) * args.rounds * (args.buckets / 2), buckets + (start + i) * bucket_time);
        }
    }
    ScoreTerms terms;
    terms.squared = args.squared, terms.ahead = args.ahead;
    terms.relative_keys = args.relative_keys, terms.relative_values = args.relative_values;
    terms.distance = args.distance, terms.cap = args.cap, terms.rows = args.factors, terms.columns = args.columns;
    if (args.mask >= 0) terms.mask = pass.masks[args.mask].allowed + row * pass.masks[args.mask].row;
    for (int i = 0; i < pass.time; i++) {
        const int64_t t = int64_t(row) * pass.time + i;
        const int position = start + i;
        Seen seen{0, 0, 0, nullptr};
        const bool real = i < pass.lengths[row], chosen = real && (args.branches || args.rounds);
        if (real)
            seen.count = cached           ? position + 1
                         : from == SOURCE ? pass.sources[row / pass.group]
                                          : pass.lengths[row];
        if (args.recent && from == CACHED && !args.branches) {
            seen.first = args.first, seen.gap = std::max(0, position + 1 - args.recent - args.first);
            seen.count -= seen.gap;
        }
        terms.position = position;
        for (int h = head * shared; h < (head + 1) * shared; h++) {
            if (chosen) {
                seen.list = list;
                seen.count = args.rounds ? keys_of_buckets(args, buckets, bucket_time, position, list)
                                         : keys_of_branches(args, h, position, list);
            }
            if (args.placed) terms.placed = args.placed + int64_t(h) * args.length * args.ahead;
            if (args.place_bias)
                terms.place_bias = args.place_bias + h * args.place_head + position * args.place_query;
            if (args.columns) terms.factors = other_of(o, pass, t) + h * (args.factors + args.columns);
            if (args.additive) terms.additive = args.additive + int64_t(h) * width;
            if (args.vectors >= 0) terms.vectors = pass.tables[args.vectors] + int64_t(h) * pass.positions * width;
            if (args.bias >= 0)
                terms.bias = pass.tables[args.bias] + int64_t(h) * (2 * pass.positions - 1) + pass.positions - 1 - position;
            if (args.pairs) {
                combine_pairs(input_of(o, pass, t), at, seen, width, args.length, terms, weights, output_of(o, pass, t));
                continue;
            }
            attend(input_of(o, pass, t) + h * width, at, seen, width, values, args.scale, terms, weights,
                   output_of(o, pass, t) + h * values);
        }
    }
}

inline float* weights_of(const Pass& pass, int thread) {
    return pass.scratch + 2 * int64_t(pass.most_rows) + 2 * int64_t(thread) * pass.longest;
}

void attention(const Instruction& o, const Pass& pass, int task, int thread) {
    const AttentionArgs& args = o.attention;
    const int heads = args.heads, kv_heads = args.kv_heads, width = args.head_width, from = args.keys;
    float* weights = weights_of(pass, thread);
    const int row = task / kv_heads, head = task % kv_heads;
    if (from == SELF) {
        const int64_t stride = pass.widths[o.input];
        float* first = (float*)input_of(o, pass, int64_t(row) * pass.time);
        const int key_width = width - args.ahead;
        const Contiguous at{first + heads * width + head * key_width,
                            first + heads * width + kv_heads * key_width + head * args.value_width, stride, stride};
        return attend_row(o, pass, at, row, head, weights);
    }
    if (from == SEGMENT) {
        const Memory& memory = pass.memories[args.cache];
        const int64_t at = int64_t(head) * args.segment;
        float *keys = carry_of(memory, 1, row) + at * width, *values = carry_of(memory, 2, row) + at * args.value_width;
        return attend_row(o, pass, Contiguous{keys, values, width, args.value_width}, row, head, weights);
    }
    const Cache& cache = pass.caches[args.cache];
    float *keys = cache.keys + head * cache.head, *values = cache.values + head * cache.value_head;
    if (from == CACHED && cache.paged) {
        const int32_t* table = pass.block_table + int64_t(row) * pass.blocks;
        const Paged at{keys, values, table, cache.row, cache.time, cache.value_row, cache.value_time, pass.shift};
        return attend_row(o, pass, at, row, head, weights);
    }
    const int64_t line = from == SOURCE ? row / pass.group : row;
    keys += line * cache.row, values += line * cache.value_row;
    if (args.ring)
        attend_row(o, pass, Ring{keys, values, cache.time, cache.value_time, args.first, args.ring}, row, head, weights);
    else attend_row(o, pass, Contiguous{keys, values, cache.time, cache.value_time}, row, head, weights);
}

}  // namespace
