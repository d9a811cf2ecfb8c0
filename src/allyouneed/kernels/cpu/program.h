// What the machine is told: orders, and what all orders of one pass share. kernels/cpu/build.py has the same.
#pragma once

#include <cstdint>

namespace {

constexpr int LANES = 16, WIDE = 4 * LANES;  // outputs that are computed side by side
constexpr int TALL = 6;                      // with so many tokens at once: 24 sums stay in registers

enum Kind { EMBED, PRODUCT, NORM, ADD, SCALE, ACTIVATE, GATE, ATTEND };
enum Keys { CACHED, SOURCE, OWN };  // whom a query looks at
enum Form { EIGHT, SINGLE, HALF };  // weights: 8 bits and packed, or as torch has them, float32 or bfloat16

struct Order {  // runtime/cpu/lower.py has the same
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

}  // namespace
