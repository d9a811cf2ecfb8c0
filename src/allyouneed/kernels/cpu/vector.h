// Sixteen floats or integers in as many registers as the instruction set needs: one with AVX-512, two with AVX2, four
// with NEON, SSE2 or nothing special. All sets add up lanes in the same order.
//
// A register (`Leaf`) is a vector type of the compiler (GCC, Clang), which knows + − · ÷ and comparisons for every
// processor. What it does not know is written per set here; all other files know `Floats`, `Ints` and `Tail` only.
#pragma once

#if defined(__SSE2__) && !defined(PORTABLE)
#define SSE2 1
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(PORTABLE)
#define NEON 1
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "program.h"

#define ALWAYS inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LEAF 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LEAF 8
#else
#define LEAF 4
#endif

namespace {

typedef float Leaf __attribute__((vector_size(4 * LEAF)));
typedef int32_t LeafInts __attribute__((vector_size(4 * LEAF)));
typedef float Four __attribute__((vector_size(16)));

template <typename T>
struct Two {
    T low, high;
};

template <int LANES_LEFT, typename T>
struct Repeated {
    using Half = typename Repeated<LANES_LEFT / 2, T>::Type;
    using Type = Two<Half>;
};
template <typename T>
struct Repeated<LEAF, T> {
    using Type = T;
};
using Floats = Repeated<LANES, Leaf>::Type;
using Ints = Repeated<LANES, LeafInts>::Type;

template <typename T>
constexpr bool IS_TWO = false;
template <typename T>
constexpr bool IS_TWO<Two<T>> = true;
template <typename T>
constexpr int SIZE = sizeof(T) / 4;

// --- of two halves: the same of each ----------------------------------------------------------------------------------

#define OF_ONE(name) \
    template <typename T> \
    ALWAYS auto name(Two<T> a)->Two<decltype(name(a.low))> { \
        return {name(a.low), name(a.high)}; \
    }
#define OF_TWO(name) \
    template <typename T> \
    ALWAYS auto name(Two<T> a, Two<T> b)->Two<decltype(name(a.low, b.low))> { \
        return {name(a.low, b.low), name(a.high, b.high)}; \
    }
#define INFIX(sign) \
    template <typename T> \
    ALWAYS Two<T> operator sign(Two<T> a, Two<T> b) { \
        return {a.low sign b.low, a.high sign b.high}; \
    }
INFIX(+)
INFIX(-)
INFIX(*)
INFIX(/)
template <typename T>
ALWAYS Two<T> operator-(Two<T> a) {
    return {-a.low, -a.high};
}

// --- registers --------------------------------------------------------------------------------------------------------

template <typename T>
ALWAYS T as(const void* x) {  // what stands there, register by register: a copy of the whole would go through memory
    if constexpr (IS_TWO<T>) {
        const auto low = as<decltype(T::low)>(x);
        return {low, as<decltype(T::low)>((const char*)x + sizeof(low))};
    } else {
        T found;
        std::memcpy(&found, x, sizeof(T));
        return found;
    }
}
template <typename T>
ALWAYS void put(void* x, T some) {
    if constexpr (IS_TWO<T>) put(x, some.low), put((char*)x + sizeof(some.low), some.high);
    else std::memcpy(x, &some, sizeof(T));
}

#if LEAF == 16
ALWAYS Leaf larger(Leaf a, Leaf b) { return _mm512_max_ps(a, b); }
ALWAYS Leaf smaller(Leaf a, Leaf b) { return _mm512_min_ps(a, b); }
ALWAYS Leaf absolute(Leaf a) { return _mm512_abs_ps(a); }
ALWAYS Leaf nearest(Leaf a) { return _mm512_roundscale_ps(a, 0); }
ALWAYS Leaf times_power(Leaf a, Leaf n) { return _mm512_scalef_ps(a, n); }
ALWAYS Leaf times_any_power(Leaf a, Leaf n) { return _mm512_scalef_ps(a, n); }
ALWAYS __mmask16 is_less(Leaf a, Leaf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
ALWAYS __mmask16 is_equal(Leaf a, Leaf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
ALWAYS __mmask16 is_nan(Leaf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
ALWAYS Leaf select(__mmask16 which, Leaf a, Leaf b) { return _mm512_mask_mov_ps(b, which, a); }
ALWAYS unsigned bits(__mmask16 which) { return which; }
ALWAYS LeafInts to_ints(Leaf a) { return (LeafInts)_mm512_cvtps_epi32(a); }
ALWAYS LeafInts larger(LeafInts a, LeafInts b) { return (LeafInts)_mm512_max_epi32((__m512i)a, (__m512i)b); }
ALWAYS LeafInts smaller(LeafInts a, LeafInts b) { return (LeafInts)_mm512_min_epi32((__m512i)a, (__m512i)b); }
#else
ALWAYS Leaf select(LeafInts which, Leaf a, Leaf b) { return (Leaf)(((LeafInts)a & which) | ((LeafInts)b & ~which)); }
ALWAYS LeafInts is_less(Leaf a, Leaf b) { return (LeafInts)(a < b); }
ALWAYS LeafInts is_equal(Leaf a, Leaf b) { return (LeafInts)(a == b); }
ALWAYS LeafInts is_nan(Leaf a) { return (LeafInts)(a != a); }
ALWAYS Leaf absolute(Leaf a) { return (Leaf)((LeafInts)a & 0x7fffffff); }
#if LEAF == 8
ALWAYS Leaf larger(Leaf a, Leaf b) { return _mm256_max_ps(a, b); }
ALWAYS Leaf smaller(Leaf a, Leaf b) { return _mm256_min_ps(a, b); }
ALWAYS Leaf nearest(Leaf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ALWAYS unsigned bits(LeafInts which) { return _mm256_movemask_ps((Leaf)which); }
ALWAYS LeafInts to_ints(Leaf a) { return (LeafInts)_mm256_cvtps_epi32(a); }
ALWAYS LeafInts larger(LeafInts a, LeafInts b) { return (LeafInts)_mm256_max_epi32((__m256i)a, (__m256i)b); }
ALWAYS LeafInts smaller(LeafInts a, LeafInts b) { return (LeafInts)_mm256_min_epi32((__m256i)a, (__m256i)b); }
#else
ALWAYS LeafInts select(LeafInts which, LeafInts a, LeafInts b) { return (a & which) | (b & ~which); }
ALWAYS LeafInts larger(LeafInts a, LeafInts b) { return select((LeafInts)(a > b), a, b); }
ALWAYS LeafInts smaller(LeafInts a, LeafInts b) { return select((LeafInts)(a < b), a, b); }
#if defined(SSE2)
ALWAYS Leaf larger(Leaf a, Leaf b) { return _mm_max_ps(a, b); }
ALWAYS Leaf smaller(Leaf a, Leaf b) { return _mm_min_ps(a, b); }
ALWAYS unsigned bits(LeafInts which) { return _mm_movemask_ps((Leaf)which); }
ALWAYS LeafInts to_ints(Leaf a) { return (LeafInts)_mm_cvtps_epi32(a); }
#else  // of a NaN: b, as on x86
ALWAYS Leaf larger(Leaf a, Leaf b) { return select(is_less(b, a), a, b); }
ALWAYS Leaf smaller(Leaf a, Leaf b) { return select(is_less(a, b), a, b); }
#if defined(NEON)
ALWAYS unsigned bits(LeafInts which) {
    const uint32_t powers[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)which, vld1q_u32(powers)));
}
ALWAYS LeafInts to_ints(Leaf a) { return (LeafInts)vcvtnq_s32_f32((float32x4_t)a); }
#else
ALWAYS unsigned bits(LeafInts which) { return which[0] & 1 | which[1] & 2 | which[2] & 4 | which[3] & 8; }
ALWAYS LeafInts to_ints(Leaf a) {
    LeafInts found;
    for (int i = 0; i < LEAF; i++)
        found[i] = std::fabs(a[i]) < 2147483520.0f ? int32_t(std::nearbyint(a[i])) : INT32_MIN;
    return found;
}
#endif
#endif
ALWAYS Leaf nearest(Leaf a) { return __builtin_convertvector(to_ints(a), Leaf); }  // |a| < 2³¹
#endif
ALWAYS Leaf power(LeafInts n) { return (Leaf)((n + 127) << 23); }
ALWAYS Leaf times_power(Leaf a, Leaf n) { return a * power(to_ints(n)); }  // −126 ≤ n ≤ 127
ALWAYS Leaf times_any_power(Leaf a, Leaf n) {
    const LeafInts whole = smaller(to_ints(n), LeafInts{} + 254), half = whole >> 1;
    return a * power(half) * power(whole - half);
}
#endif

// a b + c, rounded once where the set has such an instruction (-ffp-contract=fast)
ALWAYS Leaf fmadd(Leaf a, Leaf b, Leaf c) { return a * b + c; }
ALWAYS Leaf fnmadd(Leaf a, Leaf b, Leaf c) { return c - a * b; }
ALWAYS Leaf fmsub(Leaf a, Leaf b, Leaf c) { return a * b - c; }
ALWAYS Leaf to_floats(LeafInts a) { return __builtin_convertvector(a, Leaf); }

// (a₀ + a₂) + (a₁ + a₃), then those of b, c and d, of each four lanes
ALWAYS Leaf lane_sums(Leaf a, Leaf b, Leaf c, Leaf d) {
#if LEAF == 16
    const __m512 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    const __m512 cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))) +
           _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
#elif LEAF == 8
    const __m256 ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    const __m256 cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd))) +
           _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd)));
