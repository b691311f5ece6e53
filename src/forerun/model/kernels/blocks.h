// Weights that stay as a GGUF file keeps them, in blocks of few bits, and become bf16 where a product reads them.
//
// A value is scale * integer + least, with one scale and one least value for each output and block of inputs: exactly what
// dequantising to float32 and rounding to bf16 gives, since scale * integer is exact in float32.
//
// Such weights begin with one `Panel` for each panel. A panel is a sequence of blocks: scales of LANES outputs, their least
// values, then a line for every two inputs: LANES x 2 integers, in 8 bits, or in 4 the first half below the second. Scales
// and least values are float16; those of the formats "K" are 8-bit integers, and before every 256 inputs stand the float16
// numbers that they are multiplied by.

#ifndef FORERUN_BLOCKS_H
#define FORERUN_BLOCKS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 2 * LANES, MOST_INPUTS = 256 };    // Values of a line; inputs of a block in the file
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 30 };    // As in GGUF

typedef struct { int64_t at, type; } Panel;    // Bytes from the beginning of the weights

typedef struct {
    int64_t bits, inputs;     // Of an integer; of a block
    int64_t least, nested;    // Whether there are least values; whether scales are integers
    int64_t held, bytes;      // Inputs and bytes of a block in the file
} Form;

// The form of a type; all zeros where it is no type of such blocks.
INLINE Form form_of(int64_t type) {
    switch (type) {
        case Q4_0: return (Form){4, 32, 0, 0, 32, 18};
        case Q4_1: return (Form){4, 32, 1, 0, 32, 20};
        case Q5_0: return (Form){8, 32, 0, 0, 32, 22};
        case Q5_1: return (Form){8, 32, 1, 0, 32, 24};
        case Q8_0: return (Form){8, 32, 0, 0, 32, 34};
        case Q2_K: return (Form){4, 16, 1, 1, 256, 84};
        case Q3_K: return (Form){4, 16, 0, 1, 256, 110};
        case Q4_K: return (Form){4, 32, 1, 1, 256, 144};
        case Q5_K: return (Form){8, 32, 1, 1, 256, 176};
        case Q6_K: return (Form){8, 16, 0, 1, 256, 210};
        default: return (Form){0};
    }
}

// Bytes of a block with its scales, and of what stands before all blocks of 256 inputs.
INLINE int64_t block_bytes(Form f) { return (f.nested ? 1 : 2) * LANES * (1 + f.least) + f.inputs / 2 * f.bits * 4; }
INLINE int64_t head_bytes(Form f) { return f.nested ? 2 * LANES * (1 + f.least) : 0; }

// Bytes of so many inputs of a panel, whole blocks of the file.
INLINE int64_t panel_bytes(int64_t type, int64_t inputs) {
    Form f = form_of(type);
    return type == BF16 ? inputs * LANES * 2 : inputs / f.held * head_bytes(f) + inputs / f.inputs * block_bytes(f);
}

#ifdef __AVX512F__
#define bytes_to_words(from) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define unsigned_bytes_to_words(from) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define shift_left _mm512_slli_epi32
#define shift_right _mm512_srli_epi32
#define shift_right_signed _mm512_srai_epi32
#define mask_words(words, bits) _mm512_and_si512(words, _mm512_set1_epi32(bits))
#define words_to_lanes _mm512_cvtepi32_ps
#define halves_to_lanes(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define multiply_lanes _mm512_mul_ps
#else
#define bytes_to_words(from) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define unsigned_bytes_to_words(from) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define shift_left _mm256_slli_epi32
#define shift_right _mm256_srli_epi32
#define shift_right_signed _mm256_srai_epi32
#define mask_words(words, bits) _mm256_and_si256(words, _mm256_set1_epi32(bits))
#define words_to_lanes _mm256_cvtepi32_ps
#define halves_to_lanes(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define multiply_lanes _mm256_mul_ps
#endif

enum { VECTORS = LINE / WIDTH };

// WIDTH numbers, one for each output -> one for each value of a line, 2 * WIDTH.
INLINE void spread(Lanes from, Lanes *to) {
#ifdef __AVX512F__
    to[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), from);
    to[1] = _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), from);
