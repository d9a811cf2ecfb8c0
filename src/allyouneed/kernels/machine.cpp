// A pass of a model over the newest tokens of many rows, order by order, in one call: products of 8-bit numbers, all
// else in single precision. nn/flat.py writes the orders of a model; what they mean is said there, part by part.
//
// A token's numbers never depend on how many others come with it, nor on the number of threads: every sum is made in
// the same order. It knows neither torch nor Python, so it is compiled in a second or two (native.py).

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace {

constexpr int LANES = 16, WIDE = 4 * LANES;  // outputs that are computed side by side
constexpr int TALL = 6;                      // with so many tokens at once: 24 sums stay in registers

enum Kind { EMBED, PRODUCT, NORM, ADD, SCALE, ACTIVATE, GATE, ATTEND };
enum Keys { CACHED, SOURCE, OWN };  // whom a query looks at

struct Order {  // nn/flat.py has the same
    int32_t kind, input, other, output;  // registers
    int32_t numbers[8];
    float factors[2];
    const void* places[6];
};

struct Cache {  // keys and values of a layer: where row, head and time begin, in floats
    float *keys, *values;
    int64_t row, head, time;
};

struct Pass {
    int32_t orders, rows, time, threads, group, longest;  // longest: the most keys anybody looks at
    const Order* order;
    float* const* registers;  // (rows * time, width) each
    const int32_t* widths;
    const Cache* caches;
    const float* const* tables;  // by position
    const int64_t* tokens;       // (rows, time)
    const int32_t* starts;       // (rows) tokens that were there before
    const int32_t* lengths;      // (rows) new ones; the others of `time` are padding
    const int32_t* sources;      // (rows / group) lengths
    uint8_t* rounded;            // (rows * time, widest input)
    float* scratch;              // 2 for each token, its step and its zero; then (threads, longest)
};

struct Share {  // what falls to a thread
    int begin, end;
    Share(int count, int number, int threads)
        : begin(int64_t(count) * number / threads), end(int64_t(count) * (number + 1) / threads) {}
};

// --- functions of 16 numbers -----------------------------------------------------------------------------------------

inline __mmask16 tail(int left) { return left >= LANES ? 0xffff : (1u << left) - 1; }  // of the numbers that are left

inline __m512 exponential(__m512 x) {  // 2^n · e^r, |r| ≤ ln 2 / 2, by its series
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
    return _mm512_scalef_ps(sum, n);
}

inline __m512 sigmoid(__m512 x) {
    __m512 one = _mm512_set1_ps(1), e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(one, _mm512_add_ps(one, e));
}

inline __m512 tangent(__m512 x) {  // tanh x = 2 σ(2x) − 1
    return _mm512_fmsub_ps(_mm512_set1_ps(2), sigmoid(_mm512_add_ps(x, x)), _mm512_set1_ps(1));
}

inline __m512 error(__m512 x) {  // erf: Abramowitz, Stegun 1964, 7.1.26
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 a = _mm512_abs_ps(x), one = _mm512_set1_ps(1);
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(a, _mm512_set1_ps(0.3275911f), one));
    __m512 sum = _mm512_set1_ps(1.061405429f);
    for (float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.0f})
        sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(term));
    __m512 found = _mm512_fnmadd_ps(sum, exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(a, a))), one);
    return _mm512_mask_sub_ps(found, below, _mm512_setzero_ps(), found);
}

inline __m512 activated(__m512 x, int which) {  // nn/flat.py numbers them
    switch (which) {
        case 1: return _mm512_max_ps(x, _mm512_setzero_ps());
        case 2: x = _mm512_max_ps(x, _mm512_setzero_ps()); return _mm512_mul_ps(x, x);
        case 3: {
            __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
            return _mm512_fmadd_ps(half, error(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678f))), half);
        }
        case 4: {
            __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x), half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
            __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
            return _mm512_fmadd_ps(half, tangent(_mm512_mul_ps(inner, _mm512_set1_ps(0.79788456f))), half);
        }
        case 5: return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, _mm512_set1_ps(1.702f))));
        case 6: return _mm512_mul_ps(x, sigmoid(x));
        case 7: return sigmoid(x);
        case 8: return tangent(x);
        default: return x;
    }
}

