// y = x W^T + bias over weights packed once into panels [n / PANEL][k][PANEL], zero-padded in n. Weights that come in
// bfloat16 stay so: half the memory, and half of what a decode step reads. Their products are those of floats, or of
// pairs of bfloat16, which have twice the speed where the CPU has an instruction for them.
#include "codes.h"
#include "integers.h"

namespace {
constexpr int64_t ROW_BLOCK = 192;  // rows of x that stay in L2 while all panels pass by
constexpr int64_t PANEL_GROUP = 4;  // panels of one task
constexpr int64_t FEW_ROWS = 16;    // for which panels are read from end to end

// Depth of a panel that stays in the cache while the rows pass by.
template <typename A>
constexpr int64_t DEPTH_BLOCK = BY_PANEL<A> ? 128 : 256;

// Where element i of column j lies in a panel of that kind, and the depth of a panel: whole blocks for PAIRS.
int64_t place(int64_t kind, int64_t i, int64_t j) {
    if (kind == FLOATS) return i * PANEL + j;
    if (kind == WIDENED) return i * PANEL + j % LANES * 2 + j / LANES;
    const int64_t word = CHAINED ? i / 4 * 2 + i % 2 : i / 2, half = CHAINED ? 1 - i / 2 % 2 : i % 2;
    return 2 * (word * PANEL + j) + half;
}

int64_t padded(int64_t kind, int64_t k) { return is_pairs(kind) ? 2 * block_words(k) : k; }

// Of a panel whose rows have so many words.
int64_t panel_bytes(int64_t kind, int64_t words) {
    if (kind == INTEGERS) return integers_bytes(words - 1);
    if (!code_of(kind)) return words * PANEL * (kind == WIDENED ? sizeof(uint16_t) : sizeof(float));
    const Codes codes(kind, is_pairs(kind) ? 2 * words : words);
    return codes.pieces * codes.bytes;
}

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

// codes [n][k], two in a byte if they have 4 bits, with scales and perhaps offsets [n][groups].
void pack_codes(const uint8_t* given, const float* scales, const float* offsets, uint8_t* packed, int64_t kind, int64_t n,
                int64_t k) {
    const Codes codes(kind, padded(kind, k));
    const bool is_half = bits_of(codes.code) == 4;
    const int64_t groups = (k + codes.group - 1) / codes.group, bytes = codes.pieces * codes.bytes;
    const int64_t unit_bytes = UNIT * PANEL / (is_half ? 2 : 1);
#pragma omp parallel for
    for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; p++) {
        uint8_t* const panel = packed + p * bytes;
        std::fill(panel, panel + bytes, 0);
        for (int64_t j = 0; j < std::min<int64_t>(PANEL, n - p * PANEL); j++) {
            const int64_t row = p * PANEL + j;
            for (int64_t g = 0; g < groups; g++) {
                float* const columns = (float*)(panel + g * codes.bytes);
                columns[j] = scales[row * groups + g];
                if (offsets) columns[PANEL + j] = offsets[row * groups + g];
            }
            for (int64_t i = 0; i < k; i++) {
                const int64_t in_group = i % codes.group, at = place(kind % (1 << CODE_BIT), i % UNIT, j);
                uint8_t* const unit = panel + i / codes.group * codes.bytes + codes.header + in_group / UNIT * unit_bytes;
                if (!is_half) unit[at] = given[row * k + i];
                else unit[at % LANES * 4 + at / LANES / 2] |= (given[(row * k + i) / 2] >> i % 2 * 4 & 15) << at / LANES % 2 * 4;
            }
        }
    }
}

