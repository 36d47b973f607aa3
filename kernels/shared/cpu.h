// Vector type, exp and the one matrix tile that linear, attention and moe share.
//
// Bit-exactness: the build turns contraction off and never enables fast-math, so a plain loop has the same bits
// whether the compiler vectorises it or not. A fused multiply-add is written as one. A sum is either one chain in
// index order or `LANES_SUM` interleaved chains folded as a tree: its order depends on the length alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__linux__) && __GNUC__ >= 11
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;
constexpr int WIDE_ROWS = 7;  // two panels of these fit the 32 registers
#else
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;
constexpr int WIDE_ROWS = 3;  // of 16
#endif
constexpr int PANEL = 2 * LANES;  // columns of one packed panel
constexpr int LANES_SUM = 16;     // the same on every machine

typedef float vec __attribute__((vector_size(LANES * 4)));

static inline vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

constexpr uintptr_t LINE = 64;  // bytes of a cache line

// Store past the caches, what is not read soon; `p` is at the start of a vector. `after_streams` orders it.
static inline void stream(float* p, vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
    _mm256_stream_ps(p, (__m256)v);
#else
    store(p, v);
#endif
}

static inline void after_streams() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// The first `count` elements of `room` from a cache line on: a vector that lies on two costs twice.
template <typename T>
static inline T* lined(std::vector<T>& room, int64_t count) {
    if (room.size() < count + LINE / sizeof(T)) room.resize(count + LINE / sizeof(T));
    return (T*)(((uintptr_t)room.data() + LINE - 1) / LINE * LINE);
}

static inline vec splat(float x) { return x - vec{}; }  // -0.0 keeps its sign

