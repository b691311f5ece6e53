// Attention of few or many query rows over a row-and-slot cache, bf16, AVX-512 with BF16 dot products.
//
// Flash attention (online softmax, arXiv 2205.14135) over blocks of BLOCK keys. What one query row gets depends on that
// row, the keys it sees and their slots alone, to the bit: every row does the same operations in the same order however
// many rows, sequences or masked keys there are. So a token scored in a tree's chain has the bits that plain decoding
// gives it. Blocks that nobody in a tile of rows sees are not even read. What is computed from NaN or infinity is NaN.
//
// A key counts by its rank, the number of tokens before it on the row's own path: lanes, pairs of keys (a BF16 dot product
// takes two) and blocks fall by ranks. A rank is a slot but for nodes of a tree, between whose ancestors siblings stand:
// for these `paths` says which slots follow the committed ones, and a branch has the bits of plain decoding, too. What a
// score is does not depend on its lane. So scores are computed by slots and then put where their ranks are; pairs of
// values that all rows have in common are interleaved once, the few behind them for each row.
//
// Both products, of queries and keys and of weights and values, are taken for TILE rows at once: by AMX tiles where the
// processor has them, else by BF16 dot products. An entry of either is one sum in order, in an accumulator of its own; of
// a row's pairs it takes LANES at a time, with zeros behind the last.
//
// Knows pointers and strides (in elements). Depths are multiples of 32, at most MOST_DEPTH; the innermost stride is 1.
// Sizes that it cannot work with, and rows that are not there, are refused before anything is read or written.

#define _GNU_SOURCE
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "tiles.h"

enum { BLOCK = 128, TILE = LANES, CHUNK = 64, MOST_DEPTH = 256 };
#define UNROLL _Pragma("GCC unroll 4")

#define UNSEEN -1e38f
#define NOBODYS 0xff80      // A mask's entry where there is no key: minus infinity

typedef struct {
    const uint16_t *query, *key, *value, *mask;
    const int64_t *rows;        // (batch,) which row of the keys and values each sequence has; NULL: its own number
    uint16_t *out;              // (batch, count, heads, value_depth), contiguous
    const int64_t *lengths;     // (batch,) committed tokens, with which every path begins
    const int32_t *paths;       // (batch, count, longest) the nodes that follow, rising; -1 behind the last
    const int64_t *kept;        // (tokens,) rising: which of the batch * count places have a query, all of them in one
    const int64_t *starts;      // row behind each other, and (batch + 1,) where each sequence's begin; NULL: every place has
    int64_t batch, held, heads, key_heads, count, width, depth, value_depth;    // `held` rows of keys and values
    int64_t longest;            // 0: there are no paths, and ranks are slots
    int64_t tokens;             // where `kept` says which
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
    __attribute__((aligned(64))) uint32_t keys[BLOCK * MOST_DEPTH / 2];      // [group][depth / 2][LANES] pairs of a key's entries
    __attribute__((aligned(64))) uint32_t values[BLOCK / 2 * MOST_DEPTH];    // [pair][value_depth] pairs of two keys' entries
    __attribute__((aligned(64))) float sums[CHUNK][MOST_DEPTH];
    __attribute__((aligned(64))) float scores[TILE][BLOCK];
    __attribute__((aligned(64))) uint16_t weights[TILE][BLOCK];
    float highest[CHUNK], total[CHUNK];
    int tiles;    // Whether AMX multiplies
    const uint16_t *next_key, *next_value;    // Of the block that follows, which is fetched while rows are weighed
    int64_t next;                             // Slots of it
    // Of blocks that reach behind the committed tokens:
    uint16_t masks[CHUNK][BLOCK];
    int32_t slots[CHUNK][BLOCK];    // Where the key of each lane stands; -1: there is none
    float *found;                   // (CHUNK, longest) scores along each row's path
    const uint16_t *value;          // Of slot 0
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

// Queries of a sequence for each head.
INLINE int64_t count_of(const Problem *p, int64_t batch) {
    return p->starts ? p->starts[batch + 1] - p->starts[batch] : p->count;
}

// The place of a sequence's query number `at` among its `count`.
INLINE int64_t place_of(const Problem *p, int64_t batch, int64_t at) {
    return p->starts ? p->kept[p->starts[batch] + at] - batch * p->count : at;
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
            uint32_t *to = s->keys + (group * p->depth / 2 + part * LANES) * LANES;
            for (int lane = 0; lane < LANES; lane++) _mm512_store_si512(to + lane * LANES, rows[lane]);
        }
}

