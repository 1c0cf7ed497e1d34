/* Fused CPU kernels for float32 and for bfloat16. Arithmetic is float32.
 *
 * Every output element is computed by one thread in a fixed order, so results do not depend on the number of threads.
 * Tensors are contiguous unless a stride (in elements) is given. The Python modules that call the kernels check arguments.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define ONCE static __attribute__((noinline)) /* compiled once, so that all callers get the same bits */
#define LANES 16 /* floats in one wide register */
#define BLOCK 256 /* vocabulary entries that are summed in float32 before they are added to a double */
#define SMALL 65536 /* number of elements below which starting threads takes longer than it saves */

typedef uint16_t bfloat16;

INLINE float from_bfloat16(bfloat16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE bfloat16 to_bfloat16(float x) { /* round to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bfloat16)(x != x ? 0x7fc0 : rounded);
}

/* exp(x) to about 1e-7, 0 below -87, infinite above 88; inlined, so that loops over it are vectorized (Cephes, S. Moshier). */
INLINE float fast_exp(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x; /* NaN stays NaN */
    float n = __builtin_rintf(clamped * 1.44269504088896341f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : x > 88.0f ? INFINITY : p * scale;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

/* The row size of a transposed head: an odd number of whole vectors, because rows at a distance of a power of two would
 * compete for the same cache sets. */
INLINE int64_t padded_tokens(int64_t longest) { return ((longest + LANES - 1) / LANES | 1) * LANES; }

/* scores[j] = sum_i query[i] * transposed[i * stride + j] for j < num_keys, a whole number of LANES. */
INLINE void scores_of(const float *query, const float *transposed, float *scores, int64_t num_keys, int64_t stride,
                      const int dim) {
    for (int64_t j = 0; j < num_keys; j += LANES) {
        float sums[LANES] = {0};
        for (int i = 0; i < dim; i++)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += query[i] * transposed[i * stride + j + lane];
        for (int lane = 0; lane < LANES; lane++) scores[j + lane] = sums[lane];
    }
}

/* Call `call(DIM)` with common head dimensions as constants, so that loops over them are unrolled. */
#define WITH_CONSTANT_DIM(dim, call) \
    switch (dim) {                   \
        case 32: call(32); break;    \
        case 64: call(64); break;    \
        case 128: call(128); break;  \
        default: call((int)(dim));   \
    }

/* A matrix product computes TILE rows and PANEL columns at a time, with their sums in TILE * PANEL / VECTOR registers, of
 * which there are 32 or 16. A vector holds VECTOR items of 32 bits: one float, or two adjacent bfloat16. */
#if defined(__AVX512F__)
#define VECTOR 16
#define TILE 12
#elif defined(__AVX__)
#define VECTOR 8
#define TILE 6
#else
#define VECTOR 4
#define TILE 6
#endif
#define PANEL (2 * VECTOR)
#define ROW_BLOCK (10 * TILE) /* rows of one thread's task */

typedef float floats __attribute__((vector_size(4 * VECTOR)));
typedef uint32_t items __attribute__((vector_size(4 * VECTOR)));

INLINE items load_items(const void *from) {
    items loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE items repeat_item(const void *from) {
    uint32_t item;
    memcpy(&item, from, sizeof item);
    return (items){0} + item;
}

INLINE float sum_of(floats x) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int lane = 0; lane < VECTOR; lane++) sum += x[lane];
    return sum;
}

/* The values of items, as one vector for each position in an item. */
INLINE void split_float32(items x, floats *values) { values[0] = (floats)x; }

INLINE void split_bfloat16(items x, floats *values) {
    values[0] = (floats)(x << 16);
    values[1] = (floats)(x & 0xffff0000u);
}

/* sum + the product of the values in each item */
INLINE floats multiply_add_float32(floats sum, items a, items b) { return sum + (floats)a * (floats)b; }

INLINE floats multiply_add_bfloat16(floats sum, items a, items b) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    floats x[2], y[2];
    split_bfloat16(a, x);
    split_bfloat16(b, y);
    return sum + x[0] * y[0] + x[1] * y[1];
#endif
}

#define T float
#define ITEM 1 /* values in 32 bits */
#define UP(x) (x)
#define DOWN(x) (x)
#define NAME(f) f##_float32
#include "kernels_of_type.h"
#include "decoder_of_type.h"
#undef T
#undef ITEM
#undef UP
#undef DOWN
#undef NAME

#define T bfloat16
#define ITEM 2
#define UP(x) from_bfloat16(x)
#define DOWN(x) to_bfloat16(x)
#define NAME(f) f##_bfloat16
#include "kernels_of_type.h"
#include "decoder_of_type.h"

/* The odd constant of a position (SplitMix64: Steele et al., 2014). */
INLINE uint64_t odd_constant(uint64_t position) {
    uint64_t x = (position + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (x ^ (x >> 31)) | 1;
}

/* Mix a word with the odd constant of its position: a one-to-one function in which every bit moves. */
INLINE uint64_t mixed(uint64_t word, uint64_t constant) {
    word *= constant;
    word = (word ^ (word >> 32)) * constant;
    return word ^ (word >> 29);
}

/* sum over blocks b of mixed(sum over positions i of mixed(words[b * block + i], constants[i]), odd_constant(b)), mod 2^64 */
int64_t sum_words_int64(const uint64_t *words, const uint64_t *constants, int64_t num_words, int64_t block) {
    uint64_t total = 0;
    int64_t num_blocks = (num_words + block - 1) / block;
#pragma omp parallel for schedule(static) reduction(+ : total) if (num_words > SMALL)
    for (int64_t b = 0; b < num_blocks; b++) {
        const uint64_t *first = words + b * block;
        int64_t count = b + 1 < num_blocks ? block : num_words - b * block;
        uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) sum += mixed(first[i], constants[i]);
        total += mixed(sum, odd_constant((uint64_t)b));
    }
    return (int64_t)total;
}
