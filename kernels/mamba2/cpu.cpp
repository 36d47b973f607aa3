// State space duality of Mamba-2, one token after the other, over an indexed state: the same bits in any cut.
#include "../shared/ranges.h"
#include "../shared/recurrence.h"

namespace {
constexpr int SSD_VECS = 4;       // of a strip: enough chains in flight to hide the latency of one
constexpr int SSD_WIDE_VECS = 8;  // of a single token, which waits for memory

// The inputs of the tokens of one head, and its output; each with the distance between tokens.
struct SsdHead {
    const float *b, *c, *x, *gate, *scales;
    float* out;
    float skip;
    int64_t mixed_token, gate_token, scales_token, out_token;
};

// A row of tokens over the columns from `start` on. The first token reads a slot, the last one writes one:
//   state <- decay * state + b (outer) dt * x,  out <- (c . state + skip * x) * silu(gate)
template <int N, bool WHOLE, typename T>
__attribute__((noinline)) void ssd_run(const Row<T>& row, const SsdHead& head, Strip<N, WHOLE, T> from, int64_t start) {
    typedef Strip<N, WHOLE, T> Slot;
    const Strip<N, WHOLE, float> scratch = row.template scratch<N, WHOLE>(start);
    const auto compute = [&](int64_t t, auto source, auto to, auto kept) {
        typedef decltype(kept) Kept;
        const float *b = head.b + t * head.mixed_token, *c = head.c + t * head.mixed_token;
        const float *scale = head.scales + t * head.scales_token, decay = scale[0];
        vec x[N], u[N], sum[N] = {}, s[N];
        from.get(head.x + t * head.mixed_token + start, x, from.columns);
        for (int n = 0; n < N; n++) u[n] = x[n] * scale[1];
        for (int64_t i = 0; i < row.key_dim; i++) {
            const vec b_i = splat(b[i]), c_i = splat(c[i]);
            source.get(i, s);
            for (int n = 0; n < N; n++) {
                const vec after = fused(b_i, u[n], s[n] * decay);
                sum[n] = fused(c_i, after, sum[n]);
                s[n] = rounded<Kept>(after);
            }
            to.put(i, s);
        }
        float columns[Slot::WIDTH], gate[Slot::WIDTH];
        for (int n = 0; n < N; n++) store(columns + n * LANES, fused(splat(head.skip), x[n], sum[n]));
        from.get(head.gate + t * head.gate_token + start, s, from.columns);
        for (int n = 0; n < N; n++) store(gate + n * LANES, s[n]);
        for (int64_t i = 0; i < Slot::WIDTH; i++) columns[i] *= silu(gate[i]);
        std::memcpy(head.out + t * head.out_token + start, columns,
                    (WHOLE ? Slot::WIDTH : from.columns) * sizeof(float));
    };
    const auto run_token = [&](int64_t t, auto source, auto to) {
        typedef std::conditional_t<std::is_same_v<decltype(to), Slot>, float, T> Kept;  // a slot rounds by itself
        row.rounds(t) ? compute(t, source, to, uint16_t{}) : compute(t, source, to, Kept{});
    };
    bool apart = false;  // the state is in scratch, which `from` cannot say of another type
    for (int64_t t = row.begin; t < row.end; t++) {
        const int32_t write = row.write(t);
        if (write < 0) {
            apart ? run_token(t, scratch, scratch) : run_token(t, from, scratch);
            if constexpr (std::is_same_v<T, float>) from = scratch;
            else apart = true;
        } else {
            const Slot to = row.template in_slot<Slot>(write, start);
            apart ? run_token(t, scratch, to) : run_token(t, from, to);
            from = to, apart = false;
        }
    }
}
}  // namespace

// mixed   [tokens][groups][B | C | x of its heads], packed
// z       [tokens][groups][heads][value_dim], with token and group strides
// dt      [tokens][groups * heads], tokens by stride; a_log, dt_bias and skip [groups * heads]
// state   [slots][groups][heads][key_dim][value_dim] of float, or of `halves` bfloat16
// out     [tokens][groups][heads][value_dim], packed
// writes  [rows][kept]: slots for the states after the last `kept` tokens of a row, -1 for none
// lens    [rows]: tokens of the sequence after each row. A state is rounded at multiples of `round` tokens, 0: never
extern "C" void mamba2(const float* mixed, const float* z, int64_t z_token, int64_t z_group, const float* dt,
                       int64_t dt_token, const float* a_log, const float* dt_bias, const float* skip, float dt_min,
                       float dt_max, float* out, void* state, int64_t slots, int64_t state_slot, int64_t state_group,
                       const int32_t* cu, const int32_t* read, const int32_t* writes, int64_t rows, int64_t kept,
                       int64_t tokens, int64_t halves, const int32_t* lens, int64_t round, int64_t groups,
                       int64_t heads, int64_t key_dim, int64_t value_dim) {
    assert_states("mamba2", cu, read, writes, rows, kept, tokens, slots);
    const int64_t every = groups * heads;
    const int64_t channels = 2 * key_dim + heads * value_dim;
    static thread_local std::vector<float> scratch;  // of each token and head: its decay, dt
    scratch.resize(2 * tokens * every);
    float* const scales = scratch.data();
#pragma omp parallel for if (tokens * every >= 1 << 10)
    for (int64_t i = 0; i < tokens * every; i++) {
        const int64_t head = i % every;
        const float free = softplus(dt[i / every * dt_token + head] + dt_bias[head]);
        const float bound = std::min(std::max(free, dt_min), dt_max);
        scales[2 * i] = exp_f32(-exp_f32(a_log[head]) * bound);
        scales[2 * i + 1] = bound;
    }
    const auto run_all = [&](auto* states) {
        typedef Row<std::remove_pointer_t<decltype(states)>> StateRow;
#pragma omp parallel for collapse(2) schedule(dynamic) if (tokens * every * key_dim * value_dim >= 1 << 17)
        for (int64_t b = 0; b < rows; b++) {
            for (int64_t h = 0; h < every; h++) {
                const int64_t group = h / heads, head = h % heads;
                const StateRow row{states + group * state_group + head * key_dim * value_dim,
                                   state_slot, key_dim, value_dim, cu[b], cu[b + 1], read[b], writes + b * kept, kept,
                                   lens[b], round};
                const float* B = mixed + group * channels;
                const SsdHead at{B, B + key_dim, B + 2 * key_dim + head * value_dim,
                                 z + group * z_group + head * value_dim, scales + 2 * h, out + h * value_dim, skip[h],
                                 groups * channels, z_token, 2 * every, every * value_dim};
                each_strip<SSD_VECS, SSD_WIDE_VECS>(
                    row, [&](auto from, int64_t start) { ssd_run(row, at, from, start); });
            }
        }
    };
    if (halves) run_all((uint16_t*)state);
    else run_all((float*)state);
}
