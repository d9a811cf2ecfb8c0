// Runs a program: one pass of a model over the newest tokens of many rows in one call. Weights are int8, bfloat16 or
// float32, all else is float32. runtime/cpu/lower.py writes the programs.
//
// The numbers of a token depend neither on the other tokens of the pass nor on the number of threads: every sum is
// computed in the same order. The code needs neither torch nor Python, so it compiles in seconds (build.py).

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#endif

#include <cstdlib>
#include <vector>

#include "attention.h"
#include "chunks.h"
#include "elementwise.h"
#include "experts.h"
#include "gemm.h"
#include "matrix_state.h"
#include "pool.h"
#include "recurrent.h"
#include "rnn.h"
#include "selective_scan.h"
#include "state_space.h"

namespace {

bool is_stateful(int kind) { return kind >= LOAD; }  // one new token of every row

// 0; 1: a token id is outside the vocabulary; 2: lengths exceed the room for tokens, keys or attention weights.
int32_t check(const Pass& pass) {
    if (pass.rows < 0 || pass.time < 0) return 2;
    const int tokens = pass.rows * pass.time, room = pass.longest - 4;  // keys are read in fours
    bool single = pass.time == 1;
    for (int row = 0; row < pass.rows; row++) {
        if (pass.lengths[row] < 0 || pass.lengths[row] > pass.time || pass.starts[row] < 0) return 2;
        if (pass.block_table && pass.starts[row] + pass.lengths[row] > int64_t(pass.blocks) << pass.shift) return 2;
        single = single && pass.lengths[row] == 1;
    }
    for (int n = 0; n < pass.count; n++) {
        const Instruction& o = pass.instructions[n];
        if (is_stateful(o.kind) && !single) return 2;
        if (o.kind == EMBED)
            for (int t = 0; t < tokens; t++)
                if (pass.tokens[t] < 0 || pass.tokens[t] >= o.embed.vocab) return 1;
        if (o.kind == CHUNK_ATTENTION && o.chunk.size > room)
            for (int row = 0; row < pass.rows; row++)
                if (pass.starts[row] % o.chunk.size >= room) return 2;
        if (o.kind == ATTENTION) {
            if ((o.attention.mask >= 0 || o.attention.ring || o.attention.segment) && !single) return 2;
            for (int row = 0; row < pass.rows; row++) {
                const int keys = o.attention.keys == SOURCE ? pass.sources[row / pass.group]
                                 : o.attention.keys == CACHED ? pass.starts[row] + pass.lengths[row]
                                 : o.attention.keys == SEGMENT ? pass.starts[row] % o.attention.segment + 1
                                                              : pass.lengths[row];
                if (o.attention.length && keys > o.attention.length) return 2;
                if (keys < 0 || int64_t(keys) * std::max(1, o.attention.branches) > room) return 2;
            }
        }
    }
    return 0;
}

void run_token(const Instruction& o, const Pass& pass, int t) {
    switch (o.kind) {
        case EMBED: return embed(o, pass, t);
        case NORM: return norm(o, pass, t);
        case ROTATE: return rotate(o, pass, t);
        case SOFTMAX: return softmax(o, pass, t);
        case SPREAD: return spread(o, pass, t);
        case COMBINE: return combine(o, pass, t);
        case LOAD: return load_carry(o, pass, t);
        case STORE: return store_carry(o, pass, t);
        case COMMIT: return commit(o, pass, t);
        case PUSH: return push(o, pass, t);
        case RECALL: return recall(o, pass, t);
        case CONVOLVE: return convolve(o, pass, t);
        case UNFOLD: return unfold(o, pass, t);
        case WKV: return wkv(o, pass, t);
        case LSTM: return lstm(o, pass, t);
        case GRU: return gru(o, pass, t);
        case SLIDE: return slide(o, pass, t);
        case REMEMBER: return remember(o, pass, t);
        default: return elementwise(o, pass, t);
    }
}

// Instructions whose work on a row is divided further: the number of tasks of a pass, 0 of other instructions.
int64_t count_tasks(const Instruction& o, const Pass& pass) {
    const int64_t rows = pass.rows;
    switch (o.kind) {
        case ATTENTION: return rows * o.attention.kv_heads;
        case RETAIN: return rows * o.retain.heads;
        case ASSOCIATE: return rows * o.associate.heads;
        case SCAN: return FeatureTasks(o, pass).count();
        case STATE_SPACE: return FeatureTasks(o, pass).count();
        case CHUNK_ATTENTION: return rows;
        case CHUNK_SUMS: return FeatureTasks(o, pass).count();
        default: return 0;
    }
}

void run_task(const Instruction& o, const Pass& pass, int task, int thread) {
    switch (o.kind) {
        case ATTENTION: return attention(o, pass, task, thread);
        case RETAIN: return retain(o, pass, task / o.retain.heads, task % o.retain.heads);
        case ASSOCIATE: return associate(o, pass, task / o.associate.heads, task % o.associate.heads);
        case SCAN: return FeatureTasks(o, pass).run(task, scan);
        case CHUNK_ATTENTION: return chunk_attention(o, pass, task, thread);
        case CHUNK_SUMS: return FeatureTasks(o, pass).run(task, chunk_sums);
        default: return FeatureTasks(o, pass).run(task, state_space);
    }
}

bool is_tokenwise(const Instruction& o, const Pass& pass) {
    return o.kind != LINEAR && o.kind != ROUTE && !count_tasks(o, pass);
}

struct Phase {  // either instructions that run token by token, then the quantization of a product's input (−1: none);
                // or one other instruction
    int first, last, quantized;
};

struct PassWork : Work {
    const Pass& pass;
    std::vector<Phase> phases_;

