// Training kernels of the keeper: gated delta rule, convolution, norms and SwiGLU, forward and backward, for one CPU thread.
//
// All tensors are contiguous float32 in row-major order unless a stride is named. B sequences of T tokens; H_k key heads and
// H_v value heads of kHead columns. A "projected" row is q | k | v | z | beta | decay and `stride` floats long; its first
// C = (2 H_k + H_v) kHead columns pass through the convolution, and the rows that come out of it are C long.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kHead = 32;
constexpr int64_t kTaps = 4;
constexpr float kEpsilon = 1e-6f;

// One row of a head: the compiler splits it into the widest registers the machine has.
typedef float Row __attribute__((vector_size(kHead * sizeof(float)), aligned(4)));
typedef Row State[kHead];  // temporal state of one head, S[key column] = row of value columns

inline const Row& row(const float* from) { return *reinterpret_cast<const Row*>(from); }
inline Row& row(float* from) { return *reinterpret_cast<Row*>(from); }

inline float sum(const Row& values) {
  float total = 0;
  for (int i = 0; i < kHead; i++) total += values[i];
  return total;
}

inline float inverse_norm(const float* values) {
  float squares = 0;
  for (int i = 0; i < kHead; i++) squares += values[i] * values[i];
  return 1.0f / std::sqrt(squares + kEpsilon);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
inline float silu_slope(float x, float gate) { return gate * (1.0f + x * (1.0f - gate)); }

// Where one token of one head lies in the convolved rows and in the per-head gates.
struct Token {
  const float *q, *k, *v;
  float decay, beta, q_scale, k_scale;
};

struct Heads {
  int64_t T, H_k, H_v;
  int64_t columns() const { return (2 * H_k + H_v) * kHead; }
  int64_t q(int64_t head) const { return head / (H_v / H_k) * kHead; }
  int64_t k(int64_t head) const { return H_k * kHead + q(head); }
  int64_t v(int64_t head) const { return (2 * H_k + head) * kHead; }
  Token token(const float* rows, const float* log_decay, const float* beta, int64_t at, int64_t head) const {
    const float* r = rows + at * columns();
    Token token{r + q(head), r + k(head), r + v(head), std::exp(log_decay[at * H_v + head]), beta[at * H_v + head], 0, 0};
    token.q_scale = inverse_norm(token.q);
    token.k_scale = inverse_norm(token.k);
    return token;
  }
};

const float kQueryScale = 1.0f / std::sqrt(static_cast<float>(kHead));

// What the decayed state still predicts wrongly about the value: v - decay * S^T k.
inline Row surprise(const Token& token, const State& before) {
  Row recalled = {};
  for (int i = 0; i < kHead; i++) recalled += token.k[i] * token.k_scale * before[i];
  return row(token.v) - token.decay * recalled;
}

struct Taps {  // the convolution's weights, one contiguous run of channels per tap
  std::vector<float> weights;
  Taps(const float* weight, int64_t channels) : weights(kTaps * channels) {
    for (int64_t c = 0; c < channels; c++)
      for (int64_t tap = 0; tap < kTaps; tap++) weights[tap * channels + c] = weight[c * kTaps + tap];
  }
};

}  // namespace

