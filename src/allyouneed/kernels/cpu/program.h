// What a program of the interpreter is made of. This is the only definition: abi.py reads it for Python, so every
// declaration stands on a line of its own and uses fixed-size integers, floats and pointers only.
#pragma once

#include <cstdint>

namespace {

constexpr int LANES = 16;         // floats that are computed together (vector.h)
constexpr int TILE_OUTPUTS = 64;  // outputs of an int8 product that are computed together
constexpr int QUAD = 4;           // int8 inputs of one multiply-add instruction
constexpr int DIGIT = 2;          // bytes of a quantized input, at most
constexpr int SLACK = 64;         // quantized inputs after those of a token that may be overwritten
constexpr int MAX_DISTANCE = 256;  // of relative vectors
constexpr int MAX_EXPERTS = 1024;
constexpr int SCAN_FEATURES = 64;  // of a selective scan that are computed together
constexpr int SCAN_SEGMENT = 16;   // tokens between two states that it stores for its gradients
constexpr int RNN_FEATURES = 64;   // of an RNN's state that are computed together

// Instructions from LOAD on read and write the state of a layer: one new token of every row.
enum Kind { EMBED, LINEAR, NORM, ADD, SCALE, ACTIVATE, GATE, ATTENTION, LERP, COPY, ROTATE, SOFTMAX, ROUTE, SPREAD, COMBINE, LOAD, STORE, COMMIT, PUSH, RECALL, CONVOLVE, UNFOLD, RETAIN, WKV, LSTM, GRU, SLIDE, SCAN, STATE_SPACE, ASSOCIATE, REMEMBER, CHUNK_ATTENTION, CHUNK_SUMS };
enum Format { INT8, FLOAT32, BFLOAT16 };  // of weights; INT8 ones are packed by `pack`
// what a query attends to: the KV cache, the source, the tokens of this pass, or those of its segment in a memory
enum Keys { CACHED, SOURCE, SELF, SEGMENT };
enum Activation { IDENTITY, RELU, RELU_SQUARED, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, LOG_SIGMOID, SOFTPLUS };
enum Cell { LSTM_CELL, GRU_CELL, GRU_RESET_FIRST };  // the last: the reset gate in front of the state matrix
enum Features { EXPONENTIAL, RECTIFIED, ELU };  // φ of linear attention: e^x of log φ, max(x, 0) + 0.001, ELU + 1

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
    int32_t digits;       // INT8: 2: activations are quantized to 16 bits, two digits of 8 bits; the result is the sum of
                          // the two halves of the output (2, outputs)
    int32_t groups;       // one map per group of features: weight (groups, outputs, inputs); not of INT8
    int32_t input_step;   // features from the inputs of a group to those of the next
    int32_t output_step;
    int32_t shared;       // FLOAT32: all groups have the same map, without bias or activation: weight (inputs, outputs)
    int32_t experts;      // one map per expert, over the rows that ROUTE, in register `other`, gave it; 0: none
    int32_t top;          // rows per token
    float input_scale;    // INT8: activations are quantized to −127 … 127 by this factor; 0: each token has its own range
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
    const float* added;    // (width) or null
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
    int32_t cache;   // which of the caches, for CACHED and SOURCE; of the memories, for SEGMENT
    int32_t segment;  // tokens of a segment
    int32_t bias;    // table (heads, 2 positions − 1) by key position − query position; −1: none
    int32_t mask;    // which of the masks; −1: none
    int32_t first;   // with `recent`: the first keys are seen by all
    int32_t recent;  // keys up to the query that it sees; 0: all
    int32_t ring;    // slots of a ring that follow `first` slots; 0: the slot is the position
    int32_t distance;  // relative vectors are those of −distance … distance
    int32_t vectors;   // table (heads, positions, head_width) by distance; its product with q is added; −1: none
    int32_t squared;   // weights are relu(score)²; 0: softmax
    int32_t branches;  // a query sees the keys of each branch in turn (LongNet), see `segments`; 0: none
    int32_t rounds;    // of hashing (LSH): a query sees earlier keys of its buckets, else itself; 0: none
    int32_t buckets;   // of a round; if more than one, half as many products with directions are in register `other`
    int32_t whole;     // LSH: queries at positions below it see all earlier keys
    int32_t ahead;     // features of a query before those that are multiplied with the key, which has so many fewer
    int32_t length;    // positions that `placed`, `place_bias` and `pairs` have; 0: any number
    int32_t columns;   // of a score by position p: factor p div columns times factor `factors` + p mod columns, both of the
                       // head's ones in register `other`, is added; 0: none
    int32_t factors;   // of the first kind; the others are `columns`
    int32_t pairs;     // the result is Σ q k v of every two keys (length, length), 0 where one is not seen
    float scale;       // 0: 1 / keys that are seen
    float cap;                    // of scores; 0: none
    const int32_t* segments;      // (branches, heads, 3): size of a segment, dilation, first position in it
    const float* placed;          // (heads, length, ahead) by key position; its product with q is added; or null
    const float* place_bias;      // (heads, queries, length) by position, added to scores; or null
    int64_t place_head;           // numbers from one head to the next in `place_bias`
    int64_t place_query;          // and from one query position to the next
    const float* additive;        // (heads, head_width): scores are its product with tanh(q + k); null: q·k
    const float* relative_keys;   // (2 distance + 1, head_width) or null
    const float* relative_values;  // (2 distance + 1, value_width) or null
};