// 32 entries of two keys' values, interleaved; NULL: there is no such key, and zeros stand for it.
INLINE void pair_up(const uint16_t *first, const uint16_t *second, __m512i pair[2]) {
    static const __attribute__((aligned(64))) uint16_t order[2][32] = {
        {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63},
    };
    __m512i one = first ? _mm512_loadu_si512(first) : _mm512_setzero_si512();
    __m512i two = second ? _mm512_loadu_si512(second) : _mm512_setzero_si512();
    for (int half = 0; half < 2; half++) pair[half] = _mm512_permutex2var_epi16(one, _mm512_load_si512(order[half]), two);
}

// Pair number `pair` of a block's values.
INLINE void pack_pair(const Problem *p, const uint16_t *first, const uint16_t *second, int64_t pair, Scratch *s) {
    uint32_t *to = s->values + pair * p->value_depth;
    for (int64_t column = 0; column < p->value_depth; column += 32) {
        __m512i both[2];
        pair_up(first ? first + column : NULL, second ? second + column : NULL, both);
        _mm512_store_si512(to + column, both[0]);
        _mm512_store_si512(to + column + LANES, both[1]);
    }
}

INLINE int64_t in_lanes(int64_t pairs) { return (pairs + LANES - 1) / LANES * LANES; }

// The values of a block, two keys interleaved; missing ones are zero.
static void pack_values(const Problem *p, const uint16_t *value, int64_t size, Scratch *s) {
    for (int64_t pair = 0; pair < in_lanes((size + 1) / 2); pair++) {
        const uint16_t *first = value + 2 * pair * p->value_slot;
        pack_pair(p, 2 * pair < size ? first : NULL, 2 * pair + 1 < size ? first + p->value_slot : NULL, pair, s);
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

INLINE int64_t in_groups(int64_t size) { return (size + 2 * LANES - 1) / (2 * LANES) * 2; }

// Sums (rows, groups * LANES) += pairs of bf16 (rows, pairs) x packed pairs (pairs, groups * LANES). Steps are in dwords.
typedef struct {
    const void *rows;
    const uint32_t *packed;
    float *sums;
    int64_t row, pair, group, sums_row;    // from row to row, from pair to pair, from group to group
    int64_t pairs, groups;                 // a multiple of LANES; an even number
    int zero;                              // whether the sums are zero so far, whatever stands there
} Product;

INLINE void dots(const int ROWS, const int GROUPS, const Product *f, int64_t first, int64_t group) {
    __m512 sums[4][4];
    UNROLL for (int row = 0; row < ROWS; row++)
        UNROLL for (int at = 0; at < GROUPS; at++)
            sums[row][at] = f->zero ? _mm512_setzero_ps()
                                    : _mm512_loadu_ps(f->sums + (first + row) * f->sums_row + (group + at) * LANES);
    for (int64_t pair = 0; pair < f->pairs; pair++)
        UNROLL for (int row = 0; row < ROWS; row++) {
            int32_t both;
            memcpy(&both, (const char *)f->rows + ((first + row) * f->row + pair) * 4, sizeof both);
            UNROLL for (int at = 0; at < GROUPS; at++) {
                const uint32_t *packed = f->packed + pair * f->pair + (group + at) * f->group;
                sums[row][at] =
                    _mm512_dpbf16_ps(sums[row][at], (__m512bh)_mm512_loadu_si512(packed), (__m512bh)_mm512_set1_epi32(both));
            }
        }
    UNROLL for (int row = 0; row < ROWS; row++)
        UNROLL for (int at = 0; at < GROUPS; at++)
            _mm512_storeu_ps(f->sums + (first + row) * f->sums_row + (group + at) * LANES, sums[row][at]);
}

INLINE void dots_of(const int ROWS, const Product *f, int64_t first) {
    int64_t group = 0;
    for (; f->groups - group >= 4; group += 4) dots(ROWS, 4, f, first, group);
    for (; group < f->groups; group += 2) dots(ROWS, 2, f, first, group);
}

#ifdef __AMX_BF16__
// For TILE rows: what stands behind the last is computed, too, and nobody reads it.
static void by_tiles(const Product *f) {
    __asm__ volatile("" ::: "memory");    // The compiler does not know that a tile reads memory
    for (int64_t group = 0; group < f->groups; group += 4) {
        int four = f->groups - group >= 4;
        float *sums = f->sums + group * LANES;
        const uint32_t *packed = f->packed + group * f->group;
        if (f->zero) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, f->sums_row * 4);
            _tile_loadd(1, sums + LANES, f->sums_row * 4);
            if (four) _tile_loadd(2, sums + 2 * LANES, f->sums_row * 4);
            if (four) _tile_loadd(3, sums + 3 * LANES, f->sums_row * 4);
        }
        for (int64_t pair = 0; pair < f->pairs; pair += LANES, packed += LANES * f->pair) {
            _tile_loadd(4, (const char *)f->rows + pair * 4, f->row * 4);
            _tile_loadd(5, packed, f->pair * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, packed + f->group, f->pair * 4);
            _tile_dpbf16ps(1, 4, 6);
            if (four) {
                _tile_loadd(7, packed + 2 * f->group, f->pair * 4);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, packed + 3 * f->group, f->pair * 4);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, sums, f->sums_row * 4);
        _tile_stored(1, sums + LANES, f->sums_row * 4);
        if (four) {
            _tile_stored(2, sums + 2 * LANES, f->sums_row * 4);
            _tile_stored(3, sums + 3 * LANES, f->sums_row * 4);
        }
    }
}
#endif

