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
constexpr int MAX_DISTANCE = 256;  // of relative vectors
constexpr int MAX_EXPERTS = 1024;

// Instructions from LOAD on read and write the state of a layer: one new token of every row.
enum Kind { EMBED, LINEAR, NORM, ADD, SCALE, ACTIVATE, GATE, ATTENTION, LERP, COPY, ROTATE, SOFTMAX, ROUTE, SPREAD, COMBINE, LOAD, STORE, COMMIT, PUSH, RECALL, CONVOLVE, UNFOLD, RETAIN, WKV, LSTM, GRU };
enum Format { INT8, FLOAT32, BFLOAT16 };  // of weights; INT8 ones are packed by `pack`
enum Keys { CACHED, SOURCE, SELF };       // what a query attends to: the KV cache, the source, the tokens of this pass
enum Activation { IDENTITY, RELU, RELU_SQUARED, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, LOG_SIGMOID };

struct EmbedArgs {
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
    int32_t symmetric;    // INT8: activations are quantized to −128 … 127 of their largest absolute value (BitNet)
    int32_t groups;       // one map per group of features: weight (groups, outputs, inputs); not of INT8
    int32_t input_step;   // features from the inputs of a group to those of the next
    int32_t output_step;
    int32_t experts;      // one map per expert, over the rows that ROUTE, in register `other`, gave it; 0: none
    int32_t top;          // rows per token
    const void* weight;   // (groups, outputs, inputs), or packed; of experts that are not packed, their addresses
    const float* step;    // (experts, outputs) of INT8
    const int32_t* sums;  // (experts, outputs) of packed INT8: the sum of each row of weights
    const float* bias;    // (experts, outputs) or null
};

struct NormArgs {
    int32_t groups;   // of features that are normalised apart
    int32_t centred;  // LayerNorm; 0: RMSNorm
    float eps;
    float offset;         // added to the weight
    const float* weight;  // (width of a group) or null
    const float* bias;    // (width of a group) or null
};

struct ScaleArgs {
    float factor;
    const float* factors;  // (width), or null: `factor` for all
};

struct ActivateArgs {
    int32_t activation;
};

struct RotateArgs {  // in place
    int32_t heads;
    int32_t head_width;
    int32_t planes;       // pairs of features that are rotated
    int32_t table;        // by position: cosines, then sines
    int32_t interleaved;  // pairs are neighbours; 0: features i and i + planes
};

struct SoftmaxArgs {
    int32_t groups;  // of features
};

struct RouteArgs {  // to the output: `top` weights, `top` rows as integers; in the first token then the first row of
                    // each expert
    int32_t experts;
    int32_t top;
    int32_t sigmoid;  // 0: softmax
    int32_t normalise;
    int32_t groups;  // experts are chosen in the `top_groups` best groups; 0: among all
    int32_t top_groups;
    int32_t two_best;  // a group is as good as the sum of its two best; 0: as its best
    float scale;
    const float* correction;  // (experts) added for choosing, or null
};

struct AttentionArgs {
    int32_t heads;
    int32_t kv_heads;
    int32_t head_width;
    int32_t value_width;
    int32_t keys;
    int32_t cache;   // which of the caches, for CACHED and SOURCE
    int32_t bias;    // table (heads, 2 positions − 1) by key position − query position; −1: none
    int32_t mask;    // which of the masks; −1: none
    int32_t first;   // with `recent`: the first keys are seen by all
    int32_t recent;  // keys up to the query that it sees; 0: all
    int32_t ring;    // slots of a ring that follow `first` slots; 0: the slot is the position
    int32_t distance;  // relative vectors are those of −distance … distance
    float scale;
    float cap;                    // of scores; 0: none
    const float* relative_keys;   // (2 distance + 1, head_width) or null
    const float* relative_values;  // (2 distance + 1, value_width) or null
};

struct StateArgs {
    int32_t memory;  // which of the memories
    int32_t part;    // LOAD, STORE: of the carry; RECALL: tokens back
    int32_t size;    // CONVOLVE, UNFOLD: tokens; PUSH: tokens that are kept
    int32_t heads;   // CONVOLVE: filters (heads, size) in register `other`; 0: `weight`
    const float* weight;  // CONVOLVE: (size, width); WKV: decay (width)
    const float* bonus;   // WKV: (width)
};

struct RetainArgs {
    int32_t memory;
    int32_t heads;
    int32_t keys;
    int32_t values;
    int32_t normalised;
    const float* decay;  // (heads) logarithms; null: in register `other`
};

struct Instruction {
    int32_t kind;
    int32_t input;  // registers
    int32_t other;
    int32_t output;
    int32_t input_at;  // first feature
    int32_t other_at;
    int32_t output_at;
    int32_t width;  // features that are written
    union {
        EmbedArgs embed;
        LinearArgs linear;
        NormArgs norm;
        ScaleArgs scale;
        ActivateArgs activate;
        RotateArgs rotate;
        SoftmaxArgs softmax;
        RouteArgs route;
        AttentionArgs attention;
        StateArgs state;
        RetainArgs retain;
    };
};

struct Cache {  // keys and values of one layer, and the distances, in floats, from one row (of paged ones, block), head
                // and token to the next
    float* keys;
    float* values;
    int64_t row;
    int64_t head;
    int64_t time;
    int64_t value_row;
    int64_t value_head;
    int64_t value_time;
};

struct Mask {  // 1 where a row's query may attend to the key at a position
    const uint8_t* allowed;
    int64_t row;
};

struct Memory {  // of a recurrence (nn/states/recurrent.py), or recent tokens (nn/mixers/convolution.py)
    float* const* carry;    // (rows, size) each
    float* const* pending;  // the carry `snapshot_after` tokens after the snapshot
    const int32_t* sizes;
    int32_t parts;
    int32_t snapshot_after;
    int32_t format;      // of the inputs: FLOAT32 or BFLOAT16
    int64_t row;         // numbers from one row's inputs to the next
    void* inputs;       // since the snapshot; of recent tokens: where the new one is written
    int64_t* lengths;    // (rows)
    int64_t* since;      // (rows) tokens in the snapshot; of recent tokens: position of the oldest
    int64_t* pending_at;  // (rows) tokens in `pending`
};

struct Pass {
    int32_t count;  // of instructions
    int32_t rows;
    int32_t time;
    int32_t threads;
    int32_t group;      // rows that share a source
    int32_t longest;    // the most keys that any query attends to
    int32_t blocks;     // in a row's block table
    int32_t shift;      // a block has 1 << shift tokens
    int32_t positions;  // in each table
    int32_t most_rows;     // rows of an int8 product
    const Instruction* instructions;
    float* const* registers;  // (rows * time, width) each
    const int32_t* widths;
    const Cache* caches;
    const Mask* masks;
    const Memory* memories;
    const float* const* tables;  // by position
    const int64_t* tokens;       // (rows, time)
    const int32_t* starts;       // (rows) tokens that were read before
    const int32_t* lengths;      // (rows) new tokens; the rest of `time` is padding
    const int32_t* sources;      // (rows / group) lengths of the sources
    const int32_t* block_table;  // (rows, blocks) of paged caches, or null
    uint8_t* quantized;          // (rows * time, widest input), more rows for experts
    float* scratch;              // step and zero point of `most_rows` rows; then (threads, longest) attention weights
};

}  // namespace