// --- products: nn/quantized.py has the definition --------------------------------------------------------------------

void round_token(const float* x, int inputs, uint8_t* numbers, float* step, float* zero) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int i = 0; i < inputs; i += LANES) {
        __m512 some = _mm512_maskz_loadu_ps(tail(inputs - i), x + i);
        low = _mm512_min_ps(low, some), high = _mm512_max_ps(high, some);
    }
    float least = _mm512_reduce_min_ps(low), most = _mm512_reduce_max_ps(high);
    float size = (most - least) * (1.0f / 255);
    *zero = -std::nearbyint(least / std::fmax(size, 1.17549435e-38f));
    *step = std::fmax(size, 6.1e-5f);
    __m512 inverse = _mm512_set1_ps(1 / *step), origin = _mm512_set1_ps(*zero);
    for (int i = 0; i < inputs; i += LANES) {
        __m512 some = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(tail(inputs - i), x + i), inverse, origin);
        __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32(some), _mm512_setzero_si512());
        _mm_storeu_si128((__m128i*)(numbers + i), _mm512_cvtusepi32_epi8(whole));
    }
}

struct Map {  // codes are packed: (outputs / WIDE, inputs / 4, WIDE, 4)
    const int8_t* codes;
    const float *step, *bias;
    const int32_t* sums;
    int inputs, outputs, activation;
    explicit Map(const Order& o)
        : codes((const int8_t*)o.places[0]), step((const float*)o.places[1]), bias((const float*)o.places[3]),
          sums((const int32_t*)o.places[2]), inputs(o.numbers[0]), outputs(o.numbers[1]), activation(o.numbers[2]) {}
};

// Sums for ROWS tokens and WIDE outputs. By itself, or the compiler keeps what comes after in the registers it needs.
template <int ROWS>
__attribute__((noinline)) void sum_up(const int8_t* codes, int quads, const uint8_t* numbers, int64_t stride,
                                      __m512i* found) {
    __m512i sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_si512();
    for (int k = 0; k < quads; k++, codes += 4 * WIDE, numbers += 4) {
        __m512i some[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) some[j] = _mm512_loadu_si512(codes + j * 64);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, numbers + r * stride, 4);
            __m512i token = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_dpbusd_epi32(sums[r][j], token, some[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_si512(found + 4 * r + j, sums[r][j]);
}

template <int ROWS>
inline void tile(const Map& map, int block, const uint8_t* numbers, int64_t stride, const float* steps, float* out) {
    const int quads = (map.inputs + 3) / 4;
    __m512i sums[ROWS * 4];
    sum_up<ROWS>(map.codes + int64_t(block) * quads * 4 * WIDE, quads, numbers, stride, sums);
    for (int j = 0; j < 4; j++) {
        int n = block * WIDE + j * LANES;
        if (n >= map.outputs) break;
        __mmask16 there = tail(map.outputs - n);
        __m512i own = _mm512_maskz_loadu_epi32(there, map.sums + n);
        __m512 worth = _mm512_maskz_loadu_ps(there, map.step + n);
        __m512 bias = map.bias ? _mm512_maskz_loadu_ps(there, map.bias + n) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; r++) {
            __m512i zeros = _mm512_mullo_epi32(own, _mm512_set1_epi32(int(steps[2 * r + 1])));
            __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[4 * r + j], zeros));
            __m512 found = _mm512_fmadd_ps(sum, _mm512_mul_ps(worth, _mm512_set1_ps(steps[2 * r])), bias);
            _mm512_mask_storeu_ps(out + int64_t(r) * map.outputs + n, there, activated(found, map.activation));
        }
    }
}