static inline vec fused(vec a, vec b, vec c) {  // a * b + c, rounded once
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

typedef int32_t ints __attribute__((vector_size(LANES * 4)));

// x * 2^n, which is normal, of an integer n.
static inline float times_power(float x, float n) { return x * __builtin_bit_cast(float, ((int32_t)n + 127) << 23); }

static inline vec times_power(vec x, vec n) {
#if defined(__AVX512F__)
    return _mm512_scalef_ps(x, n);
#else
    return x * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
#endif
}

// A bound where x is beyond it, else x, which may be NaN. The compiler makes two instructions of a choice.
static inline float at_least(float x, float bound) { return x < bound ? bound : x; }
static inline float at_most(float x, float bound) { return x > bound ? bound : x; }

static inline vec at_least(vec x, vec bound) {
#if defined(__AVX512F__)
    return _mm512_max_ps(bound, x);
#else
    return x < bound ? bound : x;
#endif
}

static inline vec at_most(vec x, vec bound) {
#if defined(__AVX512F__)
    return _mm512_min_ps(bound, x);
#else
    return x > bound ? bound : x;
#endif
}

// e^x within 2 ulp, of a float or a vec; x is clamped to the range of normal results. Cody-Waite reduction and the Taylor
// series on |r| <= ln(2) / 2. libm is not used: its vector and scalar variants may differ in the last bit. Without POSITIVE
// x is at most 0.
template <bool POSITIVE = true, typename T>
static inline T exp_f32(T x) {
    const T zero{};
    x = at_least(x, zero - 87.3f);
    if constexpr (POSITIVE) x = at_most(x, zero + 88.3f);
    const T n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // nearest integer
    T r = fused(n, zero - 0.693359375f, x);
    r = fused(n, zero + 2.12194440e-4f, r);
    T p = zero + 1.0f / 5040;
    p = fused(p, r, zero + 1.0f / 720);
    p = fused(p, r, zero + 1.0f / 120);
    p = fused(p, r, zero + 1.0f / 24);
    p = fused(p, r, zero + 1.0f / 6);
    p = fused(p, r, zero + 0.5f);
    p = fused(p, r, zero + 1.0f);
    p = fused(p, r, zero + 1.0f);
    return times_power(p, n);
}

// 2^x of x <= 0 within 3e-6 of it, and 0 below 2^-126, where denormals are flushed. A difference that is no float, which
// comes from x > -0.5 alone, is rounded down: AVX-512 takes one instruction.
static inline vec exp2_f32(vec x) {
    const vec zero{};
#if defined(__AVX512DQ__)
    const vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    vec n = x;
    for (int i = 0; i < LANES; i++) n[i] = std::floor(x[i]);
    vec r = x - n;
    r = r + n > x ? r - 0x1p-24f : r;
#endif
    vec p = fused(r, zero + 0.013426686f, zero + 0.052242473f);
    p = fused(p, r, zero + 0.24128021f);
    p = fused(p, r, zero + 0.69304484f);
    p = fused(p, r, zero + 1.0f);
#if defined(__AVX512DQ__)
    return _mm512_scalef_ps(p, x);
#else
    return x < zero - 126.0f ? zero : times_power(p, n);
#endif
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

template <typename T>
static inline T silu(T x) {
    return x / (T{} + 1.0f + exp_f32(-x));
}

static inline float softplus(float x) { return x > 20 ? x : std::log1p(exp_f32(x)); }

// One float of all lanes: halves on halves, as a tree, in registers.
template <int HALF = LANES / 2, typename Combine>
static inline float tree(vec lanes, Combine combine) {
    if constexpr (HALF == 0) {
        return lanes[0];
    } else {
        ints other;
        for (int l = 0; l < LANES; l++) other[l] = (l + HALF) % LANES;
        return tree<HALF / 2>(combine(lanes, __builtin_shuffle(lanes, other)), combine);
    }
}

// The fold of LANES_SUM sums: add(lane, i) adds element i to its lane, a float or a vec of them.
template <typename Add>
static inline float in_lanes(int64_t n, Add add) {
    constexpr int PARTS = LANES_SUM / LANES;
    vec lanes[PARTS] = {};
    int64_t i = 0;
    for (; i + LANES_SUM <= n; i += LANES_SUM)
        for (int p = 0; p < PARTS; p++) add(lanes[p], i + p * LANES);
    if (i < n) {
        float rest[LANES_SUM];
        std::memcpy(rest, lanes, sizeof rest);
        for (int l = 0; i + l < n; l++) add(rest[l], i + l);
        std::memcpy(lanes, rest, sizeof rest);
    }
    for (int p = 1; p < PARTS; p++) lanes[0] += lanes[p];
    return tree(lanes[0], [](vec a, vec b) { return a + b; });
}

template <typename T>
static inline T load_as(const float* p) {
    T t;
    std::memcpy(&t, p, sizeof t);
    return t;
}

static inline void store(float* p, float x) { *p = x; }

// each(T{}, i) for the elements from 0 to n: T is a vec of those from i on, or a float at the end. The same bits.
template <typename Each>
static inline void by_vectors(int64_t n, Each each) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) each(vec{}, i);
    for (; i < n; i++) each(0.0f, i);
}

static inline float sum(const float* x, int64_t n) {
    return in_lanes(n, [x](auto& lane, int64_t i) { lane += load_as<std::decay_t<decltype(lane)>>(x + i); });
}

static inline float dot(const float* x, const float* y, int64_t n) {
    return in_lanes(n, [x, y](auto& lane, int64_t i) {
        typedef std::decay_t<decltype(lane)> T;
        lane = fused(load_as<T>(x + i), load_as<T>(y + i), lane);
    });
}

typedef uint32_t words __attribute__((vector_size(LANES * 4)));

// A word of two bfloat16 is a float of its lower half, and one of its upper half.
static inline vec lower(words pairs) { return (vec)(pairs << 16); }

static inline vec upper(words pairs) { return (vec)(pairs & 0xffff0000u); }

static inline words load(const uint32_t* p) {
    words v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline words splat(uint32_t x) { return x + words{}; }

// In its scope, operands and results of this thread that are denormal are zeros.
struct FlushDenormals {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#else
    FlushDenormals() {}
#endif
};

struct Nothing {
    Nothing() {}
};

// The nearest bfloat16, ties to even; denormals become zeros. As vcvtneps2bf16, whatever the CPU.
static inline uint32_t to_bfloat16(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x), size = bits & 0x7fffffffu;
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return size < 0x00800000u ? bits >> 31 << 15 : size > 0x7f800000u ? bits >> 16 | 0x40 : rounded;
}