#elif defined(SSE2)
    const __m128 ab = _mm_unpacklo_ps(a, b) + _mm_unpackhi_ps(a, b);
    const __m128 cd = _mm_unpacklo_ps(c, d) + _mm_unpackhi_ps(c, d);
    return _mm_movelh_ps(ab, cd) + _mm_movehl_ps(cd, ab);
#elif defined(NEON)
    const float64x2_t ab = (float64x2_t)(vzip1q_f32(a, b) + vzip2q_f32(a, b));
    const float64x2_t cd = (float64x2_t)(vzip1q_f32(c, d) + vzip2q_f32(c, d));
    return (Leaf)vzip1q_f64(ab, cd) + (Leaf)vzip2q_f64(ab, cd);
#else
    return Leaf{(a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]), (c[0] + c[2]) + (c[1] + c[3]),
                (d[0] + d[2]) + (d[1] + d[3])};
#endif
}

// --- sixteen lanes ----------------------------------------------------------------------------------------------------

OF_TWO(larger)
OF_TWO(smaller)
OF_TWO(times_power)
OF_TWO(times_any_power)
OF_TWO(is_less)
OF_TWO(is_equal)
OF_ONE(absolute)
OF_ONE(nearest)
OF_ONE(is_nan)
OF_ONE(to_ints)
OF_ONE(to_floats)

