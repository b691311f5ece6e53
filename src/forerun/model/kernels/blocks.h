// Weights that stay as a GGUF file keeps them, in blocks of few bits, times states in 8 bits.
//
// A weight is scale * integer + least, with one scale and one least value for each output and block of inputs. The states
// of a row are rounded to integers of 8 bits, with one scale for every `GROUP` inputs (llama.cpp: for every 32). A group
// with a state that stands out in its row would lose the others: what rounding leaves of it is multiplied, too, as integers
// of its own. Integers are multiplied exactly; their sum over a group is multiplied by both scales, and the least value by
// the sum of the states. Processors differ in how they multiply integers, never in what comes out.
//
// Such weights begin with one `Panel` for each panel. A panel is a sequence of blocks: scales of LANES outputs, their least
// values, then lines of 64 bytes. A line of 8 bits has four inputs of each output side by side. A line of 4 bits has eight:
// the first four in the low halves of its bytes. Integers are unsigned: those of types without least values were moved up
// by `offset_of`. Scales and least values are float16; those of the formats "K" are 8-bit integers, and before every 256
// inputs stand the float16 numbers that they are multiplied by.

#ifndef FORERUN_BLOCKS_H
#define FORERUN_BLOCKS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { GROUP = 16, LINE = 4 * LANES };    // Inputs that share a scale of the states; bytes of a line
enum { MOST_INPUTS = 256 };              // Of a block in the file
enum { OUTSTANDING = 3 };                // Times the mean of its row's groups that the largest state of such a group has
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
INLINE int64_t block_bytes(Form f) { return (f.nested ? 1 : 2) * LANES * (1 + f.least) + f.inputs * f.bits / 32 * LINE; }
INLINE int64_t head_bytes(Form f) { return f.nested ? 2 * LANES * (1 + f.least) : 0; }

// Bytes of so many inputs of a panel, whole blocks of the file.
INLINE int64_t panel_bytes(int64_t type, int64_t inputs) {
    Form f = form_of(type);
    return type == BF16 ? inputs * LANES * 2 : inputs / f.held * head_bytes(f) + inputs / f.inputs * block_bytes(f);
}

// What was added to the integers of a type.
INLINE int offset_of(Form f) { return f.least ? 0 : f.bits == 4 ? 8 : 128; }

// A block of a panel.
typedef struct {
    const uint8_t *outer, *inner;    // Scales and least values, LANES each: float16, and for "K" the integers behind them
    const uint8_t *lines, *next;
} Block;

// The block behind `b`, which begins with the input `at`.
INLINE Block next_block(Form f, Block b, int64_t at) {
    const uint8_t *inner = b.next;
    if (!f.nested) b.outer = inner;
    else if (at % MOST_INPUTS == 0) b.outer = inner, inner += head_bytes(f);
    return (Block){b.outer, inner, inner + (f.nested ? 1 : 2) * LANES * (1 + f.least), inner + block_bytes(f)};
}

// The scales (`least` = 0) of WIDTH outputs from number `first` on, or their least values (1).
INLINE Lanes scales_of(Form f, Block b, int first, int least) {
#ifdef __AVX512F__
    Lanes outer = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(b.outer + 2 * (least * LANES + first))));
    if (!f.nested) return outer;
    Words inner = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(b.inner + least * LANES + first)));
    return _mm512_mul_ps(least ? _mm512_mul_ps(outer, all_lanes(-1.0f)) : outer, _mm512_cvtepi32_ps(inner));
#else
    Lanes outer = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b.outer + 2 * (least * LANES + first))));
    if (!f.nested) return outer;
    Words inner = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(b.inner + least * LANES + first)));
    return _mm256_mul_ps(least ? _mm256_mul_ps(outer, all_lanes(-1.0f)) : outer, _mm256_cvtepi32_ps(inner));
#endif
}