// Columns of one task of a product, for at most ROW_BLOCK rows from `row` on. Of PAIRS, k counts words.
template <typename A, typename W>
void apply(const Product& product, int64_t, int64_t row, int64_t column, int64_t n, int64_t k) {
    const std::conditional_t<std::is_same_v<A, uint32_t>, FlushDenormals, Nothing> flushed;
    const int64_t rows = std::min(ROW_BLOCK, product.m - row), stride = product.stride, y_stride = product.y_stride;
    const int64_t columns = std::min(PANEL_GROUP * PANEL, n - column), whole = columns / PANEL, rest = columns % PANEL;
    float *const y = product.y + row * y_stride + column, *const edge = y + whole * PANEL;
    float bias[PANEL_GROUP * PANEL] = {}, last[ROW_BLOCK * PANEL];  // a panel that is wider than what is left of y
    if (product.bias) std::memcpy(bias, product.bias + column, columns * sizeof(float));
    // AMX takes the whole depth too: its sums stay in registers and go to y once.
    const bool whole_depth = rows <= FEW_ROWS || (HAS_AMX && std::is_same_v<A, uint32_t>);
    const auto times = whole_depth ? multiply<true, A, W> : multiply<false, A, W>;
    const int64_t most = whole_depth ? k : DEPTH_BLOCK<A>;
    for (int64_t start = 0; start < k; start += most) {
        const int64_t depth = std::min(most, k - start), behind = k - start - depth;
        const A* a = (const A*)product.rows + row * stride + start;
        const W* b = (const W*)product.packed + column * k + start * PANEL;
        const float *const from = start ? nullptr : bias, *const from_last = start ? nullptr : bias + whole * PANEL;
        // The rest of the depth, then the next columns; behind the last ones a prefetch does no harm.
        const Later<W> later = behind ? Later<W>{b + depth * PANEL, std::min(most, behind)}
                                      : Later<W>{b + (PANEL_GROUP * k - start) * PANEL, std::min(most, k)};
        times(rows, whole, a, stride, b, k * PANEL, depth, y, y_stride, from, later);
        if (rest) times(rows, 1, a, stride, b + whole * k * PANEL, k * PANEL, depth, last, PANEL, from_last, {});
    }
    for (int64_t r = 0; rest && r < rows; r++) std::memcpy(edge + r * y_stride, last + r * PANEL, rest * sizeof(float));
}

constexpr int64_t GROUP = PANEL_GROUP * PANEL;

// The same of codes: some panels' factors are decoded, for a block of depth that the cache keeps, and multiplied.
template <typename A>
void apply_codes(const Product& product, int64_t kind, int64_t row, int64_t column, int64_t n, int64_t k) {
    constexpr bool PAIRED = std::is_same_v<A, uint32_t>;
    constexpr int64_t DEPTH = PAIRED ? 2 : 1;  // of a word
    const std::conditional_t<PAIRED, FlushDenormals, Nothing> flushed;
    const int64_t rows = std::min(ROW_BLOCK, product.m - row), columns = std::min(PANEL_GROUP * PANEL, n - column);
    const Codes codes(kind, k * DEPTH);
    const Decode decode = decode_of<PAIRED>(codes);
    const int64_t together = PAIRED ? 1 : PANEL_GROUP, most = DEPTH_BLOCK<A> / together;
    static thread_local std::vector<A> room;
    A* const factors = lined(room, together * most * PANEL);
    float last[ROW_BLOCK * PANEL], bias[PANEL_GROUP * PANEL] = {};
    if (product.bias) std::memcpy(bias, product.bias + column, columns * sizeof(float));
    for (int64_t p = 0; p < columns; p += together * PANEL) {
        const int64_t left = std::min(together * PANEL, columns - p), whole = left / PANEL, rest = left % PANEL;
        const uint8_t* const panels = (const uint8_t*)product.packed + (column + p) / PANEL * codes.pieces * codes.bytes;
        float* const y = product.y + row * product.y_stride + column + p;
#if defined(__AVX512BF16__)
        if constexpr (PAIRED) {
            if (CHAINED && rows <= FUSED_ROWS) {
                fused_tile_of(codes, rows)(codes, panels, (const A*)product.rows + row * product.stride, product.stride, k,
                                           whole ? y : last, whole ? product.y_stride : PANEL, bias + p);
                for (int64_t r = 0; rest && r < rows; r++)
                    std::memcpy(y + r * product.y_stride, last + r * PANEL, rest * sizeof(float));
                continue;
            }
        }
#endif
        for (int64_t start = 0; start < k; start += most) {
            const int64_t depth = std::min(most, k - start), units = (depth * DEPTH + UNIT - 1) / UNIT * UNIT, stride = units / DEPTH * PANEL;
            for (int64_t i = 0; i * PANEL < left; i++)
                decode(codes, panels + i * codes.pieces * codes.bytes, start * DEPTH, units, factors + i * stride);
            const A* const a = (const A*)product.rows + row * product.stride + start;
            const float* const from = start ? nullptr : bias + p;
            const auto times = multiply<false, A, A>;
            if (whole) times(rows, whole, a, product.stride, factors, stride, depth, y, product.y_stride, from, {});
            if (rest) times(rows, 1, a, product.stride, factors + whole * stride, stride, depth, last, PANEL, from ? from + whole * PANEL : from, {});
        }
        for (int64_t r = 0; rest && r < rows; r++)
            std::memcpy(y + whole * PANEL + r * product.y_stride, last + r * PANEL, rest * sizeof(float));
    }
}