template <typename T>
ALWAYS Two<T> fmadd(Two<T> a, Two<T> b, Two<T> c) {
    return {fmadd(a.low, b.low, c.low), fmadd(a.high, b.high, c.high)};
}
template <typename T>
ALWAYS Two<T> fnmadd(Two<T> a, Two<T> b, Two<T> c) {
    return {fnmadd(a.low, b.low, c.low), fnmadd(a.high, b.high, c.high)};
}
template <typename T>
ALWAYS Two<T> fmsub(Two<T> a, Two<T> b, Two<T> c) {
    return {fmsub(a.low, b.low, c.low), fmsub(a.high, b.high, c.high)};
}
template <typename M, typename T>
ALWAYS Two<T> select(Two<M> which, Two<T> a, Two<T> b) {
    return {select(which.low, a.low, b.low), select(which.high, a.high, b.high)};
}
template <typename T>
ALWAYS Two<T> lane_sums(Two<T> a, Two<T> b, Two<T> c, Two<T> d) {
    return {lane_sums(a.low, b.low, c.low, d.low), lane_sums(a.high, b.high, c.high, d.high)};
}
template <typename T>
ALWAYS unsigned bits(Two<T> which) {
    constexpr int HALF = SIZE<T>;  // masks of AVX-512 are no Two
    return bits(which.low) | bits(which.high) << HALF;
}

