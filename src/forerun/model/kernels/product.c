// Matrix products of few or many rows with packed weights: float32, and bf16 by AMX tiles, by AVX-512 dot products, or
// widened to float32 on any processor with AVX2.
//
// Every entry of the result is one sum over the depth, in order, in an accumulator of its own: what a row gets depends on
// that row alone, to the bit, however many rows, threads or outputs there are. Few rows read the weights once, at the
// memory's pace; for many, blocks of the weights stay in the cache while the rows pass by.
//
// Weights (outputs, depth) lie in panels of LANES outputs, zeros behind the last: float32 [panel][depth][LANES], bf16
// [panel][depth / 2][LANES][2], which is what a tile, a dot product and a shift take alike. The depth of bf16 is a
// multiple of STEP; whoever packs fills up with zeros.

#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "product.h"
#include "tiles.h"

#ifdef __AVX512F__
typedef __m512 Lanes;
typedef __m512i Words;
enum { WIDTH = 16, MOST_ROWS = 8, MOST_PANELS = 3 };
#define load_lanes _mm512_loadu_ps
#define store_lanes _mm512_storeu_ps
#define all_lanes _mm512_set1_ps
#define load_words(from) _mm512_loadu_si512(from)
#define high_half(words) _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u)))
#define low_half(words) _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
#define multiply_add _mm512_fmadd_ps
#else
typedef __m256 Lanes;
typedef __m256i Words;
enum { WIDTH = 8, MOST_ROWS = 6, MOST_PANELS = 1 };
#define load_lanes _mm256_loadu_ps
#define store_lanes _mm256_storeu_ps
#define all_lanes _mm256_set1_ps
#define load_words(from) _mm256_loadu_si256((const __m256i *)(from))
#define high_half(words) _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000u)))
#define low_half(words) _mm256_castsi256_ps(_mm256_slli_epi32(words, 16))
#define multiply_add _mm256_fmadd_ps
#endif

enum { PARTS = LANES / WIDTH, ROW_BLOCK = 64, LINES = 96, HELD = 1 << 19, WORTH = 1 << 15 };
// Most lines of a panel, 64 bytes each, that are multiplied while as many are fetched; bytes of the states that stay in
// a core's cache; entries of a matrix from which on several threads share the work
#define UNROLL _Pragma("GCC unroll 16")

INLINE uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((value != value ? bits | 0x400000 : rounded) >> 16);
}

#include "blocks.h"

// Stores `count` sums, plus the bias, as entries of the result from `output` on.
INLINE void finish_some(const Product *p, const float *sums, int64_t row, int64_t output, int64_t count) {
    if (p->kind == FLOAT32) {
        float *out = (float *)p->out + row * p->outputs + output;
        const float *bias = p->bias ? (const float *)p->bias + output : NULL;
        for (int64_t lane = 0; lane < count; lane++) out[lane] = bias ? sums[lane] + bias[lane] : sums[lane];
    } else {
        uint16_t *out = (uint16_t *)p->out + row * p->outputs + output;
        const uint16_t *bias = p->bias ? (const uint16_t *)p->bias + output : NULL;
        for (int64_t lane = 0; lane < count; lane++) {
            uint32_t wide = bias ? (uint32_t)bias[lane] << 16 : 0;
            float added;
            memcpy(&added, &wide, sizeof added);
            out[lane] = narrow(bias ? sums[lane] + added : sums[lane]);
        }
    }
}

// The same of a panel's LANES; none behind the last.
static void finish(const Product *p, const float *sums, int64_t row, int64_t output) {
    if (p->outputs - output >= LANES) finish_some(p, sums, row, output, LANES);    // The compiler knows how many
    else finish_some(p, sums, row, output, p->outputs - output);
}

// Lines of neighbouring panels, `apart` bytes from one panel to the next.
typedef struct { const void *from; int64_t apart; } Weights;

// What is fetched while a tile is computed: a line of each panel at every line, `step` bytes behind the last.
typedef struct { const char *from; int64_t step, apart; } Ahead;