void product(const Order& o, const Pass& pass, int number) {
    const Map map(o);
    const int tokens = pass.rows * pass.time, width = pass.widths[o.input];
    const float* x = pass.registers[o.input];
    float *out = pass.registers[o.output], *steps = pass.scratch;
    const int stride = (map.inputs + 3) / 4 * 4 + 64;
    Share mine(tokens, number, pass.threads);
    for (int t = mine.begin; t < mine.end; t++)
        round_token(x + int64_t(t) * width, map.inputs, pass.rounded + int64_t(t) * stride, steps + 2 * t,
                    steps + 2 * t + 1);
#pragma omp barrier
    Share blocks((map.outputs + WIDE - 1) / WIDE, number, pass.threads);
    for (int block = blocks.begin; block < blocks.end; block++) {
        int t = 0;
        auto next = [&](auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            tile<ROWS>(map, block, pass.rounded + int64_t(t) * stride, stride, steps + 2 * t,
                       out + int64_t(t) * map.outputs);
            t += ROWS;
        };
        while (tokens - t >= TALL && tokens - t != 7 && tokens - t != 8) next(std::integral_constant<int, TALL>());
        if (tokens - t > TALL) next(std::integral_constant<int, 4>());  // 4 and 3 or 4: one or two alone are slow
        switch (tokens - t) {
            case 5: next(std::integral_constant<int, 5>()); break;
            case 4: next(std::integral_constant<int, 4>()); break;
            case 3: next(std::integral_constant<int, 3>()); break;
            case 2: next(std::integral_constant<int, 2>()); break;
            case 1: next(std::integral_constant<int, 1>()); break;
        }
    }
}

// --- token by token --------------------------------------------------------------------------------------------------

void embed(const Order& o, const Pass& pass, int t) {
    const int width = o.numbers[0];
    const int64_t token = pass.tokens[t];
    const int place = pass.starts[t / pass.time] + t % pass.time;
    const bool padding = t % pass.time >= pass.lengths[t / pass.time];
    const float* position = o.numbers[1] < 0 ? nullptr : pass.tables[o.numbers[1]] + int64_t(padding ? 0 : place) * width;
    const int8_t* codes = (const int8_t*)o.places[0] + token * width;
    const float worth = ((const float*)o.places[1])[token];
    float* out = pass.registers[o.output] + int64_t(t) * width;
    for (int i = 0; i < width; i++) out[i] = codes[i] * worth * o.factors[0] + (position ? position[i] : 0);
}

void norm(const Order& o, const Pass& pass, int t) {
    const int width = o.numbers[0];
    const bool centred = o.numbers[1];
    const float* x = pass.registers[o.input] + int64_t(t) * width;
    float* out = pass.registers[o.output] + int64_t(t) * width;
    const float *weight = (const float*)o.places[0], *bias = (const float*)o.places[1];
    float mean = 0, square = 0;
    if (centred) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < width; i += LANES) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(tail(width - i), x + i));
        mean = _mm512_reduce_add_ps(sum) / width;
    }
    __m512 sum = _mm512_setzero_ps(), middle = _mm512_set1_ps(mean);
    for (int i = 0; i < width; i += LANES) {
        __mmask16 there = tail(width - i);
        __m512 some = _mm512_maskz_sub_ps(there, _mm512_maskz_loadu_ps(there, x + i), middle);
        sum = _mm512_fmadd_ps(some, some, sum);
    }
    square = _mm512_reduce_add_ps(sum) / width;
    __m512 scale = _mm512_set1_ps(1 / std::sqrt(square + o.factors[0])), offset = _mm512_set1_ps(o.factors[1]);
    for (int i = 0; i < width; i += LANES) {
        __mmask16 there = tail(width - i);
        __m512 some = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, x + i), middle), scale);
        if (weight) some = _mm512_mul_ps(some, _mm512_add_ps(_mm512_maskz_loadu_ps(there, weight + i), offset));
        if (bias) some = _mm512_add_ps(some, _mm512_maskz_loadu_ps(there, bias + i));
        _mm512_mask_storeu_ps(out + i, there, some);
    }
}