// The values of two neighbouring inputs, the first of which lie `shift` bits up in a line's words, as a line of bf16.
INLINE void expand_pair(
    const uint32_t *words, const int BITS, int shift, int offset, const float *scale, const float *least, uint32_t *to) {
    for (int lane = 0; lane < LANES; lane++) {
        int first = (int)(words[lane] >> shift) & ((1 << BITS) - 1);
        int second = (int)(words[lane] >> (shift + 8)) & ((1 << BITS) - 1);
        float one = fmaf((float)(first - offset), scale[lane], least[lane]);
        float other = fmaf((float)(second - offset), scale[lane], least[lane]);
        to[lane] = narrow(one) | (uint32_t)narrow(other) << 16;
    }
}

// The values of a panel as lines of bf16.
static void expand(const uint8_t *panel, int64_t type, int64_t inputs, uint16_t *out) {
    if (type == BF16) {
        memcpy(out, panel, (size_t)(inputs * LANES * 2));
        return;
    }
    Form f = form_of(type);
    int offset = offset_of(f);
    uint32_t words[LANES], *to = (uint32_t *)out;
    Block b = {.next = panel};
    for (int64_t at = 0; at < inputs; at += f.inputs) {
        b = next_block(f, b, at);
        float scale[LANES], least[LANES];
        for (int part = 0; part < PARTS; part++) {
            store_lanes(scale + part * WIDTH, scales_of(f, b, part * WIDTH, 0));
            // A least value of -0 leaves every sum as it is
            store_lanes(least + part * WIDTH, f.least ? scales_of(f, b, part * WIDTH, 1) : all_lanes(-0.0f));
        }
        for (int64_t line = 0; line < f.inputs * f.bits / 32; line++) {
            memcpy(words, b.lines + line * LINE, LINE);
            for (int shift = 0; shift < 32; shift += 16, to += LANES)
                if (f.bits == 4) expand_pair(words, 4, shift, offset, scale, least, to);
                else expand_pair(words, 8, shift, offset, scale, least, to);
            for (int shift = 4; f.bits == 4 && shift < 32; shift += 16, to += LANES)
                expand_pair(words, 4, shift, offset, scale, least, to);
        }
    }
}

// GROUP states of a row in 8 bits.
typedef struct {
    int8_t integers[GROUP];
    float scale;
    int32_t sum;       // Of the integers
    float total;       // Of the states
    float pair;        // Of these states and those of the group before
} Group;

// The states of a tile's rows in 8 bits; (groups, rows) each.
typedef struct {
    Group *groups, *rests;    // What rounding left, zeros but for outstanding groups
    uint8_t *outstanding;     // (groups,) whether it is one in any of the rows
} States;

INLINE int64_t room_of_states(int64_t groups, int64_t rows) {
    return (groups * (2 * rows * (int64_t)sizeof(Group) + 1) + 63) / 64 * 64;
}

INLINE States states_in(char *room, int64_t groups, int64_t rows) {
    Group *first = (Group *)room;
    return (States){first, first + groups * rows, (uint8_t *)(first + 2 * groups * rows)};
}

// The largest magnitude of GROUP states in bf16; where one is not finite, neither is this.
INLINE float largest_of(const uint16_t *states) {
    __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)states), _mm256_set1_epi16(0x7fff));
    __m128i larger = _mm_max_epu16(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(larger, _mm_set1_epi16(-1))), 0);
    uint32_t wide = (uint32_t)(0xffff - least) << 16;
    float largest;
    memcpy(&largest, &wide, sizeof largest);
    return largest;
}

// Rounds values to multiples of `largest` / 127 and leaves in them what remains.
INLINE void round_group(__m256 values[2], float largest, Group *to) {
    __m256i words[2];
    to->scale = largest / 127;
    for (int half = 0; half < 2; half++) {
        __m256 inverse = _mm256_set1_ps(largest > 1e-35f ? 127 / largest : 0);    // Smaller states and NaN: all are 0
        words[half] = _mm256_cvtps_epi32(_mm256_mul_ps(values[half], inverse));
        values[half] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(words[half]), _mm256_set1_ps(to->scale), values[half]);
    }
    __m256i added = _mm256_add_epi32(words[0], words[1]);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(added), _mm256_extracti128_si256(added, 1));
    sum = _mm_hadd_epi32(sum, sum);
    to->sum = _mm_cvtsi128_si32(_mm_hadd_epi32(sum, sum));
    to->total = to->scale * (float)to->sum;
    added = _mm256_permute4x64_epi64(_mm256_packs_epi32(words[0], words[1]), 0xd8);
    sum = _mm_packs_epi16(_mm256_castsi256_si128(added), _mm256_extracti128_si256(added, 1));
    _mm_storeu_si128((__m128i *)to->integers, sum);
}

