// Fused kernels: RMSNorm, RoPE with the write to the KV cache, the gated activation (SwiGLU), the largest logits, and all
// of a decoder layer that stands before and behind its attention. bf16 or float32, AVX-512; every intermediate value is
// rounded where transformers' modules round it.
//
// What a token gets depends on that token alone, to the bit. Knows pointers; everything is contiguous, widths are
// multiples of 16, a head's of 32; a vocabulary is as large as it likes. Slots that are not there are refused before
// anything is written.

#include <math.h>

#include "lanes.h"
#include "product.h"

#ifdef FLOAT32_ELEMENTS
#define LEAST (-INFINITY)
#else
#define LEAST 0xFF80    // minus infinity
#endif

enum { WORTH = 1 << 15, MOST_DEPTH = 512, MOST_TOP = 64 };    // entries that several threads share; of a head; of `top`

// (rows, width) / root mean square of each row * weight (width,).
INLINE void norm(const Element *in, const Element *weight, Element *out, int64_t width, float epsilon) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += LANES) {
        __m512 values = load(in + at);
        sum = _mm512_fmadd_ps(values, values, sum);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)width + epsilon));
    for (int64_t at = 0; at < width; at += LANES)
        store(out + at, _mm512_mul_ps(load(weight + at), rounded(_mm512_mul_ps(load(in + at), scale))));
}

void forerun_norm(
    const Element *in, const Element *weight, Element *out, int64_t rows, int64_t width, float epsilon, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width >= WORTH)
    for (int64_t row = 0; row < rows; row++) norm(in + row * width, weight, out + row * width, width, epsilon);
}

// silu(gate) * up of LANES entries.
INLINE void gated(const Element *gate, const Element *up, Element *out) {
    __m512 x = load(gate), one = _mm512_set1_ps(1.0f);
    __m512 shrunk = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 above = _mm512_mask_blend_ps(negative, one, shrunk);
    __m512 silu = _mm512_mul_ps(x, _mm512_div_ps(above, _mm512_add_ps(one, shrunk)));
    store(out, _mm512_mul_ps(rounded(silu), load(up)));
}

// silu(first half of a row) * second half: (rows, 2 * width) -> (rows, width).
void forerun_gate(const Element *both, Element *out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width >= WORTH)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < width; at += LANES)
            gated(both + row * 2 * width + at, both + (row * 2 + 1) * width + at, out + row * width + at);
}

typedef struct {
    const Element *states;                    // (tokens, (heads + 2 * key_heads) * depth): queries, keys, values
    const Element *cosine, *sine;             // (tokens, depth)
    const Element *query_norm, *key_norm;     // (depth,) weights, or NULL
    const int64_t *places;                     // (tokens,) slots of the cache, counted through all its rows
    Element *query;                           // (tokens, heads, depth)
    Element *keys, *values;                   // (slots, key_heads, depth)
    int64_t tokens, slots, heads, key_heads, depth;
    float query_epsilon, key_epsilon;
    int32_t threads;
} Placing;

INLINE void rotate(const Element *in, const Element *cosine, const Element *sine, Element *out, int64_t depth) {
    int64_t half = depth / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        __m512 low = load(in + at), high = load(in + half + at), zero = _mm512_setzero_ps();
        __m512 turned = rounded(_mm512_mul_ps(_mm512_sub_ps(zero, high), load(sine + at)));
        store(out + at, _mm512_add_ps(rounded(_mm512_mul_ps(low, load(cosine + at))), turned));
        turned = rounded(_mm512_mul_ps(low, load(sine + half + at)));
        store(out + half + at, _mm512_add_ps(rounded(_mm512_mul_ps(high, load(cosine + half + at))), turned));
    }
}

static void place(const Placing *p, int64_t token) {
    const Element *cosine = p->cosine + token * p->depth, *sine = p->sine + token * p->depth;
    const Element *in = p->states + token * (p->heads + 2 * p->key_heads) * p->depth;
    Element *query = p->query + token * p->heads * p->depth;
    Element *key = p->keys + p->places[token] * p->key_heads * p->depth;
    Element *value = p->values + p->places[token] * p->key_heads * p->depth;
    Element normed[MOST_DEPTH];
    for (int64_t head = 0; head < p->heads + p->key_heads; head++, in += p->depth) {
        int asks = head < p->heads;
        const Element *weight = asks ? p->query_norm : p->key_norm;
        Element *out = asks ? query + head * p->depth : key + (head - p->heads) * p->depth;
        if (weight) norm(in, weight, normed, p->depth, asks ? p->query_epsilon : p->key_epsilon);
        rotate(weight ? normed : in, cosine, sine, out, p->depth);
    }
    for (int64_t at = 0; at < p->key_heads * p->depth; at += LANES) store(value + at, load(in + at));
}