#else
    to[0] = _mm256_permutevar8x32_ps(from, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    to[1] = _mm256_permutevar8x32_ps(from, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
#endif
}

// WIDTH integers of a line, from `at` on.
INLINE Lanes integers(const int BITS, const int SIGNED, const uint8_t *line, int at) {
    if (BITS == 8) return words_to_lanes(bytes_to_words(line + at));
    int upper = at >= LANES;
    Words words = unsigned_bytes_to_words(line + at % LANES);
    if (SIGNED) return words_to_lanes(shift_right_signed(shift_left(words, upper ? 24 : 28), 28));
    return words_to_lanes(upper ? shift_right(words, 4) : mask_words(words, 15));
}

// The nearest bf16 of a line's values.
INLINE void store_line(const Lanes *values, uint16_t *out) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
#elif defined(__AVX512F__)
    for (int at = 0; at < VECTORS; at++) {
        __m512i bits = _mm512_castps_si512(values[at]);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
        _mm256_storeu_si256((__m256i *)out + at, _mm512_cvtepi32_epi16(bits));
    }
#else
    for (int at = 0; at < VECTORS; at += 2) {
        __m256i near[2];
        for (int one = 0; one < 2; one++) {
            __m256i bits = _mm256_castps_si256(values[at + one]);
            __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            near[one] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
        }
        __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(near[0], near[1]), 0xd8);
        _mm256_storeu_si256((__m256i *)(out + at * WIDTH), both);
    }
#endif
}

INLINE int64_t divide(int64_t number, int64_t power_of_two) { return number >> __builtin_ctzll((uint64_t)power_of_two); }

// The scales and least values of the block that begins with the input `at` of a panel, one for each value of a line;
// returns where its lines are. A least value of -0 leaves every product as it is.
INLINE const uint8_t *read_scales(Form f, const uint8_t *panel, int64_t at, Lanes *scale, Lanes *least) {
    int64_t block = block_bytes(f), head = head_bytes(f), each = divide(f.held, f.inputs);
    const uint8_t *outer = panel + divide(at, f.held) * (head + each * block);
    const uint8_t *here = outer + head + divide(at & (f.held - 1), f.inputs) * block;
    if (!f.nested) outer = here;
    for (int part = 0; part < PARTS; part++) {
        Lanes scales = halves_to_lanes(outer + part * WIDTH * 2), leasts = all_lanes(-0.0f);
        if (f.least) leasts = halves_to_lanes(outer + (LANES + part * WIDTH) * 2);
        if (f.nested) scales = multiply_lanes(scales, words_to_lanes(bytes_to_words(here + part * WIDTH)));
        if (f.nested && f.least) {
            Lanes negative = multiply_lanes(leasts, all_lanes(-1.0f));
            leasts = multiply_lanes(negative, words_to_lanes(bytes_to_words(here + LANES + part * WIDTH)));
        }
        spread(scales, scale + 2 * part);
        spread(leasts, least + 2 * part);
    }
    return here + (f.nested ? 1 : 2) * LANES * (1 + f.least);
}

// WIDTH values of a line, from `at` on.
INLINE Lanes values_of(const int BITS, const int SIGNED, const uint8_t *line, int at, const Lanes *scale, const Lanes *least) {
    return multiply_add(integers(BITS, SIGNED, line, at), scale[at / WIDTH], least[at / WIDTH]);
}

INLINE void expand_lines(
    const int BITS, const int SIGNED, const uint8_t *line, int64_t lines, const Lanes *scale, const Lanes *least,
    uint16_t *out) {
    for (int64_t at = 0; at < lines; at++, line += BITS * 4, out += LINE) {
        Lanes values[VECTORS];
        for (int part = 0; part < VECTORS; part++) values[part] = values_of(BITS, SIGNED, line, part * WIDTH, scale, least);
        store_line(values, out);
    }
}

INLINE void fetch_bytes(const char *from, int64_t count) {
    for (int64_t byte = 0; byte < count; byte += 64) _mm_prefetch(from + byte, _MM_HINT_T1);
}

// Inputs `from` to `to` of a panel, multiples of 32, as lines of bf16. As many bytes from `next` on are fetched.
static void expand(const uint8_t *panel, int64_t type, int64_t from, int64_t to, uint16_t *out, const char *next) {
    if (type == BF16) {
        memcpy(out, panel + from * LANES * 2, (size_t)((to - from) * LANES * 2));
        return;
    }
    Form f = form_of(type);
    for (int64_t at = from; at < to; at += f.inputs, out += f.inputs * LANES, next += block_bytes(f)) {
        Lanes scale[VECTORS], least[VECTORS];
        const uint8_t *lines = read_scales(f, panel, at, scale, least);
        fetch_bytes(next, block_bytes(f));
        if (f.bits == 8) expand_lines(8, 1, lines, f.inputs / 2, scale, least, out);
        else if (f.least) expand_lines(4, 0, lines, f.inputs / 2, scale, least, out);
        else expand_lines(4, 1, lines, f.inputs / 2, scale, least, out);
    }
}

