// y = x W^T + bias over weights packed once into panels [n / PANEL][k][PANEL], zero-padded in n. Weights that come in
// bfloat16 stay so: half the memory, and half of what a decode step reads. Their products are those of floats, or of
// pairs of bfloat16, which have twice the speed where the CPU has an instruction for them.
#include "../shared/cpu.h"

namespace {
constexpr int64_t ROW_BLOCK = 192;   // rows of x that stay in L2 while all panels pass by
constexpr int64_t DEPTH_BLOCK = 256; // depth of a panel that stays in L1 while the rows pass by
constexpr int64_t PANEL_GROUP = 4;   // panels of one task
constexpr int64_t FEW_ROWS = 16;     // for which panels are read from end to end
constexpr int64_t SERIAL_BELOW = 1 << 20;  // multiply-adds worth less than waking a thread

// Where element i of column j lies in a panel of that kind, and the depth of a panel: whole blocks for PAIRS.
int64_t place(int64_t kind, int64_t i, int64_t j) {
    if (kind == FLOATS) return i * PANEL + j;
    if (kind == WIDENED) return i * PANEL + j % LANES * 2 + j / LANES;
    return i / 2 * 2 * PANEL + 2 * j + i % 2;
}

int64_t padded(int64_t kind, int64_t k) { return kind == PAIRS ? 2 * block_words(k) : k; }

template <typename W>
void pack(const W* weight, W* packed, int64_t kind, int64_t n, int64_t k) {
    const int64_t panels = (n + PANEL - 1) / PANEL, depth = padded(kind, k);
#pragma omp parallel for
    for (int64_t p = 0; p < panels; p++) {
        W* panel = packed + p * depth * PANEL;
        for (int64_t j = 0; j < PANEL; j++) {
            const int64_t row = p * PANEL + j;
            for (int64_t i = 0; i < depth; i++)
                panel[place(kind, i, j)] = row < n && i < k ? weight[row * k + i] : W{};
        }
    }
}

// Of PAIRS, k counts words.
template <typename A, typename W>
void apply(const A* x, int64_t x_stride, const W* packed, const float* bias, float* y, int64_t y_stride, int64_t m,
           int64_t n, int64_t k) {
    using Flush = std::conditional_t<std::is_same_v<A, uint32_t>, FlushDenormals, Nothing>;
    const int64_t blocks = (m + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t groups = (n + PANEL_GROUP * PANEL - 1) / (PANEL_GROUP * PANEL);
#pragma omp parallel for collapse(2) if (m * n * k >= SERIAL_BELOW)
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = block * ROW_BLOCK, rows = std::min(ROW_BLOCK, m - row);
            const Flush flushed;
            const int64_t column = group * PANEL_GROUP * PANEL;
            const int64_t columns = std::min(PANEL_GROUP * PANEL, n - column);
            const int64_t whole = columns / PANEL, rest = columns % PANEL;
            float last[ROW_BLOCK * PANEL];  // a panel that is wider than what is left of y
            for (int64_t r = 0; r < rows; r++) {
                float* out = y + (row + r) * y_stride + column;
                for (int64_t c = 0; c < columns; c++) out[c] = bias ? bias[column + c] : 0.0f;
                for (int64_t c = 0; rest && c < PANEL; c++) last[r * PANEL + c] = c < rest ? out[whole * PANEL + c] : 0;
            }
            const bool few = rows <= FEW_ROWS || (HAS_AMX && std::is_same_v<A, uint32_t>);  // waits for memory
            const auto times = few ? multiply<true, A, W> : multiply<false, A, W>;
            const int64_t most = few ? k : DEPTH_BLOCK;
            for (int64_t start = 0; start < k; start += most) {
                const int64_t depth = std::min(most, k - start);
                const A* a = x + row * x_stride + start;
                const W* b = packed + column * k + start * PANEL;
                times(rows, whole, a, x_stride, b, k * PANEL, depth, y + row * y_stride + column, y_stride);
                if (rest) times(rows, 1, a, x_stride, b + whole * k * PANEL, k * PANEL, depth, last, PANEL);
            }
            for (int64_t r = 0; rest && r < rows; r++)
                std::memcpy(y + (row + r) * y_stride + column + whole * PANEL, last + r * PANEL, rest * sizeof(float));
        }
    }
}

void multiply_any(const float* x, int64_t x_stride, const void* packed, int64_t kind, const float* bias, float* y,
                  int64_t y_stride, int64_t m, int64_t n, int64_t k) {
    if (kind == FLOATS) return apply(x, x_stride, (const float*)packed, bias, y, y_stride, m, n, k);
    if (kind == WIDENED) return apply(x, x_stride, (const uint16_t*)packed, bias, y, y_stride, m, n, k);
    static thread_local std::vector<uint32_t> room;
    const int64_t words = row_words(kind, k);
    uint32_t* const rows = lined(room, m * words);
#pragma omp parallel for if (m * n * k >= SERIAL_BELOW)
    for (int64_t r = 0; r < m; r++) to_blocks(x + r * x_stride, k, rows + r * words);
    apply(rows, words, (const uint32_t*)packed, bias, y, y_stride, m, n, words);
}
}  // namespace

void multiply_rows(const uint32_t* rows, const void* packed, int64_t kind, const float* bias, float* y, int64_t m,
                   int64_t n, int64_t k) {
    const int64_t words = row_words(kind, k);
    if (kind == PAIRS) return apply(rows, words, (const uint32_t*)packed, bias, y, n, m, n, words);
    multiply_any((const float*)rows, words, packed, kind, bias, y, n, m, n, k);
}

extern "C" int64_t linear_panel() { return PANEL; }

extern "C" void linear_pack(const void* weight, void* packed, int64_t kind, int64_t n, int64_t k) {
    if (kind == FLOATS) return pack((const float*)weight, (float*)packed, kind, n, k);
    pack((const uint16_t*)weight, (uint16_t*)packed, kind, n, k);
}

extern "C" void linear(const float* x, int64_t x_stride, const void* packed, int64_t kind, const float* bias, float* y,
                       int64_t m, int64_t n, int64_t k) {
    multiply_any(x, x_stride, packed, kind, bias, y, n, m, n, k);
}

// y [m][heads][n] of x [m][heads][k] by strides; packed weights of head h start at h * head_bytes.
extern "C" void linear_heads(const float* x, int64_t x_stride, int64_t x_head, const void* packed, int64_t head_bytes,
                             int64_t kind, float* y, int64_t m, int64_t heads, int64_t n, int64_t k) {
    const int64_t work = m * n * k;  // of a head: threads take heads where one head is not worth waking them
#pragma omp parallel for if (work < SERIAL_BELOW && heads * work >= SERIAL_BELOW)
    for (int64_t h = 0; h < heads; h++)
        multiply_any(x + h * x_head, x_stride, (const char*)packed + h * head_bytes, kind, nullptr, y + h * n,
                     heads * n, m, n, k);
}