void elementwise(const Order& o, const Pass& pass, int t) {
    const int width = pass.widths[o.output];
    const float* a = pass.registers[o.input] + int64_t(t) * pass.widths[o.input];
    float* out = pass.registers[o.output] + int64_t(t) * width;
    const float* factors = (const float*)o.places[0];
    for (int i = 0; i < width; i += LANES) {
        __mmask16 there = tail(width - i);
        __m512 x = _mm512_maskz_loadu_ps(there, a + i);
        if (o.kind == ADD) {
            const float* b = pass.registers[o.other] + int64_t(t) * width;
            x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(there, b + i));
        } else if (o.kind == SCALE) {
            x = _mm512_mul_ps(x, factors ? _mm512_maskz_loadu_ps(there, factors + i) : _mm512_set1_ps(o.factors[0]));
        } else if (o.kind == ACTIVATE) {
            x = activated(x, o.numbers[0]);
        } else {  // GATE: the second half, as far as the first half opens
            x = _mm512_mul_ps(activated(x, o.numbers[0]), _mm512_maskz_loadu_ps(there, a + width + i));
        }
        _mm512_mask_storeu_ps(out + i, there, x);
    }
}

// --- attention -------------------------------------------------------------------------------------------------------

void turn(float* x, const float* cosines, int planes) {  // nn/rotary.py: pairs i and i + planes
    const float* sines = cosines + planes;
    for (int i = 0; i < planes; i++) {
        float a = x[i], b = x[i + planes];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + planes] = b * cosines[i] + a * sines[i];
    }
}

// The sums of four vectors, all in the same order.
inline __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d first = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d second = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(first), _mm512_castpd_ps(second));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// softmax(q·k · scale) v over so many keys; `weights` has room for four more.
void look(const float* q, const Cache& cache, int64_t at, int keys, int width, float scale, float* weights, float* out) {
    if (!keys) {
        std::memset(out, 0, width * sizeof(float));
        return;
    }
    for (int t = 0; t < keys; t += 4) {
        const float* k[4];
        for (int n = 0; n < 4; n++) k[n] = cache.keys + at + std::min(t + n, keys - 1) * cache.time;
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int i = 0; i < width; i += LANES) {
            __mmask16 there = tail(width - i);
            __m512 some = _mm512_maskz_loadu_ps(there, q + i);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                sums[n] = _mm512_fmadd_ps(some, _mm512_maskz_loadu_ps(there, k[n] + i), sums[n]);
        }
        __m128 found = four_sums(sums[0], sums[1], sums[2], sums[3]);
        _mm_storeu_ps(weights + t, _mm_mul_ps(found, _mm_set1_ps(scale)));
    }
    __m512 high = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int t = 0; t < keys; t += LANES)
        high = _mm512_max_ps(high, _mm512_mask_loadu_ps(high, tail(keys - t), weights + t));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(high));
    for (int t = 0; t < keys; t += LANES) {
        __mmask16 there = tail(keys - t);
        __m512 some = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, weights + t), top));
        total = _mm512_mask_add_ps(total, there, total, some);
        _mm512_mask_storeu_ps(weights + t, there, some);
    }
    const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total));
    for (int i = 0; i < width; i += WIDE) {  // four vectors of features at a time, odd and even keys apart
        __mmask16 there[4];
        __m512 even[4], odd[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            there[n] = tail(std::max(0, width - i - n * LANES));
            even[n] = odd[n] = _mm512_setzero_ps();
        }
        const float* v = cache.values + at + i;
        for (int t = 0; t < keys; t += 2, v += 2 * cache.time) {
            const __m512 one = _mm512_set1_ps(weights[t]);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                even[n] = _mm512_fmadd_ps(one, _mm512_maskz_loadu_ps(there[n], v + n * LANES), even[n]);
            if (t + 1 == keys) break;
            const __m512 next = _mm512_set1_ps(weights[t + 1]);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                odd[n] = _mm512_fmadd_ps(next, _mm512_maskz_loadu_ps(there[n], v + cache.time + n * LANES), odd[n]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            __m512 sum = _mm512_mul_ps(_mm512_add_ps(even[n], odd[n]), share);
            _mm512_mask_storeu_ps(out + i + n * LANES, there[n], sum);
        }
    }
}