struct StateArgs {
    int32_t memory;  // which of the memories
    int32_t part;    // LOAD, STORE, SLIDE: of the carry; RECALL: tokens back
    int32_t size;    // CONVOLVE, UNFOLD, SLIDE: tokens; PUSH: tokens that are kept
    int32_t heads;   // CONVOLVE: filters (heads, size) in register `other`; 0: `weight`
    int32_t activation;   // SLIDE
    const float* weight;  // CONVOLVE, SLIDE: (size, width); WKV: decay (width)
    const float* bonus;   // WKV: (width)
    const float* bias;    // SLIDE: (width) or null
};

struct RetainArgs {  // a matrix per head: S = a S + kᵀ v, o = q S
    int32_t memory;
    int32_t part;  // of the carry: S (heads, keys, values)
    int32_t sums;  // of the carry: sums of keys (heads, keys); −1: none
    int32_t heads;
    int32_t groups;  // of heads that have the same queries and keys
    int32_t keys;
    int32_t values;
    int32_t query_at;  // in `input`: q (groups, keys), k (groups, keys), v (heads, values)
    int32_t key_at;
    int32_t value_at;
    int32_t normalised;  // by the sums
    int32_t weighted;    // a factor of v per head stands after the logarithms in register `other`
    const float* decay;  // (heads) logarithms; null: in register `other`
    const float* skip;   // (heads) times v is added to the result, or null
};

struct ScanArgs {  // selective state space: h = e^{Δ A} h + Δ B x, y = C h + D x; in `input`: x, Δ
                   // before its softplus; in `other`: B, C
    int32_t memory;
    int32_t part;  // of the carry: h (states, width)
    int32_t states;
    const float* decay;  // A (states, width)
    const float* skip;   // D (width)
};

struct StateSpaceArgs {  // a complex state space per feature: h = α h − w (g·h) + b x, y = c·h + D x
    int32_t memory;
    int32_t part;  // of the carry: h (width, 2 pairs), real parts, then imaginary ones
    int32_t pairs;
    int32_t low_rank;  // 0: w is 0
    const float* weight;  // (width, numbers, 2 pairs): α, b, c and, with `low_rank`, w, g; c and g act on real numbers
    const float* skip;    // D (width)
};

struct AssociateArgs {  // linear attention: S = a S + φ(k)ᵀ (v, 1), o = φ(q) S, divided by its last number
    int32_t memory;  // carry: S (heads, keys, values + 1); of EXPONENTIAL then the largest exponent so far (heads)
    int32_t heads;
    int32_t keys;    // features φ
    int32_t values;
    int32_t features;
    int32_t update;  // 0: S is only read
    int32_t width;   // of a key from which the exponents were computed
    int32_t first;   // without update: before this position the result is `other`
    float scale;     // of ‖k‖², which is subtracted from exponents
};

