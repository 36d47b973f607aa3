// Mixture of experts: the choice, and the two halves of the routed experts as linears over gathered rows.
#include "../shared/cpu.h"

namespace {
struct Picks {  // indices into chosen, by expert, then by token; those of expert e are [start[e], start[e + 1])
    std::vector<int64_t> start, index;
};

Picks by_expert(const int32_t* chosen, int64_t count, int64_t experts) {
    Picks picks{std::vector<int64_t>(experts + 1), std::vector<int64_t>(count)};
    for (int64_t i = 0; i < count; i++) picks.start[chosen[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) picks.start[e + 1] += picks.start[e];
    std::vector<int64_t> next(picks.start);
    for (int64_t i = 0; i < count; i++) picks.index[next[chosen[i]]++] = i;
    return picks;
}

float at_most(float x, float limit) { return x > limit ? limit : x; }

float clamped(float gate, float up, float alpha, float limit) {
    gate = at_most(gate, limit), up = std::max(-limit, at_most(up, limit));
    return (up + 1.0f) * (gate * sigmoid(alpha * gate));
}

// Leaves the experts of the `kept` groups whose two best have the highest sums; ties go to the lower group.
void keep_groups(float* choice, int64_t experts, int64_t groups, int64_t kept) {
    const int64_t size = experts / groups;
    std::vector<float> best(groups);
    std::vector<int32_t> order(groups);
    for (int64_t g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            second = std::max(second, std::min(first, choice[e]));
            first = std::max(first, choice[e]);
        }
        best[g] = first + second, order[g] = g;
    }
    std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                      [&](int32_t a, int32_t b) { return best[a] != best[b] ? best[a] > best[b] : a < b; });
    for (int64_t i = kept; i < groups; i++)
        std::fill(choice + order[i] * size, choice + (order[i] + 1) * size, -INFINITY);
}
}  // namespace

// The top_k experts of each token in ascending order of id (ties go to the lower id), with their scores, the softmax of
// the logits or sigmoids, divided by their sum if renormalise, times scale. `bias` [experts], or null, is added for the
// choice alone.
extern "C" void route(const float* logits, int64_t logits_stride, const float* bias, int32_t* chosen, float* weights,
                      int64_t tokens, int64_t experts, int64_t top_k, int64_t softmax, int64_t renormalise,
                      int64_t groups, int64_t groups_kept, float scale) {
    std::vector<float> p(experts), choice(experts);
    std::vector<int32_t> order(experts);
    for (int64_t t = 0; t < tokens; t++) {
        const float* row = logits + t * logits_stride;
        float total = 1.0f;
        if (softmax) {
            const float peak = *std::max_element(row, row + experts);
            for (int64_t e = 0; e < experts; e++) p[e] = exp_f32(row[e] - peak);
            total = sum(p.data(), experts);
        } else {
            for (int64_t e = 0; e < experts; e++) p[e] = sigmoid(row[e]);
        }
        // The bias is one of scores: of shares, not of what they are shares of.
        for (int64_t e = 0; e < experts; e++) choice[e] = bias ? p[e] / total + bias[e] : p[e];
        if (groups > 1) keep_groups(choice.data(), experts, groups, groups_kept);
        for (int64_t e = 0; e < experts; e++) order[e] = e;
        std::partial_sort(order.begin(), order.begin() + top_k, order.end(), [&](int32_t a, int32_t b) {
            return choice[a] != choice[b] ? choice[a] > choice[b] : a < b;
        });
        std::sort(order.begin(), order.begin() + top_k);
        float kept = 1e-20f;
        for (int64_t i = 0; i < top_k; i++) kept += p[order[i]];
        for (int64_t i = 0; i < top_k; i++) {
            chosen[t * top_k + i] = order[i];
            weights[t * top_k + i] = p[order[i]] / (renormalise ? kept : total) * scale;
        }
    }
}

