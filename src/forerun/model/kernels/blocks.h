// Weights that stay as a GGUF file keeps them, in blocks of few bits.
//
// A value is scale * integer + least, with one scale and one least value for each output and block of inputs. The integers
// are multiplied, as float32 or as bf16, which holds them exactly; the sum over a block by its scale, and the least value by
// the sum of the states. AMX tiles take whole panels of bf16: what dequantising to float32 and rounding gives.
//
// Such weights begin with one `Panel` for each panel. A panel is a sequence of blocks: scales of LANES outputs, their least
// values, then a line for every two inputs: LANES x 2 integers. Those of 8 bits lie side by side, those of 4 in words of 16
// bits, each of which holds the same place of four lines, the first one lowest. Scales and least values are float16; those
// of the formats "K" are 8-bit integers, and before every 256 inputs stand the float16 numbers that they are multiplied by.

#ifndef FORERUN_BLOCKS_H
#define FORERUN_BLOCKS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 2 * LANES, TOGETHER = 4 };    // Values of a line; lines that lie together
enum { MOST_INPUTS = 256 };                // Of a block in the file
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
#define halves_to_words(from) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from)))
#define shift_left(words, by) _mm512_slli_epi32(words, (unsigned)(by))
#define shift_right(words, by) _mm512_srli_epi32(words, (unsigned)(by))
#define shift_right_signed(words, by) _mm512_srai_epi32(words, by)
#define mask_words(words, bits) _mm512_and_si512(words, _mm512_set1_epi32((int)(bits)))
#define join_words _mm512_or_si512
#define add_words _mm512_add_epi32
#define all_words _mm512_set1_epi32
#define store_words(to, words) _mm512_storeu_si512(to, words)
#define words_of_lanes _mm512_castps_si512
#define words_to_lanes _mm512_cvtepi32_ps
#define halves_to_lanes(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define multiply_lanes _mm512_mul_ps
#else
#define bytes_to_words(from) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define halves_to_words(from) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define shift_left _mm256_slli_epi32
#define shift_right _mm256_srli_epi32
#define shift_right_signed _mm256_srai_epi32
#define mask_words(words, bits) _mm256_and_si256(words, _mm256_set1_epi32((int)(bits)))
#define join_words _mm256_or_si256
#define add_words _mm256_add_epi32
#define all_words _mm256_set1_epi32
#define store_words(to, words) _mm256_storeu_si256((__m256i *)(to), words)
#define words_of_lanes _mm256_castps_si256
#define words_to_lanes _mm256_cvtepi32_ps
#define halves_to_lanes(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define multiply_lanes _mm256_mul_ps
#endif

// Bytes of as many lines as lie together.
INLINE int64_t bytes_together(const int BITS) { return TOGETHER * LINE * BITS / 8; }

// Integers of WIDTH outputs, from number `part` * WIDTH on, of the first input (0) or the second (1) of the line `at`. Those of
// 4 bits are signed where there are no least values.
INLINE Lanes integers(const int BITS, const int LEAST, const uint8_t *lines, int at, int part, int input) {
    if (BITS == 8) {
        Words words = halves_to_words(lines + at * LINE + part * WIDTH * 2);
        return words_to_lanes(shift_right_signed(shift_left(words, 24 - 8 * input), 24));
    }
    Words words = load_words(lines + part * WIDTH * 4);
    if (LEAST) return words_to_lanes(mask_words(shift_right(words, 16 * input + 4 * at), 15));
    return words_to_lanes(shift_right_signed(shift_left(words, 28 - 16 * input - 4 * at), 28));
}

// Two values of WIDTH outputs -> the nearest bf16, that part of a line.
INLINE void store_pairs(uint16_t *to, Lanes first, Lanes second) {
#ifdef __AVX512BF16__
    const __m512i halves = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_or_si512(halves, _mm512_slli_epi32(_mm512_add_epi32(halves, _mm512_set1_epi32(16)), 16));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
#else
    Words near[2] = {words_of_lanes(first), words_of_lanes(second)};
    for (int one = 0; one < 2; one++)
        near[one] = add_words(add_words(near[one], all_words(0x7fff)), mask_words(shift_right(near[one], 16), 1));
    store_words(to, join_words(shift_right(near[0], 16), mask_words(near[1], 0xffff0000u)));
#endif
}

INLINE int64_t divide(int64_t number, int64_t power_of_two) { return number >> __builtin_ctzll((uint64_t)power_of_two); }

