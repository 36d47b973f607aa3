// Gated delta rule, one token after the other, over an indexed state: the same bits however a sequence is cut.
#include "../cpu.h"

namespace {
constexpr int COLUMNS = 32;  // value columns of one task: its part of the state stays in L1
constexpr int VECS = COLUMNS / LANES;

struct Sizes {
    int64_t key_heads, values, key_dim, value_dim;  // values: value heads of one key head
    int64_t channels() const { return 2 * key_dim + values * value_dim; }
};

// Per (token, key head): q scaled and normalised [key_dim], k normalised [key_dim], q . k
void normalise(const float* mixed, float* keys, int64_t count, const Sizes& s) {
    const float scale = 1.0f / std::sqrt((float)s.key_dim);
#pragma omp parallel for if (count * s.key_dim >= 1 << 14)
    for (int64_t i = 0; i < count; i++) {
        const float *q = mixed + i * s.channels(), *k = q + s.key_dim;
        float *q_out = keys + i * (2 * s.key_dim + 1), *k_out = q_out + s.key_dim;
        const float q_scale = scale / std::sqrt(dot(q, q, s.key_dim) + 1e-6f);
        const float k_scale = 1.0f / std::sqrt(dot(k, k, s.key_dim) + 1e-6f);
        for (int64_t d = 0; d < s.key_dim; d++) {
            q_out[d] = q[d] * q_scale;
            k_out[d] = k[d] * k_scale;
        }
        k_out[s.key_dim] = dot(q_out, k_out, s.key_dim);
    }
}

// state[key_dim][COLUMNS] <- decay * state + k (outer) beta * (v - decay * k . state), out <- q . state
void step(float* state, const float* keys, const float* v, float decay, float beta, float* out, int64_t key_dim) {
    const float *q = keys, *k = keys + key_dim;
    vec at_k[VECS] = {}, at_q[VECS] = {}, change[VECS];
    for (int64_t i = 0; i < key_dim; i++) {
        const vec k_i = splat(k[i]), q_i = splat(q[i]);
        for (int n = 0; n < VECS; n++) {
            const vec s = load(state + i * COLUMNS + n * LANES);
            at_k[n] = fused(k_i, s, at_k[n]);
            at_q[n] = fused(q_i, s, at_q[n]);
        }
    }
    const vec qk = splat(k[key_dim]);
    for (int n = 0; n < VECS; n++) {
        change[n] = (load(v + n * LANES) - at_k[n] * decay) * beta;
        store(out + n * LANES, fused(qk, change[n], at_q[n] * decay));
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const vec k_i = splat(k[i]);
        for (int n = 0; n < VECS; n++) {
            float* s = state + i * COLUMNS + n * LANES;
            store(s, fused(k_i, change[n], load(s) * decay));
        }
    }
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
    scratch.resize(tokens * key_heads * (2 * key_dim + 1) + tokens * heads * 2);
    float *const keys = scratch.data(), *const scales = keys + tokens * key_heads * (2 * key_dim + 1);
    normalise(mixed, keys, tokens * key_heads, s);
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
                held.assign(key_dim * COLUMNS, 0.0f);
                float* const S = held.data();
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
                    std::memcpy(v, in + head % values * value_dim + start, width * sizeof(float));
                    const float* scale = scales + 2 * (t * heads + head);
                    step(S, keys + (t * key_heads + group) * (2 * key_dim + 1), v, scale[0], scale[1], o, key_dim);
                    std::memcpy(out + (t * heads + head) * value_dim + start, o, width * sizeof(float));
                    const int64_t column = kept - (cu[b + 1] - t);
                    if (column < 0 || writes[b * kept + column] < 0) continue;
                    float* slot = state + writes[b * kept + column] * state_slot + offset;
                    for (int64_t i = 0; i < key_dim; i++)
                        std::memcpy(slot + i * value_dim, S + i * COLUMNS, width * sizeof(float));
                }
            }
        }
    }
}
