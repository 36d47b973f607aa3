// Gated delta rule, one token after the other, over an indexed state: the same bits however a sequence is cut.
#include "../shared/ranges.h"
#include "../shared/recurrence.h"

namespace {
constexpr int VECS = 4;  // of a strip: in scratch it stays in L1, and its sums in registers
constexpr int WIDE_VECS = LANES == 16 ? 8 : VECS;  // of a single token: as many as there are registers for
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

// What a token does to its state: decay * state + k (outer) by. Without k, nothing.
template <int N>
struct Change {
    const float* k = nullptr;
    vec by[N];
    float decay;

    template <typename T>
    void make(int64_t i, vec* s) const {
        const vec k_i = splat(k[i]);
        for (int n = 0; n < N; n++) s[n] = rounded<T>(fused(k_i, by[n], s[n] * decay));
    }
};

// out <- q . (decay * state + k (outer) beta * (v - decay * k . state)). The change of the state is returned: the next
// token makes it in the pass in which it reads, from `from` to `to` (PENDING), or `settle` does, with the same bits.
// T: of the states in slots.
template <bool PENDING, typename T, int N, bool WHOLE, typename F>
Change<N> step(Strip<N, WHOLE, F> from, Strip<N, WHOLE, float> to, const Change<N> before, const float* keys, const float* v,
               float decay, float beta, float* out, int64_t key_dim) {
    const float *q = keys, *k = keys + key_dim;
    vec at_k[N] = {}, at_q[N] = {}, s[N];
    for (int64_t i = 0; i < key_dim; i++) {
        const vec k_i = splat(k[i]), q_i = splat(q[i]);
        from.get(i, s);
        if constexpr (PENDING) before.template make<T>(i, s), to.put(i, s);
        for (int n = 0; n < N; n++) {
            at_k[n] = fused(k_i, s[n], at_k[n]);
            at_q[n] = fused(q_i, s[n], at_q[n]);
        }
    }
    Change<N> change{k, {}, decay};
    from.get(v, s, from.columns);
    for (int n = 0; n < N; n++) {
        change.by[n] = (s[n] - at_k[n] * decay) * beta;
        at_q[n] = fused(splat(k[key_dim]), change.by[n], at_q[n] * decay);
    }
    from.put(at_q, out, from.columns);
    return change;
}

template <typename T, typename From, typename To, int N>
void settle(From from, To to, const Change<N> change, int64_t key_dim) {
    vec s[N];
    for (int64_t i = 0; i < key_dim; i++) from.get(i, s), change.template make<T>(i, s), to.put(i, s);
}

// A strip in scratch, and a slot that takes the same past the caches: the next token of the row reads scratch.
template <int N>
struct Both {
    Strip<N, true, float> scratch, slot;
    void put(int64_t i, const vec* s) const {
        scratch.put(i, s);
        for (int n = 0; n < N; n++) stream(slot.first + i * slot.row + n * LANES, s[n]);
    }
};

// The inputs of the tokens of one head, and its output; each with the distance between tokens.
struct Head {
    const float *keys, *values, *scales;
    float* out;
    int64_t keys_token, values_token, scales_token, out_token;
};

// A row of tokens over the columns from `start` on. A single token reads its slot twice, the second time from L2, and
// writes a slot: neither copies.
template <int N, bool WHOLE, typename T>
__attribute__((noinline)) void run(const Row<T>& row, const Head& head, Strip<N, WHOLE, T> from, int64_t start) {
    const Strip<N, WHOLE, float> scratch = row.template scratch<N, WHOLE>(start);
    bool apart = false;  // the state is in scratch, which `from` cannot say of another type
    bool rounds = false;  // ... after the change that is left
    Change<N> left;
    const auto settled = [&](auto source, auto to) {
        if (rounds) settle<uint16_t>(source, to, left, row.key_dim);
        else settle<float>(source, to, left, row.key_dim);
    };
    for (int64_t t = row.begin; t < row.end; t++) {
        const float *keys = head.keys + t * head.keys_token, *scale = head.scales + t * head.scales_token;
        const float* v = head.values + t * head.values_token + start;
        float* out = head.out + t * head.out_token + start;
        __builtin_prefetch(v + AHEAD_TOKENS * head.values_token);
        const auto next = [&](auto source) {
            if (rounds) left = step<true, uint16_t>(source, scratch, left, keys, v, scale[0], scale[1], out, row.key_dim);
            else left = step<true, T>(source, scratch, left, keys, v, scale[0], scale[1], out, row.key_dim);
        };
        if (!left.k) left = step<false, T>(from, scratch, left, keys, v, scale[0], scale[1], out, row.key_dim);
        else if (apart) next(scratch);
        else {
            next(from);
            if constexpr (std::is_same_v<T, float>) from = scratch;
            else apart = true;
        }
        rounds = row.rounds(t);
        const int32_t write = row.write(t);
        if (write < 0) continue;
        const Strip<N, WHOLE, T> to = row.template in_slot<Strip<N, WHOLE, T>>(write, start);
        if constexpr (WHOLE && std::is_same_v<T, float>) {
            if (t + 1 < row.end && !((uintptr_t)to.first % LINE) && !(to.row % LANES)) {
                settled(from, Both<N>{scratch, to});
                after_streams();
                from = scratch, left = {};
                continue;
            }
        }
        apart ? settled(scratch, to) : settled(from, to);
        from = to, apart = false;
        left.k = nullptr;
    }
}
}  // namespace