// The scales and least values of the block that begins with the input `at` of a panel, LANES each; returns where its lines
// are. A least value of -0 leaves every sum as it is.
INLINE const uint8_t *read_scales(Form f, const uint8_t *panel, int64_t at, Lanes *scale, Lanes *least) {
    int64_t block = block_bytes(f), head = head_bytes(f), each = divide(f.held, f.inputs);
    const uint8_t *outer = panel + divide(at, f.held) * (head + each * block);
    const uint8_t *here = outer + head + divide(at & (f.held - 1), f.inputs) * block;
    if (!f.nested) outer = here;
    for (int part = 0; part < PARTS; part++) {
        scale[part] = halves_to_lanes(outer + part * WIDTH * 2), least[part] = all_lanes(-0.0f);
        if (f.least) least[part] = halves_to_lanes(outer + (LANES + part * WIDTH) * 2);
        if (f.nested) scale[part] = multiply_lanes(scale[part], words_to_lanes(bytes_to_words(here + part * WIDTH)));
        if (f.nested && f.least) {
            Lanes negative = multiply_lanes(least[part], all_lanes(-1.0f));
            least[part] = multiply_lanes(negative, words_to_lanes(bytes_to_words(here + LANES + part * WIDTH)));
        }
    }
    return here + (f.nested ? 1 : 2) * LANES * (1 + f.least);
}

INLINE void expand_lines(
    const int BITS, const int LEAST, const uint8_t *lines, int64_t count, const Lanes *scale, const Lanes *least,
    uint16_t *out) {
    for (int64_t at = 0; at < count; at += TOGETHER, lines += bytes_together(BITS))
        UNROLL for (int one = 0; one < TOGETHER; one++, out += LINE)
            UNROLL for (int part = 0; part < PARTS; part++) {
                Lanes first = integers(BITS, LEAST, lines, one, part, 0);
                Lanes second = integers(BITS, LEAST, lines, one, part, 1);
                first = multiply_add(first, scale[part], least[part]);
                second = multiply_add(second, scale[part], least[part]);
                store_pairs(out + part * WIDTH * 2, first, second);
            }
}

// The values of a panel as lines of bf16.
static void expand(const uint8_t *panel, int64_t type, int64_t inputs, uint16_t *out) {
    if (type == BF16) {
        memcpy(out, panel, (size_t)(inputs * LANES * 2));
        return;
    }
    Form f = form_of(type);
    for (int64_t at = 0; at < inputs; at += f.inputs, out += f.inputs * LANES) {
        Lanes scale[PARTS], least[PARTS];
        const uint8_t *lines = read_scales(f, panel, at, scale, least);
        if (f.bits == 8) expand_lines(8, 1, lines, f.inputs / 2, scale, least, out);
        else if (f.least) expand_lines(4, 1, lines, f.inputs / 2, scale, least, out);
        else expand_lines(4, 0, lines, f.inputs / 2, scale, least, out);
    }
}

#ifdef __AVX512BF16__
// Integers of 4 bits in bf16, signed and unsigned; twice, for an index of a permutation has five bits, of which the highest
// is another integer's.
#define SEVEN 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0
#define SIGNED SEVEN, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80
#define UNSIGNED SEVEN, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170
static const uint16_t FOURS[2][2 * LANES] = {{SIGNED, SIGNED}, {UNSIGNED, UNSIGNED}};

// The line number `at` as bf16.
INLINE __m512bh line_of(const int BITS, const int LEAST, const uint8_t *lines, int at) {
    if (BITS == 8) {
        Lanes lower = words_to_lanes(bytes_to_words(lines + at * LINE));
        Lanes upper = words_to_lanes(bytes_to_words(lines + at * LINE + LANES));
        return _mm512_cvtne2ps_pbh(upper, lower);
    }
    __m512i index = _mm512_srli_epi16(_mm512_loadu_si512(lines), (unsigned)(4 * at));
    return (__m512bh)_mm512_permutexvar_epi16(index, _mm512_loadu_si512(FOURS[LEAST]));
}
#endif

#ifdef __AVX512BF16__
typedef uint16_t State;
#else
typedef float State;
#endif

// What is multiplied with a panel: rows of the states, and the sums of as many of them as a block has inputs.
typedef struct { const State *rows; const float *totals; int64_t depth; } States;

