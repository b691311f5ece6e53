// Attention of few or many query rows over a row-and-slot cache, bf16, AVX-512 with BF16 dot products.
//
// Flash attention (online softmax, arXiv 2205.14135) over blocks of BLOCK keys. What one query row gets depends on that
// row, the keys it sees and their slots alone, to the bit: every row does the same operations in the same order however
// many rows, sequences or masked keys there are. So a token scored in a tree's chain has the bits that plain decoding
// gives it. Blocks that nobody in a tile of rows sees are not even read. What is computed from NaN or infinity is NaN.
//
// Knows pointers and strides (in elements). Depths are multiples of 32, at most MOST_DEPTH; the innermost stride is 1.
// Sizes that it cannot work with, and rows that are not there, are refused before anything is read or written.

#include <math.h>
#include <string.h>

#include "lanes.h"

enum { BLOCK = 128, TILE = 4, CHUNK = 64, MOST_DEPTH = 256 };

#define UNSEEN -1e38f

typedef struct {
    const uint16_t *query, *key, *value, *mask;
    const int64_t *rows;        // (batch,) which row of the keys and values each sequence has; NULL: its own number
    uint16_t *out;              // (batch, count, heads, value_depth), contiguous
    int64_t batch, held, heads, key_heads, count, width, depth, value_depth;    // `held` rows of keys and values
    int64_t query_batch, query_head, query_row;
    int64_t key_batch, key_head, key_slot;
    int64_t value_batch, value_head, value_slot;
    int64_t mask_batch, mask_row;
    float scale;
    int32_t threads;
} Problem;

// What one thread works with; nothing outlives a chunk of rows.
typedef struct {
    __attribute__((aligned(64))) uint32_t query[CHUNK][MOST_DEPTH / 2];
    __attribute__((aligned(64))) uint32_t keys[BLOCK / LANES][MOST_DEPTH / 2][LANES];    // pairs of a key's entries
    __attribute__((aligned(64))) uint32_t values[BLOCK / 2][MOST_DEPTH];                 // pairs of two keys' entries
    __attribute__((aligned(64))) float sums[CHUNK][MOST_DEPTH];
    __attribute__((aligned(64))) float scores[TILE][BLOCK];
    __attribute__((aligned(64))) uint16_t weights[TILE][BLOCK];
    float highest[CHUNK], total[CHUNK];
} Scratch;