// Words of a block of depth: 32 elements, of which those of even index are one sum and the others another.
constexpr int64_t DEPTH_WORDS = 16;

// Words of k elements: whole blocks, with zeros at the end.
static constexpr int64_t block_words(int64_t k) { return (k + 2 * DEPTH_WORDS - 1) / (2 * DEPTH_WORDS) * DEPTH_WORDS; }

// x[k] rounded to bfloat16 in (k + 1) / 2 words, the element of even index below; a zero follows an odd k.
static inline void to_pairs(const float* x, int64_t k, uint32_t* out) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    for (; i + 2 * LANES <= k; i += 2 * LANES) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(x + i + LANES), (__m512)load(x + i));
        std::memcpy(out + i / 2, &both, sizeof both);
    }
#endif
    for (; i + 1 < k; i += 2) out[i / 2] = to_bfloat16(x[i]) | to_bfloat16(x[i + 1]) << 16;
    if (i < k) out[i / 2] = to_bfloat16(x[i]);
}

// The same in block_words(k).
static inline void to_words(const float* x, int64_t k, uint32_t* out) {
    to_pairs(x, k, out);
    std::fill(out + (k + 1) / 2, out + block_words(k), 0);
}

#if defined(AMX)
// Linux lets a process use AMX that asks for it.
static inline bool may_use_amx() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

inline const bool HAS_AMX = may_use_amx();
constexpr int64_t AMX_FROM = 2;  // rows: one has to wait for memory
#else
constexpr bool HAS_AMX = false;
#endif

// How a block of words is summed: each word has an element of the even chain, in its lower half, and one of the odd.
#if defined(__AVX512BF16__)
// vdpbf16ps adds the upper product of a word, then the lower one, each rounded once: two steps of a chain, from words
// that have their elements of two steps, the first above. Zen 4, Zen 5 and the manuals agree. Where no AMX takes words as
// they are, the factors of products are such words: CHAINED.
typedef uint32_t factor;
typedef words factors;
constexpr int64_t STEPS = 2;
inline const bool CHAINED = !HAS_AMX;