extern "C" {

// Gated delta rule: S <- decay S + k (beta (v - decay S^T k))^T, out = S^T q, with q and k of unit norm.
// rows [B,T,C], log_decay and beta [B,T,H_v] -> out [B,T,H_v,kHead] and kept [B,H_v,ceil(T/chunk),kHead,kHead], the
// states at the chunk starts, from which the backward pass recomputes the rest.
void delta_forward(const float* rows, const float* log_decay, const float* beta, float* out, float* kept, int64_t B,
                   int64_t T, int64_t H_k, int64_t H_v, int64_t chunk) {
  const Heads heads{T, H_k, H_v};
  const int64_t chunks = (T + chunk - 1) / chunk;
  for (int64_t b = 0; b < B; b++)
    for (int64_t head = 0; head < H_v; head++) {
      State state = {};
      for (int64_t t = 0; t < T; t++) {
        if (t % chunk == 0) memcpy(kept + ((b * H_v + head) * chunks + t / chunk) * kHead * kHead, state, sizeof state);
        const int64_t at = b * T + t;
        const Token token = heads.token(rows, log_decay, beta, at, head);
        const Row delta = token.beta * surprise(token, state);
        Row result = {};
        for (int i = 0; i < kHead; i++) {
          state[i] = token.decay * state[i] + token.k[i] * token.k_scale * delta;
          result += token.q[i] * token.q_scale * kQueryScale * state[i];
        }
        row(out + (at * H_v + head) * kHead) = result;
      }
    }
}

// d_out -> d_rows (added to: zero it first), d_log_decay, d_beta; shapes as in delta_forward.
void delta_backward(const float* rows, const float* log_decay, const float* beta, const float* kept, const float* d_out,
                    float* d_rows, float* d_log_decay, float* d_beta, int64_t B, int64_t T, int64_t H_k, int64_t H_v,
                    int64_t chunk) {
  const Heads heads{T, H_k, H_v};
  const int64_t chunks = (T + chunk - 1) / chunk;
  std::vector<float> state_floats((chunk + 1) * kHead * kHead), surprise_floats(chunk * kHead);
  State* states = reinterpret_cast<State*>(state_floats.data());  // states[i]: before token i of the chunk
  Row* surprises = reinterpret_cast<Row*>(surprise_floats.data());
  for (int64_t b = 0; b < B; b++)
    for (int64_t head = 0; head < H_v; head++) {
      State d_state = {};
      for (int64_t c = chunks - 1; c >= 0; c--) {
        const int64_t start = c * chunk, stop = std::min(T, start + chunk);
        memcpy(states[0], kept + ((b * H_v + head) * chunks + c) * kHead * kHead, sizeof(State));
        for (int64_t t = start; t < stop; t++) {
          const Token token = heads.token(rows, log_decay, beta, b * T + t, head);
          const State& before = states[t - start];
          State& after = states[t - start + 1];
          surprises[t - start] = surprise(token, before);
          const Row delta = token.beta * surprises[t - start];
          for (int i = 0; i < kHead; i++) after[i] = token.decay * before[i] + token.k[i] * token.k_scale * delta;
        }
        for (int64_t t = stop - 1; t >= start; t--) {
          const int64_t at = b * T + t;
          const Token token = heads.token(rows, log_decay, beta, at, head);
          const State &before = states[t - start], &after = states[t - start + 1];
          const Row d_result = row(d_out + (at * H_v + head) * kHead);
          const Row delta = token.beta * surprises[t - start];
          float d_q[kHead], d_k[kHead];  // with respect to the normalised q and k
          Row d_delta = {};
          for (int i = 0; i < kHead; i++) {
            d_q[i] = kQueryScale * sum(after[i] * d_result);
            d_state[i] += token.q[i] * token.q_scale * kQueryScale * d_result;
            d_delta += token.k[i] * token.k_scale * d_state[i];
          }
          const Row d_recalled = -token.beta * d_delta;  // recalled: decay * S^T k
          float* d_row = d_rows + at * heads.columns();
          row(d_row + heads.v(head)) -= d_recalled;
          d_beta[at * H_v + head] = sum(d_delta * surprises[t - start]);
          Row d_decay = {};
          for (int i = 0; i < kHead; i++) {
            d_k[i] = sum(d_state[i] * delta + token.decay * before[i] * d_recalled);
            const Row d_decayed = d_state[i] + token.k[i] * token.k_scale * d_recalled;
            d_decay += d_decayed * before[i];
            d_state[i] = token.decay * d_decayed;
          }
          d_log_decay[at * H_v + head] = sum(d_decay) * token.decay;
          float q_along = 0, k_along = 0;
          for (int i = 0; i < kHead; i++) {
            q_along += d_q[i] * token.q[i];
            k_along += d_k[i] * token.k[i];
          }
          q_along *= token.q_scale * token.q_scale;
          k_along *= token.k_scale * token.k_scale;
          for (int i = 0; i < kHead; i++) {
            d_row[heads.q(head) + i] += token.q_scale * (d_q[i] - q_along * token.q[i]);
            d_row[heads.k(head) + i] += token.k_scale * (d_k[i] - k_along * token.k[i]);
          }
        }
      }
    }
}

// Causal depthwise convolution over kTaps tokens, then SiLU. x rows are `stride` long; weight [C,kTaps]; y [B,T,C].
void conv_forward(const float* x, const float* weight, float* y, int64_t stride, int64_t B, int64_t T, int64_t C) {
  const Taps taps(weight, C);
  std::vector<float> sums(C);
  for (int64_t at = 0; at < B * T; at++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t tap = std::max<int64_t>(0, kTaps - 1 - at % T); tap < kTaps; tap++) {
      const float *w = &taps.weights[tap * C], *from = x + (at + tap - (kTaps - 1)) * stride;
      for (int64_t c = 0; c < C; c++) sums[c] += from[c] * w[c];
    }
    for (int64_t c = 0; c < C; c++) y[at * C + c] = sums[c] * sigmoid(sums[c]);
  }
}

// d_y -> d_x (its first C columns are overwritten) and d_weight [C,kTaps].
void conv_backward(const float* x, const float* weight, const float* d_y, float* d_x, float* d_weight, int64_t stride,
                   int64_t B, int64_t T, int64_t C) {
  const Taps taps(weight, C);
  std::vector<float> sums(C), d_taps(kTaps * C, 0.0f);
  for (int64_t at = 0; at < B * T; at++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    memset(d_x + at * stride, 0, C * sizeof(float));
    const int64_t first = std::max<int64_t>(0, kTaps - 1 - at % T);
    for (int64_t tap = first; tap < kTaps; tap++) {
      const float *w = &taps.weights[tap * C], *from = x + (at + tap - (kTaps - 1)) * stride;
      for (int64_t c = 0; c < C; c++) sums[c] += from[c] * w[c];
    }
    for (int64_t c = 0; c < C; c++) sums[c] = d_y[at * C + c] * silu_slope(sums[c], sigmoid(sums[c]));
    for (int64_t tap = first; tap < kTaps; tap++) {
      const int64_t offset = (at + tap - (kTaps - 1)) * stride;
      const float *w = &taps.weights[tap * C], *from = x + offset;
      float *d_from = d_x + offset, *d_w = &d_taps[tap * C];
#pragma omp simd
      for (int64_t c = 0; c < C; c++) {
        d_from[c] += sums[c] * w[c];
        d_w[c] += sums[c] * from[c];
      }
    }
  }
  for (int64_t c = 0; c < C; c++)
    for (int64_t tap = 0; tap < kTaps; tap++) d_weight[c * kTaps + tap] = d_taps[tap * C + c];
}

