// What a program of the interpreter is made of. This is the only definition: abi.py reads it for Python, so every
// declaration stands on a line of its own and uses fixed-size integers, floats and pointers only.
#pragma once

#include <cstdint>

namespace {

constexpr int LANES = 16;         // floats in a 512-bit register
constexpr int TILE_OUTPUTS = 64;  // outputs of an int8 product that are computed together
constexpr int TILE_TOKENS = 6;    // tokens of a product that are computed together: 24 sums stay in registers
constexpr int QUAD = 4;           // int8 inputs of one multiply-add instruction
constexpr int SLACK = 64;         // bytes after a quantized token that may be overwritten

enum Kind { EMBED, LINEAR, NORM, ADD, SCALE, ACTIVATE, GATE, ATTENTION };
enum Format { INT8, FLOAT32, BFLOAT16 };  // of weights; INT8 ones are packed by `pack`
enum Keys { CACHED, SOURCE, SELF };       // what a query attends to: the KV cache, the source, the tokens of this pass
enum Activation { IDENTITY, RELU, RELU_SQUARED, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH };

struct EmbedArgs {
    int32_t width;
    int32_t positions;  // table that is added, by position; −1: none
    int32_t format;
    int32_t vocab;
    float scale;
    const void* weight;  // (vocab, width)
    const float* step;   // (vocab) of INT8
};

struct LinearArgs {
    int32_t inputs;
    int32_t outputs;
    int32_t activation;
    int32_t format;
    const void* weight;   // (outputs, inputs), or packed
    const float* step;    // (outputs) of INT8
    const int32_t* sums;  // (outputs) of packed INT8: the sum of each row of weights
    const float* bias;    // (outputs) or null
};

struct NormArgs {
    int32_t width;
    int32_t centred;  // LayerNorm; 0: RMSNorm
    float eps;
    float offset;         // added to the weight
    const float* weight;  // (width) or null
    const float* bias;    // (width) or null
};

struct ScaleArgs {
    float factor;
    const float* factors;  // (width), or null: `factor` for all
};

struct ActivateArgs {
    int32_t activation;
};

struct AttentionArgs {
    int32_t heads;
    int32_t kv_heads;
    int32_t head_width;
    int32_t keys;
    int32_t cache;   // which of the caches, for CACHED and SOURCE
    int32_t planes;  // rotary positions: pairs of features that are rotated; 0: none
    int32_t table;   // rotary positions: cosines and sines for queries; the next table has those for keys
    float scale;
};

struct Instruction {
    int32_t kind;
    int32_t input;  // registers
    int32_t other;
    int32_t output;
    union {
        EmbedArgs embed;
        LinearArgs linear;
        NormArgs norm;
        ScaleArgs scale;
        ActivateArgs activate;
        AttentionArgs attention;
    };
};

struct Cache {  // keys and values of one layer, and the distances, in floats, from one row (of paged ones, block), head
                // and token to the next
    float* keys;
    float* values;
    int64_t row;
    int64_t head;
    int64_t time;
};

struct Pass {
    int32_t count;  // of instructions
    int32_t rows;
    int32_t time;
    int32_t threads;
    int32_t group;    // rows that share a source
    int32_t longest;  // the most keys that any query attends to
    int32_t blocks;   // in a row's block table
    int32_t shift;    // a block has 1 << shift tokens
    const Instruction* instructions;
    float* const* registers;  // (rows * time, width) each
    const int32_t* widths;
    const Cache* caches;
    const float* const* tables;  // by position
    const int64_t* tokens;       // (rows, time)
    const int32_t* starts;       // (rows) tokens that were read before
    const int32_t* lengths;      // (rows) new tokens; the rest of `time` is padding
    const int32_t* sources;      // (rows / group) lengths of the sources
    const int32_t* block_table;  // (rows, blocks) of paged caches, or null
    uint8_t* quantized;          // (rows * time, widest input)
    float* scratch;              // step and zero point of each token; then (threads, longest) attention weights
};

struct Share {  // the part of `count` items that falls to a thread
    int begin, end;
    Share(int count, int thread, int threads)
        : begin(int64_t(count) * thread / threads), end(int64_t(count) * (thread + 1) / threads) {}
};

}  // namespace