static inline vec fused(words a, words b, vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

// A block of a row: the even chain's words, then the odd one's.
static inline void chains_of(const uint32_t* row, uint32_t* out) {
    typedef uint16_t halves __attribute__((vector_size(DEPTH_WORDS * 4)));
    halves block, from;
    std::memcpy(&block, row, sizeof block);
    for (int i = 0; i < 2 * DEPTH_WORDS; i++) from[i] = i % DEPTH_WORDS / 2 * 4 + 2 * (1 - i % 2) + i / DEPTH_WORDS;
    block = __builtin_shuffle(block, from);
    std::memcpy(out, &block, sizeof block);
}

// Two rows of words become the even chain's and the odd one's.
static inline void chain(words& first, words& second) {
    const words even = first << 16 | (second & 0xffffu);
    second = (first & 0xffff0000u) | second >> 16;
    first = even;
}

// The next steps of a panel's columns.
template <bool CHAINED>
static inline void chains_of(const uint32_t* b, words even[2], words odd[2]) {
    for (int i = 0; i < 2; i++) {
        even[i] = load(b + i * LANES), odd[i] = load(b + PANEL + i * LANES);
        if (!CHAINED) chain(even[i], odd[i]);
    }
}
#else
// The factors are widened, and a caller flushes denormals.
typedef float factor;
typedef vec factors;
constexpr int64_t STEPS = 1;
constexpr bool CHAINED = false;

static inline void chains_of(const uint32_t* row, float* out) {
    for (int i = 0; i < DEPTH_WORDS; i++) {
        out[i] = __builtin_bit_cast(float, row[i] << 16);
        out[DEPTH_WORDS + i] = __builtin_bit_cast(float, row[i] & 0xffff0000u);
    }
}

template <bool CHAINED>
static inline void chains_of(const uint32_t* b, vec even[2], vec odd[2]) {
    for (int i = 0; i < 2; i++) even[i] = lower(load(b + i * LANES)), odd[i] = upper(load(b + i * LANES));
}
#endif

// Words of whole blocks as a product takes them.
static inline void chain_words(uint32_t* row, int64_t count) {
#if defined(__AVX512BF16__)
    for (int64_t w = 0; CHAINED && w < count; w += DEPTH_WORDS) chains_of(row + w, row + w);
#endif
}

// x[k], or the bits of bfloat16, as the block_words(k) of a row of a product.
static inline void to_blocks(const float* x, int64_t k, uint32_t* out) {
    to_words(x, k, out);
    chain_words(out, block_words(k));
}

static inline void to_blocks(const uint16_t* x, int64_t k, uint32_t* out) {
    std::fill(out + k / 2, out + block_words(k), 0);
    std::memcpy(out, x, k * sizeof(uint16_t));
    chain_words(out, block_words(k));
}

// A row of a panel, from float, or from the bits of bfloat16, where column j and column j + LANES share a word.
static inline void load_panel(const float* p, vec columns[2]) {
    columns[0] = load(p);
    columns[1] = load(p + LANES);
}

static inline void load_panel(const uint16_t* p, vec columns[2]) {
    words v;
    std::memcpy(&v, p, sizeof v);
    columns[0] = lower(v);
    columns[1] = upper(v);
}

// Whether a panel stays in L1 while all rows pass by; else a tile goes through several panels, which L2 keeps.
template <typename A>
constexpr bool BY_PANEL = std::is_same_v<A, uint32_t> && STEPS == 2;

// What a tile fetches. SOON: few rows wait for memory, which is read from end to end: the start of each next page of memory,
// for the CPU's own prefetch ends with a page. AHEAD: row k of each panel asks for what comes soon, of a single panel also
// for a row of the next: at STREAMS places by turns, for of several streams a CPU has more on its way than of one. NEXT:
// the next panel, beside other rows. LINES: so many of what comes later, evenly. BLOCKS: the same, at the start of each
// block.
enum Fetch { SOON, AHEAD, NEXT, LINES, BLOCKS };
constexpr uint64_t STREAMS = 4;
constexpr uintptr_t PAGE_BYTES = 4096, PAGE_START = 1024;

// The lines of a row of a panel, for L1 (3) or L2 (2).
template <int LEVEL, typename B>
static inline void ask(const B* row) {
    __builtin_prefetch(row, 0, LEVEL);
    if constexpr (PANEL * sizeof(B) > LINE) __builtin_prefetch(row + LINE / sizeof(B), 0, LEVEL);
}

static inline uint64_t later(uint64_t k, uint64_t depth) { return k % STREAMS * (depth / STREAMS) + k / STREAMS; }

template <Fetch FETCH, int PANELS, typename B>
static inline void fetch(const B* b, int64_t b_stride, uint64_t depth, uint64_t k) {
    if constexpr (FETCH == SOON) {
        const B* const soon = b + k * PANEL + PAGE_BYTES / sizeof(B);
        if ((uintptr_t)soon % PAGE_BYTES < PAGE_START) ask<2>(soon);
    }
    for (int p = 0; FETCH == AHEAD && p < PANELS; p++) ask<3>(b + p * b_stride + k * PANEL + 2048 / sizeof(B));
    if (FETCH == AHEAD && PANELS == 1) ask<2>(b + b_stride + later(k, depth) * PANEL);
    if (FETCH == NEXT && PANELS == 1) ask<2>(b + b_stride + k * PANEL);
}

// Lines from `at` on, so many for each block of depth that a tile takes.
struct Ahead {
    const char* at = nullptr;
    int64_t lines = 0;

    // Those of a block, or of a step of it.
    void ask(int64_t step = 0, int64_t steps = 1) const {
        for (int64_t i = step * lines / steps; i < (step + 1) * lines / steps; i++)
            __builtin_prefetch(at + i * LINE, 0, 2);
    }
};

// c[ROWS][PANELS * PANEL] = a[ROWS][depth] b + the row `first`, or + c if it is null, b in PANELS panels of [depth][PANEL].
// Each element of c is one chain of fused multiply-adds in the order of depth, continued from there: neither ROWS, PANELS
// nor a split of depth changes it.
// B is float, or uint16_t for the bits of bfloat16, which give the same sums as their values in float.
template <Fetch FETCH, int ROWS, int PANELS, bool, typename A, typename B>
static inline void tile(const A* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t depth, float* c,
                        int64_t c_stride, const float* first, Ahead) {
    constexpr int N = 2 * PANELS;
    vec acc[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) acc[r][n] = load((first ? first : c + r * c_stride) + n * LANES);
    for (int64_t k = 0; k < depth; k++) {
        vec column[N];
        for (int p = 0; p < PANELS; p++) load_panel(b + p * b_stride + k * PANEL, column + 2 * p);
        fetch<FETCH, PANELS>(b, b_stride, depth, k);
        for (int r = 0; r < ROWS; r++) {
            const vec x = splat(a[r * a_stride + k]);
            for (int n = 0; n < N; n++) acc[r][n] = fused(x, column[n], acc[r][n]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) store(c + r * c_stride + n * LANES, acc[r][n]);
}

// The same of pairs of bfloat16. Depth counts words, in blocks: an element of c adds, rounded, the sum of two chains that
// start at 0 in each block, one of the even elements and one of the odd. As tdpbf16ps, which is the order's reason.
template <Fetch FETCH, int ROWS, int PANELS, bool CHAINED>
static inline void tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                        float* c, int64_t c_stride, const float* first, Ahead ahead) {
    constexpr int N = 2 * PANELS, COUNT = DEPTH_WORDS / STEPS;
    for (int64_t start = 0; start < depth; start += DEPTH_WORDS) {
        factor room[ROWS][2 * COUNT];
        const auto x = [&](int r, int k) {
            if constexpr (CHAINED) return a[r * a_stride + start + k];
            else return room[r][k];
        };
        for (int r = 0; !CHAINED && r < ROWS; r++) chains_of(a + r * a_stride + start, room[r]);
        vec even[ROWS][N] = {}, odd[ROWS][N] = {};
        const auto step = [&](int k) __attribute__((always_inline)) {
            factors below[N], above[N];
            for (int p = 0; p < PANELS; p++)
                chains_of<CHAINED>(b + p * b_stride + (start + k * STEPS) * PANEL, below + 2 * p, above + 2 * p);
            for (int64_t at = start + k * STEPS; at < start + (k + 1) * STEPS; at++)
                fetch<FETCH, PANELS>(b, b_stride, depth, at);
            if (FETCH == LINES) ahead.ask(k, COUNT);
            for (int r = 0; r < ROWS; r++)
                for (int n = 0; n < N; n++) {
                    even[r][n] = fused(splat(x(r, k)), below[n], even[r][n]);
                    odd[r][n] = fused(splat(x(r, COUNT + k)), above[n], odd[r][n]);
                }
        };
        if (FETCH == BLOCKS) ahead.ask();
        if constexpr (FETCH == LINES || FETCH == BLOCKS) {
#pragma GCC unroll 8
            for (int k = 0; k < COUNT; k++) step(k);
        } else {
            for (int k = 0; k < COUNT; k++) step(k);
        }
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < N; n++) {
                float* to = c + r * c_stride + n * LANES;
                store(to, load(first ? first + n * LANES : to) + (even[r][n] + odd[r][n]));
            }
        first = nullptr;
        ahead.at += ahead.lines * LINE;
    }
}

#if defined(AMX)
constexpr int64_t AMX_ROWS = 16;  // of a register

struct AmxShapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    // The intrinsic names 8 of the 64 bytes as its input, so the compiler may leave out what the others should be.
    __attribute__((target("amx-tile"), always_inline)) inline void set() const {
        asm volatile("" : : "m"(*this));
        _tile_loadconfig(this);
    }
};

