// A mixture of experts (nn/channels/moe.py): the choice of experts, and rows in the order of their experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "simd.h"

namespace {

// The experts of one token, best first; the first of equal ones first.
void choose_experts(const RouteArgs& args, const float* scores, int32_t* chosen) {
    float rank[MAX_EXPERTS];
    for (int e = 0; e < args.experts; e++) rank[e] = scores[e] + (args.correction ? args.correction[e] : 0);
    if (args.groups) {  // only the best groups
        const int size = args.experts / args.groups;
        float quality[MAX_EXPERTS];
        for (int g = 0; g < args.groups; g++) {
            float best = -INFINITY, second = -INFINITY;
            for (int e = g * size; e < (g + 1) * size; e++) {
                if (rank[e] > best) second = best, best = rank[e];
                else second = std::max(second, rank[e]);
            }
            quality[g] = args.two_best ? best + second : best;
        }
        bool inside[MAX_EXPERTS] = {};
        for (int n = 0; n < args.top_groups; n++) {
            int best = -1;
            for (int g = 0; g < args.groups; g++)
                if (!inside[g] && (best < 0 || quality[g] > quality[best])) best = g;
            inside[best] = true;
        }
        for (int e = 0; e < args.experts; e++)
            if (!inside[e / size]) rank[e] = -INFINITY;
    }
    bool taken[MAX_EXPERTS] = {};
    for (int n = 0; n < args.top; n++) {
        int best = -1;
        for (int e = 0; e < args.experts; e++)
            if (!taken[e] && (best < 0 || rank[e] > rank[best])) best = e;
        taken[best] = true, chosen[n] = best;
    }
}

// For all tokens at once. Padding takes part; its results are not read.
void route(const Instruction& o, const Pass& pass) {
    const RouteArgs& args = o.route;
    const int tokens = pass.rows * pass.time, experts = args.experts, top = args.top;
    int32_t* begin = (int32_t*)output_of(o, pass, 0) + 2 * top;
    std::memset(begin, 0, (experts + 1) * sizeof(int32_t));
    for (int t = 0; t < tokens; t++) {
        const float* logits = input_of(o, pass, t);
        float *weights = output_of(o, pass, t), scores[MAX_EXPERTS], sum = 0;
        int32_t* chosen = (int32_t*)weights + top;  // experts, then rows
        const float most = *std::max_element(logits, logits + experts);
        for (int e = 0; e < experts; e++) {
            scores[e] = args.sigmoid ? 1 / (1 + std::exp(-logits[e])) : std::exp(logits[e] - most);
            sum += scores[e];
        }
        for (int e = 0; e < experts && !args.sigmoid; e++) scores[e] /= sum;
        choose_experts(args, scores, chosen);
        float mass = 0;
        for (int k = 0; k < top; k++) mass += scores[chosen[k]], begin[chosen[k] + 1]++;
        for (int k = 0; k < top; k++) {
            const float weight = args.normalise ? scores[chosen[k]] / (mass + 1e-20f) : scores[chosen[k]];
            weights[k] = weight * args.scale;
        }
    }
    for (int e = 0; e < experts; e++) begin[e + 1] += begin[e];
    int32_t next[MAX_EXPERTS];
    std::copy(begin, begin + experts, next);
    for (int t = 0; t < tokens; t++) {
        int32_t* chosen = (int32_t*)output_of(o, pass, t) + top;
        for (int k = 0; k < top; k++) chosen[k] = next[chosen[k]]++;
    }
}

// Each token to its `top` rows.
void spread(const Instruction& o, const Pass& pass, int t) {
    const int width = o.width, top = pass.widths[o.output] / width;
    const int32_t* rows = (const int32_t*)other_of(o, pass, t) + top;
    for (int k = 0; k < top; k++)
        std::memcpy(pass.registers[o.output] + int64_t(rows[k]) * width, input_of(o, pass, t), width * sizeof(float));
}

// The weighted sum of its rows.
void combine(const Instruction& o, const Pass& pass, int t) {
    const int width = o.width, top = pass.widths[o.input] / width;
    const float* weights = other_of(o, pass, t);
    const int32_t* rows = (const int32_t*)weights + top;
    float* out = output_of(o, pass, t);
    std::memset(out, 0, width * sizeof(float));
    for (int k = 0; k < top; k++) add_scaled(out, pass.registers[o.input] + int64_t(rows[k]) * width, weights[k], width);
}

}  // namespace