// The same of codes of x.
void apply_integers(const Product& product, int64_t, int64_t row, int64_t column, int64_t n, int64_t words) {
    const int64_t rows = std::min(ROW_BLOCK, product.m - row), columns = std::min(GROUP, n - column), units = words - 1;
    const int64_t tiles = (rows + INTEGER_ROWS - 1) / INTEGER_ROWS;
    for (int64_t p = 0; p < columns; p += PANEL) {
        const int64_t width = std::min<int64_t>(PANEL, columns - p);
        const uint8_t* const panel = (const uint8_t*)product.packed + (column + p) / PANEL * integers_bytes(units);
        float bias[PANEL] = {}, last[INTEGER_ROWS * PANEL];  // a panel that is wider than what is left of y
        if (product.bias) std::memcpy(bias, product.bias + column + p, width * sizeof(float));
        for (int64_t t = 0, r = 0, height; t < tiles; t++, r += height) {
            height = (rows - r + tiles - t - 1) / (tiles - t);
            float* const y = product.y + (row + r) * product.y_stride + column + p;
            const bool whole = width == PANEL;
            integer_tiles(height, product.rows + (row + r) * product.stride, product.stride, units, panel, bias,
                          whole ? y : last, whole ? product.y_stride : PANEL);
            for (int64_t i = 0; !whole && i < height; i++)
                std::memcpy(y + i * product.y_stride, last + i * PANEL, width * sizeof(float));
        }
    }
}

auto times_of(int64_t kind) {
    if (kind == INTEGERS) return apply_integers;
    if (code_of(kind)) return is_pairs(kind) ? apply_codes<uint32_t> : apply_codes<float>;
    return kind == FLOATS ? apply<float, float> : kind == WIDENED ? apply<float, uint16_t> : apply<uint32_t, uint32_t>;
}

float clamped(float gate, float up, float alpha, float limit) {
    gate = at_most(gate, limit), up = std::max(-limit, at_most(up, limit));
    return (up + 1.0f) * (gate * sigmoid(alpha * gate));
}

// Columns of a task of `apply_gated`: up begins amid a panel where inner is no multiple of it.
int64_t gated_columns(int64_t inner) { return inner % PANEL ? GROUP - PANEL : GROUP; }

// Of products of `gate_all`, columns of one task. Gate and up stay in the cache.
void apply_gated(const Product& product, const Gate& join, bool halves, int64_t kind, int64_t row, int64_t column,
                 int64_t inner, int64_t k) {
    const int64_t rows = std::min(ROW_BLOCK, product.m - row), columns = std::min(gated_columns(inner), inner - column);
    const int64_t words = row_words(kind, k), apart = panel_bytes(kind, words);
    static thread_local std::vector<float> room;
    float *const gate = lined(room, 2 * rows * GROUP + LANES), *const ups = gate + rows * GROUP;
    const int64_t up_panel = (inner + column) / PANEL * PANEL, behind = inner + column - up_panel;
    const auto multiply = [&](int64_t from, int64_t count, float* y) {
        times_of(kind)({product.rows + row * product.stride, product.stride, rows,
                        (const char*)product.packed + from / PANEL * apart,
                        product.bias ? product.bias + from : nullptr, y, GROUP},
                       kind, 0, 0, count, words);
    };
    multiply(column, columns, gate);
    multiply(up_panel, behind + columns, ups);
    for (int64_t r = 0; r < rows; r++) {
        float *const g = gate + r * GROUP, *const u = ups + r * GROUP + behind;
        if (join.is_clamped) {
            for (int64_t i = 0; i < columns; i++) g[i] = clamped(g[i], u[i], join.alpha, join.limit);
        } else {
            for (int64_t i = 0; i < columns; i += LANES) store(g + i, silu(load(g + i)) * load(u + i));
        }
        const int64_t at = (product.at ? product.at[row + r] : row + r) * product.y_stride + column;
        if (halves) {
            uint32_t pairs[GROUP / 2];
            to_pairs(g, columns, pairs);
            std::memcpy((uint16_t*)product.y + at, pairs, columns * sizeof(uint16_t));
        } else {
            std::memcpy(product.y + at, g, columns * sizeof(float));
        }
    }
}

// Calls `times`, in a parallel region, with products of the rows that their kind wants. All have the same m. Given are
// floats, or `halves` that were rounded for PAIRS: they lack the zeros of the last block, lie where L1 keeps few, or are not
// in chains.
template <typename Times>
void with_rows(std::vector<Product> products, bool halves, int64_t kind, int64_t n, int64_t k, const Times& times) {
    const int64_t m = products[0].m, words = row_words(kind, k) + DEPTH_WORDS;  // a power of 2 has few sets of L1
    const int64_t stride = products[0].stride;
    const bool whole = halves && !CHAINED && k % (2 * DEPTH_WORDS) == 0 && stride % 2 == 0 && stride % 1024 > 0;
    const bool ready = (!is_pairs(kind) && kind != INTEGERS) || whole;
    const int64_t count = ready ? 0 : m * products.size();
    static thread_local std::vector<uint32_t> room;
    uint32_t* const rounded = lined(room, count * words);
    const std::vector<Product> given(products);
    for (size_t i = 0; i < products.size(); i++) {
        if (!ready) products[i].rows = rounded + i * m * words, products[i].stride = words;
        else if (halves) products[i].stride /= 2;
    }
#pragma omp parallel if (m * n * k * (int64_t)products.size() >= SERIAL_BELOW)
    {
#pragma omp for
        for (int64_t r = 0; r < count; r++) {
            const int64_t at = r % m * given[r / m].stride;
            uint32_t* const to = rounded + r * words;
            if (halves) to_blocks((const uint16_t*)given[r / m].rows + at, k, to);
            else copy_row(kind, (const float*)given[r / m].rows + at, k, to);
        }
        times(products);
    }
}