static void multiply(int64_t rows, const Product *f, const Scratch *s) {
#ifdef __AMX_BF16__
    if (s->tiles) {
        by_tiles(f);
        return;
    }
#endif
    (void)s;
    for (int64_t first = 0; first < rows; first += 4)
        switch (rows - first) {
            case 1: dots_of(1, f, first); break;
            case 2: dots_of(2, f, first); break;
            case 3: dots_of(3, f, first); break;
            default: dots_of(4, f, first);
        }
}

// Scores of up to TILE rows against `groups` (even) groups of packed keys.
static void score(int64_t rows, const Problem *p, int64_t first, int64_t groups, Scratch *s) {
    multiply(rows, &(Product){
        .rows = s->query[first], .row = MOST_DEPTH / 2, .packed = s->keys, .pair = LANES, .group = p->depth / 2 * LANES,
        .sums = s->scores[0], .sums_row = BLOCK, .pairs = p->depth / 2, .groups = groups, .zero = 1}, s);
}

// Turns a row's scores into weights; returns what its sums so far have to be multiplied by.
static float weigh(const Problem *p, const uint16_t *mask, int64_t size, int64_t groups, int row, int64_t place, Scratch *s) {
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

// Adds weighted values of pairs `from` to `to` of a block to the sums of rows from `first` on. One row stands for all of a
// tile.
static void gather(int64_t rows, const Problem *p, int64_t first, int64_t row, int64_t from, int64_t to, Scratch *s) {
    multiply(rows, &(Product){
        .rows = s->weights[row] + 2 * from, .row = rows > 1 ? BLOCK / 2 : 0, .packed = s->values + from * p->value_depth,
        .pair = p->value_depth, .group = LANES, .sums = s->sums[first + row], .sums_row = rows > 1 ? MOST_DEPTH : 0,
        .pairs = to - from, .groups = p->value_depth / LANES}, s);
}

// The same for one row's own keys, from pair `from` of the block on.
static void gather_own(const Problem *p, int64_t first, int64_t row, int64_t from, int64_t pairs, Scratch *s) {
    const int32_t *slots = s->slots[first + row];
    int64_t end = from;
    while (end < pairs && slots[2 * end] >= 0) end++;
    end = in_lanes(end);
    for (int64_t pair = from; pair < end; pair++) {
        const uint16_t *both[2] = {NULL, NULL};
        for (int one = 0; one < 2; one++)
            if (slots[2 * pair + one] >= 0) both[one] = s->value + slots[2 * pair + one] * p->value_slot;
        pack_pair(p, both[0], both[1], pair, s);
    }
    gather(1, p, first, row, from / LANES * LANES, end, s);
}

// Row `row` of `rows` fetches its share of the block that follows.
INLINE void fetch(const Problem *p, int64_t row, int64_t rows, const Scratch *s) {
    for (int64_t slot = s->next * row / rows; slot < s->next * (row + 1) / rows; slot++) {
        for (int64_t at = 0; at < p->depth; at += 32)
            _mm_prefetch((const char *)(s->next_key + slot * p->key_slot + at), _MM_HINT_T1);
        for (int64_t at = 0; at < p->value_depth; at += 32)
            _mm_prefetch((const char *)(s->next_value + slot * p->value_slot + at), _MM_HINT_T1);
    }
}

// Part of a block: `size` lanes, of which the first `common` hold the same keys in all rows. `rank` is that of lane 0,
// counted from the committed tokens on.
typedef struct { int64_t size, common, rank; } Span;

static void tile(
    int64_t rows, const Problem *p, const uint16_t *const *masks, int64_t first, int64_t size, int64_t all, Span span, Scratch *s) {
    int64_t common = span.common < size ? span.common : size, pairs = (size + 1) / 2;
    int64_t packed = common < size ? common / 2 : in_lanes(pairs), whole = packed / LANES * LANES;
    score(rows, p, first, in_groups(common), s);
    for (int64_t row = 0; row < rows; row++) {
        fetch(p, first + row, all, s);
        for (int64_t lane = common; lane < size; lane++)
            s->scores[row][lane] = span.rank + lane < p->longest ? s->found[(first + row) * p->longest + span.rank + lane] : 0.0f;
        __m512 shrunk = _mm512_set1_ps(weigh(p, masks[row], size, in_groups(size), row, first + row, s));
        float *sums = s->sums[first + row];
        for (int64_t column = 0; column < p->value_depth; column += LANES)
            _mm512_store_ps(sums + column, _mm512_mul_ps(_mm512_load_ps(sums + column), shrunk));
    }
    if (whole) gather(rows, p, first, 0, 0, whole, s);
    for (int64_t row = 0; row < rows && packed < pairs; row++) gather_own(p, first, row, packed, pairs, s);
}

// The scores of all nodes on the paths of `rows` rows; `key` is the first node's.
static void score_paths(const Problem *p, const uint16_t *key, const int32_t *const *paths, int64_t rows, Scratch *s) {
    int64_t nodes = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t step = 0; step < p->longest && paths[row][step] >= 0; step++)
            if (paths[row][step] >= nodes) nodes = paths[row][step] + 1;
    memset(s->found, 0, (size_t)(rows * p->longest) * sizeof(float));
    for (int64_t start = 0; start < nodes; start += BLOCK) {
        int64_t size = nodes - start < BLOCK ? nodes - start : BLOCK;
        pack_keys(p, key + start * p->key_slot, size, s);
        for (int64_t first = 0; first < rows; first += TILE) {
            int64_t some = rows - first < TILE ? rows - first : TILE;
            score(some, p, first, in_groups(size), s);
            for (int64_t row = 0; row < some; row++)
                for (int64_t step = 0; step < p->longest && paths[first + row][step] >= 0; step++) {
                    int64_t node = paths[first + row][step] - start;
                    if (node >= 0 && node < size) s->found[(first + row) * p->longest + step] = s->scores[row][node];
                }
        }
    }
}

