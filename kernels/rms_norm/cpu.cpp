// Root-mean-square norm of rows, of a sum or gated.
#include "../shared/cpu.h"

static inline float inverse_rms(const float* x, int64_t width, float epsilon) {
    return 1.0f / std::sqrt(dot(x, x, width) / width + epsilon);
}

// Adds branch to residual, in place; y is the norm of the sum. Without a residual (null) the sum is branch.
extern "C" void add_norm(float* residual, const float* branch, const float* weight, float* y, int64_t rows,
                         int64_t width, float epsilon) {
#pragma omp parallel for if (rows * width >= 1 << 15)
    for (int64_t r = 0; r < rows; r++) {
        const float* sum = branch + r * width;
        if (residual) {
            float* to = residual + r * width;
            for (int64_t i = 0; i < width; i++) to[i] += sum[i];
            sum = to;
        }
        float* out = y + r * width;
        const float scale = inverse_rms(sum, width, epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = sum[i] * scale * weight[i];
    }
}

// y is packed; rows of x are `x_row` elements apart.
extern "C" void rms_norm(const float* x, int64_t x_row, const float* weight, float* y, int64_t rows, int64_t width,
                         float epsilon) {
#pragma omp parallel for if (rows * width >= 1 << 15)
    for (int64_t r = 0; r < rows; r++) {
        const float* in = x + r * x_row;
        const float scale = inverse_rms(in, width, epsilon);
        for (int64_t i = 0; i < width; i++) y[r * width + i] = in[i] * scale * weight[i];
    }
}

// x and y are packed [tokens][groups][heads][width]; the gate is that shape with its own token and group strides.
extern "C" void rms_norm_gated(const float* x, const float* gate, int64_t gate_token, int64_t gate_group,
                               const float* weight, float* y, int64_t tokens, int64_t groups, int64_t heads,
                               int64_t width, float epsilon) {
#pragma omp parallel for if (tokens * groups * heads * width >= 1 << 14)
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t h = 0; h < groups * heads; h++) {
            const int64_t row = (t * groups * heads + h) * width;
            const float* z = gate + t * gate_token + h / heads * gate_group + h % heads * width;
            const float scale = inverse_rms(x + row, width, epsilon);
            by_vectors(width, [=](auto lane, int64_t i) {
                typedef decltype(lane) T;
                const T normed = load_as<T>(x + row + i) * scale * load_as<T>(weight + i);
                store(y + row + i, normed * silu(load_as<T>(z + i)));
            });
        }
    }
}