// y = x / rms(x) * (1 + weight) over rows of `columns`; scale [N] keeps 1 / rms for the backward pass.
void norm_forward(const float* x, const float* weight, float* y, float* scale, int64_t N, int64_t columns) {
  for (int64_t n = 0; n < N; n++) {
    const float* from = x + n * columns;
    float squares = 0;
    for (int64_t i = 0; i < columns; i++) squares += from[i] * from[i];
    scale[n] = 1.0f / std::sqrt(squares / columns + kEpsilon);
    for (int64_t i = 0; i < columns; i++) y[n * columns + i] = from[i] * scale[n] * (1.0f + weight[i]);
  }
}

void norm_backward(const float* x, const float* weight, const float* scale, const float* d_y, float* d_x,
                   float* d_weight, int64_t N, int64_t columns) {
  memset(d_weight, 0, columns * sizeof(float));
  for (int64_t n = 0; n < N; n++) {
    const float *from = x + n * columns, *d = d_y + n * columns;
    const float r = scale[n];
    float along = 0;
    for (int64_t i = 0; i < columns; i++) along += d[i] * (1.0f + weight[i]) * from[i];
    along *= r * r * r / columns;
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
      d_weight[i] += d[i] * from[i] * r;
      d_x[n * columns + i] = d[i] * (1.0f + weight[i]) * r - from[i] * along;
    }
  }
}

// y = x / rms(x) * weight * silu(z) per value head; x and y [N,H_v,kHead], z in the projected rows (`stride`), scale [N,H_v].
void gated_norm_forward(const float* x, const float* z, const float* weight, float* y, float* scale, int64_t stride,
                        int64_t N, int64_t H_v) {
  for (int64_t at = 0; at < N * H_v; at++) {
    const float *from = x + at * kHead, *gate = z + at / H_v * stride + at % H_v * kHead;
    float squares = 0;
    for (int i = 0; i < kHead; i++) squares += from[i] * from[i];
    scale[at] = 1.0f / std::sqrt(squares / kHead + kEpsilon);
#pragma omp simd
    for (int i = 0; i < kHead; i++) y[at * kHead + i] = from[i] * scale[at] * weight[i] * gate[i] * sigmoid(gate[i]);
  }
}

void gated_norm_backward(const float* x, const float* z, const float* weight, const float* scale, const float* d_y,
                         float* d_x, float* d_z, float* d_weight, int64_t stride, int64_t N, int64_t H_v) {
  memset(d_weight, 0, kHead * sizeof(float));
  for (int64_t at = 0; at < N * H_v; at++) {
    const int64_t z_at = at / H_v * stride + at % H_v * kHead;
    const float *from = x + at * kHead, *gate = z + z_at, *d = d_y + at * kHead;
    const float r = scale[at];
    float d_normed[kHead], along = 0;
#pragma omp simd reduction(+ : along)
    for (int i = 0; i < kHead; i++) {
      const float g = sigmoid(gate[i]), silu = gate[i] * g, normed = from[i] * r;
      d_z[z_at + i] = d[i] * normed * weight[i] * silu_slope(gate[i], g);
      d_weight[i] += d[i] * normed * silu;
      d_normed[i] = d[i] * weight[i] * silu;
      along += d_normed[i] * from[i];
    }
    along *= r * r * r / kHead;
    for (int i = 0; i < kHead; i++) d_x[at * kHead + i] = d_normed[i] * r - from[i] * along;
  }
}

// y = silu(gate) * up over rows gate | up of 2 * columns.
void swiglu_forward(const float* x, float* y, int64_t N, int64_t columns) {
  for (int64_t n = 0; n < N; n++) {
    const float *gate = x + 2 * n * columns, *up = gate + columns;
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) y[n * columns + i] = gate[i] * up[i] * sigmoid(gate[i]);
  }
}

void swiglu_backward(const float* x, const float* d_y, float* d_x, int64_t N, int64_t columns) {
  for (int64_t n = 0; n < N; n++) {
    const float *gate = x + 2 * n * columns, *up = gate + columns, *d = d_y + n * columns;
    float *d_gate = d_x + 2 * n * columns, *d_up = d_gate + columns;
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
      const float g = sigmoid(gate[i]);
      d_up[i] = d[i] * gate[i] * g;
      d_gate[i] = d[i] * up[i] * silu_slope(gate[i], g);
    }
  }
}

}  // extern "C"