// A block's lanes for one row: its mask and its slots in the order of ranks. `mask` is that of the block's first slot.
static void order_lanes(
    const Problem *p, const uint16_t *mask, int64_t start, int64_t length, const int32_t *path, int64_t row, Span span, Scratch *s) {
    memcpy(s->masks[row], mask, (size_t)span.common * sizeof *mask);
    for (int64_t lane = span.common; lane < BLOCK; lane++) s->masks[row][lane] = NOBODYS;
    memset(s->slots[row], -1, sizeof s->slots[row]);
    if (span.common) s->slots[row][span.common - 1] = (int32_t)(length - 1);    // It may share a pair with the next
    for (int64_t lane = span.common; lane < BLOCK && span.rank + lane < p->longest; lane++) {
        int32_t node = path[span.rank + lane];
        if (node < 0) break;
        s->slots[row][lane] = (int32_t)(length + node);
        s->masks[row][lane] = mask[length + node - start];
    }
}

static void begin(const Problem *p, int64_t batch, int64_t key_head, int64_t first, int64_t rows, Scratch *s) {
    int64_t group = p->heads / p->key_heads, count = count_of(p, batch);
    const uint16_t *queries = p->query + (p->starts ? p->starts[batch] * p->query_row : batch * p->query_batch);
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = key_head * group + (first + row) / count, at = (first + row) % count;
        const uint16_t *query = queries + head * p->query_head + at * p->query_row;
        memcpy(s->query[row], query, (size_t)p->depth * sizeof *query);
        memset(s->sums[row], 0, (size_t)p->value_depth * sizeof(float));
        s->highest[row] = -INFINITY;
        s->total[row] = 0.0f;
    }
}