// States (rows, depth) in bf16 -> 8 bits. NaN or an infinity in a row makes its sums non-finite.
static void round_states(const uint16_t *states, int64_t rows, int64_t depth, States to) {
    memset(to.rests, 0, (size_t)(depth / GROUP) * ((size_t)rows * sizeof(Group) + 1));    // And `outstanding` behind them
    for (int64_t row = 0; row < rows; row++) {
        float sum = 0;
        for (int64_t group = 0; group < depth / GROUP; group++) {
            Group *here = to.groups + group * rows + row;
            here->scale = largest_of(states + group * GROUP);
            sum += here->scale;
        }
        float bound = sum / (float)(depth / GROUP) * OUTSTANDING;
        for (int64_t group = 0; group < depth / GROUP; group++, states += GROUP) {
            Group *here = to.groups + group * rows + row;
            float largest = here->scale;
            __m256 values[2];
            for (int half = 0; half < 2; half++) {
                __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(states + 8 * half)));
                values[half] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
            }
            round_group(values, largest, here);
            if (largest > bound) {
                Group *rest = to.rests + group * rows + row;
                round_group(values, here->scale / 2, rest);
                here->total += rest->total;
                to.outstanding[group] = 1;
            }
            if (group % 2) here->pair = here[-rows].total + here->total;
        }
    }
}

#ifdef __AVX512F__
#define all_words _mm512_set1_epi32
#define add_words _mm512_add_epi32
#define words_to_lanes _mm512_cvtepi32_ps
#define low_halves(bytes) _mm512_and_si512(bytes, _mm512_set1_epi8(15))
#define high_halves(bytes) _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15))
#define multiply_bytes _mm512_maddubs_epi16
#define add_shorts _mm512_add_epi16
#define add_pairs(shorts, times) _mm512_madd_epi16(shorts, _mm512_set1_epi16(times))
#define multiply_lanes _mm512_mul_ps
#else
#define all_words _mm256_set1_epi32
#define add_words _mm256_add_epi32
#define words_to_lanes _mm256_cvtepi32_ps
#define low_halves(bytes) _mm256_and_si256(bytes, _mm256_set1_epi8(15))
#define high_halves(bytes) _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15))
#define multiply_bytes _mm256_maddubs_epi16
#define add_shorts _mm256_add_epi16
#define add_pairs(shorts, times) _mm256_madd_epi16(shorts, _mm256_set1_epi16(times))
#define multiply_lanes _mm256_mul_ps
#endif

// Sums of WIDTH outputs over a group: those of whole integers, or of their low and high halves in 16 bits.
typedef struct { Words low, high; } Sums;

// Adds four integers of each output, of BITS bits, times four states. What is added up over a group fits 16 bits.
INLINE void add_dots(const int BITS, Sums *sums, Words bytes, Words states) {
#ifdef __AVX512VNNI__
    (void)BITS;
    sums->low = _mm512_dpbusd_epi32(sums->low, bytes, states);
#else
    sums->low = add_shorts(sums->low, multiply_bytes(BITS == 4 ? bytes : low_halves(bytes), states));
    if (BITS == 8) sums->high = add_shorts(sums->high, multiply_bytes(high_halves(bytes), states));
#endif
}

INLINE Words added_up(const int BITS, Sums sums) {
#ifdef __AVX512VNNI__
    (void)BITS;
    return sums.low;
#else
    Words low = add_pairs(sums.low, 1);
    return BITS == 4 ? low : add_words(low, add_pairs(sums.high, 16));
#endif
}