    explicit PassWork(const Pass& given) : pass(given) {
        chunks = count_chunks, run = run_chunk;
        phases_.reserve(2 * pass.count);
        bool open = false;  // the last phase is one of tokens, and may be extended
        for (int n = 0; n < pass.count; n++) {
            const Instruction& o = pass.instructions[n];
            if (is_tokenwise(o, pass)) {
                if (open) phases_.back().last = n + 1;
                else phases_.push_back({n, n + 1, -1});
                open = o.kind != SPREAD;  // which writes to the rows of other tokens
                continue;
            }
            if (o.kind == LINEAR && o.linear.format == INT8) {
                if (open) phases_.back().quantized = n;
                else phases_.push_back({n, n, n});
            }
            phases_.push_back({n, n + 1, -1});
            open = false;
        }
        phases = int(phases_.size());
    }

    int token_chunks() const { return std::min(pass.rows * pass.time, 4 * pass.threads); }

    static int count_chunks(const Work& work, int number) {
        const PassWork& self = static_cast<const PassWork&>(work);
        const Pass& pass = self.pass;
        const Phase& phase = self.phases_[number];
        if (phase.quantized >= 0 || is_tokenwise(pass.instructions[phase.first], pass)) return self.token_chunks();
        const Instruction& o = pass.instructions[phase.first];
        const int64_t tasks = o.kind == LINEAR  ? LinearChunks(o.linear, pass.rows * pass.time).total()
                              : o.kind == ROUTE ? 1
                                                : count_tasks(o, pass);
        return int(std::min<int64_t>(tasks, MAX_CHUNKS));
    }

    static void run_chunk(const Work& work, int number, int chunk, int thread) {
        const PassWork& self = static_cast<const PassWork&>(work);
        const Pass& pass = self.pass;
        const Phase& phase = self.phases_[number];
        if (phase.quantized >= 0 || is_tokenwise(pass.instructions[phase.first], pass)) {
            const int64_t tokens = pass.rows * pass.time, chunks = self.token_chunks();
            const int begin = tokens * chunk / chunks, end = tokens * (chunk + 1) / chunks;
            for (int n = phase.first; n < phase.last; n++)
                for (int t = begin; t < end; t++) run_token(pass.instructions[n], pass, t);
            if (phase.quantized >= 0)
                for (int t = begin; t < end; t++) quantize(pass.instructions[phase.quantized], pass, t);
            return;
        }
        const Instruction& o = pass.instructions[phase.first];
        if (o.kind == LINEAR) return linear(o, pass, chunk);
        if (o.kind == ROUTE) return route(o, pass);
        const int64_t tasks = count_tasks(o, pass);
        for (int64_t task = chunk; task < tasks; task += MAX_CHUNKS) run_task(o, pass, int(task), thread);
    }
};

// Without a token there is no memory behind most pointers, nor room for what the tokens of a pass share.
template <typename Given>
bool is_empty(const Given& given) {
    return given.rows < 1 || given.time < 1;
}

}  // namespace