// Adds entries `from` to `to` of the depth to the sums of ROWS rows x COUNT panels, which lie in `sums` (rows, COUNT,
// LANES) between the blocks of the depth.
INLINE void tile(
    const int KIND, const int ROWS, const int COUNT, const Product *p, int64_t row, Weights lines, int64_t from, int64_t to,
    float *sums, Ahead ahead) {
    Lanes sum[MOST_ROWS][MOST_PANELS * PARTS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int part = 0; part < COUNT * PARTS; part++)
            sum[r][part] = from ? load_lanes(sums + (r * COUNT * PARTS + part) * WIDTH) : all_lanes(0.0f);
    const char *weights = lines.from;
    if (KIND == FLOAT32) {
        const float *states = (const float *)p->states + row * p->depth;
        for (int64_t at = from; at < to; at++, weights += LANES * 4, ahead.from += ahead.step) {
            Lanes weight[MOST_PANELS * PARTS];
            UNROLL for (int part = 0; part < COUNT * PARTS; part++) {
                if (part % PARTS == 0) _mm_prefetch(ahead.from + part / PARTS * ahead.apart, _MM_HINT_T0);
                weight[part] = load_lanes((const float *)(weights + part / PARTS * lines.apart) + part % PARTS * WIDTH);
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                Lanes state = all_lanes(states[r * p->depth + at]);
                UNROLL for (int part = 0; part < COUNT * PARTS; part++)
                    sum[r][part] = multiply_add(weight[part], state, sum[r][part]);
            }
        }
    } else {
        const float *wide = p->wide + row * p->depth;
        const uint16_t *states = (const uint16_t *)p->states + row * p->depth;
        for (int64_t at = from; at < to; at += 2, weights += LANES * 4, ahead.from += ahead.step) {
            Words weight[MOST_PANELS * PARTS];
            UNROLL for (int part = 0; part < COUNT * PARTS; part++) {
                if (part % PARTS == 0) _mm_prefetch(ahead.from + part / PARTS * ahead.apart, _MM_HINT_T0);
                weight[part] = load_words(weights + part / PARTS * lines.apart + part % PARTS * WIDTH * 4);
            }
            if (KIND == WIDENED) {
                UNROLL for (int r = 0; r < ROWS; r++) {
                    Lanes state = all_lanes(wide[r * p->depth + at]);
                    UNROLL for (int part = 0; part < COUNT * PARTS; part++)
                        sum[r][part] = multiply_add(low_half(weight[part]), state, sum[r][part]);
                }
                UNROLL for (int r = 0; r < ROWS; r++) {
                    Lanes state = all_lanes(wide[r * p->depth + at + 1]);
                    UNROLL for (int part = 0; part < COUNT * PARTS; part++)
                        sum[r][part] = multiply_add(high_half(weight[part]), state, sum[r][part]);
                }
            }
#ifdef __AVX512BF16__
            if (KIND == DOTS) {
                UNROLL for (int r = 0; r < ROWS; r++) {
                    int pair;
                    memcpy(&pair, states + r * p->depth + at, sizeof pair);
                    UNROLL for (int part = 0; part < COUNT * PARTS; part++)
                        sum[r][part] =
                            _mm512_dpbf16_ps(sum[r][part], (__m512bh)weight[part], (__m512bh)_mm512_set1_epi32(pair));
                }
            }
#endif
        }
        (void)wide, (void)states;
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int part = 0; part < COUNT * PARTS; part++)
            store_lanes(sums + (r * COUNT * PARTS + part) * WIDTH, sum[r][part]);
}

INLINE void tiles(
    const int KIND, const Product *p, int64_t rows, int64_t count, int64_t row, Weights lines, int64_t from, int64_t to,
    float *sums, Ahead ahead) {
#define TILE(ROWS)                                                                           \
    case ROWS:                                                                               \
        if (count == 1) tile(KIND, ROWS, 1, p, row, lines, from, to, sums, ahead);           \
        else tile(KIND, ROWS, MOST_PANELS, p, row, lines, from, to, sums, ahead);            \
        break;
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#ifdef __AVX512F__
        TILE(7) TILE(8)
#endif
    }
#undef TILE
}

static void any_tile(
    const Product *p, int64_t rows, int64_t count, int64_t row, Weights lines, int64_t from, int64_t to, float *sums,
    Ahead ahead) {
    if (p->kind == FLOAT32) tiles(FLOAT32, p, rows, count, row, lines, from, to, sums, ahead);
#ifdef __AVX512BF16__
    else if (p->kind == DOTS) tiles(DOTS, p, rows, count, row, lines, from, to, sums, ahead);
#endif
    else tiles(WIDENED, p, rows, count, row, lines, from, to, sums, ahead);
}

