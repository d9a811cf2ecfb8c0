// A pass of a model over the newest tokens of many rows, order by order, in one call: weights of 8, 16 or 32 bits, all
// else in single precision. runtime/cpu/lower.py writes the orders of a model; what they mean is said there, part by part.
//
// A token's numbers never depend on how many others come with it, nor on the number of threads: every sum is made in
// the same order. It knows neither torch nor Python, so it is compiled in a second or two (native.py).

#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>

#include "attention.h"
#include "gemm.h"
#include "elementwise.h"

extern "C" {

// 0: done; 1: a token is none of the vocabulary, and nothing was done.
int32_t run(const Pass* given) {
    const int tokens = given->rows * given->time;
    if (given->orders && given->order->kind == EMBED)
        for (int t = 0; t < tokens; t++)
            if (given->tokens[t] < 0 || given->tokens[t] >= given->order->numbers[3]) return 1;
#pragma omp parallel num_threads(given->threads)
    {
        Pass pass = *given;
        pass.threads = omp_get_num_threads();
        const int number = omp_get_thread_num();
        Share mine(tokens, number, pass.threads);
        for (int n = 0; n < pass.orders; n++) {
            const Order& o = pass.order[n];
            if (n && !(tokenwise(o) && tokenwise(pass.order[n - 1]))) {
                // tokens of an 8-bit product are rounded by those who made them
                if (!(o.kind == PRODUCT && o.numbers[3] == EIGHT && tokenwise(pass.order[n - 1]))) {
#pragma omp barrier
                }
            }
            if (o.kind == PRODUCT)
                (o.numbers[3] == EIGHT ? product : o.numbers[3] == SINGLE ? float_product<float> : float_product<uint16_t>)(
                    o, pass, number);
            else if (o.kind == ATTEND) attend(o, pass, number);
            else
                for (int t = mine.begin; t < mine.end; t++)
                    o.kind == EMBED ? embed(o, pass, t) : o.kind == NORM ? norm(o, pass, t) : elementwise(o, pass, t);
        }
    }
    return 0;
}

// Of each row (vocab) the `few` largest scores, best first and the first of equal ones first, none of them `banned`
// (count): where they stand (rows, few), and their log-probabilities, in which the banned ones keep their share.
void best(float* scores, int32_t rows, int32_t vocab, const int64_t* banned, int32_t count, int32_t few,
          int32_t threads, int64_t* tokens, float* chances) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && int64_t(rows) * vocab > 1 << 18)
    for (int row = 0; row < rows; row++) {
        float *x = scores + int64_t(row) * vocab, *top = chances + int64_t(row) * few;
        int64_t* places = tokens + int64_t(row) * few;
        __m512 high = _mm512_set1_ps(-INFINITY);
        for (int i = 0; i < vocab; i += LANES)
            high = _mm512_max_ps(high, _mm512_mask_loadu_ps(high, tail(vocab - i), x + i));
        const float most = _mm512_reduce_max_ps(high);
        __m512 total = _mm512_setzero_ps(), largest = _mm512_set1_ps(most);
        for (int i = 0; i < vocab; i += LANES) {
            __mmask16 there = tail(vocab - i);
            __m512 some = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, x + i), largest));
            total = _mm512_mask_add_ps(total, there, total, some);
        }
        const float mass = std::log(_mm512_reduce_add_ps(total));  // beside the largest
        float kept[count ? count : 1];
        for (int n = 0; n < count; n++) kept[n] = x[banned[n]], x[banned[n]] = -INFINITY;
        for (int n = 0; n < few; n++) top[n] = -INFINITY, places[n] = 0;
        for (int i = 0; i < vocab; i += LANES) {
            __mmask16 there = tail(vocab - i);
            __mmask16 more = _mm512_mask_cmp_ps_mask(there, _mm512_maskz_loadu_ps(there, x + i),
                                                     _mm512_set1_ps(top[few - 1]), _CMP_GT_OQ);
            for (; more; more &= more - 1) {
                const int place = i + __builtin_ctz(more);
                int n = few - 1;
                if (!(x[place] > top[n])) continue;
                for (; n && x[place] > top[n - 1]; n--) top[n] = top[n - 1], places[n] = places[n - 1];
                top[n] = x[place], places[n] = place;
            }
        }
        for (int n = 0; n < count; n++) x[banned[n]] = kept[n];
        for (int n = 0; n < few; n++) top[n] = (top[n] - most) - mass;
    }
}

// Codes (outputs, inputs) in the order in which they are read; zeros where there are none.
void pack(const int8_t* codes, int32_t outputs, int32_t inputs, int8_t* packed, int32_t* sums) {
    const int64_t quads = (inputs + 3) / 4;
    for (int64_t n = 0; n < (outputs + WIDE - 1) / WIDE * WIDE; n++) {
        int8_t* block = packed + n / WIDE * quads * 4 * WIDE + n % WIDE * 4;
        int32_t sum = 0;
        for (int64_t i = 0; i < quads * 4; i++) {
            int8_t code = n < outputs && i < inputs ? codes[n * inputs + i] : 0;
            block[i / 4 * 4 * WIDE + i % 4] = code;
            sum += code;
        }
        if (n < outputs) sums[n] = sum;
    }
}

// Memory in large pages: a processor that streams weights spends half its time on looking up small ones.
void* large(int64_t bytes) {
    const int64_t page = 2 << 20;
    void* found = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    if (found) madvise(found, (bytes + page - 1) / page * page, MADV_HUGEPAGE);
    return found;
}

void give_back(void* memory) { std::free(memory); }
}
