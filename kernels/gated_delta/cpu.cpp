// Gated delta rule, one token after the other, over an indexed state: the same bits however a sequence is cut.
#include "../shared/cpu.h"

namespace {
constexpr int COLUMNS = 32;  // value columns of one task: its part of the state stays in L1
constexpr int VECS = COLUMNS / LANES;
constexpr int64_t AHEAD_TOKENS = 4;  // whose values are asked for: they lie too far apart for the CPU to foresee

struct Sizes {
    int64_t key_heads, values, key_dim, value_dim;  // values: value heads of one key head
    int64_t channels() const { return 2 * key_dim + values * value_dim; }
    int64_t keys() const { return 2 * key_dim + 1; }
};

// Per (key head, token): q scaled and normalised [key_dim], k normalised [key_dim], q . k
void normalise(const float* mixed, float* keys, int64_t tokens, const Sizes& s) {
    const float scale = 1.0f / std::sqrt((float)s.key_dim);
    const int64_t count = tokens * s.key_heads;
#pragma omp parallel for if (count * s.key_dim >= 1 << 14)
    for (int64_t i = 0; i < count; i++) {
        const float *q = mixed + i * s.channels(), *k = q + s.key_dim;
        float* const q_out = keys + (i % s.key_heads * tokens + i / s.key_heads) * s.keys();
        float* const k_out = q_out + s.key_dim;
        const float q_scale = scale / std::sqrt(dot(q, q, s.key_dim) + 1e-6f);
        const float k_scale = 1.0f / std::sqrt(dot(k, k, s.key_dim) + 1e-6f);
        for (int64_t d = 0; d < s.key_dim; d++) {
            q_out[d] = q[d] * q_scale;
            k_out[d] = k[d] * k_scale;
        }
        k_out[s.key_dim] = dot(q_out, k_out, s.key_dim);
    }
}

// What a token does to its state[key_dim][COLUMNS]: decay * state + k (outer) change
struct Change {
    const float* k;
    vec by[VECS];
    float decay;

    vec of(vec s, int64_t i, int n) const { return fused(splat(k[i]), by[n], s * decay); }
};

// Makes the change that the token before left.
void settle(float* state, Change before, int64_t key_dim) {
    for (int64_t i = 0; i < key_dim; i++) {
        for (int n = 0; n < VECS; n++) {
            float* s = state + i * COLUMNS + n * LANES;
            store(s, before.of(load(s), i, n));
        }
    }
}

// out <- q . (decay * state + k (outer) beta * (v - decay * k . state)). The change of the state is returned: the next
// token makes it in the pass in which it reads (PENDING), which gives the same bits as `settle` before.
template <bool PENDING>
Change step(float* state, Change before, const float* keys, const float* v, float decay, float beta, float* out,
            int64_t key_dim) {
    const float *q = keys, *k = keys + key_dim;
    vec at_k[VECS] = {}, at_q[VECS] = {};
    for (int64_t i = 0; i < key_dim; i++) {
        const vec k_i = splat(k[i]), q_i = splat(q[i]);
        for (int n = 0; n < VECS; n++) {
            vec s = load(state + i * COLUMNS + n * LANES);
            if (PENDING) store(state + i * COLUMNS + n * LANES, s = before.of(s, i, n));
            at_k[n] = fused(k_i, s, at_k[n]);
            at_q[n] = fused(q_i, s, at_q[n]);
        }
    }
    Change change{k, {}, decay};
    for (int n = 0; n < VECS; n++) {
        change.by[n] = (load(v + n * LANES) - at_k[n] * decay) * beta;
        store(out + n * LANES, fused(splat(k[key_dim]), change.by[n], at_q[n] * decay));
    }
    return change;
}
}  // namespace

// mixed   [tokens][key_heads][q | k | value heads], packed
// gates   [tokens][key_heads][b of its value heads | a of its value heads], tokens by stride
// state   [slots][key_heads][values][key_dim][value_dim]
// out     [tokens][key_heads][values][value_dim], packed
// writes  [rows][kept]: slots for the states after the last `kept` tokens of a row, -1 for none
extern "C" void gated_delta(const float* mixed, const float* gates, int64_t gates_token, const float* a_log,
                            const float* dt_bias, float* state, int64_t state_slot, int64_t state_group, float* out,
                            const int32_t* cu, const int32_t* read, const int32_t* writes, int64_t rows,
                            int64_t kept, int64_t key_heads, int64_t values, int64_t key_dim, int64_t value_dim) {
    const Sizes s{key_heads, values, key_dim, value_dim};
    const int64_t tokens = cu[rows], heads = key_heads * values, parts = (value_dim + COLUMNS - 1) / COLUMNS;
    static thread_local std::vector<float> scratch;
    scratch.resize(tokens * key_heads * s.keys() + tokens * heads * 2);
    float *const keys = scratch.data(), *const scales = keys + tokens * key_heads * s.keys();
    normalise(mixed, keys, tokens, s);
    for (int64_t i = 0; i < tokens * heads; i++) {
        const int64_t head = i % heads;
        const float* gate = gates + i / heads * gates_token + head / values * 2 * values + head % values;
        scales[2 * i] = exp_f32(-exp_f32(a_log[head]) * softplus(gate[values] + dt_bias[head]));
        scales[2 * i + 1] = sigmoid(gate[0]);
    }
#pragma omp parallel for collapse(3) schedule(dynamic) if (tokens * heads * key_dim * value_dim >= 1 << 17)
    for (int64_t b = 0; b < rows; b++) {
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t part = 0; part < parts; part++) {
                static thread_local std::vector<float> held;
                float* const S = lined(held, key_dim * COLUMNS);
                std::fill(S, S + key_dim * COLUMNS, 0.0f);
                Change left{};  // to do in S, unless it has no k
                const int64_t group = head / values, start = part * COLUMNS;
                const int64_t width = std::min<int64_t>(COLUMNS, value_dim - start);
                const int64_t offset = group * state_group + head % values * key_dim * value_dim + start;
                if (read[b] >= 0) {
                    const float* slot = state + read[b] * state_slot + offset;
                    for (int64_t i = 0; i < key_dim; i++)
                        std::memcpy(S + i * COLUMNS, slot + i * value_dim, width * sizeof(float));
                }
                for (int64_t t = cu[b]; t < cu[b + 1]; t++) {
                    float v[COLUMNS] = {}, o[COLUMNS];
                    const float* in = mixed + (t * key_heads + group) * s.channels() + 2 * key_dim;
                    __builtin_prefetch(in + AHEAD_TOKENS * key_heads * s.channels() + head % values * value_dim + start);
                    std::memcpy(v, in + head % values * value_dim + start, width * sizeof(float));
                    const float* scale = scales + 2 * (t * heads + head);
                    const float* at = keys + (group * tokens + t) * s.keys();
                    left = (left.k ? step<true> : step<false>)(S, left, at, v, scale[0], scale[1], o, key_dim);
                    std::memcpy(out + (t * heads + head) * value_dim + start, o, width * sizeof(float));
                    const int64_t column = kept - (cu[b + 1] - t);
                    if (column < 0 || writes[b * kept + column] < 0) continue;
                    settle(S, left, key_dim);
                    left.k = nullptr;
                    float* slot = state + writes[b * kept + column] * state_slot + offset;
                    for (int64_t i = 0; i < key_dim; i++)
                        std::memcpy(slot + i * value_dim, S + i * COLUMNS, width * sizeof(float));
                }
            }
        }
    }
}