static void finish(const Problem *p, int64_t batch, int64_t key_head, int64_t first, int64_t rows, Scratch *s) {
    int64_t group = p->heads / p->key_heads, count = count_of(p, batch);
    int64_t before = p->starts ? p->starts[batch] : batch * count;
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = key_head * group + (first + row) / count, at = (first + row) % count;
        uint16_t *out = p->out + ((before + at) * p->heads + head) * p->value_depth;
        __m512 total = _mm512_set1_ps(s->total[row] == 0.0f ? 1.0f : s->total[row]);
        for (int64_t column = 0; column < p->value_depth; column += LANES) {
            __m512 found = _mm512_div_ps(_mm512_load_ps(s->sums[row] + column), total);
            store(out + column, found);
        }
    }
}

// Up to CHUNK rows of one sequence that share a key head. Row r is query r % count of head r / count of the group.
static void attend_chunk(const Problem *p, int64_t batch, int64_t key_head, int64_t first, int64_t rows, Scratch *s) {
    int64_t held = p->rows ? p->rows[batch] : batch, length = p->longest ? p->lengths[batch] : p->width;
    const uint16_t *key = p->key + held * p->key_batch + key_head * p->key_head;
    const uint16_t *value = p->value + held * p->value_batch + key_head * p->value_head;
    const uint16_t *mask = p->mask + batch * p->mask_batch;
    const int32_t *paths[CHUNK];
    int64_t count = count_of(p, batch), places[CHUNK];
    begin(p, batch, key_head, first, rows, s);
    s->value = value;
    for (int64_t row = 0; row < rows; row++) places[row] = place_of(p, batch, (first + row) % count);
    if (p->longest) {
        for (int64_t row = 0; row < rows; row++) paths[row] = p->paths + (batch * p->count + places[row]) * p->longest;
        score_paths(p, key + length * p->key_slot, paths, rows, s);
    }
    for (int64_t start = 0; start < p->width && start < length + p->longest; start += BLOCK) {
        int64_t size = p->width - start < BLOCK ? p->width - start : BLOCK, most = 0, seen[CHUNK / TILE] = {0};
        int own = start + size > length;    // Whether rows have keys of their own in this block
        Span span = {own ? BLOCK : size, own ? length > start ? length - start : 0 : size, start - length};
        const uint16_t *masks[CHUNK];
        for (int64_t row = 0; row < rows; row++) {
            masks[row] = mask + places[row] * p->mask_row + start;
            if (own) {
                order_lanes(p, masks[row], start, length, paths[row], row, span, s);
                masks[row] = s->masks[row];
            }
            int64_t end = reach(masks[row], span.size);
            if (end > seen[row / TILE]) seen[row / TILE] = end;
        }
        for (int64_t at = 0; at * TILE < rows; at++) most = seen[at] > most ? seen[at] : most;
        if (!most) continue;
        int64_t common = span.common < most ? span.common : most;
        int64_t behind = start + BLOCK, last = p->width < length ? p->width : length;
        s->next = behind >= last ? 0 : last - behind < BLOCK ? last - behind : BLOCK;
        s->next_key = key + behind * p->key_slot, s->next_value = value + behind * p->value_slot;
        pack_keys(p, key + start * p->key_slot, common, s);
        pack_values(p, value + start * p->value_slot, common, s);
        for (int64_t row = 0; row < rows; row += TILE)
            if (seen[row / TILE])
                tile(rows - row < TILE ? rows - row : TILE, p, masks + row, row, seen[row / TILE], rows, span, s);
    }
    finish(p, batch, key_head, first, rows, s);
}

// Whether there are AMX tiles, and the system keeps their state.
static int has_tiles(void) {
#ifdef __AMX_BF16__
    static _Atomic int known = 0;    // 1: no, 2: yes
    if (!known) known = may_use_tiles() ? 2 : 1;
    return known == 2;
#else
    return 0;
#endif
}

