// States of constant size: one new token of every row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace {

inline float* carry_of(const Memory& memory, int part, int64_t row) {
    return memory.carry[part] + row * memory.sizes[part];
}

// --- nn/states/recurrent.py -------------------------------------------------------------------------------------------

void load_carry(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    std::memcpy(output_of(o, pass, row), carry_of(memory, o.state.part, row), o.width * sizeof(float));
}

void store_carry(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    std::memcpy(carry_of(memory, o.state.part, row), input_of(o, pass, row), o.width * sizeof(float));
}

// The inputs of the new token, after the carry has been updated.
void commit(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    const int64_t count = memory.lengths[row] - memory.since[row];
    const float* x = input_of(o, pass, row);
    const int64_t at = row * memory.row + count * o.width;
    if (memory.format == BFLOAT16) {
        for (int i = 0; i < o.width; i++) ((uint16_t*)memory.inputs)[at + i] = to_bfloat16(x[i]);
    } else {
        std::memcpy((float*)memory.inputs + at, x, o.width * sizeof(float));
    }
    memory.lengths[row]++;
    if (count + 1 != memory.snapshot_after) return;
    for (int part = 0; part < memory.parts; part++)
        std::memcpy(memory.pending[part] + int64_t(row) * memory.sizes[part], carry_of(memory, part, row),
                    memory.sizes[part] * sizeof(float));
    memory.pending_at[row] = memory.lengths[row];
}

// --- recent tokens (nn/mixers/convolution.py) -------------------------------------------------------------------------

void push(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    std::memcpy((float*)memory.inputs + row * memory.row, input_of(o, pass, row), o.width * sizeof(float));
    memory.lengths[row]++;
    memory.since[row] = std::max(memory.since[row], memory.lengths[row] - o.state.size);
}

inline const float* recent(const Memory& memory, int64_t row, int back, int width) {
    return (const float*)memory.inputs + row * memory.row - int64_t(back) * width;
}

void recall(const Instruction& o, const Pass& pass, int row) {
    const float* token = recent(pass.memories[o.state.memory], row, o.state.part, o.width);
    std::memcpy(output_of(o, pass, row), token, o.width * sizeof(float));
}

// One filter per feature (weight), or per head of the token (register `other`).
void convolve(const Instruction& o, const Pass& pass, int row) {
    const StateArgs& args = o.state;
    const Memory& memory = pass.memories[args.memory];
    const int width = o.width;
    float* out = output_of(o, pass, row);
    std::memset(out, 0, width * sizeof(float));
    for (int j = 0; j < args.size; j++) {
        const float* token = recent(memory, row, args.size - 1 - j, width);
        if (args.heads) {
            const float* filters = other_of(o, pass, row);
            const int each = width / args.heads;
            for (int h = 0; h < args.heads; h++)
                add_scaled(out + h * each, token + h * each, filters[h * args.size + j], each);
            continue;
        }
        const float* weight = args.weight + int64_t(j) * width;
        for (int i = 0; i < width; i += LANES) {
            const Tail inside = tail(width - i);
            const Floats sum = load(out + i, inside);
            const Floats x = load(token + i, inside);
            store(out + i, fmadd(load(weight + i, inside), x, sum), inside);
        }
    }
}

void unfold(const Instruction& o, const Pass& pass, int row) {  // `size` tokens per feature
    const int size = o.state.size, width = o.width / size;
    const Memory& memory = pass.memories[o.state.memory];
    float* out = output_of(o, pass, row);
    for (int j = 0; j < size; j++) {
        const float* token = recent(memory, row, size - 1 - j, width);
        for (int i = 0; i < width; i++) out[i * size + j] = token[i];
    }
}

// --- RWKV (nn/ops/wkv.py) ---------------------------------------------------------------------------------------------

// Keys in `input`, values in `other`; the sums stand for e^m a and e^m b, in parts 1 to 3 of the carry.
void wkv(const Instruction& o, const Pass& pass, int row) {
    const StateArgs& args = o.state;
    const Memory& memory = pass.memories[args.memory];
    const float *k = input_of(o, pass, row), *v = other_of(o, pass, row);
    float *m = carry_of(memory, 1, row), *a = carry_of(memory, 2, row), *b = carry_of(memory, 3, row);
    float* out = output_of(o, pass, row);
    for (int i = 0; i < o.width; i += LANES) {
        const Tail inside = tail(o.width - i);
        const Floats key = load(k + i, inside), value = load(v + i, inside);
        const Floats most = load(m + i, inside);
        const Floats above = load(a + i, inside), below = load(b + i, inside);
        const Floats own = key + load(args.bonus + i, inside);
        Floats top = larger(most, own);
        Floats past = exponential(most - top), now = exponential(own - top);
        const Floats sum = fmadd(past, above, now * value);
        store(out + i, sum / fmadd(past, below, now), inside);
        const Floats faded = most - load(args.weight + i, inside);
        top = larger(faded, key);
        past = exponential(faded - top), now = exponential(key - top);
        store(a + i, fmadd(past, above, now * value), inside);
        store(b + i, fmadd(past, below, now), inside);
        store(m + i, top, inside);
    }
}

// --- LSTM and GRU (torch.nn) ------------------------------------------------------------------------------------------

inline Floats gate(const float* gates, int number, int width, int i, Tail inside) {
    return load(gates + number * width + i, inside);
}

// Gates i, f, g, o in `input`; h and c are the carry.
void lstm(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    const float* gates = input_of(o, pass, row);
    float *h = carry_of(memory, 0, row), *c = carry_of(memory, 1, row), *out = output_of(o, pass, row);
    const int width = o.width;
    for (int i = 0; i < width; i += LANES) {
        const Tail inside = tail(width - i);
        const Floats kept = sigmoid(gate(gates, 1, width, i, inside)) * load(c + i, inside);
        const Floats now = fmadd(sigmoid(gate(gates, 0, width, i, inside)), tanh_(gate(gates, 2, width, i, inside)), kept);
        const Floats shown = sigmoid(gate(gates, 3, width, i, inside)) * tanh_(now);
        store(c + i, now, inside);
        store(h + i, shown, inside);
        store(out + i, shown, inside);
    }
}

// Gates r, z, n of the token in `input`, of h in `other`.
void gru(const Instruction& o, const Pass& pass, int row) {
    const Memory& memory = pass.memories[o.state.memory];
    const float *x = input_of(o, pass, row), *own = other_of(o, pass, row);
    float *h = carry_of(memory, 0, row), *out = output_of(o, pass, row);
    const int width = o.width;
    for (int i = 0; i < width; i += LANES) {
        const Tail inside = tail(width - i);
        const Floats r = sigmoid(gate(x, 0, width, i, inside) + gate(own, 0, width, i, inside));
        const Floats z = sigmoid(gate(x, 1, width, i, inside) + gate(own, 1, width, i, inside));
        const Floats n = tanh_(fmadd(r, gate(own, 2, width, i, inside), gate(x, 2, width, i, inside)));
        const Floats now = fmadd(z, load(h + i, inside) - n, n);
        store(h + i, now, inside);
        store(out + i, now, inside);
    }
}

}  // namespace
