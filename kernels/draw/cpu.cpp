// Draws, adjusted scores and counts. Fields of the tables: tables.py.
#include <numeric>

#include "../shared/cpu.h"
#include "../shared/ranges.h"

namespace {
constexpr int32_t PROMPT = 1 << 30;
constexpr int DRAW_FIELDS = 7, ADJUSTMENT_FIELDS = 8, ITEM_FIELDS = 3, CHANGE_FIELDS = 3;
constexpr int64_t SCORES_BLOCK = 256;
// Filters first look at the scores above the first of these powers of two; nearly always they cut there.
constexpr float LEVELS[] = {-8, -16, -32, -64};

static inline float clean(float score) { return score == score ? score : -INFINITY; }

static inline float power_of(float score, float top, float scale) {
    const float power = score == top ? 0.0f : (score - top) * scale;
    return power < -64.0f ? -64.0f : power;
}

// An integer.
static inline float weight(float power) {
    const float n = (power + 12582912.0f) - 12582912.0f, r = power - n;
    float p = (float)1.5252733804059838e-05;
    p = p * r + (float)0.00015403530393381606;
    p = p * r + (float)0.0013333558146428441;
    p = p * r + (float)0.009618129107628477;
    p = p * r + (float)0.055504108664821576;
    p = p * r + (float)0.2402265069591007;
    p = p * r + (float)0.6931471805599453;
    p = p * r + 1.0f;
    return __builtin_truncf(p * __builtin_bit_cast(float, ((int32_t)n + 127 + 40) << 23));
}

struct Candidate {
    float score;
    int32_t id;
};

// One row of scores, with the greatest of each block.
struct Scores {
    const float* scores;
    int64_t size;
    std::vector<float> tops;
    float top = -INFINITY;

    Scores(const float* scores, int64_t size) : scores(scores), size(size), tops((size + SCORES_BLOCK - 1) / SCORES_BLOCK) {
        for (size_t b = 0; b < tops.size(); b++) {
            float lanes[LANES_SUM];
            std::fill(lanes, lanes + LANES_SUM, -INFINITY);
            int64_t i = b * SCORES_BLOCK;
            const int64_t end = std::min(size, i + SCORES_BLOCK);
            for (; i + LANES_SUM <= end; i += LANES_SUM)
                for (int l = 0; l < LANES_SUM; l++) lanes[l] = scores[i + l] > lanes[l] ? scores[i + l] : lanes[l];
            for (int l = 0; i < end; i++, l++) lanes[l] = scores[i] > lanes[l] ? scores[i] : lanes[l];
            tops[b] = *std::max_element(lanes, lanes + LANES_SUM);
            top = std::max(top, tops[b]);
        }
    }

    int64_t first() const {
        if (top == -INFINITY) return 0;
        int64_t i = (std::find(tops.begin(), tops.end(), top) - tops.begin()) * SCORES_BLOCK;
        while (scores[i] != top) i++;
        return i;
    }

    int64_t mass(int64_t b, float scale) const {
        double lanes[LANES_SUM] = {};  // exact: a block has less than 2^53
        int64_t i = b * SCORES_BLOCK;
        const int64_t end = std::min(size, i + SCORES_BLOCK);
        for (; i + LANES_SUM <= end; i += LANES_SUM)
            for (int l = 0; l < LANES_SUM; l++) lanes[l] += weight(power_of(clean(scores[i + l]), top, scale));
        for (; i < end; i++) lanes[0] += weight(power_of(clean(scores[i]), top, scale));
        return (int64_t)std::accumulate(lanes, lanes + LANES_SUM, 0.0);
    }

    // The scores from a power of two on, by falling score and then by id.
    std::vector<Candidate> above(float level, float scale) const {
        std::vector<Candidate> found;
        for (size_t b = 0; b < tops.size(); b++) {
            if (power_of(tops[b], top, scale) < level) continue;
            const int64_t end = std::min(size, (int64_t)(b + 1) * SCORES_BLOCK);
            for (int64_t i = b * SCORES_BLOCK; i < end; i++) {
                const float score = clean(scores[i]);
                if (power_of(score, top, scale) >= level) found.push_back({score, (int32_t)i});
            }
        }
        std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
            return a.score > b.score || (a.score == b.score && a.id < b.id);
        });
        return found;
    }
};

// The row or token of a number in a table.
int64_t index_of(double number, int64_t count, const char* what) {
    assert_within("draw", what, &number, 1, 0, count);
    return (int64_t)number;
}

int64_t target_of(double uniform, int64_t mass) { return std::min((int64_t)(uniform * (double)mass), mass - 1); }

