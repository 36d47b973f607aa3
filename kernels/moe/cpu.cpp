// Mixture of experts: routing, and the routed experts as linears over gathered rows.
#include "../cpu.h"

// The top_k most probable experts of each token in ascending order of id (ties go to the lower id), with their softmax
// probabilities, divided by their sum if renormalise.
extern "C" void moe_route(const float* logits, int32_t* chosen, float* weights, int64_t tokens, int64_t experts,
                          int64_t top_k, int64_t renormalise) {
    std::vector<float> p(experts);
    std::vector<int32_t> order(experts);
    for (int64_t t = 0; t < tokens; t++) {
        const float* row = logits + t * experts;
        const float peak = *std::max_element(row, row + experts);
        for (int64_t e = 0; e < experts; e++) p[e] = exp_f32(row[e] - peak);
        const float total = sum(p.data(), experts);
        for (int64_t e = 0; e < experts; e++) order[e] = e;
        std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                          [&](int32_t a, int32_t b) { return p[a] != p[b] ? p[a] > p[b] : a < b; });
        std::sort(order.begin(), order.begin() + top_k);
        float kept = 0.0f;
        for (int64_t i = 0; i < top_k; i++) kept += p[order[i]];
        for (int64_t i = 0; i < top_k; i++) {
            chosen[t * top_k + i] = order[i];
            weights[t * top_k + i] = p[order[i]] / (renormalise ? kept : total);
        }
    }
}

// y[t] = sum over its experts, in ascending order, of weight * down(silu(gate(x[t])) * up(x[t])). Packed weights of
// expert e start at e * gate_up_size and e * down_size.
extern "C" void moe_experts(const float* x, const int32_t* chosen, const float* weights, const float* gate_up,
                            int64_t gate_up_size, const float* down, int64_t down_size, float* y, int64_t tokens,
                            int64_t experts, int64_t top_k, int64_t width, int64_t inner) {
    std::vector<std::vector<int64_t>> picks(experts);  // of each expert: indices into chosen, by token
    for (int64_t i = 0; i < tokens * top_k; i++) picks[chosen[i]].push_back(i);
    std::fill(y, y + tokens * width, 0.0f);
    std::vector<float> in, projected, hidden, out;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t n = picks[e].size();
        if (n == 0) continue;
        in.resize(n * width), projected.resize(n * 2 * inner), hidden.resize(n * inner), out.resize(n * width);
        for (int64_t r = 0; r < n; r++)
            std::memcpy(in.data() + r * width, x + picks[e][r] / top_k * width, width * sizeof(float));
        linear(in.data(), width, gate_up + e * gate_up_size, nullptr, projected.data(), n, 2 * inner, width);
        for (int64_t r = 0; r < n; r++) {
            const float *gate = projected.data() + r * 2 * inner, *up = gate + inner;
            for (int64_t i = 0; i < inner; i++) hidden[r * inner + i] = silu(gate[i]) * up[i];
        }
        linear(hidden.data(), inner, down + e * down_size, nullptr, out.data(), n, width, inner);
        for (int64_t r = 0; r < n; r++) {
            float* to = y + picks[e][r] / top_k * width;
            const float weight = weights[picks[e][r]], *from = out.data() + r * width;
            for (int64_t i = 0; i < width; i++) to[i] = __builtin_fmaf(weight, from[i], to[i]);
        }
    }
}