extern "C" {

// Returns what `check` finds; nothing is done unless that is 0.
int32_t run(const Pass* given) {
    if (const int32_t problem = check(*given)) return problem;
    if (is_empty(*given)) return 0;
    pool().execute(PassWork(*given), given->threads);
    return 0;
}

void selective_scan(const SelectiveScan* given) {
    if (is_empty(*given)) return;
    pool().execute(ScanWork(*given), given->threads);
}

void rnn_layer(const RnnLayer* given) {
    if (is_empty(*given)) return;
    pool().execute(RnnWork(*given), given->threads);
}

// The k largest scores of each row (vocab), best first, the first of equal ones first, without the banned ones: their
// indices (rows, k) and log-probabilities. Banned tokens keep their share of the probability.
void top_k(float* scores, int32_t rows, int32_t vocab, const int64_t* banned, int32_t count, int32_t k,
           int32_t threads, int64_t* tokens, float* log_probs) {
    if (k < 1 || k > vocab) return;
    auto one = [=](int row) {
        float *x = scores + int64_t(row) * vocab, *best = log_probs + int64_t(row) * k;
        int64_t* index = tokens + int64_t(row) * k;
        Floats high = fill(-INFINITY);
        unsigned invalid = 0;  // NaN, which a maximum may pass over
        for (int i = 0; i < vocab; i += LANES) {
            const Floats some = load(x + i, tail(vocab - i), high);
            invalid |= bits(is_nan(some));
            high = larger(high, some);
        }
        const float most = invalid ? NAN : largest_of(high);
        Floats total = zeros(), largest = fill(most);
        for (int i = 0; i < vocab; i += LANES) {
            Tail inside = tail(vocab - i);
            Floats some = exponential(load(x + i, inside) - largest);
            total = total + keep(some, inside);
        }
        const float mass = std::log(sum_of(total));  // relative to the largest
        std::vector<float> kept(count);
        for (int n = 0; n < count; n++)
            if (banned[n] >= 0 && banned[n] < vocab) kept[n] = x[banned[n]], x[banned[n]] = -INFINITY;
        for (int n = 0; n < k; n++) best[n] = -INFINITY, index[n] = 0;
        for (int i = 0; i < vocab; i += LANES) {
            Tail inside = tail(vocab - i);
            unsigned better = bits(is_less(fill(best[k - 1]), load(x + i, inside))) & bits_of(inside);
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
    };
    struct Rows : Work {
        decltype(one)& each;
        int rows;
        Rows(decltype(one)& each, int rows) : each(each), rows(rows) {
            phases = 1;
            chunks = [](const Work& work, int) { return std::min(static_cast<const Rows&>(work).rows, MAX_CHUNKS); };
            run = [](const Work& work, int, int chunk, int) {
                const Rows& self = static_cast<const Rows&>(work);
                for (int row = chunk; row < self.rows; row += MAX_CHUNKS) self.each(row);
            };
        }
    };
    pool().execute(Rows(one, rows), int64_t(rows) * vocab > 1 << 18 ? threads : 1);
}

// Reorders int8 weights (outputs, inputs) for `int8_linear`, padded with zeros, and sums up each row of them.
void pack(const int8_t* weights, int32_t outputs, int32_t inputs, int8_t* packed, int32_t* sums) {
    const int64_t quads = (inputs + QUAD - 1) / QUAD;
    for (int64_t n = 0; n < (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS * TILE_OUTPUTS; n++) {
        int8_t* tile = packed + n / TILE_OUTPUTS * quads * QUAD * TILE_OUTPUTS + n % TILE_OUTPUTS * QUAD;
        int32_t sum = 0;
        for (int64_t i = 0; i < quads * QUAD; i++) {
            int8_t weight = n < outputs && i < inputs ? weights[n * inputs + i] : 0;
            const int64_t at = PAIRS ? i % 2 * 2 + i % QUAD / 2 : i % QUAD;
            tile[i / QUAD * QUAD * TILE_OUTPUTS + at] = weight;
            sum += weight;
        }
        if (n < outputs) sums[n] = sum;
    }
}

// Memory in huge pages: streaming weights through small pages spends half the time on address translation.
void* allocate(int64_t bytes) {
    const int64_t page = 2 << 20, size = (bytes + page - 1) / page * page;
#ifdef _WIN32
    return _aligned_malloc(size, 64);
#else
    void* memory = std::aligned_alloc(page, size);
#ifdef __linux__
    if (memory) madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
#endif
}

void release(void* memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}
}