struct ChunkArgs {  // mixed chunks: attention within the chunk, sums over those before; keys are γ ⊙ Z + β, rotated
    int32_t memory;  // carry: tokens so far, as an integer; Z, V of the chunk (size, keys + values); sums (keys, values)
    int32_t size;    // tokens of a chunk
    int32_t keys;
    int32_t values;
    int32_t table;  // of rotations, by position; −1: none
    int32_t planes;
    int32_t interleaved;
    int32_t bias;  // CHUNK_ATTENTION: table (2 size − 1) by key position − query position; −1: none
    float scale;   // 0: 1 / tokens that are seen, or summed up
    const float* gains;    // (keys) γ
    const float* offsets;  // (keys) β
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
        ScanArgs scan;
        StateSpaceArgs state_space;
        AssociateArgs associate;
        ChunkArgs chunk;
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
    int64_t paged;     // rows are blocks, found through the block table
    int32_t* buckets;  // of LSH (rows, heads, time, rounds)
    int64_t bucket_row;
    int64_t bucket_head;
    int64_t bucket_time;
};

struct Mask {  // 1 where a row's query may attend to the key at a position
    const uint8_t* allowed;
    int64_t row;
};

struct Memory {  // of a recurrence (nn/states/recurrent.py), recent tokens (nn/mixers/convolution.py), or a compressive memory
                // (nn/mixers/attention/infini.py), whose carry is: M and z; keys and values of the segment; all cached ones
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
    int32_t longest;    // the most keys that any query attends to, counted in each branch
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
    uint8_t* quantized;          // (rows * time, widest input) of DIGIT bytes, more rows for experts
    float* scratch;              // step and zero point of `most_rows` rows; then (threads, 2, longest):
                                 // attention weights, and positions of chosen keys
};

struct SelectiveScan {  // of whole rows, not an instruction (selective_scan.h); with `dy` its gradients
    int32_t rows;
    int32_t time;
    int32_t width;
    int32_t states;
    int32_t threads;
    const int32_t* lengths;  // (rows) tokens that are not padding, or null: all
    const float* x;          // (rows, time, width)
    const float* steps;      // (rows, time, width): Δ = softplus(steps + bias)
    const float* bias;       // (width)
    const float* a;          // (states, width)
    const float* b;          // (rows, time, states)
    const float* c;          // (rows, time, states)
    const float* skip;       // (width)
    const float* state;      // (rows, states, width)
    float* y;                // (rows, time, width)
    float* last;             // (rows, states, width)
    float* starts;           // (segments, rows, states, width): written without, read with `dy`; or null
    const float* dy;
    const float* d_last;
    float* dx;
    float* d_steps;
    float* d_bias;   // (rows, width), to be added up
    float* d_a;      // (rows, states, width), to be added up
    float* d_b;      // (blocks of features, rows, time, states), to be added up
    float* d_c;
    float* d_skip;   // (rows, width), to be added up
    float* d_state;
};

struct RnnLayer {  // of whole rows, not an instruction (rnn.h); with `dy` its gradients
    int32_t rows;
    int32_t time;
    int32_t hidden;
    int32_t cell;
    int32_t threads;
    const int32_t* lengths;  // (rows) tokens that are not padding, or null: all
    const float* weight;     // of the state, padded with zeros: (blocks of features, gates, hidden, RNN_FEATURES); with
                             // `dy` (blocks of features, gates · hidden, RNN_FEATURES)
    const float* seen;       // (rows, time, gates · hidden): what the gates get from the inputs
    const float* bias;       // (hidden) of U h in GRU_CELL, or null
    const float* h;          // (rows, hidden) before the first token
    const float* c;          // (rows, hidden) of LSTM_CELL
    float* y;                // (rows, time, hidden): h after each token, 0 in padding
    float* cells;            // (rows, time, hidden): c of LSTM_CELL
    float* gates;            // (rows, time, 4, hidden): i, f, g, o; r, z, n, and U h of n or r ⊙ h
    const float* dy;
    const float* d_cells;  // or null
    float* d_seen;
    float* d_own;  // (rows, time, hidden) of U h in GRU_CELL
    float* d_h;    // (rows, hidden), zeros before
    float* d_c;    // (rows, hidden) of LSTM_CELL, zeros before
};

}  // namespace