int64_t draw_row(const float* scores, int64_t size, const double* entry) {
    const Scores row(scores, size);
    const float scale = (float)entry[1];
    if (scale == 0) return row.first();
    std::vector<int64_t> masses(row.tops.size());
    int64_t total = 0;
    for (size_t b = 0; b < masses.size(); b++) total += masses[b] = row.mass(b, scale);
    if (entry[3] < 0) {
        const int64_t target = target_of(entry[2], total);
        int64_t before = 0, b = 0;
        while (before + masses[b] <= target) before += masses[b++];
        int64_t i = b * SCORES_BLOCK;
        while ((before += (int64_t)weight(power_of(clean(scores[i]), row.top, scale))) <= target) i++;
        return i;
    }
    const int64_t top_k = entry[4] > 0 ? (int64_t)entry[4] : size, least = std::max(1.0, entry[6]);
    const int64_t share = entry[5] < 1 ? (int64_t)std::ceil(entry[5] * (double)total) : total;
    for (float level : LEVELS) {
        const std::vector<Candidate> found = row.above(level, scale);
        std::vector<int64_t> sums;  // of what the filters leave
        int64_t mass = 0, kept = 0;
        for (; kept < (int64_t)found.size(); kept++) {
            const int64_t own = (int64_t)weight(power_of(found[kept].score, row.top, scale));
            if (kept && (kept >= top_k || mass >= share || own < least)) break;
            sums.push_back(mass += own);
        }
        if (kept < (int64_t)found.size() || kept >= top_k || mass >= share || level == LEVELS[3])
            return found[std::upper_bound(sums.begin(), sums.end(), target_of(entry[2], mass)) - sums.begin()].id;
    }
    return 0;  // not reached: every score is above the last level
}
}  // namespace

extern "C" void draw(const float* logits, int64_t logits_rows, int64_t logits_row, const float* scores,
                     int64_t scores_rows, int64_t vocabulary, const double* draws, int64_t rows, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic) if (rows * vocabulary >= 1 << 14)
    for (int64_t n = 0; n < rows; n++) {
        const double* entry = draws + n * DRAW_FIELDS;
        const float* row = entry[0] < 0 ? scores + index_of(-1 - entry[0], scores_rows, "scores") * vocabulary
                                        : logits + index_of(entry[0], logits_rows, "logits") * logits_row;
        tokens[n] = draw_row(row, vocabulary, entry);
    }
}

// `counts` may be null, and so may `masks`; `words` of a mask.
extern "C" void adjust(const float* logits, int64_t logits_rows, int64_t logits_row, const int32_t* counts,
                       int64_t counts_rows, const int32_t* masks, int64_t num_masks, int64_t words, int64_t vocabulary,
                       const double* rows, int64_t num_rows, const double* items, int64_t num_items, float* scores) {
#pragma omp parallel for schedule(dynamic) if (num_rows * vocabulary >= 1 << 14)
    for (int64_t m = 0; m < num_rows; m++) {
        const double* row = rows + m * ADJUSTMENT_FIELDS;
        const float* logit = logits + index_of(row[0], logits_rows, "logits") * logits_row;
        const int32_t* count = row[1] < 0 ? nullptr : counts + index_of(row[1], counts_rows, "counts") * vocabulary;
        const float repetition = (float)row[2], inverse = 1 / repetition;
        const float presence = (float)row[3], frequency = (float)row[4];
        float* score = scores + m * vocabulary;
        const auto penalised = [=](float x, int32_t seen) {
            const int32_t times = seen & (PROMPT - 1);
            const float repeated = x > 0 ? x * inverse : x * repetition;
            return (seen ? repeated : x) - frequency * (float)times - presence * (times > 0 ? 1.0f : 0.0f);
        };
        if (count) {
            for (int64_t v = 0; v < vocabulary; v++) score[v] = penalised(logit[v], count[v]);
        } else {
            std::memcpy(score, logit, vocabulary * sizeof(float));
        }
        const int64_t first_item = index_of(row[6], num_items + 1, "item"), end_item = index_of(row[7], num_items + 1, "item");
        for (int64_t i = first_item; i < end_item; i++) {
            const double* item = items + i * ITEM_FIELDS;
            const int64_t v = index_of(item[0], vocabulary, "token");
            score[v] = penalised(logit[v], (count ? count[v] : 0) + (int32_t)item[1]) + (float)item[2];
        }
        if (row[5] >= 0) {
            const int32_t* mask = masks + index_of(row[5], num_masks, "mask") * words;
            for (int64_t v = 0; v < vocabulary; v++) score[v] = mask[v >> 5] >> (v & 31) & 1 ? score[v] : -INFINITY;
        }
    }
}

extern "C" void count(int32_t* counts, int64_t counts_rows, int64_t vocabulary, const double* changes,
                      int64_t num_changes) {
    for (int64_t c = 0; c < num_changes; c++) {
        const double* change = changes + c * CHANGE_FIELDS;
        const int64_t row = index_of(change[0], counts_rows, "counts");
        counts[row * vocabulary + index_of(change[1], vocabulary, "token")] += (int32_t)change[2];
    }
}