template <typename T = Floats, typename Number>
ALWAYS T filled(Number x) {
    if constexpr (IS_TWO<T>) {
        const auto half = filled<decltype(T::low)>(x);
        return {half, half};
    } else {
        return x - T{};
    }
}
ALWAYS Floats fill(float x) { return filled<Floats>(x); }
ALWAYS Ints fill_ints(int32_t x) { return filled<Ints>(x); }
ALWAYS Floats zeros() { return Floats{}; }

ALWAYS Four to_four(Four x) { return x; }
#if LEAF == 16
ALWAYS Four to_four(Leaf x) {
    const __m256 half = _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1);
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}
#elif LEAF == 8
ALWAYS Four to_four(Leaf x) { return _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1); }
#endif
template <typename T>
ALWAYS Four to_four(Two<T> x) {  // the sum of the halves, and of theirs
    return to_four(x.low + x.high);
}
ALWAYS float sum_of(Floats x) {
    const Four four = to_four(x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
// The sums of four vectors, each added up in the same order.
ALWAYS Four four_sums(Floats a, Floats b, Floats c, Floats d) { return to_four(lane_sums(a, b, c, d)); }

template <typename T>
ALWAYS float largest_of(T x) {
    if constexpr (IS_TWO<T>) {
        return largest_of(larger(x.low, x.high));
    } else {
#if LEAF == 16
        return _mm512_reduce_max_ps(x);
#else
        float most = x[0];
        for (int i = 1; i < LEAF; i++) most = x[i] > most ? x[i] : most;
        return most;
#endif
    }
}
ALWAYS float smallest_of(Floats x) { return -largest_of(-x); }

// --- memory -----------------------------------------------------------------------------------------------------------

#if LEAF == 16
using Tail = __mmask16;
ALWAYS Tail tail(int left) { return left >= LANES ? 0xffff : (1u << left) - 1; }  // lanes that are inside
ALWAYS Floats load(const float* x) { return _mm512_loadu_ps(x); }
ALWAYS Floats load(const float* x, Tail inside) { return _mm512_maskz_loadu_ps(inside, x); }
ALWAYS Floats load(const float* x, Tail inside, Floats others) { return _mm512_mask_loadu_ps(others, inside, x); }
ALWAYS Ints load(const int32_t* x, Tail inside) { return (Ints)_mm512_maskz_loadu_epi32(inside, x); }
ALWAYS void store(float* x, Floats some) { _mm512_storeu_ps(x, some); }
ALWAYS void store(float* x, Floats some, Tail inside) { _mm512_mask_storeu_ps(x, inside, some); }
ALWAYS Floats keep(Floats some, Tail inside) { return _mm512_maskz_mov_ps(inside, some); }  // 0 in the others
ALWAYS unsigned bits_of(Tail inside) { return inside; }
ALWAYS Floats load(const uint16_t* x, Tail inside) {  // bfloat16 is the upper half of float32
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, x)), 16));
}
#else
struct Tail {  // the first lanes are inside
    int count;
};
ALWAYS Tail tail(int left) { return {std::min(left, LANES)}; }
ALWAYS unsigned bits_of(Tail inside) { return (1u << inside.count) - 1; }
template <typename T>
ALWAYS T load_first(const void* x, Tail inside, T others) {
    T room;
    if (__builtin_expect(inside.count != LANES, 0)) {
        put(&room, others);
        x = std::memcpy(&room, x, 4 * inside.count);
    }
    return as<T>(x);
}
ALWAYS Floats load(const float* x) { return as<Floats>(x); }
ALWAYS Floats load(const float* x, Tail inside, Floats others) { return load_first(x, inside, others); }
ALWAYS Floats load(const float* x, Tail inside) { return load_first(x, inside, zeros()); }
ALWAYS Ints load(const int32_t* x, Tail inside) { return load_first(x, inside, Ints{}); }
ALWAYS void store(float* x, Floats some) { put(x, some); }
ALWAYS void store(float* x, Floats some, Tail inside) {
    if (__builtin_expect(inside.count == LANES, 1)) return put(x, some);
    float room[LANES];
    put(room, some);
    std::memcpy(x, room, 4 * inside.count);
}
alignas(64) constexpr int32_t FIRST_LANES[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
ALWAYS Leaf keep_bits(Leaf some, LeafInts which) { return (Leaf)((LeafInts)some & which); }
template <typename T, typename M>
ALWAYS Two<T> keep_bits(Two<T> some, Two<M> which) {
    return {keep_bits(some.low, which.low), keep_bits(some.high, which.high)};
}
ALWAYS Floats keep(Floats some, Tail inside) { return keep_bits(some, as<Ints>(FIRST_LANES + LANES - inside.count)); }
template <typename T>
ALWAYS T widened(const uint16_t* x) {
    if constexpr (IS_TWO<T>) {
        return {widened<decltype(T::low)>(x), widened<decltype(T::low)>(x + SIZE<T> / 2)};
    } else {
        typedef uint16_t Narrow __attribute__((vector_size(2 * LEAF)));
        typedef uint32_t Wide __attribute__((vector_size(4 * LEAF)));
        return (T)(__builtin_convertvector(as<Narrow>(x), Wide) << 16);
    }
}
ALWAYS Floats load(const uint16_t* x, Tail inside) {  // bfloat16 is the upper half of float32
    if (__builtin_expect(inside.count == LANES, 1)) return widened<Floats>(x);
    uint16_t some[LANES] = {};
    std::memcpy(some, x, 2 * inside.count);
    return widened<Floats>(some);
}
#endif

ALWAYS Four load_four(const float* x, int count = 4) {
    if (count >= 4) return as<Four>(x);
    Four found = {};
    for (int i = 0; i < count; i++) found[i] = x[i];
    return found;
}
ALWAYS void store_four(float* x, Four some, int count = 4) {
    if (count >= 4) std::memcpy(x, &some, sizeof(some));
    for (int i = 0; i < count && count < 4; i++) x[i] = some[i];
}

// --- dot products of int8 weights with quantized tokens ---------------------------------------------------------------

// `Digit` is how a quantized input stands in memory, less DIGIT_ZERO; `Token` and `Weights` are QUAD inputs, the latter of
// as many outputs as a register has lanes. Sums are exact: vpmaddubsw, which saturates, is not used. Sets without an
// instruction for four products of bytes multiply pairs of 16 bits: inputs 0, 1 and then 2, 3 of a QUAD (`PAIRS`: `pack`
// puts their weights into the even and the odd bytes).
typedef int8_t LeafBytes __attribute__((vector_size(4 * LEAF)));

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || (defined(NEON) && defined(__ARM_FEATURE_MATMUL_INT8))
#define DOT_UNSIGNED 1
#elif defined(NEON)
#define DOT_SIGNED 1
#elif defined(SSE2)
#define DOT_PAIRS 1
#endif

#if defined(DOT_PAIRS)
constexpr bool PAIRS = true;
constexpr int DIGIT_ZERO = 0;
using Digit = uint16_t;
typedef int16_t LeafShorts __attribute__((vector_size(4 * LEAF)));
struct Token {
    LeafInts first, second;
};
struct Weights {
    LeafShorts first, second;
};
ALWAYS Token token_of(const Digit* x) { return {filled<LeafInts>(as<int32_t>(x)), filled<LeafInts>(as<int32_t>(x + 2))}; }
ALWAYS Weights weights_of_leaf(const int8_t* x) {
    const LeafShorts both = as<LeafShorts>(x);
    return {(LeafShorts)(both << 8) >> 8, both >> 8};
}
ALWAYS LeafInts pair_sums(LeafShorts a, LeafInts b) {
#if LEAF == 16
    return (LeafInts)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LEAF == 8
    return (LeafInts)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (LeafInts)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
ALWAYS LeafInts add_dots(LeafInts sum, Token token, Weights weights) {
    return sum + pair_sums(weights.first, token.first) + pair_sums(weights.second, token.second);
}
#else
constexpr bool PAIRS = false;
using Token = LeafInts;
using Weights = LeafBytes;
ALWAYS Weights weights_of_leaf(const int8_t* x) { return as<LeafBytes>(x); }
#if defined(DOT_SIGNED)
constexpr int DIGIT_ZERO = 128;
using Digit = int8_t;
#else
constexpr int DIGIT_ZERO = 0;
using Digit = uint8_t;
#endif
ALWAYS Token token_of(const Digit* x) { return filled<LeafInts>(as<int32_t>(x)); }
ALWAYS LeafInts add_dots(LeafInts sum, Token token, Weights weights) {
#if defined(__AVX512VNNI__) && LEAF == 16
    return (LeafInts)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)token, (__m512i)weights);
#elif defined(__AVXVNNI__)
    return (LeafInts)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)token, (__m256i)weights);
