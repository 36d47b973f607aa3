// Depthwise causal convolution with silu over rows of tokens, its window kept in an indexed state.
#include "../shared/cpu.h"
#include "../shared/ranges.h"

namespace {
// out <- silu(bias + sum over j of tap j * input(j)), WIDTH taps `taps_row` floats apart. One pass: a tap at a time
// would read and write `out` once for each.
template <int WIDTH, typename Input>
void convolve(Input input, const float* taps, int64_t taps_row, const float* bias, float* __restrict out,
              int64_t channels) {
    const float *in[WIDTH], *tap[WIDTH];
    for (int j = 0; j < WIDTH; j++) in[j] = input(j), tap[j] = taps + j * taps_row;
    by_vectors(channels, [&](auto lane, int64_t c) {
        typedef decltype(lane) T;
        T sum = load_as<T>(bias + c);
        for (int j = 0; j < WIDTH; j++) sum = fused(load_as<T>(tap[j] + c), load_as<T>(in[j] + c), sum);
        store(out + c, silu(sum));
    });
}

template <typename Input>
void convolve(int64_t width, Input input, const float* taps, int64_t taps_row, const float* bias, float* __restrict out,
              int64_t channels) {
    if (width == 4) return convolve<4>(input, taps, taps_row, bias, out, channels);
    std::copy(bias, bias + channels, out);
    for (int64_t j = 0; j < width; j++) {
        const float *in = input(j), *tap = taps + j * taps_row;
        for (int64_t c = 0; c < channels; c++) out[c] = __builtin_fmaf(tap[c], in[c], out[c]);
    }
    for (int64_t c = 0; c < channels; c++) out[c] = silu(out[c]);
}
}  // namespace

// x [tokens][groups][channels] with token and group strides; weight [width][groups][channels], oldest tap first;
// bias [groups][channels], or null; y packed like x; state [slots][groups][width - 1][channels], oldest input first;
// writes [rows][kept]: slots for the states after the last `kept` tokens of a row, -1 for none.
extern "C" void causal_conv(const float* x, int64_t x_token, int64_t x_group, const float* weight, const float* bias,
                            float* y, float* state, int64_t slots, int64_t state_slot, int64_t state_group,
                            const int32_t* cu, const int32_t* read, const int32_t* writes, int64_t rows, int64_t kept,
                            int64_t tokens, int64_t groups, int64_t channels, int64_t width) {
    assert_states("causal_conv", cu, read, writes, rows, kept, tokens, slots);
    const int64_t past = width - 1;
    const std::vector<float> zeros(bias ? 0 : channels);
#pragma omp parallel for collapse(2) schedule(dynamic) if (tokens * groups * channels >= 1 << 13)
    for (int64_t b = 0; b < rows; b++) {
        for (int64_t g = 0; g < groups; g++) {
            const int64_t begin = cu[b], n = cu[b + 1] - begin;
            static thread_local std::vector<float> window;  // a copy: the slot that is read may be written
            window.assign(past * channels, 0.0f);
            if (read[b] >= 0) {
                const float* slot = state + read[b] * state_slot + g * state_group;
                std::copy(slot, slot + past * channels, window.begin());
            }
            const auto input = [&](int64_t i) {  // input i of the row, the window being inputs [0, past)
                return i < past ? window.data() + i * channels : x + (begin + i - past) * x_token + g * x_group;
            };
            for (int64_t t = 0; t < n; t++)
                convolve(width, [&](int64_t j) { return input(t + j); }, weight + g * channels, groups * channels,
                         bias ? bias + g * channels : zeros.data(),
                         y + ((begin + t) * groups + g) * channels, channels);
            for (int64_t column = std::max<int64_t>(0, kept - n); column < kept; column++) {
                if (writes[b * kept + column] < 0) continue;
                float* slot = state + writes[b * kept + column] * state_slot + g * state_group;
                const int64_t first = n - (kept - 1 - column);
                for (int64_t i = 0; i < past; i++)
                    std::memcpy(slot + i * channels, input(first + i), channels * sizeof(float));
            }
        }
    }
}
