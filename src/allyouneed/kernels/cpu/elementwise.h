// Orders that look at one token at a time.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

void embed(const Order& o, const Pass& pass, int t) {
    const int width = o.numbers[0];
    const int64_t token = pass.tokens[t];
    const int place = pass.starts[t / pass.time] + t % pass.time;
    const bool padding = t % pass.time >= pass.lengths[t / pass.time];
    const float* position = o.numbers[1] < 0 ? nullptr : pass.tables[o.numbers[1]] + int64_t(padding ? 0 : place) * width;
    float* out = pass.registers[o.output] + int64_t(t) * width;
    if (o.numbers[2] == EIGHT) {
        const int8_t* codes = (const int8_t*)o.places[0] + token * width;
        const float worth = ((const float*)o.places[1])[token];
        for (int i = 0; i < width; i++) out[i] = codes[i] * worth;
    } else {
        for (int i = 0; i < width; i += LANES) {
            const __mmask16 there = tail(width - i);
            const __m512 some = o.numbers[2] == SINGLE ? wide((const float*)o.places[0] + token * width + i, there)
                                                       : wide((const uint16_t*)o.places[0] + token * width + i, there);
            _mm512_mask_storeu_ps(out + i, there, some);
        }
    }
    for (int i = 0; i < width; i++) out[i] = out[i] * o.factors[0] + (position ? position[i] : 0);
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

// orders that look at one token at a time: a thread does several of them one after another without waiting
bool tokenwise(const Order& o) { return o.kind != PRODUCT && o.kind != ATTEND; }

}  // namespace