// Rows `first` to `last` with `count` panels from `panel` on. While all rows pass by a block of the weights, the next one
// is fetched, evenly over the groups of rows: memory is never idle.
static void by_lanes(const Product *p, int64_t first, int64_t last, int64_t panel, int64_t count) {
    __attribute__((aligned(64))) float sums[ROW_BLOCK * MOST_PANELS * LANES];
    int64_t line = p->kind == FLOAT32 ? 1 : 2, all = p->depth / line, size = all * 64;
    int64_t blocks = (all + LINES - 1) / LINES, lines = (all + blocks - 1) / blocks;    // Equal ones
    for (int64_t start = first; start < last; start += ROW_BLOCK) {
        int64_t end = last - start < ROW_BLOCK ? last : start + ROW_BLOCK;
        int64_t groups = (end - start + MOST_ROWS - 1) / MOST_ROWS, most = (end - start + groups - 1) / groups;
        for (int64_t from = 0; from < p->depth; from += lines * line) {
            int64_t to = p->depth - from < lines * line ? p->depth : from + lines * line;
            const char *here = (const char *)p->weights + panel * size;
            Weights weights = {here + from / line * 64, size};
            Ahead ahead = {here + (to < p->depth ? to / line * 64 : count * size), 64 / groups, size};
            for (int64_t row = start; row < end; row += most, ahead.from += lines * ahead.step) {
                int64_t some = end - row < most ? end - row : most;
                float *own = sums + (row - start) * count * LANES;
                any_tile(p, some, count, row, weights, from, to, own, ahead);
            }
        }
        for (int64_t row = start; row < end; row++)
            for (int64_t one = 0; one < count; one++)
                finish(p, sums + ((row - start) * count + one) * LANES, row, (panel + one) * LANES);
    }
}

#ifdef __AMX_BF16__
static void configure(int64_t upper, int64_t lower) {
    // 0, 1: sums of the upper rows, 2, 3: of the lower ones (or all four of the upper ones); 4, 5: states; 6, 7: weights
    uint8_t first = (uint8_t)upper, second = (uint8_t)(lower ? lower : upper);
    set_up_tiles((const uint8_t[8]){first, first, second, second, first, (uint8_t)(lower ? lower : 1), 16, 16});
}

INLINE void fetch(const uint16_t *from) {
    UNROLL for (int line = 0; line < 16; line++) _mm_prefetch((const char *)from + line * 64, _MM_HINT_T0);
}

static void finish_tile(const Product *p, float (*sums)[LANES], int64_t rows, int64_t row, int64_t panel) {
    for (int64_t r = 0; r < rows; r++) finish(p, sums[r], row + r, panel * LANES);
}

// At most 16 rows x 1 to 4 panels.
static void few_tiles(const Product *p, int64_t row, int64_t rows, int64_t panel, int64_t count) {
    __attribute__((aligned(64))) float sums[16][LANES];
    const uint16_t *states = (const uint16_t *)p->states + row * p->depth;
    const uint16_t *weights = (const uint16_t *)p->weights + panel * p->depth * LANES;
    int64_t stride = p->depth * 2, next = p->depth * LANES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < p->depth; at += STEP) {
        const uint16_t *here = weights + at * LANES;
        _tile_loadd(4, states + at, stride);
#define ONE(number, tile)                                                       \
    if (count > number) {                                                       \
        fetch(here + number * next + 2 * STEP * LANES);                         \
        _tile_loadd(tile, here + number * next, 64);                            \
        _tile_dpbf16ps(number, 4, tile);                                        \
    }
        ONE(0, 6) ONE(1, 7) ONE(2, 6) ONE(3, 7)
#undef ONE
    }
#define ONE(number)                                                             \
    if (count > number) {                                                       \
        _tile_stored(number, sums, 64);                                         \
        finish_tile(p, sums, rows, row, panel + number);                        \
    }
    ONE(0) ONE(1) ONE(2) ONE(3)
#undef ONE
}

