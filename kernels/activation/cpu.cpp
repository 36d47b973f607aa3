// silu(g) * u, and x * sigmoid(gate).
#include "../shared/cpu.h"

extern "C" void silu_mul(const float* gate_up, float* y, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width >= 1 << 14)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i++) y[r * width + i] = silu(gate[i]) * up[i];
    }
}

// x and y are packed [tokens][heads][width]; the gate has strides, its last one is 1, or 0 for one gate per head.
extern "C" void sigmoid_mul(const float* x, const float* gate, int64_t gate_token, int64_t gate_head,
                            int64_t gate_element, float* y, int64_t tokens, int64_t heads, int64_t width) {
#pragma omp parallel for if (tokens * heads * width >= 1 << 14)
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t h = 0; h < heads; h++) {
            const int64_t row = (t * heads + h) * width;
            const float* z = gate + t * gate_token + h * gate_head;
            if (gate_element) {
                for (int64_t i = 0; i < width; i++) y[row + i] = x[row + i] * sigmoid(z[i]);
            } else {
                const float scale = sigmoid(z[0]);
                for (int64_t i = 0; i < width; i++) y[row + i] = x[row + i] * scale;
            }
        }
    }
}