int64_t forerun_placing_size(void) { return sizeof(Placing); }

// Whether sizes and places are in range.
static int placeable(const Placing *p) {
    if (p->heads < 1 || p->key_heads < 1 || p->depth < 32 || p->depth > MOST_DEPTH || p->depth % 32) return 0;
    for (int64_t token = 0; token < p->tokens; token++)
        if (p->places[token] < 0 || p->places[token] >= p->slots) return 0;
    return 1;
}

// 0, or 1 where sizes or places are out of range.
int32_t forerun_place(const Placing *p) {
    if (!placeable(p)) return 1;
    int64_t entries = (p->heads + 2 * p->key_heads) * p->depth;
#pragma omp parallel for num_threads(p->threads) if (p->tokens > 1 && p->tokens * entries >= WORTH)
    for (int64_t token = 0; token < p->tokens; token++) place(p, token);
    return 0;
}

INLINE __m512 load_some(const Element *from, int64_t left) {
    if (left >= LANES) return load(from);
    Element padded[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) padded[lane] = lane < left ? from[lane] : LEAST;
    return load(padded);
}

// The largest values so far, falling; of equals the first.
typedef struct {
    float values[MOST_TOP];
    int64_t *places;
    int64_t known, most;
} Top;

// Take in (LANES,) values, from the place `at` on, of which only those in `which` may be among the largest.
INLINE void take(Top *top, __m512 values, __mmask16 which, int64_t at) {
    float some[LANES];
    _mm512_storeu_ps(some, values);
    for (; which; which &= which - 1) {
        float value = some[__builtin_ctz(which)];
        if (top->known == top->most && !(value > top->values[top->most - 1])) continue;
        int64_t place = top->known < top->most ? top->known++ : top->most - 1;
        for (; place && top->values[place - 1] < value; place--) {
            top->values[place] = top->values[place - 1];
            top->places[place] = top->places[place - 1];
        }
        top->values[place] = value;
        top->places[place] = at + __builtin_ctz(which);
    }
}

// The places of the `most` largest of (width,), the largest first, of equals the first; the first is -1 where there is NaN.
static void find_top(const Element *in, int64_t *out, int64_t most, int64_t width) {
    Top top = {.places = out, .most = most};
    __m512 least = _mm512_set1_ps(-INFINITY);
    __mmask16 unordered = 0;
    for (int64_t at = 0; at < width;) {
        __m512 values = load_some(in + at, width - at);
        if (top.known == most && width - at >= 4 * LANES) {    // nearly always none of them is among the largest
            __m512 second = load(in + at + LANES), third = load(in + at + 2 * LANES), fourth = load(in + at + 3 * LANES);
            __mmask16 nan = _mm512_cmp_ps_mask(values, second, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(third, fourth, _CMP_UNORD_Q);
            __m512 larger = _mm512_max_ps(_mm512_max_ps(values, second), _mm512_max_ps(third, fourth));
            if (!(nan | _mm512_cmp_ps_mask(larger, least, _CMP_GT_OQ))) {
                at += 4 * LANES;
                continue;
            }
        }
        int64_t lanes = width - at < LANES ? width - at : LANES;
        unordered |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        __mmask16 larger = _mm512_cmp_ps_mask(values, least, _CMP_GT_OQ);
        take(&top, values, top.known < most ? (__mmask16)((1u << lanes) - 1) : larger, at);
        if (top.known == most) least = _mm512_set1_ps(top.values[most - 1]);
        at += LANES;
    }
    if (unordered) out[0] = -1;
}

// (rows, width) -> (rows, most) by `find_top`; 1 where that is more than there are, or than it holds.
int32_t forerun_top(const Element *in, int64_t *out, int64_t most, int64_t rows, int64_t width, int32_t threads) {
    if (most < 1 || most > width || most > MOST_TOP) return 1;
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width >= 8 * WORTH)
    for (int64_t row = 0; row < rows; row++) find_top(in + row * width, out + row * most, most, width);
    return 0;
}

// One decoder layer: norm, joint projection of queries, keys and values, `place`, attention, output projection, residual,
// norm, joint projection of gate and up, activation, down projection, residual. What differs from pass to pass is left out.
typedef struct {
    Product joint;           // of `normed`, into what `placing` reads
    Product mix;             // of what attention found, into (tokens, width)
    Product gates;           // of `normed`, into (tokens, 2 * inner)
    Product down;            // of (tokens, inner), into (tokens, width), the layer's answer
    Placing placing;
    const Element *first, *second;    // (width,) weights of the norms
    int64_t width, inner;
    float first_epsilon, second_epsilon;
} Layer;