// 16 + `lower` rows x 2 panels.
static void many_tiles(const Product *p, int64_t row, int64_t lower, int64_t panel) {
    __attribute__((aligned(64))) float sums[16][LANES];
    const uint16_t *states = (const uint16_t *)p->states + row * p->depth;
    const uint16_t *weights = (const uint16_t *)p->weights + panel * p->depth * LANES;
    int64_t stride = p->depth * 2, next = p->depth * LANES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < p->depth; at += STEP) {
        const uint16_t *here = weights + at * LANES;
        _tile_loadd(4, states + at, stride);
        fetch(here + 2 * STEP * LANES);
        _tile_loadd(6, here, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch(here + next + 2 * STEP * LANES);
        _tile_loadd(7, here + next, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, states + 16 * p->depth + at, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    finish_tile(p, sums, 16, row, panel);
    _tile_stored(1, sums, 64);
    finish_tile(p, sums, 16, row, panel + 1);
    _tile_stored(2, sums, 64);
    finish_tile(p, sums, lower, row + 16, panel);
    _tile_stored(3, sums, 64);
    finish_tile(p, sums, lower, row + 16, panel + 1);
}

// Rows `first` to `last` with `count` panels from `panel` on. Of many rows as many as the cache holds stay while all panels
// pass by, and two panels while all of these rows do.
static void by_tiles(const Product *p, int64_t first, int64_t last, int64_t panel, int64_t count) {
    int64_t pairs = count / 2 * 2, rest = (last - first) % 32, whole = last - rest;
    int64_t held = HELD / (p->depth * 2) / 32 * 32, block = held < 32 ? 32 : held;
    if (whole > first) configure(16, 16);
    for (int64_t start = first; start < whole; start += block) {
        int64_t end = whole - start < block ? whole : start + block;
        for (int64_t at = 0; at < pairs; at += 2)
            for (int64_t row = start; row < end; row += 32) many_tiles(p, row, 16, panel + at);
        for (int64_t row = start; row < end && pairs < count; row += 16) few_tiles(p, row, 16, panel + pairs, 1);
    }
    if (rest > 16) {
        configure(16, rest - 16);
        for (int64_t at = 0; at < pairs; at += 2) many_tiles(p, whole, rest - 16, panel + at);
        if (pairs < count) {
            few_tiles(p, whole, 16, panel + pairs, 1);
            configure(rest - 16, 0);
            few_tiles(p, whole + 16, rest - 16, panel + pairs, 1);
        }
    } else if (rest) {
        configure(rest, 0);
        for (int64_t at = 0; at < count; at += 4)
            few_tiles(p, whole, rest, panel + at, count - at < 4 ? count - at : 4);
    }
    _tile_release();
}

#endif

// Room of so many bytes that each thread keeps.
static void *room_of(int64_t size) {
    static _Thread_local struct { void *at; int64_t size; } room;
    if (room.size < size) {
        free(room.at);
        room.size = (size + 63) / 64 * 64, room.at = aligned_alloc(64, (size_t)room.size);
        if (!room.at) abort();    // Of some hundred KB
    }
    return room.at;
}

#ifdef __AMX_BF16__
// All rows with `count` panels in blocks from `panel` on, two at a time as panels of bf16.
static void by_expanded_tiles(const Product *p, int64_t panel, int64_t count) {
    int64_t size = p->depth * LANES;
    uint16_t *room = room_of(2 * size * (int64_t)sizeof *room);
    for (int64_t end = panel + count; panel < end; panel += 2) {
        int64_t some = end - panel < 2 ? 1 : 2;
        for (int64_t one = 0; one < some; one++) {
            const Panel *at = (const Panel *)p->weights + panel + one;
            expand((const uint8_t *)p->weights + at->at, at->type, p->depth, room + one * size);
        }
        Product shown = *p;
        shown.weights = room - panel * size;
        by_tiles(&shown, 0, p->rows, panel, some);
    }
}
#endif

// `count` rows from `row` on with one panel in blocks.
static void by_blocks(const Product *p, int64_t row, int64_t count, States states, int64_t panel) {
    __attribute__((aligned(64))) float sums[MOST_ROWS * LANES];
    const Panel *at = (const Panel *)p->weights + panel;
    const uint8_t *weights = (const uint8_t *)p->weights + at->at;
    if (at->type == BF16) {
        Product shown = *p;
        shown.weights = (const uint16_t *)weights - panel * p->depth * LANES;
#ifdef __AMX_BF16__
        if (p->kind == TILES_OF_AMX) {
            by_tiles(&shown, row, row + count, panel, 1);
            return;
        }
#endif
        by_lanes(&shown, row, row + count, panel, 1);
        return;
    }
    Form f = form_of(at->type);
    for (int part = 0; part < PARTS; part++)
        block_tiles(count, f, p->depth, states, weights, part * WIDTH, sums);
    for (int64_t one = 0; one < count; one++) finish(p, sums + one * LANES, row + one, panel * LANES);
}

// A `Multiply`.
void forerun_product_part(const Product *p, int64_t thread, int64_t threads) {
    int64_t panels = (p->outputs + LANES - 1) / LANES;
    int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
#ifdef __AMX_BF16__
    if (p->kind == TILES_OF_AMX && p->blocks != IN_BLOCKS) {
        if (p->blocks) by_expanded_tiles(p, begin, end - begin);
        else by_tiles(p, 0, p->rows, begin, end - begin);
        return;
    }
#endif
    if (p->blocks) {
        int64_t groups = p->depth / GROUP, tiles = (p->rows + MOST_ROWS - 1) / MOST_ROWS;
        int64_t most = tiles ? (p->rows + tiles - 1) / tiles : 1, size = room_of_states(groups, most);
        char *room = room_of(tiles * size);
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = tile * most, count = p->rows - row < most ? p->rows - row : most;
            States states = states_in(room + tile * size, groups, count);
            round_states((const uint16_t *)p->states + row * p->depth, count, p->depth, states);
        }
        for (int64_t panel = begin; panel < end; panel++)
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t row = tile * most, count = p->rows - row < most ? p->rows - row : most;
                by_blocks(p, row, count, states_in(room + tile * size, groups, count), panel);
            }
        return;
    }
    for (int64_t panel = begin; panel < end;) {
        int64_t count = end - panel >= MOST_PANELS ? MOST_PANELS : 1;
        by_lanes(p, 0, p->rows, panel, count);
        panel += count;
    }
}

