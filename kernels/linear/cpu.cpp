// y = x W^T + bias over weights packed once into panels [n / PANEL][k][PANEL], zero-padded in n. Weights that come in
// bfloat16 stay so: half the memory, and half of what a decode step reads. Their products are those of floats, or of
// pairs of bfloat16, which have twice the speed where the CPU has an instruction for them.
#include "../shared/cpu.h"

namespace {
constexpr int64_t ROW_BLOCK = 192;   // rows of x that stay in L2 while all panels pass by
constexpr int64_t DEPTH_BLOCK = 256; // depth of a panel that stays in L1 while the rows pass by
constexpr int64_t PANEL_GROUP = 4;   // panels of one task
constexpr int64_t FEW_ROWS = 16;     // for which panels are read from end to end

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

#if defined(AMX)
constexpr int64_t AMX_DEPTH = 192;  // words of depth of a tile of rows, which stay in L1 while panels pass by

// `apply` of pairs, a tile of rows after the other: its sums and its factors stay in L1, the panels in L2.
void apply_amx(const Product& product, int64_t row, int64_t column, int64_t n, int64_t k) {
    const int64_t rows = std::min(ROW_BLOCK, product.m - row), stride = product.stride;
    const int64_t columns = std::min(PANEL_GROUP * PANEL, n - column), panels = (columns + PANEL - 1) / PANEL;
    const uint32_t *const a = product.rows + row * stride, *const b = (const uint32_t*)product.packed + column * k;
    alignas(LINE) float bias[PANEL_GROUP * PANEL] = {}, sums[2 * AMX_ROWS][PANEL_GROUP * PANEL];
    if (product.bias) std::memcpy(bias, product.bias + column, columns * sizeof(float));
    for (int64_t first = 0; first < rows; first += 2 * AMX_ROWS) {
        const int64_t height = std::min(2 * AMX_ROWS, rows - first);
        const int64_t most = rows > 2 * AMX_ROWS ? AMX_DEPTH : k;
        const auto times = first ? multiply<false, uint32_t, uint32_t> : multiply<true, uint32_t, uint32_t>;
        for (int64_t start = 0; start < k; start += most)
            times(height, panels, a + first * stride + start, stride, b + start * PANEL, k * PANEL,
                  std::min(most, k - start), sums[0], PANEL_GROUP * PANEL, start ? nullptr : bias);
        for (int64_t r = 0; r < height; r++)
            std::memcpy(product.y + (row + first + r) * product.y_stride + column, sums[r], columns * sizeof(float));
    }
}
#endif

// Columns of one task of a product, for at most ROW_BLOCK rows from `row` on. Of PAIRS, k counts words.
template <typename A, typename W>
void apply(const Product& product, int64_t row, int64_t column, int64_t n, int64_t k) {
    const std::conditional_t<std::is_same_v<A, uint32_t>, FlushDenormals, Nothing> flushed;
    const int64_t rows = std::min(ROW_BLOCK, product.m - row), stride = product.stride, y_stride = product.y_stride;
#if defined(AMX)
    if (HAS_AMX && std::is_same_v<A, uint32_t> && rows >= AMX_FROM) return apply_amx(product, row, column, n, k);
#endif
    const int64_t columns = std::min(PANEL_GROUP * PANEL, n - column), whole = columns / PANEL, rest = columns % PANEL;
    float *const y = product.y + row * y_stride + column, *const edge = y + whole * PANEL;
    float bias[PANEL_GROUP * PANEL] = {}, last[ROW_BLOCK * PANEL];  // a panel that is wider than what is left of y
    if (product.bias) std::memcpy(bias, product.bias + column, columns * sizeof(float));
    const bool few = rows <= FEW_ROWS;
    const auto times = few ? multiply<true, A, W> : multiply<false, A, W>;
    const int64_t most = few ? k : DEPTH_BLOCK;
    for (int64_t start = 0; start < k; start += most) {
        const int64_t depth = std::min(most, k - start);
        const A* a = (const A*)product.rows + row * stride + start;
        const W* b = (const W*)product.packed + column * k + start * PANEL;
        const float *const from = start ? nullptr : bias, *const from_last = start ? nullptr : bias + whole * PANEL;
        times(rows, whole, a, stride, b, k * PANEL, depth, y, y_stride, from);
        if (rest) times(rows, 1, a, stride, b + whole * k * PANEL, k * PANEL, depth, last, PANEL, from_last);
    }
    for (int64_t r = 0; rest && r < rows; r++) std::memcpy(edge + r * y_stride, last + r * PANEL, rest * sizeof(float));
}

// Products of floats, all of the same m: rows are rounded where the kind wants it.
void multiply_floats(std::vector<Product> products, int64_t kind, int64_t n, int64_t k) {
    const int64_t m = products[0].m, count = kind == PAIRS ? m * products.size() : 0;
    const int64_t words = row_words(kind, k) + DEPTH_WORDS;  // a line beside a row: a power of 2 has few sets of L1
    static thread_local std::vector<uint32_t> room;
    uint32_t* const rounded = lined(room, count * words);
    const std::vector<Product> given(products);
    for (size_t i = 0; i < products.size() && kind == PAIRS; i++)
        products[i].rows = rounded + i * m * words, products[i].stride = words;
#pragma omp parallel if (m * n * k * (int64_t)products.size() >= SERIAL_BELOW)
    {
#pragma omp for
        for (int64_t r = 0; r < count; r++)
            to_blocks((const float*)given[r / m].rows + r % m * given[r / m].stride, k, rounded + r * words);
        multiply_all(products, kind, n, k);
    }
}
}  // namespace