constexpr int64_t WORD = 4;  // bytes

// Registers 0 to 3 are of c, 4 and 5 of a, 6 and 7 of b, for at most two registers of rows. Setting them takes long.
static inline __attribute__((target("amx-tile"))) void shape_amx(int64_t rows) {
    AmxShapes shapes;
    for (int i : {0, 1, 4}) shapes.rows[i] = std::min(AMX_ROWS, rows);
    for (int i : {2, 3, 5}) shapes.rows[i] = rows > AMX_ROWS ? rows - AMX_ROWS : AMX_ROWS;
    for (int i : {6, 7}) shapes.rows[i] = DEPTH_WORDS;
    shapes.set();
}

// c[rows][panels * PANEL] = a b + the row `start`, or + c if it is null, for rows that `shape_amx` was called with, in the
// order of `tile` of pairs. FETCH: b lies in memory, and its lines are asked for before they are read.
template <bool TWO, bool FETCH>
static __attribute__((target("amx-tile,amx-bf16"))) void amx_tile(
        int64_t rows, int64_t panels, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
        int64_t depth, float* c, int64_t c_stride, const float* start) {
    const int64_t from_stride = start ? 0 : c_stride * WORD;
    const float* from = start ? start : c;
    for (int64_t p = 0; p < panels; p++, b += b_stride, c += PANEL, from += PANEL) {
        float* const second = c + AMX_ROWS * c_stride;
        const float* const from_second = start ? from : second;
        _tile_loadd(0, from, from_stride);
        _tile_loadd(1, from + LANES, from_stride);
        if (TWO) _tile_loadd(2, from_second, from_stride);
        if (TWO) _tile_loadd(3, from_second + LANES, from_stride);
        for (int64_t k = 0; k < depth; k += DEPTH_WORDS) {
            const uint32_t* const block = b + k * PANEL;
            if (FETCH)
                for (int64_t w = k; w < k + DEPTH_WORDS; w++) ask<2>(b + b_stride + later(w, depth) * PANEL);
            _tile_loadd(6, block, PANEL * WORD);
            _tile_loadd(4, a + k, a_stride * WORD);
            _tile_loadd(7, block + LANES, PANEL * WORD);
            if (TWO) _tile_loadd(5, a + AMX_ROWS * a_stride + k, a_stride * WORD);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) _tile_dpbf16ps(2, 5, 6);
            if (TWO) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, c_stride * WORD);
        _tile_stored(1, c + LANES, c_stride * WORD);
        if (TWO) _tile_stored(2, second, c_stride * WORD);
        if (TWO) _tile_stored(3, second + LANES, c_stride * WORD);
    }
}