// Rows of a matrix, each a pointer to `words` words of 4 bytes or NULL for zeros -> panels of LANES rows, (panels,
// padded, LANES) words, zeros behind the last one of a row. A word is a float or two neighbours in bf16.
void forerun_pack(
    const uint32_t *const *rows, uint32_t *out, int64_t panels, int64_t words, int64_t padded) {
    for (int64_t panel = 0; panel < panels; panel++) {
        const uint32_t *const *from = rows + panel * LANES;
        uint32_t *to = out + panel * padded * LANES;
        if (from[LANES - 1]) {
            const uint32_t *lanes[LANES];
            memcpy(lanes, from, sizeof lanes);
            for (int64_t word = 0; word < words; word++, to += LANES)
                for (int64_t lane = 0; lane < LANES; lane++) to[lane] = lanes[lane][word];
        } else {    // The last panel
            for (int64_t word = 0; word < words; word++, to += LANES)
                for (int64_t lane = 0; lane < LANES; lane++) to[lane] = from[lane] ? from[lane][word] : 0;
        }
        memset(to, 0, (size_t)((padded - words) * LANES) * sizeof *to);
    }
}

// Rows of a matrix as a GGUF file keeps them, or NULL for zeros -> panels, as in `blocks.h`.
void forerun_pack_blocks(const uint8_t *const *rows, int64_t type, uint8_t *out, int64_t panels, int64_t depth) {
    Form f = form_of(type);
    Held held[LANES];
    int64_t step = panel_bytes(type, f.held);
    for (int64_t panel = 0; panel < panels; panel++, rows += LANES)
        for (int64_t block = 0; block < depth / f.held; block++, out += step) {
            for (int64_t lane = 0; lane < LANES; lane++)
                if (rows[lane]) read_block(type, rows[lane] + block * f.bytes, held + lane);
                else memset(held + lane, 0, sizeof *held);
            write_blocks(f, held, out);
        }
}

// Bytes of so many inputs of a panel in blocks of this type; 0 where there are no such blocks.
int64_t forerun_block_bytes(int64_t type, int64_t inputs) {
    Form f = form_of(type);
    return type == BF16 || (f.held && inputs % f.held == 0) ? panel_bytes(type, inputs) : 0;
}

// Weights in blocks -> panels of bf16.
void forerun_expand(const uint8_t *weights, uint16_t *out, int64_t panels, int64_t depth) {
    const Panel *at = (const Panel *)weights;
    for (int64_t panel = 0; panel < panels; panel++, at++, out += depth * LANES)
        expand(weights + at->at, at->type, depth, out);
}

// Whether products of this kind can be computed here.
int32_t forerun_product_has(int32_t kind) {
    if (kind == FLOAT32 || kind == WIDENED) return 1;
#ifdef __AVX512BF16__
    if (kind == DOTS) return 1;
#endif
#ifdef __AMX_BF16__
    if (kind == TILES_OF_AMX) return may_use_tiles();
#endif
    return 0;
}

// states (rows, depth) x weights in panels (outputs, depth) + bias (outputs,), or NULL -> out (rows, outputs); all
// contiguous. 0, or 1 where sizes are out of range or there is no memory.
int32_t forerun_multiply(
    const void *states, const void *weights, const void *bias, void *out, int64_t rows, int64_t depth, int64_t outputs,
    int32_t kind, int32_t blocks, int32_t threads) {
    Product product = {states, weights, bias, out, NULL, rows, depth, outputs, kind, blocks}, *p = &product;
    if (rows < 0 || outputs < 1 || depth < 1 || threads < 1 || (kind != FLOAT32 && depth % STEP)) return 1;
    if (kind == WIDENED && !(p->wide = malloc((size_t)(rows * depth + 1) * sizeof(float)))) return 1;
#pragma omp parallel num_threads(threads) if (outputs * depth >= WORTH)
    {
        int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
        widen_states(p, thread, count);
#pragma omp barrier
        forerun_product_part(p, thread, count);
    }
    free(p->wide);
    return 0;
}