void attend(const Order& o, const Pass& pass, int number) {
    const int heads = o.numbers[0], narrow = o.numbers[1], width = o.numbers[2], from = o.numbers[3];
    const int planes = o.numbers[5], share = heads / narrow;
    const int64_t stride = pass.widths[o.input];
    float *x = pass.registers[o.input], *weights = pass.scratch + 2 * pass.rows * pass.time + int64_t(number) * pass.longest;
    Cache cache{};
    if (from == OWN)
        cache = {x + heads * width, x + (heads + narrow) * width, pass.time * stride, width, stride};
    else
        cache = pass.caches[o.numbers[4]];
    Share tasks(pass.rows * narrow, number, pass.threads);
    for (int task = tasks.begin; task < tasks.end; task++) {
        const int row = task / narrow, head = task % narrow, start = from == CACHED ? pass.starts[row] : 0;
        const int source = from == SOURCE ? row / pass.group : row;
        const int64_t at = source * cache.row + head * cache.head;
        for (int i = 0; i < pass.lengths[row]; i++) {
            float* token = x + (int64_t(row) * pass.time + i) * stride;
            float *k = token + (heads + head) * width, *v = token + (heads + narrow + head) * width;
            if (planes) {
                const int64_t line = int64_t(start + i) * 2 * planes;
                for (int h = head * share; h < (head + 1) * share; h++)
                    turn(token + h * width, pass.tables[o.numbers[6]] + line, planes);
                turn(k, pass.tables[o.numbers[6] + 1] + line, planes);
            }
            if (from == CACHED) {
                std::memcpy(cache.keys + at + (start + i) * cache.time, k, width * sizeof(float));
                std::memcpy(cache.values + at + (start + i) * cache.time, v, width * sizeof(float));
            }
        }
        for (int i = 0; i < pass.time; i++) {
            const int64_t t = int64_t(row) * pass.time + i;
            const int keys = i >= pass.lengths[row] ? 0 : from == CACHED ? start + i + 1 : from == SOURCE ? pass.sources[source] : pass.lengths[row];
            for (int h = head * share; h < (head + 1) * share; h++)
                look(x + t * stride + h * width, cache, at, keys, width, o.factors[0], weights,
                     pass.registers[o.output] + (t * heads + h) * width);
        }
    }
}

// orders that look at one token at a time: a thread does several of them one after another without waiting
bool tokenwise(const Order& o) { return o.kind != PRODUCT && o.kind != ATTEND; }

}  // namespace

extern "C" {

void run(const Pass* given) {
    const int tokens = given->rows * given->time;
#pragma omp parallel num_threads(given->threads)
    {
        Pass pass = *given;
        pass.threads = omp_get_num_threads();
        const int number = omp_get_thread_num();
        Share mine(tokens, number, pass.threads);
        for (int n = 0; n < pass.orders; n++) {
            const Order& o = pass.order[n];
            if (n && !(tokenwise(o) && tokenwise(pass.order[n - 1]))) {
                // a product's tokens are rounded by those who made them
                if (!(o.kind == PRODUCT && tokenwise(pass.order[n - 1]))) {
#pragma omp barrier
                }
            }
            if (o.kind == PRODUCT) product(o, pass, number);
            else if (o.kind == ATTEND) attend(o, pass, number);
            else
                for (int t = mine.begin; t < mine.end; t++)
                    o.kind == EMBED ? embed(o, pass, t) : o.kind == NORM ? norm(o, pass, t) : elementwise(o, pass, t);
        }
    }
}

// Of each row (vocab) the `few` largest scores, best first and the first of equal ones first, none of them `banned`
// (count): where they stand (rows, few), and their log-probabilities, in which the banned ones keep their share.
void best(float* scores, int32_t rows, int32_t vocab, const int64_t* banned, int32_t count, int32_t few,
          int32_t threads, int64_t* tokens, float* chances) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
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
