// State space duality of Mamba-2, one token after the other, over an indexed state: the same bits in any cut.
#include "../shared/cpu.h"

namespace {
constexpr int SSD_VECS = 4;  // enough chains in flight to hide the latency of one
constexpr int SSD_COLUMNS = SSD_VECS * LANES;  // of the state, those of one task, which stay in L1

// state[key_dim][SSD_COLUMNS] <- decay * state + b (outer) u, out <- c . state
void ssd_step(float* state, const float* b, const float* c, const vec* u, float decay, vec* out, int64_t key_dim) {
    vec sum[SSD_VECS] = {};
    for (int64_t i = 0; i < key_dim; i++) {
        const vec b_i = splat(b[i]), c_i = splat(c[i]);
        for (int n = 0; n < SSD_VECS; n++) {
            float* s = state + i * SSD_COLUMNS + n * LANES;
            const vec next = fused(b_i, u[n], load(s) * decay);
            sum[n] = fused(c_i, next, sum[n]);
            store(s, next);
        }
    }
    for (int n = 0; n < SSD_VECS; n++) out[n] = sum[n];
}
}  // namespace

// mixed   [tokens][groups][B | C | x of its heads], packed
// z       [tokens][groups][heads][value_dim], with token and group strides
// dt      [tokens][groups * heads], tokens by stride; a_log, dt_bias and skip [groups * heads]
// state   [slots][groups][heads][key_dim][value_dim]
// out     [tokens][groups][heads][value_dim], packed
// writes  [rows][kept]: slots for the states after the last `kept` tokens of a row, -1 for none
extern "C" void mamba2(const float* mixed, const float* z, int64_t z_token, int64_t z_group, const float* dt,
                       int64_t dt_token, const float* a_log, const float* dt_bias, const float* skip, float dt_min,
                       float dt_max, float* state, int64_t state_slot, int64_t state_group, float* out,
                       const int32_t* cu, const int32_t* read, const int32_t* writes, int64_t rows, int64_t kept,
                       int64_t groups, int64_t heads, int64_t key_dim, int64_t value_dim) {
    const int64_t tokens = cu[rows], every = groups * heads, parts = (value_dim + SSD_COLUMNS - 1) / SSD_COLUMNS;
    const int64_t channels = 2 * key_dim + heads * value_dim;
    static thread_local std::vector<float> scratch;  // of each token and head: its decay, dt
    scratch.resize(2 * tokens * every);
    float* const scales = scratch.data();
    for (int64_t i = 0; i < tokens * every; i++) {
        const int64_t head = i % every;
        const float free = softplus(dt[i / every * dt_token + head] + dt_bias[head]);
        const float bound = std::min(std::max(free, dt_min), dt_max);
        scales[2 * i] = exp_f32(-exp_f32(a_log[head]) * bound);
        scales[2 * i + 1] = bound;
    }
#pragma omp parallel for collapse(3) schedule(dynamic) if (tokens * every * key_dim * value_dim >= 1 << 17)
    for (int64_t b = 0; b < rows; b++) {
        for (int64_t head = 0; head < every; head++) {
            for (int64_t part = 0; part < parts; part++) {
                static thread_local std::vector<float> held;
                float* const S = lined(held, key_dim * SSD_COLUMNS);
                std::fill(S, S + key_dim * SSD_COLUMNS, 0.0f);
                const int64_t group = head / heads, start = part * SSD_COLUMNS;
                const int64_t width = std::min<int64_t>(SSD_COLUMNS, value_dim - start);
                const int64_t offset = group * state_group + head % heads * key_dim * value_dim + start;
                if (read[b] >= 0) {
                    const float* slot = state + read[b] * state_slot + offset;
                    for (int64_t i = 0; i < key_dim; i++)
                        std::memcpy(S + i * SSD_COLUMNS, slot + i * value_dim, width * sizeof(float));
                }
                for (int64_t t = cu[b]; t < cu[b + 1]; t++) {
                    const float *B = mixed + (t * groups + group) * channels, *C = B + key_dim;
                    const float* x = C + key_dim + head % heads * value_dim + start;
                    const float* gate = z + t * z_token + group * z_group + head % heads * value_dim + start;
                    const float decay = scales[2 * (t * every + head)], dt_t = scales[2 * (t * every + head) + 1];
                    float columns[SSD_COLUMNS] = {};
                    for (int64_t i = 0; i < width; i++) columns[i] = dt_t * x[i];
                    vec u[SSD_VECS], y[SSD_VECS];
                    for (int n = 0; n < SSD_VECS; n++) u[n] = load(columns + n * LANES);
                    ssd_step(S, B, C, u, decay, y, key_dim);
                    for (int n = 0; n < SSD_VECS; n++) store(columns + n * LANES, y[n]);
                    float* to = out + (t * every + head) * value_dim + start;
                    for (int64_t i = 0; i < width; i++)
                        to[i] = __builtin_fmaf(skip[head], x[i], columns[i]) * silu(gate[i]);
                    const int64_t column = kept - (cu[b + 1] - t);
                    if (column < 0 || writes[b * kept + column] < 0) continue;
                    float* slot = state + writes[b * kept + column] * state_slot + offset;
                    for (int64_t i = 0; i < key_dim; i++)
                        std::memcpy(slot + i * value_dim, S + i * SSD_COLUMNS, width * sizeof(float));
                }
            }
        }
    }
}
