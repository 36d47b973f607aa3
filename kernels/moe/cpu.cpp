// Mixture of experts: the choice, and the two halves of the routed experts as linears over gathered rows.
#include "../shared/cpu.h"
#include "../shared/ranges.h"

namespace {
// Indices into chosen, by expert, then by token; those of expert e are [start[e], start[e + 1]). Picks without an
// expert (-1) are left out.
struct Picks {
    std::vector<int64_t> start, index;

    // The products of all experts that have picks, of n outputs; rows are in the order of `index`, as is y without `to_picks`.
    std::vector<Product> products(const uint32_t* rows, int64_t words, const void* packed, int64_t bytes,
                                  const float* bias, int64_t n, float* y, int64_t y_stride, bool to_picks) const {
        std::vector<Product> found;
        for (size_t e = 0; e + 1 < start.size(); e++)
            if (start[e] < start[e + 1])
                found.push_back({rows + start[e] * words, words, start[e + 1] - start[e],
                                 (const char*)packed + e * bytes, bias ? bias + e * n : nullptr,
                                 to_picks ? y : y + start[e] * y_stride, y_stride,
                                 to_picks ? index.data() + start[e] : nullptr});
        return found;
    }
};

Picks by_expert(const int32_t* chosen, int64_t count, int64_t experts) {
    assert_within("moe", "expert", chosen, count, -1, experts);
    Picks picks{std::vector<int64_t>(experts + 1), {}};
    for (int64_t i = 0; i < count; i++)
        if (chosen[i] >= 0) picks.start[chosen[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) picks.start[e + 1] += picks.start[e];
    picks.index.resize(picks.start[experts]);
    std::vector<int64_t> next(picks.start);
    for (int64_t i = 0; i < count; i++)
        if (chosen[i] >= 0) picks.index[next[chosen[i]]++] = i;
    return picks;
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

// hidden[t][i] = silu(gate) * up, or `clamped`, of the expert chosen[t][i]; float, or of `halves` bfloat16. Packed weights
// of expert e start at e * gate_up_bytes, of that kind; bias [experts][2 * inner], or null.
extern "C" void moe_inner(const float* x, const int32_t* chosen, const void* gate_up, int64_t gate_up_bytes,
                          int64_t kind, const float* bias, void* hidden, int64_t halves, int64_t tokens,
                          int64_t experts, int64_t top_k, int64_t width, int64_t inner, int64_t is_clamped,
                          float alpha, float limit) {
    const int64_t words = row_words(kind, width);
    const Picks picks = by_expert(chosen, tokens * top_k, experts);
    const int64_t count = picks.index.size();
    static thread_local std::vector<uint32_t> rows_room;
    uint32_t *const rows = lined(rows_room, (count + tokens) * words), *const rounded = rows + count * words;
    const auto products =
        picks.products(rows, words, gate_up, gate_up_bytes, bias, 2 * inner, (float*)hidden, inner, true);
#pragma omp parallel if (count * 2 * inner * width >= SERIAL_BELOW)
    {
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) copy_row(kind, x + t * width, width, rounded + t * words);
#pragma omp for
        for (int64_t r = 0; r < count; r++)
            std::memcpy(rows + r * words, rounded + picks.index[r] / top_k * words, words * sizeof(uint32_t));
        gate_all(products, {is_clamped != 0, alpha, limit}, halves, kind, inner, width);
    }
}

// y[t] = sum over its experts, in ascending order, of weight * down(hidden), then + shared[t] unless that is null, times
// sigmoid(gate[t]) unless that is. Packed weights of expert e start at e * down_bytes, of that kind; bias [experts][width],
// or null. hidden is float, or of `halves` bfloat16 in whole blocks of depth.
extern "C" void moe_outer(const void* hidden, int64_t halves, const int32_t* chosen, const float* weights, const void* down,
                          int64_t down_bytes, int64_t kind, const float* bias, const float* shared,
                          const float* gate, int64_t gate_stride, float* y, int64_t tokens, int64_t experts,
                          int64_t top_k, int64_t width, int64_t inner) {
    const int64_t words = row_words(kind, inner);
    const Picks picks = by_expert(chosen, tokens * top_k, experts);
    const int64_t count = picks.index.size();
    static thread_local std::vector<uint32_t> rows_room;
    static thread_local std::vector<float> out_room;
    std::vector<const float*> out_of(tokens * top_k);  // of each pick, or null
    uint32_t* const rows = lined(rows_room, count * words);
    float* const out = lined(out_room, count * width);
    for (int64_t r = 0; r < count; r++) out_of[picks.index[r]] = out + r * width;
    const auto products = picks.products(rows, words, down, down_bytes, bias, width, out, width, false);
#pragma omp parallel if (count * inner * width >= SERIAL_BELOW)
    {
#pragma omp for
        for (int64_t r = 0; r < count; r++) {
            const int64_t at = picks.index[r] * inner;
            if (halves) to_blocks((const uint16_t*)hidden + at, inner, rows + r * words);
            else copy_row(kind, (const float*)hidden + at, inner, rows + r * words);
        }
        multiply_all(products, kind, width, inner);
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            float* to = y + t * width;
            std::fill(to, to + width, 0.0f);
            for (int64_t pick = t * top_k; pick < (t + 1) * top_k; pick++) {
                const float* const part = out_of[pick];
                if (!part) continue;
                for (int64_t i = 0; i < width; i++) to[i] = __builtin_fmaf(weights[pick], part[i], to[i]);
            }
            if (!shared) continue;
            const float scale = gate ? sigmoid(gate[t * gate_stride]) : 1.0f, *from = shared + t * width;
            for (int64_t i = 0; i < width; i++) to[i] += from[i] * scale;
        }
    }
}
