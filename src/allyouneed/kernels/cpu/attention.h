// Softmax attention over a KV cache, over a source, or over the tokens of the pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace {

void rotate(float* x, const float* cosines, int planes) {  // nn/positions/rotary.py: features i and i + planes
    const float* sines = cosines + planes;
    for (int i = 0; i < planes; i++) {
        float a = x[i], b = x[i + planes];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + planes] = b * cosines[i] + a * sines[i];
    }
}

struct Contiguous {  // where the keys of one row and head are in a cache, in floats
    int64_t begin, time;
    int64_t operator()(int64_t t) const { return begin + t * time; }
};

struct Paged {
    const int32_t* table;
    int64_t begin, block, time;
    int shift;
    int64_t operator()(int64_t t) const {
        return begin + table[t >> shift] * block + (t & ((int64_t(1) << shift) - 1)) * time;
    }
};

// softmax(q·k · scale) v of one query over `keys` keys; `weights` has room for four more.
template <typename Place>
void attend(const float* q, const Cache& cache, const Place& at, int keys, int width, float scale, float* weights,
            float* out) {
    if (!keys) {
        std::memset(out, 0, width * sizeof(float));
        return;
    }
    for (int t = 0; t < keys; t += 4) {
        const float* k[4];
        for (int n = 0; n < 4; n++) k[n] = cache.keys + at(std::min(t + n, keys - 1));
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int i = 0; i < width; i += LANES) {
            __mmask16 inside = tail(width - i);
            __m512 some = _mm512_maskz_loadu_ps(inside, q + i);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                sums[n] = _mm512_fmadd_ps(some, _mm512_maskz_loadu_ps(inside, k[n] + i), sums[n]);
        }
        __m128 dots = four_sums(sums[0], sums[1], sums[2], sums[3]);
        _mm_storeu_ps(weights + t, _mm_mul_ps(dots, _mm_set1_ps(scale)));
    }
    __m512 high = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int t = 0; t < keys; t += LANES)
        high = _mm512_max_ps(high, _mm512_mask_loadu_ps(high, tail(keys - t), weights + t));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(high));
    for (int t = 0; t < keys; t += LANES) {
        __mmask16 inside = tail(keys - t);
        __m512 some = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(inside, weights + t), top));
        total = _mm512_mask_add_ps(total, inside, total, some);
        _mm512_mask_storeu_ps(weights + t, inside, some);
    }
    const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total));
    for (int i = 0; i < width; i += 4 * LANES) {  // four registers of features at a time, odd and even keys apart
        __mmask16 inside[4];
        __m512 even[4], odd[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            inside[n] = tail(std::max(0, width - i - n * LANES));
            even[n] = odd[n] = _mm512_setzero_ps();
        }
        for (int t = 0; t < keys; t += 2) {
            const float* v = cache.values + at(t) + i;
            const __m512 one = _mm512_set1_ps(weights[t]);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                even[n] = _mm512_fmadd_ps(one, _mm512_maskz_loadu_ps(inside[n], v + n * LANES), even[n]);
            if (t + 1 == keys) break;
            v = cache.values + at(t + 1) + i;
            const __m512 next = _mm512_set1_ps(weights[t + 1]);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                odd[n] = _mm512_fmadd_ps(next, _mm512_maskz_loadu_ps(inside[n], v + n * LANES), odd[n]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            __m512 sum = _mm512_mul_ps(_mm512_add_ps(even[n], odd[n]), share);
            _mm512_mask_storeu_ps(out + i + n * LANES, inside[n], sum);
        }
    }
}

// The tokens of one row, for the query heads that share a key head.
template <typename Place>
void attend_row(const Instruction& o, const Pass& pass, const Cache& cache, const Place& at, int row, int head,
                float* weights) {
    const AttentionArgs& args = o.attention;
    const int heads = args.heads, kv_heads = args.kv_heads, width = args.head_width, from = args.keys;
    const int planes = args.planes, shared = heads / kv_heads;  // query heads per key head
    const int start = from == CACHED ? pass.starts[row] : 0;
    const int64_t stride = pass.widths[o.input];
    float* x = pass.registers[o.input];
    for (int i = 0; i < pass.lengths[row]; i++) {
        float* token = x + (int64_t(row) * pass.time + i) * stride;
        float *k = token + (heads + head) * width, *v = token + (heads + kv_heads + head) * width;
        if (planes) {
            const int64_t line = int64_t(start + i) * 2 * planes;
            for (int h = head * shared; h < (head + 1) * shared; h++)
                rotate(token + h * width, pass.tables[args.table] + line, planes);
            rotate(k, pass.tables[args.table + 1] + line, planes);
        }
        if (from == CACHED) {
            std::memcpy(cache.keys + at(start + i), k, width * sizeof(float));
            std::memcpy(cache.values + at(start + i), v, width * sizeof(float));
        }
    }
    for (int i = 0; i < pass.time; i++) {
        const int64_t t = int64_t(row) * pass.time + i;
        const int keys = i >= pass.lengths[row] ? 0
                         : from == CACHED       ? start + i + 1
                         : from == SOURCE       ? pass.sources[row / pass.group]
                                                : pass.lengths[row];
        for (int h = head * shared; h < (head + 1) * shared; h++)
            attend(x + t * stride + h * width, cache, at, keys, width, args.scale, weights,
                   pass.registers[o.output] + (t * heads + h) * width);
    }
}

void attention(const Instruction& o, const Pass& pass, int thread) {
    const AttentionArgs& args = o.attention;
    const int heads = args.heads, kv_heads = args.kv_heads, width = args.head_width, from = args.keys;
    const int64_t stride = pass.widths[o.input];
    float* x = pass.registers[o.input];
    float* weights = pass.scratch + 2 * pass.rows * pass.time + int64_t(thread) * pass.longest;
    Cache cache{};
    if (from == SELF)
        cache = {x + heads * width, x + (heads + kv_heads) * width, pass.time * stride, width, stride};
    else
        cache = pass.caches[args.cache];
    Share tasks(pass.rows * kv_heads, thread, pass.threads);
    for (int task = tasks.begin; task < tasks.end; task++) {
        const int row = task / kv_heads, head = task % kv_heads;
        if (from == CACHED && pass.block_table) {
            const int32_t* table = pass.block_table + int64_t(row) * pass.blocks;
            const Paged at{table, head * cache.head, cache.row, cache.time, pass.shift};
            attend_row(o, pass, cache, at, row, head, weights);
        } else {
            const int64_t line = from == SOURCE ? row / pass.group : row;
            const Contiguous at{line * cache.row + head * cache.head, cache.time};
            attend_row(o, pass, cache, at, row, head, weights);
        }
    }
}

}  // namespace