void multiply_all(const std::vector<Product>& products, int64_t kind, int64_t n, int64_t k) {
    const auto times = kind == FLOATS    ? apply<float, float>
                       : kind == WIDENED ? apply<float, uint16_t>
                                         : apply<uint32_t, uint32_t>;
    std::vector<std::pair<const Product*, int64_t>> blocks;
    for (const Product& product : products)
        for (int64_t row = 0; row < product.m; row += ROW_BLOCK) blocks.emplace_back(&product, row);
    const int64_t count = blocks.size();
#pragma omp for collapse(2) schedule(dynamic)  // columns first: their weights are read once for all rows
    for (int64_t column = 0; column < n; column += PANEL_GROUP * PANEL)
        for (int64_t i = 0; i < count; i++)
            times(*blocks[i].first, blocks[i].second, column, n, row_words(kind, k));
}

extern "C" int64_t linear_panel() { return PANEL; }

extern "C" void linear_pack(const void* weight, void* packed, int64_t kind, int64_t n, int64_t k) {
    if (kind == FLOATS) return pack((const float*)weight, (float*)packed, kind, n, k);
    pack((const uint16_t*)weight, (uint16_t*)packed, kind, n, k);
}

extern "C" void linear(const float* x, int64_t x_stride, const void* packed, int64_t kind, const float* bias, float* y,
                       int64_t m, int64_t n, int64_t k) {
    multiply_floats({{(const uint32_t*)x, x_stride, m, packed, bias, y, n}}, kind, n, k);
}

// y [m][heads][n] of x [m][heads][k] by strides; packed weights of head h start at h * head_bytes.
extern "C" void linear_heads(const float* x, int64_t x_stride, int64_t x_head, const void* packed, int64_t head_bytes,
                             int64_t kind, float* y, int64_t m, int64_t heads, int64_t n, int64_t k) {
    std::vector<Product> products;
    for (int64_t h = 0; h < heads; h++)
        products.push_back({(const uint32_t*)(x + h * x_head), x_stride, m, (const char*)packed + h * head_bytes,
                            nullptr, y + h * n, heads * n});
    multiply_floats(products, kind, n, k);
}