// A thread's share of attention, over the keys and values at these addresses; 0, or what is wrong.
typedef int32_t (*Attend)(const void *problem, const void *keys, const void *values);

// What the layers of one pass share.
typedef struct {
    const Element *states;       // (tokens, width) the first layer's input
    Element *answer;             // (tokens, width) that of one layer which runs alone
    Element *const *outputs;     // (tokens, width) each: where several layers write theirs
    Element *attended;           // (tokens, heads * depth)
    const Element *cosine, *sine;
    const int64_t *places;
    const void *attention;       // what `attend` is asked, but for the keys and values
    Multiply multiply;
    Attend attend;
    int64_t tokens, slots;
    int64_t keys_from, values_from;    // entries of the stores before those that attention reads
    int64_t reads;                     // whether the tokens are a prompt's
    int32_t threads;
} Pass;

int64_t forerun_layer_size(void) { return sizeof(Layer); }

int64_t forerun_pass_size(void) { return sizeof(Pass); }

static Placing placing_of(const Layer *l, const Pass *p) {
    Placing placing = l->placing;
    placing.tokens = p->tokens, placing.cosine = p->cosine, placing.sine = p->sine, placing.places = p->places, placing.slots = p->slots;
    return placing;
}

// A product of all tokens by all threads of a team, which are together before and behind it.
static void multiply(const Pass *p, Product product) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    product.rows = p->tokens;
    if (product.blocks && p->reads) product.blocks = IN_BLOCKS_READING;
    if (product.kind == WIDENED) {
        widen_states(&product, thread, threads);
#pragma omp barrier
    }
    p->multiply(&product, thread, threads);
#pragma omp barrier
}

// What stands before a layer's attention, by all threads of a team.
static void enter(const Layer *l, const Pass *p, const Element *states) {
    Placing placing = placing_of(l, p);
    Element *normed = (Element *)l->joint.states;
#pragma omp for
    for (int64_t token = 0; token < placing.tokens; token++)
        norm(states + token * l->width, l->first, normed + token * l->width, l->width, l->first_epsilon);
    multiply(p, l->joint);
#pragma omp for
    for (int64_t token = 0; token < placing.tokens; token++) place(&placing, token);
}

// to += from
INLINE void add(Element *to, const Element *from, int64_t width) {
    for (int64_t at = 0; at < width; at += LANES) store(to + at, _mm512_add_ps(load(from + at), load(to + at)));
}

// What stands behind it.
static void leave(const Layer *l, const Pass *p, const Element *states, Element *answer) {
    int64_t tokens = p->tokens, width = l->width, parts = l->inner / LANES;
    Product mix = l->mix, down = l->down;
    mix.states = p->attended, down.out = answer;
    Element *mixed = mix.out, *normed = (Element *)l->gates.states, *inner = (Element *)down.states;
    const Element *both = l->gates.out;
    multiply(p, mix);
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
        add(mixed + token * width, states + token * width, width);
        norm(mixed + token * width, l->second, normed + token * width, width, l->second_epsilon);
    }
    multiply(p, l->gates);
#pragma omp for
    for (int64_t at = 0; at < tokens * parts; at++) {
        const Element *gate = both + at / parts * 2 * l->inner + at % parts * LANES;
        gated(gate, gate + l->inner, inner + at * LANES);
    }
    multiply(p, down);
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) add(answer + token * width, mixed + token * width, width);
}

// 0, or 1 where places are out of range.
int32_t forerun_enter(const Layer *l, const Pass *p) {
    Placing placing = placing_of(l, p);
    if (!placeable(&placing)) return 1;
#pragma omp parallel num_threads(p->threads)
    enter(l, p, p->states);
    return 0;
}

void forerun_leave(const Layer *l, const Pass *p) {
#pragma omp parallel num_threads(p->threads)
    leave(l, p, p->states, p->answer);
}

// Layers one behind the other. 0, or 1 where places are out of range, 2 where attention cannot be computed.
int32_t forerun_layers(const Layer *const *layers, int64_t count, const Pass *p) {
    int32_t failed = 0;
    for (int64_t at = 0; at < count; at++) {
        Placing placing = placing_of(layers[at], p);
        if (!placeable(&placing)) return 1;
    }
#pragma omp parallel num_threads(p->threads)
    for (int64_t at = 0; at < count; at++) {
        const Layer *l = layers[at];
        const Element *states = at ? p->outputs[at - 1] : p->states;
        enter(l, p, states);
        if (p->attend(p->attention, l->placing.keys + p->keys_from, l->placing.values + p->values_from)) {
#pragma omp atomic write
            failed = 2;
        }
#pragma omp barrier
        leave(l, p, states, p->outputs[at]);
    }
    return failed;
}