// Adds one line times the states of its two inputs, which lie at `states`, to the sums of ROWS rows.
INLINE void add_line(
    const int BITS, const int LEAST, const int ROWS, const uint8_t *lines, int at, const State *states, int64_t depth,
    Lanes (*sum)[PARTS]) {
#ifdef __AVX512BF16__
    __m512bh weights = line_of(BITS, LEAST, lines, at);
    UNROLL for (int r = 0; r < ROWS; r++) {
        int pair;
        memcpy(&pair, states + r * depth, sizeof pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], weights, (__m512bh)_mm512_set1_epi32(pair));
    }
#else
    UNROLL for (int input = 0; input < 2; input++) {
        Lanes weights[PARTS];
        UNROLL for (int part = 0; part < PARTS; part++) weights[part] = integers(BITS, LEAST, lines, at, part, input);
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int part = 0; part < PARTS; part++)
                sum[r][part] = multiply_add(weights[part], all_lanes(states[r * depth + input]), sum[r][part]);
    }
#endif
}

// ROWS rows x a panel -> sums (ROWS, LANES).
INLINE void block_tile(
    const int BITS, const int LEAST, const int ROWS, Form f, States s, const uint8_t *panel, float *sums) {
    Lanes sum[MOST_ROWS][PARTS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int part = 0; part < PARTS; part++) sum[r][part] = all_lanes(0.0f);
    const float *totals = s.totals;
    int64_t blocks = divide(s.depth, f.inputs);
    for (int64_t start = 0; start < s.depth; start += f.inputs, totals++) {
        Lanes scale[PARTS], least[PARTS], block[MOST_ROWS][PARTS];
        const uint8_t *lines = read_scales(f, panel, start, scale, least);
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int part = 0; part < PARTS; part++) block[r][part] = all_lanes(0.0f);
        for (int64_t at = start; at < start + f.inputs; at += 2 * TOGETHER, lines += bytes_together(BITS))
            UNROLL for (int one = 0; one < TOGETHER; one++)
                add_line(BITS, LEAST, ROWS, lines, one, s.rows + at + 2 * one, s.depth, block);
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int part = 0; part < PARTS; part++) sum[r][part] = multiply_add(block[r][part], scale[part], sum[r][part]);
        if (!LEAST) continue;
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int part = 0; part < PARTS; part++)
                sum[r][part] = multiply_add(least[part], all_lanes(totals[r * blocks]), sum[r][part]);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int part = 0; part < PARTS; part++) store_lanes(sums + r * LANES + part * WIDTH, sum[r][part]);
}

static void block_tiles(int64_t rows, Form f, States s, const uint8_t *panel, float *sums) {
#define TILE(ROWS)                                                                     \
    case ROWS:                                                                         \
        if (f.bits == 8 && f.least) block_tile(8, 1, ROWS, f, s, panel, sums);         \
        else if (f.bits == 8) block_tile(8, 0, ROWS, f, s, panel, sums);               \
        else if (f.least) block_tile(4, 1, ROWS, f, s, panel, sums);                   \
        else block_tile(4, 0, ROWS, f, s, panel, sums);                                \
        break;
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#ifdef __AVX512F__
        TILE(7) TILE(8)
#endif
    }
#undef TILE
}

// The sums of every 16 of `count` states, and behind them those of every 32.
static void add_up(const uint16_t *states, int64_t count, float *totals) {
    for (int64_t at = 0; at < count; at += 16) {
        float values[16];
        for (int one = 0; one < 16; one++) {
            uint32_t bits = (uint32_t)states[at + one] << 16;
            memcpy(values + one, &bits, sizeof bits);
        }
        UNROLL for (int half = 8; half; half /= 2)
            UNROLL for (int one = 0; one < half; one++) values[one] += values[one + half];
        totals[at / 16] = values[0];
    }
    for (int64_t at = 0; at < count / 32; at++) totals[count / 16 + at] = totals[2 * at] + totals[2 * at + 1];
}

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
        for (int64_t at = start; at < start + f.inputs; at += 2)
            for (int place = 0; place < LINE; place++) {
                uint8_t value = (uint8_t)held[place / 2].values[at + place % 2];
                int64_t line = (at - start) / 2;
                uint8_t *byte = to + line / TOGETHER * 2 * LINE + 2 * place + line % TOGETHER / 2;
                if (f.bits == 8) to[line * LINE + place] = value;
                else if (line % 2) *byte |= (uint8_t)(value << 4);
                else *byte = value & 15;
            }
        to += f.inputs / 2 * f.bits * 4;
    }
}

#endif