static inline __attribute__((target("amx-tile"))) void release_amx() { _tile_release(); }
#endif

template <Fetch FETCH, int ROWS, bool CHAINED, typename A, typename B>
static inline void tile_panels(int64_t panels, const A* a, int64_t a_stride, const B* b, int64_t b_stride,
                               int64_t depth, float* c, int64_t c_stride, const float* first, Ahead ahead) {
    constexpr bool PAIRED = std::is_same_v<A, uint32_t>;  // two chains for each element of c
    // Enough chains to hide the latency of one. SOON: memory takes longer, and panels are read from end to end.
    constexpr int OF_ONE_ROW = PAIRED ? LANES / 4 : 4, ROWS_OF_TWO = WIDE_ROWS / (PAIRED ? 2 : 1);
    constexpr int WIDE = FETCH == SOON ? 1 : ROWS == 1 ? OF_ONE_ROW : ROWS <= ROWS_OF_TWO ? 2 : 1;
    const auto first_of = [&](int64_t p) { return first ? first + p * PANEL : nullptr; };
    const auto ahead_of = [&](int64_t p) { return Ahead{ahead.at + p * b_stride * sizeof(B), ahead.lines}; };
    int64_t p = 0;
    for (; p + WIDE <= panels; p += WIDE)
        tile<FETCH, ROWS, WIDE, CHAINED>(a, a_stride, b + p * b_stride, b_stride, depth, c + p * PANEL, c_stride,
                                         first_of(p), ahead_of(p));
    for (; p < panels; p++)
        tile<FETCH, ROWS, 1, CHAINED>(a, a_stride, b + p * b_stride, b_stride, depth, c + p * PANEL, c_stride,
                                      first_of(p), ahead_of(p));
}

