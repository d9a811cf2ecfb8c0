// Runs a program: one pass of a model over the newest tokens of many rows in one call. Weights are int8, bfloat16 or
// float32, all else is float32. runtime/cpu/lower.py writes the programs.
//
// The numbers of a token depend neither on the other tokens of the pass nor on the number of threads: every sum is
// computed in the same order. The code needs neither torch nor Python, so it compiles in seconds (build.py).

#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"

namespace {

// 0; 1: a token id is outside the vocabulary; 2: lengths exceed the room for tokens, keys or attention weights.
int32_t check(const Pass& pass) {
    const int tokens = pass.rows * pass.time, room = pass.longest - 4;  // keys are read in fours
    for (int row = 0; row < pass.rows; row++) {
        if (pass.lengths[row] < 0 || pass.lengths[row] > pass.time || pass.starts[row] < 0) return 2;
        if (pass.block_table && pass.starts[row] + pass.lengths[row] > int64_t(pass.blocks) << pass.shift) return 2;
    }
    for (int n = 0; n < pass.count; n++) {
        const Instruction& o = pass.instructions[n];
        if (o.kind == EMBED)
            for (int t = 0; t < tokens; t++)
                if (pass.tokens[t] < 0 || pass.tokens[t] >= o.embed.vocab) return 1;
        if (o.kind == ATTENTION)
            for (int row = 0; row < pass.rows; row++) {
                const int keys = o.attention.keys == SOURCE ? pass.sources[row / pass.group]
                                 : o.attention.keys == CACHED ? pass.starts[row] + pass.lengths[row]
                                                              : pass.lengths[row];
                if (keys < 0 || keys > room) return 2;
            }
    }
    return 0;
}

}  // namespace

extern "C" {

// Returns what `check` finds; nothing is done unless that is 0.
int32_t run(const Pass* given) {
    if (const int32_t problem = check(*given)) return problem;
    const int tokens = given->rows * given->time;
#pragma omp parallel num_threads(given->threads)
    {
        Pass pass = *given;
        pass.threads = omp_get_num_threads();
        const int thread = omp_get_thread_num();
        Share mine(tokens, thread, pass.threads);
        for (int n = 0; n < pass.count; n++) {
            const Instruction& o = pass.instructions[n];
            if (n && !(is_tokenwise(o) && is_tokenwise(pass.instructions[n - 1]))) {
                // the inputs of an int8 product are quantized by the thread that computed them
                if (!(o.kind == LINEAR && o.linear.format == INT8 && is_tokenwise(pass.instructions[n - 1]))) {
#pragma omp barrier
                }
            }
            if (o.kind == LINEAR)
                (o.linear.format == INT8      ? int8_linear
                 : o.linear.format == FLOAT32 ? float_linear<float>
                                              : float_linear<uint16_t>)(o, pass, thread);
            else if (o.kind == ATTENTION) attention(o, pass, thread);
            else
                for (int t = mine.begin; t < mine.end; t++)
                    o.kind == EMBED ? embed(o, pass, t) : o.kind == NORM ? norm(o, pass, t) : elementwise(o, pass, t);
        }
    }
    return 0;
}

// The k largest scores of each row (vocab), best first, the first of equal ones first, without the banned ones: their
// indices (rows, k) and log-probabilities. Banned tokens keep their share of the probability.
void top_k(float* scores, int32_t rows, int32_t vocab, const int64_t* banned, int32_t count, int32_t k,
           int32_t threads, int64_t* tokens, float* log_probs) {
    if (k < 1 || k > vocab) return;
#pragma omp parallel for num_threads(threads) if (rows > 1 && int64_t(rows) * vocab > 1 << 18)
    for (int row = 0; row < rows; row++) {
        float *x = scores + int64_t(row) * vocab, *best = log_probs + int64_t(row) * k;
        int64_t* index = tokens + int64_t(row) * k;
        __m512 high = _mm512_set1_ps(-INFINITY);
        for (int i = 0; i < vocab; i += LANES)
            high = _mm512_max_ps(high, _mm512_mask_loadu_ps(high, tail(vocab - i), x + i));
        const float most = _mm512_reduce_max_ps(high);
        __m512 total = _mm512_setzero_ps(), largest = _mm512_set1_ps(most);
        for (int i = 0; i < vocab; i += LANES) {
            __mmask16 inside = tail(vocab - i);
            __m512 some = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(inside, x + i), largest));
            total = _mm512_mask_add_ps(total, inside, total, some);
        }
        const float mass = std::log(_mm512_reduce_add_ps(total));  // relative to the largest
        std::vector<float> kept(count);
        for (int n = 0; n < count; n++)
            if (banned[n] >= 0 && banned[n] < vocab) kept[n] = x[banned[n]], x[banned[n]] = -INFINITY;
        for (int n = 0; n < k; n++) best[n] = -INFINITY, index[n] = 0;
        for (int i = 0; i < vocab; i += LANES) {
            __mmask16 inside = tail(vocab - i);
            __mmask16 better = _mm512_mask_cmp_ps_mask(inside, _mm512_maskz_loadu_ps(inside, x + i),
                                                       _mm512_set1_ps(best[k - 1]), _CMP_GT_OQ);
            for (; better; better &= better - 1) {
                const int token = i + __builtin_ctz(better);
                int n = k - 1;
                if (!(x[token] > best[n])) continue;
                for (; n && x[token] > best[n - 1]; n--) best[n] = best[n - 1], index[n] = index[n - 1];
                best[n] = x[token], index[n] = token;
            }
        }
        for (int n = count - 1; n >= 0; n--)  // backwards: an id that is banned twice was saved first
            if (banned[n] >= 0 && banned[n] < vocab) x[banned[n]] = kept[n];
        for (int n = 0; n < k; n++) best[n] = (best[n] - most) - mass;
    }
}

// Reorders int8 weights (outputs, inputs) for `int8_linear`, padded with zeros, and sums up each row of them.
void pack(const int8_t* weights, int32_t outputs, int32_t inputs, int8_t* packed, int32_t* sums) {
    const int64_t quads = (inputs + QUAD - 1) / QUAD;
    for (int64_t n = 0; n < (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS * TILE_OUTPUTS; n++) {
        int8_t* tile = packed + n / TILE_OUTPUTS * quads * QUAD * TILE_OUTPUTS + n % TILE_OUTPUTS * QUAD;
        int32_t sum = 0;
        for (int64_t i = 0; i < quads * QUAD; i++) {
            int8_t weight = n < outputs && i < inputs ? weights[n * inputs + i] : 0;
            tile[i / QUAD * QUAD * TILE_OUTPUTS + i % QUAD] = weight;
            sum += weight;
        }
        if (n < outputs) sums[n] = sum;
    }
}

// Memory in huge pages: streaming weights through small pages spends half the time on address translation.
void* allocate(int64_t bytes) {
    const int64_t page = 2 << 20;
    void* memory = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    if (memory) madvise(memory, (bytes + page - 1) / page * page, MADV_HUGEPAGE);
    return memory;
}

void release(void* memory) { std::free(memory); }
}