// Adds GROUP inputs, whose integers lie from `lines` on, times the states of ROWS rows to a block's sums; to none at first.
INLINE void add_group(
    const int BITS, const int LEAST, const int ROWS, const int FIRST, const uint8_t *lines, const Group *groups,
    Lanes *block) {
    Sums whole[MOST_ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) whole[r].low = whole[r].high = all_words(0);
    UNROLL for (int four = 0; four < GROUP / 4; four++) {
        Words bytes = load_words(lines + four * BITS / 8 * LINE);
        if (BITS == 4) bytes = four % 2 ? high_halves(bytes) : low_halves(bytes);
        UNROLL for (int r = 0; r < ROWS; r++) {
            int states;
            memcpy(&states, groups[r].integers + four * 4, sizeof states);
            add_dots(BITS, whole + r, bytes, all_words(states));
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        Words words = added_up(BITS, whole[r]);
        if (!LEAST) words = add_words(words, all_words(-(BITS == 4 ? 8 : 128) * groups[r].sum));
        Lanes lanes = words_to_lanes(words), scale = all_lanes(groups[r].scale);
        block[r] = FIRST ? multiply_lanes(lanes, scale) : multiply_add(lanes, scale, block[r]);
    }
}

// ROWS rows x WIDTH outputs of a panel from number `first` on -> sums (ROWS, LANES).
INLINE void block_tile(
    const int BITS, const int LEAST, const int INPUTS, const int ROWS, Form f, int64_t depth, States s,
    const uint8_t *panel, int first, float *sums) {
    Lanes sum[MOST_ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) sum[r] = all_lanes(0.0f);
    Block b = {.next = panel};
    for (int64_t at = 0; at < depth; at += INPUTS) {
        b = next_block(f, b, at);
        const uint8_t *lines = b.lines + 4 * first;
        Lanes block[MOST_ROWS];
        UNROLL for (int half = 0; half < INPUTS / GROUP; half++, lines += GROUP * BITS / 32 * LINE) {
            if (half) add_group(BITS, LEAST, ROWS, 0, lines, s.groups, block);
            else add_group(BITS, LEAST, ROWS, 1, lines, s.groups, block);
            if (*s.outstanding) add_group(BITS, LEAST, ROWS, 0, lines, s.rests, block);
            s.groups += ROWS, s.rests += ROWS, s.outstanding++;
        }
        Lanes scale = scales_of(f, b, first, 0);
        UNROLL for (int r = 0; r < ROWS; r++) sum[r] = multiply_add(block[r], scale, sum[r]);
        if (!LEAST) continue;
        Lanes least = scales_of(f, b, first, 1);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Group *last = s.groups + r - ROWS;
            sum[r] = multiply_add(least, all_lanes(INPUTS == GROUP ? last->total : last->pair), sum[r]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) store_lanes(sums + r * LANES + first, sum[r]);
}

static void block_tiles(
    int64_t rows, Form f, int64_t depth, States s, const uint8_t *panel, int first, float *sums) {
#define TILE(BITS, LEAST, INPUTS, ROWS)                                                            \
    if (f.bits == BITS && f.least == LEAST && f.inputs == INPUTS) {                                \
        block_tile(BITS, LEAST, INPUTS, ROWS, f, depth, s, panel, first, sums);                    \
        return;                                                                                    \
    }
#define TILES(ROWS)                                                                                \
    case ROWS:                                                                                     \
        TILE(4, 0, 16, ROWS) TILE(4, 0, 32, ROWS) TILE(4, 1, 16, ROWS) TILE(4, 1, 32, ROWS)        \
        TILE(8, 0, 16, ROWS) TILE(8, 0, 32, ROWS) TILE(8, 1, 32, ROWS)                             \
        break;
    switch (rows) {
        TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#ifdef __AVX512F__
        TILES(7) TILES(8)
#endif
    }
#undef TILES
#undef TILE
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
        for (int64_t at = 0; at < f.inputs; at++)
            for (int lane = 0; lane < LANES; lane++) {
                uint8_t value = (uint8_t)(held[lane].values[start + at] + offset_of(f));
                uint8_t *byte = to + at * f.bits / 32 * LINE + 4 * lane + at % 4;
                *byte = f.bits == 4 && at / 4 % 2 ? (uint8_t)(*byte | value << 4) : value;
            }
        to += f.inputs * f.bits / 32 * LINE;
    }
}

#endif