#elif defined(NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum, (uint8x16_t)token, (int8x16_t)weights);
#elif defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, (int8x16_t)weights, (int8x16_t)token);
#elif defined(NEON)  // two products of bytes, −128 … 127 times −127 … 127, add up in 16 bits
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)weights), vget_low_s8((int8x16_t)token));
    const int16x8_t high = vmull_high_s8((int8x16_t)weights, (int8x16_t)token);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
#else
    uint8_t x[sizeof(token)];
    std::memcpy(x, &token, sizeof(token));
    for (int i = 0; i < LEAF * QUAD; i++) sum[i / QUAD] += weights[i] * x[i % QUAD];
    return sum;
#endif
}
#endif

// 0 … 255, of one or two bytes, to a quantized token
template <typename T>
ALWAYS void store_digits(Digit* out, T whole) {
    if constexpr (IS_TWO<T>) {
        store_digits(out, whole.low), store_digits(out + SIZE<T> / 2, whole.high);
    } else {
        typedef Digit Narrow __attribute__((vector_size(sizeof(Digit) * LEAF)));
        const Narrow digits = __builtin_convertvector(whole - DIGIT_ZERO, Narrow);
        std::memcpy(out, &digits, sizeof(digits));
    }
}

ALWAYS LeafInts upper_byte(LeafInts whole) { return whole >> 8; }
OF_ONE(upper_byte)

// Registers of sums that the products of some tokens keep, and how many tokens that are: weights take the others.
#if LEAF == 16
constexpr int SUMS = PAIRS ? 16 : 24;
#elif defined(NEON)
constexpr int SUMS = 24;
#else
constexpr int SUMS = PAIRS ? 8 : 12;
#endif
constexpr int TILE_TOKENS = PAIRS ? 4 : 6;
constexpr int COPIES = LANES / LEAF;  // registers of a `Floats`

constexpr int columns(int registers, int most) {  // a power of two
    return most > 1 && most > registers ? columns(registers, most / 2) : most;
}
constexpr int GROUP = columns(SUMS / COPIES / 2, 4);  // `Floats` of which two sums each stay in registers

ALWAYS void relax() {  // while this thread waits for another one
#if defined(SSE2)
    _mm_pause();
#elif defined(NEON)
    asm volatile("yield");
#endif
}

}  // namespace