#ifdef __AVX512BF16__
// What `tile` of `product.c` adds up, for MOST_PANELS panels in blocks of one type, whose lines are expanded as they are
// multiplied: the processor does both at once. They are stored in `out` (MOST_PANELS, `apart`), too, unless that is NULL.
INLINE void block_tile(
    const int BITS, const int SIGNED, const int ROWS, const uint16_t *states, int64_t depth, const Panel *panel,
    const uint8_t *weights, int64_t from, int64_t to, float *sums, uint16_t *out, int64_t apart, const char *const *next) {
    Lanes sum[MOST_ROWS][MOST_PANELS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int one = 0; one < MOST_PANELS; one++)
            sum[r][one] = from ? load_lanes(sums + (r * MOST_PANELS + one) * LANES) : all_lanes(0.0f);
    Form f = form_of(panel->type);
    int64_t block = block_bytes(f), ahead = 0;
    for (int64_t start = from; start < to; start += f.inputs, ahead += block) {
        Lanes scale[MOST_PANELS][VECTORS], least[MOST_PANELS][VECTORS];
        const uint8_t *line[MOST_PANELS];
        UNROLL for (int one = 0; one < MOST_PANELS; one++) {
            line[one] = read_scales(f, weights + panel[one].at, start, scale[one], least[one]);
            fetch_bytes(next[one] + ahead, block);
        }
        for (int64_t at = start; at < start + f.inputs; at += 2) {
            __m512bh weight[MOST_PANELS];
            UNROLL for (int one = 0; one < MOST_PANELS; one++) {
                Lanes low = values_of(BITS, SIGNED, line[one], 0, scale[one], least[one]);
                Lanes high = values_of(BITS, SIGNED, line[one], LANES, scale[one], least[one]);
                weight[one] = _mm512_cvtne2ps_pbh(high, low);
                if (out) _mm512_store_si512(out + one * apart, (__m512i)weight[one]);
                line[one] += BITS * 4;
            }
            if (out) out += LINE;
            UNROLL for (int r = 0; r < ROWS; r++) {
                int pair;
                memcpy(&pair, states + r * depth + at, sizeof pair);
                UNROLL for (int one = 0; one < MOST_PANELS; one++)
                    sum[r][one] = _mm512_dpbf16_ps(sum[r][one], weight[one], (__m512bh)_mm512_set1_epi32(pair));
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int one = 0; one < MOST_PANELS; one++)
            store_lanes(sums + (r * MOST_PANELS + one) * LANES, sum[r][one]);
}

static void block_tiles(
    int64_t rows, const uint16_t *states, int64_t depth, const Panel *panel, const uint8_t *weights, int64_t from,
    int64_t to, float *sums, uint16_t *out, int64_t apart, const char *const *next) {
    Form f = form_of(panel->type);
#define TILE(BITS, SIGNED, ROWS) \
    block_tile(BITS, SIGNED, ROWS, states, depth, panel, weights, from, to, sums, out, apart, next)
#define TILES_OF(ROWS)                            \
    case ROWS:                                    \
        if (f.bits == 8) TILE(8, 1, ROWS);        \
        else if (f.least) TILE(4, 0, ROWS);       \
        else TILE(4, 1, ROWS);                    \
        break;
    switch (rows) {
        TILES_OF(1) TILES_OF(2) TILES_OF(3) TILES_OF(4) TILES_OF(5) TILES_OF(6) TILES_OF(7) TILES_OF(8)
    }
#undef TILES_OF
#undef TILE
}
#endif

// A block of the file.
typedef struct {
    uint8_t outer[4];                   // Two numbers in float16: the scale and the least value, or what theirs are multiplied by
    int8_t scales[16], leasts[16];
    int8_t values[MOST_INPUTS];
} Held;

// Adds `count` numbers of `bits` bits each, shifted by `up`: those in the lowest bits of `width` bytes, then those in the
// next ones, and so on; then those of the next bytes.
static void take_bits(const uint8_t *from, int bits, int width, int up, int count, int8_t *to) {
    int each = 8 / bits;
    for (int start = 0; start < count; start += width * each, from += width)
        for (int part = 0; part < each; part++)
            for (int at = 0; at < width; at++)
                to[start + part * width + at] |= (int8_t)((from[at] >> (part * bits) & ((1 << bits) - 1)) << up);
}

static void take_outer(const uint8_t *scale, const uint8_t *least, Held *to) {
    memcpy(to->outer, scale, 2);
    if (least) memcpy(to->outer + 2, least, 2);
}

static void lower(int8_t *numbers, int count, int8_t by) {
    for (int at = 0; at < count; at++) numbers[at] -= by;
}

// Scales and least values of 6 bits, eight each.
static void take_sixes(const uint8_t *from, Held *to) {
    for (int at = 0; at < 4; at++) {
        to->scales[at] = from[at] & 63, to->leasts[at] = from[at + 4] & 63;
        to->scales[at + 4] = (from[at + 8] & 15) | (from[at] >> 2 & 48);
        to->leasts[at + 4] = from[at + 8] >> 4 | (from[at + 4] >> 2 & 48);
    }
}

// Reads a block as the package ``gguf`` does.
static void read_block(int64_t type, const uint8_t *from, Held *to) {
    int8_t both[32] = {0};
    memset(to, 0, sizeof *to);
    switch (type) {
        case Q4_0:
            take_outer(from, NULL, to);
            take_bits(from + 2, 4, 16, 0, 32, to->values);
            lower(to->values, 32, 8);
            break;
        case Q4_1:
            take_outer(from, from + 2, to);
            take_bits(from + 4, 4, 16, 0, 32, to->values);
            break;
        case Q5_0:
            take_outer(from, NULL, to);
            take_bits(from + 6, 4, 16, 0, 32, to->values);
            take_bits(from + 2, 1, 1, 4, 32, to->values);
            lower(to->values, 32, 16);
            break;
        case Q5_1:
            take_outer(from, from + 2, to);
            take_bits(from + 8, 4, 16, 0, 32, to->values);
            take_bits(from + 4, 1, 1, 4, 32, to->values);
            break;
        case Q8_0:
            take_outer(from, NULL, to);
            memcpy(to->values, from + 2, 32);
            break;
        case Q2_K:
            take_outer(from + 80, from + 82, to);
            take_bits(from, 4, 16, 0, 32, both);
            memcpy(to->scales, both, 16), memcpy(to->leasts, both + 16, 16);
            take_bits(from + 16, 2, 32, 0, 256, to->values);
            break;
        case Q3_K:
            take_outer(from + 108, NULL, to);
            take_bits(from + 96, 4, 8, 0, 16, to->scales);
            take_bits(from + 104, 2, 4, 4, 16, to->scales);
            lower(to->scales, 16, 32);
            take_bits(from + 32, 2, 32, 0, 256, to->values);
            take_bits(from, 1, 32, 2, 256, to->values);
            lower(to->values, 256, 4);
            break;
        case Q4_K:
            take_outer(from, from + 2, to);
            take_sixes(from + 4, to);
            take_bits(from + 16, 4, 32, 0, 256, to->values);
            break;
        case Q5_K:
            take_outer(from, from + 2, to);
            take_sixes(from + 4, to);
            take_bits(from + 48, 4, 32, 0, 256, to->values);
            take_bits(from + 16, 1, 32, 4, 256, to->values);
            break;
        case Q6_K:
            take_outer(from + 208, NULL, to);
            memcpy(to->scales, from + 192, 16);
            take_bits(from, 4, 64, 0, 256, to->values);
            take_bits(from + 128, 2, 32, 4, 256, to->values);
            lower(to->values, 256, 32);
    }
}

// One block of the file for each of LANES outputs -> that part of a panel.
static void write_blocks(Form f, const Held held[LANES], uint8_t *to) {
    int both = 1 + (int)f.least;
    if (f.nested)
        for (int one = 0; one < both; one++)
            for (int lane = 0; lane < LANES; lane++, to += 2) memcpy(to, held[lane].outer + 2 * one, 2);
    for (int64_t start = 0, block = 0; start < f.held; start += f.inputs, block++) {
        for (int one = 0; one < both; one++)
            for (int lane = 0; lane < LANES; lane++) {
                if (f.nested) *to++ = (uint8_t)(one ? held[lane].leasts : held[lane].scales)[block];
                else memcpy(to, held[lane].outer + 2 * one, 2), to += 2;
            }
        for (int64_t at = start; at < start + f.inputs; at += 2, to += f.bits * 4)
            for (int word = 0; word < LANES; word++) {
                int8_t first = held[word / 2].values[at + word % 2], second = held[word / 2 + LANES / 2].values[at + word % 2];
                if (f.bits == 8) to[word] = (uint8_t)first, to[word + LANES] = (uint8_t)second;
                else to[word] = (uint8_t)((first & 15) | second << 4);
            }
    }
}

#endif