// mixed   [tokens][key_heads][q | k | value heads], packed
// gates   [tokens][key_heads][b of its value heads | a of its value heads], tokens by stride
// state   [slots][key_heads][values][key_dim][value_dim] of float, or of `halves` bfloat16
// out     [tokens][key_heads][values][value_dim], packed
// writes  [rows][kept]: slots for the states after the last `kept` tokens of a row, -1 for none
// lens    [rows]: tokens of the sequence after each row. A state is rounded at multiples of `round` tokens, 0: never
extern "C" void gated_delta(const float* mixed, const float* gates, int64_t gates_token, const float* a_log,
                            const float* dt_bias, float* out, void* state, int64_t slots, int64_t state_slot,
                            int64_t state_group, const int32_t* cu, const int32_t* read, const int32_t* writes,
                            int64_t rows, int64_t kept, int64_t tokens, int64_t halves, const int32_t* lens, int64_t round,
                            int64_t key_heads, int64_t values, int64_t key_dim, int64_t value_dim) {
    assert_states("gated_delta", cu, read, writes, rows, kept, tokens, slots);
    const Sizes s{key_heads, values, key_dim, value_dim};
    const int64_t heads = key_heads * values;
    static thread_local std::vector<float> scratch;
    scratch.resize(tokens * key_heads * s.keys() + tokens * heads * 2);
    float *const keys = scratch.data(), *const scales = keys + tokens * key_heads * s.keys();
    normalise(mixed, keys, tokens, s);
#pragma omp parallel for if (tokens * heads >= 1 << 10)
    for (int64_t i = 0; i < tokens * heads; i++) {
        const int64_t head = i % heads;
        const float* gate = gates + i / heads * gates_token + head / values * 2 * values + head % values;
        scales[2 * i] = exp_f32(-exp_f32(a_log[head]) * softplus(gate[values] + dt_bias[head]));
        scales[2 * i + 1] = sigmoid(gate[0]);
    }
    const auto run_all = [&](auto* states) {
        typedef Row<std::remove_pointer_t<decltype(states)>> StateRow;
#pragma omp parallel for collapse(2) schedule(dynamic) if (tokens * heads * key_dim * value_dim >= 1 << 17)
        for (int64_t b = 0; b < rows; b++) {
            for (int64_t h = 0; h < heads; h++) {
                const int64_t group = h / values, value = h % values;
                const StateRow row{states + group * state_group + value * key_dim * value_dim,
                                   state_slot, key_dim, value_dim, cu[b], cu[b + 1], read[b], writes + b * kept, kept,
                                   lens[b], round};
                const Head head{keys + group * tokens * s.keys(),
                                mixed + group * s.channels() + 2 * key_dim + value * value_dim,
                                scales + 2 * h, out + h * value_dim,
                                s.keys(), key_heads * s.channels(), 2 * heads, heads * value_dim};
                each_strip<VECS, WIDE_VECS>(row, [&](auto from, int64_t start) { run(row, head, from, start); });
            }
        }
    };
    if (halves) run_all((uint16_t*)state);
    else run_all((float*)state);
}