template <Fetch FETCH, int ROWS, typename A, typename B>
static inline void tile_rows(int64_t rows, int64_t panels, const A* a, int64_t a_stride, const B* b, int64_t b_stride,
                             int64_t depth, float* c, int64_t c_stride, const float* first, Ahead ahead) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS)
            return tile_rows<FETCH, ROWS - 1>(rows, panels, a, a_stride, b, b_stride, depth, c, c_stride, first, ahead);
    }
    tile_panels<FETCH, ROWS, STEPS == 2>(panels, a, a_stride, b, b_stride, depth, c, c_stride, first, ahead);
}

// What is multiplied after panels: as many, of that depth, or nothing.
template <typename B>
struct Later {
    const B* panels = nullptr;
    int64_t depth = 0;

    // Of them, the part of a tile among others, which takes `depth` of each panel meanwhile.
    Ahead part(int64_t tile, int64_t tiles, int64_t depth) const {
        const int64_t lines = this->depth * PANEL * sizeof(B) / LINE, blocks = depth / DEPTH_WORDS;
        return {(const char*)panels + tile * lines / tiles * LINE, (lines / tiles + blocks - 1) / blocks};
    }
};

// c[rows][panels * PANEL] = a b + the row `start`, or + c if it is null, for any number of rows. FEW: so few that all wait
// for b, which lies in memory.
template <bool FEW, typename A, typename B>
static __attribute__((noinline)) void multiply(int64_t rows, int64_t panels, const A* a, int64_t a_stride, const B* b,
                                               int64_t b_stride, int64_t depth, float* c, int64_t c_stride,
                                               const float* start = nullptr, Later<B> later = {}) {
    constexpr bool PAIRED = std::is_same_v<A, uint32_t>;
    constexpr Fetch FETCH = BY_PANEL<A> ? (FEW ? LINES : BLOCKS) : FEW ? AHEAD : NEXT;
    constexpr int MOST = FETCH == BLOCKS ? 4 : PAIRED ? TILE_ROWS / 2 : TILE_ROWS;  // of BLOCKS 6 take 2 % longer
#if defined(AMX)
    if constexpr (PAIRED) {
        if (HAS_AMX && rows == 1)
            return tile_panels<FEW ? AHEAD : NEXT, 1, false>(panels, a, a_stride, b, b_stride, depth, c, c_stride, start,
                                                             {});
        if (HAS_AMX && rows >= AMX_FROM) {
            for (int64_t r = 0; r < rows; r += 2 * AMX_ROWS) {
                const int64_t height = std::min(2 * AMX_ROWS, rows - r);
                if (r == 0 || height < 2 * AMX_ROWS) shape_amx(height);
                const bool two = height > AMX_ROWS, fetch = FEW && r == 0;
                const auto times = two ? (fetch ? amx_tile<true, true> : amx_tile<true, false>)
                                       : (fetch ? amx_tile<false, true> : amx_tile<false, false>);
                times(height, panels, a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride, start);
            }
            release_amx();
            return;
        }
    }
#endif
    const int64_t tiles = (rows + MOST - 1) / MOST;
    if constexpr (FETCH == LINES) {
        if (tiles == 1)
            return tile_rows<SOON, MOST>(rows, panels, a, a_stride, b, b_stride, depth, c, c_stride, start, {});
        later = {b + b_stride, depth};  // the tiles share the wait for each panel
    }
    const int64_t together = BY_PANEL<A> ? 1 : panels;
    for (int64_t p = 0; p < panels; p += together, later.panels += b_stride)
        for (int64_t t = 0, r = 0, height; t < tiles; t++, r += height) {
            height = (rows - r + tiles - t - 1) / (tiles - t);  // 7 are 4 + 3
            tile_rows<FETCH, MOST>(height, together, a + r * a_stride, a_stride, b + p * b_stride, b_stride, depth,
                                   c + r * c_stride + p * PANEL, c_stride, start ? start + p * PANEL : nullptr,
                                   BY_PANEL<A> ? later.part(t, tiles, depth) : Ahead{});
        }
}