// 16 rows of 16 dwords -> 16 columns.
INLINE void transpose(__m512i rows[LANES]) {
    __m512i other[LANES];
    for (int i = 0; i < LANES; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

// The keys of a block, 16 beside each other; missing ones are zero. An even number of groups is written.
static void pack_keys(const Problem *p, const uint16_t *key, int64_t size, Scratch *s) {
    for (int64_t group = 0; group * LANES < size || group % 2; group++)
        for (int64_t part = 0; part < p->depth / 32; part++) {
            __m512i rows[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t slot = group * LANES + lane;
                rows[lane] = slot < size ? _mm512_loadu_si512(key + slot * p->key_slot + part * 32) : _mm512_setzero_si512();
            }
            transpose(rows);
            for (int lane = 0; lane < LANES; lane++) _mm512_store_si512(s->keys[group][part * LANES + lane], rows[lane]);
        }
}

// The values of a block, two keys interleaved; a missing one is zero.
static void pack_values(const Problem *p, const uint16_t *value, int64_t size, Scratch *s) {
    __attribute__((aligned(64))) uint16_t order[2][32];
    for (int lane = 0; lane < LANES; lane++)
        for (int half = 0; half < 2; half++) {
            order[half][2 * lane] = (uint16_t)(half * LANES + lane);
            order[half][2 * lane + 1] = (uint16_t)(32 + half * LANES + lane);
        }
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (int64_t pair = 0; 2 * pair < size; pair++) {
        const uint16_t *first = value + 2 * pair * p->value_slot, *second = first + p->value_slot;
        for (int64_t part = 0; part < p->value_depth / 32; part++) {
            __m512i one = _mm512_loadu_si512(first + part * 32);
            __m512i two = 2 * pair + 1 < size ? _mm512_loadu_si512(second + part * 32) : _mm512_setzero_si512();
            _mm512_store_si512(s->values[pair] + part * 32, _mm512_permutex2var_epi16(one, low, two));
            _mm512_store_si512(s->values[pair] + part * 32 + LANES, _mm512_permutex2var_epi16(one, high, two));
        }
    }
}

INLINE __m512 mask_of(const uint16_t *mask, int64_t left) {
    __mmask16 there = left >= LANES ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, mask));
    return _mm512_mask_blend_ps(there, _mm512_set1_ps(-INFINITY), _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}

// The last of so many keys that a row sees, plus one; 0 if it sees none.
INLINE int64_t reach(const uint16_t *mask, int64_t size) {
    for (int64_t start = (size - 1) / LANES * LANES; start >= 0; start -= LANES) {
        __mmask16 seen = _mm512_cmp_ps_mask(mask_of(mask + start, size - start), _mm512_set1_ps(UNSEEN), _CMP_GT_OQ);
        if (seen) return start + 32 - __builtin_clz((unsigned)seen);
    }
    return 0;
}

// Scores of ROWS rows against `groups` (even) groups of packed keys.
INLINE void score(const int ROWS, const Problem *p, int64_t first, int64_t groups, Scratch *s) {
    for (int64_t group = 0; group < groups; group += 2) {
        __m512 left[TILE], right[TILE];
        for (int row = 0; row < ROWS; row++) left[row] = right[row] = _mm512_setzero_ps();
        for (int64_t entry = 0; entry < p->depth / 2; entry++) {
            __m512bh one = (__m512bh)_mm512_load_si512(s->keys[group][entry]);
            __m512bh two = (__m512bh)_mm512_load_si512(s->keys[group + 1][entry]);
            for (int row = 0; row < ROWS; row++) {
                __m512bh asked = (__m512bh)_mm512_set1_epi32((int)s->query[first + row][entry]);
                left[row] = _mm512_dpbf16_ps(left[row], one, asked);
                right[row] = _mm512_dpbf16_ps(right[row], two, asked);
            }
        }
        for (int row = 0; row < ROWS; row++) {
            _mm512_store_ps(s->scores[row] + group * LANES, left[row]);
            _mm512_store_ps(s->scores[row] + (group + 1) * LANES, right[row]);
        }
    }
}

// Turns a row's scores into weights; returns what its sums so far have to be multiplied by.
INLINE float weigh(const Problem *p, const uint16_t *mask, int64_t size, int64_t groups, int row, int64_t place, Scratch *s) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m512 added = mask_of(mask + group * LANES, size - group * LANES);
        __m512 found = _mm512_fmadd_ps(_mm512_load_ps(s->scores[row] + group * LANES), _mm512_set1_ps(p->scale), added);
        __mmask16 seen = _mm512_cmp_ps_mask(added, _mm512_set1_ps(UNSEEN), _CMP_GT_OQ);
        found = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), found);
        _mm512_store_ps(s->scores[row] + group * LANES, found);
        most = _mm512_max_ps(most, found);
    }
    float before = s->highest[place], highest = _mm512_reduce_max_ps(most);
    highest = highest > before ? highest : before;
    for (int64_t group = 0; group < groups; group++) {
        __m512 found = _mm512_load_ps(s->scores[row] + group * LANES);
        __mmask16 seen = _mm512_cmp_ps_mask(found, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);    // NaN, too
        __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(found, _mm512_set1_ps(highest))));
        sum = _mm512_add_ps(sum, weight);
        _mm256_store_si256((__m256i *)(s->weights[row] + group * LANES), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    if (highest == -INFINITY) return 1.0f;
    float shrunk = before == highest ? 1.0f : _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - highest)));
    if (before == -INFINITY) shrunk = 0.0f;
    s->highest[place] = highest;
    s->total[place] = s->total[place] * shrunk + _mm512_reduce_add_ps(sum);
    return shrunk;
}

// Adds the weighted values of `pairs` pairs of keys to the sums of ROWS rows, WIDE * 16 columns at a time.
INLINE void gather(const int ROWS, const int WIDE, const Problem *p, int64_t first, int64_t pairs, const float *shrunk, Scratch *s) {
    for (int64_t column = 0; column < p->value_depth; column += WIDE * LANES) {
        __m512 sums[TILE][4];
        for (int row = 0; row < ROWS; row++)
            for (int part = 0; part < WIDE; part++)
                sums[row][part] = _mm512_mul_ps(
                    _mm512_load_ps(s->sums[first + row] + column + part * LANES), _mm512_set1_ps(shrunk[row]));
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int row = 0; row < ROWS; row++) {
                uint32_t weights;
                memcpy(&weights, s->weights[row] + 2 * pair, sizeof weights);
                for (int part = 0; part < WIDE; part++)
                    sums[row][part] = _mm512_dpbf16_ps(
                        sums[row][part],
                        (__m512bh)_mm512_load_si512(s->values[pair] + column + part * LANES),
                        (__m512bh)_mm512_set1_epi32((int)weights));
            }
        for (int row = 0; row < ROWS; row++)
            for (int part = 0; part < WIDE; part++)
                _mm512_store_ps(s->sums[first + row] + column + part * LANES, sums[row][part]);
    }
}

INLINE void tile(const int ROWS, const Problem *p, const uint16_t *const *masks, int64_t first, int64_t size, Scratch *s) {
    int64_t groups = (size + 2 * LANES - 1) / (2 * LANES) * 2;
    float shrunk[TILE];
    score(ROWS, p, first, groups, s);
    for (int row = 0; row < ROWS; row++) shrunk[row] = weigh(p, masks[row], size, groups, row, first + row, s);
    if (p->value_depth % 64) gather(ROWS, 2, p, first, (size + 1) / 2, shrunk, s);
    else gather(ROWS, 4, p, first, (size + 1) / 2, shrunk, s);
}