// Calls run(product, row, column) for blocks of rows and of columns. A product's weights are read once for all its rows,
// from end to end.
template <typename Run>
void each_block(const std::vector<Product>& products, int64_t n, int64_t columns, Run run) {
    struct Block {
        const Product* product;
        int64_t row, column;
    };
    std::vector<Block> blocks;
    for (const Product& product : products)
        for (int64_t column = 0; column < n; column += columns)
            for (int64_t row = 0; row < product.m; row += ROW_BLOCK) blocks.push_back({&product, row, column});
    const int64_t count = blocks.size();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) run(*blocks[i].product, blocks[i].row, blocks[i].column);
}
}  // namespace

void multiply_all(const std::vector<Product>& products, int64_t kind, int64_t n, int64_t k) {
    each_block(products, n, GROUP, [&](const Product& product, int64_t row, int64_t column) {
        times_of(kind)(product, kind, row, column, n, row_words(kind, k));
    });
}

void gate_all(const std::vector<Product>& products, const Gate& join, bool halves, int64_t kind, int64_t inner, int64_t k) {
    each_block(products, inner, gated_columns(inner), [&](const Product& product, int64_t row, int64_t column) {
        apply_gated(product, join, halves, kind, row, column, inner, k);
    });
}

extern "C" int64_t linear_panel() { return PANEL; }

extern "C" void linear_pack(const void* weight, void* packed, int64_t kind, int64_t n, int64_t k) {
    if (kind == FLOATS) return pack((const float*)weight, (float*)packed, kind, n, k);
    pack((const uint16_t*)weight, (uint16_t*)packed, kind, n, k);
}

// Bytes of the panels of n outputs of codes.
extern "C" int64_t linear_codes_bytes(int64_t kind, int64_t n, int64_t k) {
    return (n + PANEL - 1) / PANEL * panel_bytes(kind, row_words(kind, k));
}

extern "C" void linear_pack_codes(const void* codes, const float* scales, const float* offsets, void* packed, int64_t kind,
                                  int64_t n, int64_t k) {
    if (kind == INTEGERS) return pack_integers((const int8_t*)codes, scales, (uint8_t*)packed, n, k);
    pack_codes((const uint8_t*)codes, scales, offsets, (uint8_t*)packed, kind, n, k);
}

// x is float, or of `halves` bfloat16, for PAIRS.
extern "C" void linear(const void* x, int64_t x_stride, int64_t halves, const void* packed, int64_t kind,
                       const float* bias, float* y, int64_t y_stride, int64_t m, int64_t n, int64_t k) {
    with_rows({{(const uint32_t*)x, x_stride, m, packed, bias, y, y_stride}}, halves, kind, n, k,
              [&](const auto& products) { multiply_all(products, kind, n, k); });
}

// y [m][inner] = silu(gate) * up, packed as [gate, up][inner]; y is float, or of `halves` bfloat16.
extern "C" void linear_silu(const float* x, int64_t x_stride, const void* packed, int64_t kind, const float* bias,
                            void* y, int64_t y_stride, int64_t halves, int64_t m, int64_t inner, int64_t k) {
    with_rows({{(const uint32_t*)x, x_stride, m, packed, bias, (float*)y, y_stride}}, false, kind, 2 * inner, k,
              [&](const auto& products) { gate_all(products, Gate{}, halves, kind, inner, k); });
}

// y [m][heads][n] of x [m][heads][k] by strides; packed weights of head h start at h * head_bytes.
extern "C" void linear_heads(const float* x, int64_t x_stride, int64_t x_head, const void* packed, int64_t head_bytes,
                             int64_t kind, float* y, int64_t m, int64_t heads, int64_t n, int64_t k) {
    std::vector<Product> given;
    for (int64_t h = 0; h < heads; h++)
        given.push_back({(const uint32_t*)(x + h * x_head), x_stride, m, (const char*)packed + h * head_bytes,
                         nullptr, y + h * n, heads * n});
    with_rows(given, false, kind, n, k, [&](const auto& products) { multiply_all(products, kind, n, k); });
}