// What weights are packed as: float; bfloat16 that is widened, so that products are those of floats; or pairs of
// bfloat16, for which x is rounded to bfloat16 once; or int8, for which x becomes int8.
enum Kind : int64_t { FLOATS, WIDENED, PAIRS, INTEGERS };

// ... or as codes (linear/codes.h), of which FLOATS or PAIRS are made. The number of a kind has these fields: what they
// become, the code, whether there are offsets, and the columns of a group, or 0 for all.
enum Code : int64_t { NO_CODE, INT8, FP8, INT4, UINT4, FP4 };
constexpr int64_t CODE_BIT = 2, SHIFTED_BIT = 5, GROUP_BIT = 6;

static inline bool is_pairs(int64_t kind) { return kind % (1 << CODE_BIT) == PAIRS; }
static inline int64_t code_of(int64_t kind) { return kind >> CODE_BIT & 7; }

// The words of a row of x as weights of that kind take it; they are floats but for PAIRS and INTEGERS.
static inline int64_t row_words(int64_t kind, int64_t k) {
    return kind == INTEGERS ? (k + 3) / 4 + 1 : is_pairs(kind) ? block_words(k) : k;
}

// What is added to the codes of a row: vpdpbusd takes them without a sign.
#if defined(__AVX512VNNI__)
constexpr int CODE_SHIFT = 128;
#else
constexpr int CODE_SHIFT = 0;
#endif

// x[k] as codes of 8 bits (`quantised` of linear/reference.py), 4 in a word, and in the last word their scale.
static inline void to_integers(const float* x, int64_t k, uint32_t* row) {
    int32_t size = 0;  // of the largest: as integers NaN is larger than infinity
    for (int64_t i = 0; i < k; i++) size = std::max(size, __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff);
    const float largest = __builtin_bit_cast(float, size);
    const bool is_tiny = largest < 0x1p-100f;
    const float inverse = is_tiny ? 0.0f : 127.0f / largest;
    const float scale = size >= 0x7f800000 ? NAN : is_tiny ? 0.0f : largest / 127.0f;
    const int64_t words = (k + 3) / 4;
    row[words - 1] = 0x01010101u * CODE_SHIFT;
    int8_t* const codes = (int8_t*)row;
    // The last bits of 1.5 * 2^23 and an integer are those of the integer. Those of a row without numbers are any.
    for (int64_t i = 0; i < k; i++)
        codes[i] = (int8_t)(__builtin_bit_cast(int32_t, x[i] * inverse + 12582912.0f) + CODE_SHIFT);
    std::memcpy(row + words, &scale, sizeof scale);
}

static inline void copy_row(int64_t kind, const float* x, int64_t k, uint32_t* row) {
    if (kind == INTEGERS) return to_integers(x, k, row);
    if (is_pairs(kind)) return to_blocks(x, k, row);
    std::memcpy(row, x, k * sizeof(float));
}

// y[m][n] = rows[m] W^T + bias, W [n][k] packed by linear_pack, rows by copy_row; bias may be null.
struct Product {
    const uint32_t* rows;
    int64_t stride, m;
    const void* packed;
    const float* bias;
    float* y;
    int64_t y_stride;
    const int64_t* at = nullptr;  // of `gate_all`: the row of y of each row, or null for their own order
};

// What joins the halves of a row: silu(gate) * up, or of `clamped` ones (up + 1) * gate * sigmoid(alpha * gate).
struct Gate {
    bool is_clamped = false;
    float alpha = 0, limit = 0;
};

constexpr int64_t SERIAL_BELOW = 1 << 20;  // multiply-adds worth less than waking a thread

// All threads of a parallel region call it together, or one thread outside. Defined in linear/cpu.cpp.
void multiply_all(const std::vector<Product>& products, int64_t kind, int64_t n, int64_t k);

// The same of products packed as [gate, up][inner], whose halves are joined; y is float, or of `halves` bfloat16.
void gate_all(const std::vector<Product>& products, const Gate& join, bool halves, int64_t kind, int64_t inner, int64_t k);