// hidden[t][i] = silu(gate) * up, or `clamped`, of the expert chosen[t][i]. Packed weights of expert e start
// at e * gate_up_bytes, of that kind; bias [experts][2 * inner], or null.
extern "C" void moe_inner(const float* x, const int32_t* chosen, const void* gate_up, int64_t gate_up_bytes,
                          int64_t kind, const float* bias, float* hidden, int64_t tokens, int64_t experts,
                          int64_t top_k, int64_t width, int64_t inner, int64_t is_clamped, float alpha, float limit) {
    const Picks picks = by_expert(chosen, tokens * top_k, experts);
    static thread_local std::vector<uint32_t> in;
    static thread_local std::vector<float> projected;
    const int64_t words = row_words(kind, width);
    for (int64_t e = 0; e < experts; e++) {
        const int64_t *pick = picks.index.data() + picks.start[e], n = picks.start[e + 1] - picks.start[e];
        if (n == 0) continue;
        in.resize(n * words), projected.resize(n * 2 * inner);
        for (int64_t r = 0; r < n; r++)
            copy_row(kind, x + pick[r] / top_k * width, width, in.data() + r * words);
        multiply_rows(in.data(), (const char*)gate_up + e * gate_up_bytes, kind, bias ? bias + e * 2 * inner : nullptr,
                      projected.data(), n, 2 * inner, width);
        for (int64_t r = 0; r < n; r++) {
            const float *gate = projected.data() + r * 2 * inner, *up = gate + inner;
            float* out = hidden + pick[r] * inner;
            if (is_clamped) {
                for (int64_t i = 0; i < inner; i++) out[i] = clamped(gate[i], up[i], alpha, limit);
            } else {
                for (int64_t i = 0; i < inner; i++) out[i] = silu(gate[i]) * up[i];
            }
        }
    }
}

// y[t] = sum over its experts, in ascending order, of weight * down(hidden), then + shared[t] unless that is null, times
// sigmoid(gate[t]) unless that is. Packed weights of expert e start at e * down_bytes, of that kind; bias [experts][width],
// or null.
extern "C" void moe_outer(const float* hidden, const int32_t* chosen, const float* weights, const void* down,
                          int64_t down_bytes, int64_t kind, const float* bias, const float* shared,
                          const float* gate, int64_t gate_stride, float* y, int64_t tokens, int64_t experts,
                          int64_t top_k, int64_t width, int64_t inner) {
    const Picks picks = by_expert(chosen, tokens * top_k, experts);
    std::fill(y, y + tokens * width, 0.0f);
    static thread_local std::vector<uint32_t> in;
    static thread_local std::vector<float> out;
    const int64_t words = row_words(kind, inner);
    for (int64_t e = 0; e < experts; e++) {
        const int64_t *pick = picks.index.data() + picks.start[e], n = picks.start[e + 1] - picks.start[e];
        if (n == 0) continue;
        in.resize(n * words), out.resize(n * width);
        for (int64_t r = 0; r < n; r++)
            copy_row(kind, hidden + pick[r] * inner, inner, in.data() + r * words);
        multiply_rows(in.data(), (const char*)down + e * down_bytes, kind, bias ? bias + e * width : nullptr,
                      out.data(), n, width, inner);
        for (int64_t r = 0; r < n; r++) {
            float* to = y + pick[r] / top_k * width;
            const float weight = weights[pick[r]], *from = out.data() + r * width;
            for (int64_t i = 0; i < width; i++) to[i] = __builtin_fmaf(weight, from[i], to[i]);
        }
    }
    if (!shared) return;
#pragma omp parallel for if (tokens * width >= 1 << 14)
    for (int64_t t = 0; t < tokens; t++) {
        const float scale = gate ? sigmoid(gate[t * gate_stride]) : 1.0f, *from = shared + t * width;
        float* to = y + t * width;
        for (int64_t i = 0; i < width; i++) to[i] += from[i] * scale;
    }
}
