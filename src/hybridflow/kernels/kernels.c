/* Fused CPU kernels, once for float and once for bfloat16. Arithmetic is float32 throughout.
 *
 * Every output element is computed whole by one thread in a fixed order: results do not depend on the number of threads.
 * Tensors are contiguous unless a stride (in elements) is given. Checks are the caller's affair (operations.py).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* floats in one wide register */
#define BLOCK 256 /* vocabulary entries that are summed in float32 before they are added to a double */
#define SMALL 65536 /* elements below which starting threads costs more than it saves */

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

/* exp(x) to about 1e-7, 0 below -87; without a call, so that loops over it become vector code (Cephes, S. Moshier). */
INLINE float fast_exp(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
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
    return x < -87.0f ? 0.0f : p * scale;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

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

/* Call `call(DIM)` with the head dimension as a constant where it is a common one: loops over it are then unrolled. */
#define WITH_CONSTANT_DIM(dim, call) \
    switch (dim) {                   \
        case 32: call(32); break;    \
        case 64: call(64); break;    \
        case 128: call(128); break;  \
        default: call((int)(dim));   \
    }

#define T float
#define UP(x) (x)
#define DOWN(x) (x)
#define NAME(f) f##_float32
#include "kernels_of_type.h"
#undef T
#undef UP
#undef DOWN
#undef NAME

#define T bfloat16
#define UP(x) from_bfloat16(x)
#define DOWN(x) to_bfloat16(x)
#define NAME(f) f##_bfloat16
#include "kernels_of_type.h"