static void tile_of(int64_t rows, const Problem *p, const uint16_t *const *masks, int64_t first, int64_t size, Scratch *s) {
    switch (rows) {
        case 1: tile(1, p, masks, first, size, s); break;
        case 2: tile(2, p, masks, first, size, s); break;
        case 3: tile(3, p, masks, first, size, s); break;
        default: tile(4, p, masks, first, size, s);
    }
}

static void begin(const Problem *p, int64_t batch, int64_t key_head, int64_t first, int64_t rows, Scratch *s) {
    int64_t group = p->heads / p->key_heads;
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = key_head * group + (first + row) / p->count, place = (first + row) % p->count;
        const uint16_t *query = p->query + batch * p->query_batch + head * p->query_head + place * p->query_row;
        memcpy(s->query[row], query, (size_t)p->depth * sizeof *query);
        memset(s->sums[row], 0, (size_t)p->value_depth * sizeof(float));
        s->highest[row] = -INFINITY;
        s->total[row] = 0.0f;
    }
}

static void finish(const Problem *p, int64_t batch, int64_t key_head, int64_t first, int64_t rows, Scratch *s) {
    int64_t group = p->heads / p->key_heads;
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = key_head * group + (first + row) / p->count, place = (first + row) % p->count;
        uint16_t *out = p->out + ((batch * p->count + place) * p->heads + head) * p->value_depth;
        __m512 total = _mm512_set1_ps(s->total[row] == 0.0f ? 1.0f : s->total[row]);
        for (int64_t column = 0; column < p->value_depth; column += LANES) {
            __m512 found = _mm512_div_ps(_mm512_load_ps(s->sums[row] + column), total);
            store(out + column, found);
        }
    }
}

// Up to CHUNK rows of one sequence that share a key head. Row r is position r % count of head r / count of the group.
static void attend_chunk(const Problem *p, int64_t batch, int64_t key_head, int64_t first, int64_t rows, Scratch *s) {
    int64_t held = p->rows ? p->rows[batch] : batch;
    const uint16_t *key = p->key + held * p->key_batch + key_head * p->key_head;
    const uint16_t *value = p->value + held * p->value_batch + key_head * p->value_head;
    const uint16_t *mask = p->mask + batch * p->mask_batch;
    begin(p, batch, key_head, first, rows, s);
    for (int64_t start = 0; start < p->width; start += BLOCK) {
        int64_t size = p->width - start < BLOCK ? p->width - start : BLOCK, most = 0, seen[CHUNK / TILE] = {0};
        const uint16_t *masks[CHUNK];
        for (int64_t row = 0; row < rows; row++) {
            masks[row] = mask + (first + row) % p->count * p->mask_row + start;
            int64_t own = reach(masks[row], size);
            if (own > seen[row / TILE]) seen[row / TILE] = own;
        }
        for (int64_t at = 0; at * TILE < rows; at++) most = seen[at] > most ? seen[at] : most;
        if (!most) continue;
        pack_keys(p, key + start * p->key_slot, most, s);
        pack_values(p, value + start * p->value_slot, most, s);
        for (int64_t row = 0; row < rows; row += TILE)
            if (seen[row / TILE])
                tile_of(rows - row < TILE ? rows - row : TILE, p, masks + row, row, seen[row / TILE], s);
    }
    finish(p, batch, key_head, first, rows, s);
}

int64_t forerun_problem_size(void) { return sizeof(Problem); }

INLINE int fits(int64_t depth) { return depth > 0 && depth <= MOST_DEPTH && depth % 32 == 0; }

// 0, or what is wrong: 1 the sizes, 2 the rows.
int32_t forerun_attend(const Problem *p) {
    if (p->batch < 1 || p->count < 1 || p->width < 1 || p->key_heads < 1 || p->heads < 1 || p->heads % p->key_heads) return 1;
    if (!fits(p->depth) || !fits(p->value_depth) || p->threads < 1) return 1;
    for (int64_t batch = 0; batch < p->batch; batch++) {
        int64_t row = p->rows ? p->rows[batch] : batch;
        if (row < 0 || row >= p->held) return 2;
    }
    int64_t rows = p->heads / p->key_heads * p->count, chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(p->threads)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < p->batch * p->key_heads * chunks; task++) {
            int64_t chunk = task % chunks, first = chunk * CHUNK;
            int64_t some = rows - first < CHUNK ? rows - first : CHUNK;
            attend_chunk(p, task / chunks / p->key_heads, task / chunks % p->key_heads, first, some, &scratch);
        }
    }
    return 0;
}