int64_t forerun_problem_size(void) { return sizeof(Problem); }

INLINE int fits(int64_t depth) { return depth > 0 && depth <= MOST_DEPTH && depth % 32 == 0; }

static int leads_outside(const Problem *p, int64_t batch) {
    int64_t room = p->width - p->lengths[batch];
    if (p->lengths[batch] < 0 || room < 0) return 1;
    for (int64_t at = 0; at < p->count * p->longest; at++)
        if (p->paths[batch * p->count * p->longest + at] >= room) return 1;
    return 0;
}

// Whether a sequence's queries are not at rising places of its own.
static int misplaced(const Problem *p, int64_t batch) {
    int64_t start = p->starts[batch], end = p->starts[batch + 1];
    if (start < 0 || end < start || end > p->tokens) return 1;
    for (int64_t at = start; at < end; at++) {
        int64_t place = p->kept[at] - batch * p->count;
        if (place < 0 || place >= p->count || (at > start && p->kept[at] <= p->kept[at - 1])) return 1;
    }
    return 0;
}

// 0, or what is wrong: 1 the sizes, 2 the rows, 3 the paths, 4 the places.
int32_t forerun_attend_check(const Problem *p) {
    if (p->batch < 1 || p->count < 1 || p->width < 1 || p->key_heads < 1 || p->heads < 1 || p->heads % p->key_heads) return 1;
    if (!fits(p->depth) || !fits(p->value_depth) || p->threads < 1) return 1;
    if (p->starts && (p->starts[0] || p->starts[p->batch] != p->tokens)) return 4;
    for (int64_t batch = 0; batch < p->batch; batch++) {
        int64_t row = p->rows ? p->rows[batch] : batch;
        if (row < 0 || row >= p->held) return 2;
        if (p->longest && leads_outside(p, batch)) return 3;
        if (p->starts && misplaced(p, batch)) return 4;
    }
    return 0;
}

// One thread's share of a sound problem over other keys and values, which lie as its own; all threads of a team call it,
// and none waits for the others. 0, or 5: there is no memory.
int32_t forerun_attend_part(const Problem *problem, const uint16_t *key, const uint16_t *value) {
    Problem own = *problem, *p = &own;
    Scratch scratch;
    int64_t rows = p->heads / p->key_heads * p->count, chunks = (rows + CHUNK - 1) / CHUNK, all = p->batch * p->key_heads * chunks;
    // What does not go round among the threads they share by rows, where these are worth reading the keys once more
    int64_t threads = omp_get_num_threads(), left = all % threads, whole = all - left, most = rows / chunks / (TILE / 2);
    int64_t parts = !left || most < 2 ? 1 : threads / left < most ? threads / left : most;
    p->key = key, p->value = value;
    scratch.found = malloc((size_t)(CHUNK * (p->longest + 1)) * sizeof(float));
    scratch.tiles = has_tiles();
#ifdef __AMX_BF16__
    if (scratch.tiles) set_up_tiles((const uint8_t[8]){16, 16, 16, 16, 16, 16, 16, 16});
#endif
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < whole + left * parts; task++) {
        int64_t number = task < whole ? task : whole + (task - whole) / parts, part = task < whole ? 0 : (task - whole) % parts;
        int64_t share = task < whole ? 1 : parts, start = number % chunks * CHUNK, batch = number / chunks / p->key_heads;
        int64_t own = p->heads / p->key_heads * count_of(p, batch);    // At most `rows`
        int64_t some = own - start < CHUNK ? own - start : CHUNK, first = some * part / share, end = some * (part + 1) / share;
        if (scratch.found && first < end)
            attend_chunk(p, batch, number / chunks % p->key_heads, start + first, end - first, &scratch);
    }
#ifdef __AMX_BF16__
    if (scratch.tiles) _tile_release();
#endif
    int32_t failed = scratch.found ? 0 : 5;
    free(scratch.found);
    return failed;
}

// 0, or what is wrong, as both say.
int32_t forerun_attend(const Problem *p) {
    int32_t failed = forerun_attend_check(p);
    if (failed) return failed;
#pragma omp parallel num_threads(p->threads)
    if (forerun_attend_part(p, p->key, p->value)) {
#pragma omp atomic write
        failed = 5;
    }
    return failed;
}
