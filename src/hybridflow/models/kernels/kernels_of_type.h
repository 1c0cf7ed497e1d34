/* The kernels for one element type: T, UP (to float), DOWN (from float) and NAME are set by kernels.c. */

/* to = weight * in / sqrt(mean(in^2) + eps); returns the factor. */
ONCE float NAME(norm_row)(const T *in, const T *weight, T *to, int64_t width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += UP(in[i]) * UP(in[i]);
    float scale = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) to[i] = DOWN(UP(in[i]) * scale * UP(weight[i]));
    return scale;
}

/* norm_row of each row; inverse_rms (rows,) is kept for the backward pass. */
void NAME(rms_norm)(const T *x, const T *weight, T *out, float *inverse_rms, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > SMALL)
    for (int64_t row = 0; row < rows; row++)
        inverse_rms[row] = NAME(norm_row)(x + row * width, weight, out + row * width, width, eps);
}

/* grad_weight (chunks, width) is summed over rows within each chunk of rows; the caller adds up the chunks. */
void NAME(rms_norm_backward)(const T *grad_out, const T *x, const T *weight, const float *inverse_rms, T *grad_x,
                             float *grad_weight, int64_t rows, int64_t width, int64_t chunks) {
    int64_t chunk_rows = (rows + chunks - 1) / chunks;
#pragma omp parallel for schedule(static) if (rows * width > SMALL)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float *sums = grad_weight + chunk * width;
        memset(sums, 0, width * sizeof(float));
        int64_t end = (chunk + 1) * chunk_rows < rows ? (chunk + 1) * chunk_rows : rows;
        for (int64_t row = chunk * chunk_rows; row < end; row++) {
            const T *in = x + row * width, *from = grad_out + row * width;
            T *to = grad_x + row * width;
            float scale = inverse_rms[row], projection = 0;
#pragma omp simd reduction(+ : projection)
            for (int64_t i = 0; i < width; i++) projection += UP(from[i]) * UP(weight[i]) * UP(in[i]);
            projection *= scale * scale / (float)width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float g = UP(from[i]), value = UP(in[i]);
                sums[i] += g * value * scale;
                to[i] = DOWN(scale * (g * UP(weight[i]) - value * projection));
            }
        }
    }
}

/* Rotate each pair (i, i + half) by its angle; direction is 1 in the forward pass and -1 in the backward pass. */
ONCE void NAME(rotate)(const T *in, T *to, const float *cos, const float *sin, int64_t half, float direction) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = UP(in[i]), second = UP(in[i + half]), sine = direction * sin[i];
        to[i] = DOWN(first * cos[i] - second * sine);
        to[i + half] = DOWN(second * cos[i] + first * sine);
    }
}

/* Rotary embedding (Su et al., 2021) of x (tokens, heads, dim) with strides, into out, which is contiguous.
 * cos and sin: (tokens, dim / 2). */
void NAME(rotary)(const T *x, T *out, const float *cos, const float *sin, int64_t tokens, int64_t heads, int64_t dim,
                  int64_t token_stride, int64_t head_stride, float direction) {
    int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t token = 0; token < tokens; token++) {
        for (int64_t head = 0; head < heads; head++)
            NAME(rotate)(x + token * token_stride + head * head_stride, out + (token * heads + head) * dim,
                         cos + token * half, sin + token * half, half, direction);
    }
}

/* out = gate * sigmoid(gate) * up, (rows, width); gate and up with a row stride. */
void NAME(silu_mul)(const T *gate, const T *up, T *out, int64_t rows, int64_t width, int64_t stride) {
#pragma omp parallel for schedule(static) if (rows * width > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = gate + row * stride, *factor = up + row * stride;
        T *to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = UP(from[i]);
            to[i] = DOWN(g * sigmoid(g) * UP(factor[i]));
        }
    }
}

void NAME(silu_mul_backward)(const T *grad_out, const T *gate, const T *up, T *grad_gate, T *grad_up, int64_t count) {
#pragma omp parallel for simd schedule(static) if (count > SMALL)
    for (int64_t i = 0; i < count; i++) {
        float g = UP(gate[i]), from = UP(grad_out[i]), s = sigmoid(g);
        grad_gate[i] = DOWN(from * UP(up[i]) * s * (1.0f + g * (1.0f - s)));
        grad_up[i] = DOWN(from * g * s);
    }
}

/* ---------------------------------------------------------------------------------------- decoding, one token a row */

/* The largest logit of a row, and the sum of exp((logit - largest) * inverse_temperature), of which sums has the parts
 * of each BLOCK. */
ONCE double NAME(total_of)(const T *in, float *sums, float *largest, int64_t vocabulary, float inverse_temperature) {
    float most = UP(in[0]);
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < vocabulary; i++) most = UP(in[i]) > most ? UP(in[i]) : most;
    double total = 0;
    for (int64_t block = 0; block * BLOCK < vocabulary; block++) {
        int64_t end = (block + 1) * BLOCK < vocabulary ? (block + 1) * BLOCK : vocabulary;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = block * BLOCK; i < end; i++) sum += fast_exp((UP(in[i]) - most) * inverse_temperature);
        sums[block] = sum;
        total += sum;
    }
    *largest = most;
    return total;
}

ONCE float NAME(log_prob_of)(T logit, float largest, double total, float inverse_temperature) {
    return (UP(logit) - largest) * inverse_temperature - (float)log(total);
}

/* log_probs (rows,) of the tokens under softmax(logits * inverse_temperature), as `draw` returns them, the logs of the
 * sums of exp(logit * inverse_temperature), and the entropies, which may be NULL. */
void NAME(log_probs)(const T *logits, const int64_t *tokens, float *log_probs, float *log_normalizers,
                     float *entropies, int64_t rows, int64_t vocabulary, float inverse_temperature) {
#pragma omp parallel if (rows * vocabulary > SMALL)
    {
        float *sums = malloc((vocabulary + BLOCK - 1) / BLOCK * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *in = logits + row * vocabulary;
            float largest;
            double total = NAME(total_of)(in, sums, &largest, vocabulary, inverse_temperature);
            log_probs[row] = NAME(log_prob_of)(in[tokens[row]], largest, total, inverse_temperature);
            log_normalizers[row] = largest * inverse_temperature + (float)log(total);
            if (!entropies) continue;
            double weighted = 0; /* the sum of exp(x) * x, where exp(x) is 0 below -87 */
            for (int64_t start = 0; start < vocabulary; start += BLOCK) {
                int64_t end = start + BLOCK < vocabulary ? start + BLOCK : vocabulary;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = start; i < end; i++) {
                    float x = (UP(in[i]) - largest) * inverse_temperature;
                    sum += x < -87.0f ? 0.0f : fast_exp(x) * x;
                }
                weighted += sum;
            }
            entropies[row] = (float)(log(total) - weighted / total);
        }
        free(sums);
    }
}

/* Sample a token for each row of logits (rows, vocabulary): the first whose cumulative share of the sum of
 * exp(logit * inverse_temperature) exceeds the row's uniform number; if `greedy`, the first largest logit. log_probs is
 * the log of its share, NaN if a logit is NaN. The logits are read twice and not written. */
void NAME(draw)(const T *logits, const double *uniforms, int64_t *tokens, float *log_probs, int64_t rows,
                int64_t vocabulary, int64_t greedy, float inverse_temperature) {
#pragma omp parallel if (rows * vocabulary > SMALL)
    {
        int64_t num_blocks = (vocabulary + BLOCK - 1) / BLOCK;
        float *sums = malloc(num_blocks * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *in = logits + row * vocabulary;
            float largest;
            double total = NAME(total_of)(in, sums, &largest, vocabulary, inverse_temperature);
            double threshold = uniforms[row] * total, before = 0;
            int64_t token = 0, block = 0;
            if (greedy) {
                while (token < vocabulary - 1 && UP(in[token]) != largest) token++;
            } else {
                while (block < num_blocks - 1 && before + sums[block] <= threshold) before += sums[block++];
                for (int64_t i = block * BLOCK; i < vocabulary; i++) { /* a token with share 0 is not sampled */
                    float share = fast_exp((UP(in[i]) - largest) * inverse_temperature);
                    before += share;
                    if (share > 0) token = i;
                    if (before > threshold && share > 0) break;
                }
            }
            tokens[row] = token;
            log_probs[row] = NAME(log_prob_of)(in[token], largest, total, inverse_temperature);
        }
        free(sums);
    }
}

/* Prefetch the cache lines of a vector that the next row will read: decoding is limited by memory. */
INLINE void NAME(prefetch)(const T *x, const int dim) {
    for (int i = 0; i < dim; i += 64 / (int)sizeof(T)) __builtin_prefetch(x + i, 0, 2);
}

/* Return log sum exp of the scores. `ahead`: distance in elements from these keys and values to those that are read next. */
INLINE float NAME(attend_one)(const T *query, const T *keys, const T *values, T *out, float *scores, int64_t num_keys,
                              const int dim, float scaling, int64_t ahead) {
    const int chunk = VECTOR * ITEM, whole = dim / chunk * chunk;
    for (int64_t j = 0; j < num_keys; j++) {
        const T *key = keys + j * dim;
        NAME(prefetch)(key + ahead, dim);
        floats sums = {0};
        float rest = 0;
        for (int i = 0; i < whole; i += chunk)
            sums = NAME(multiply_add)(sums, load_items(query + i), load_items(key + i));
        for (int i = whole; i < dim; i++) rest += UP(query[i]) * UP(key[i]);
        scores[j] = (sum_of(sums) + rest) * scaling;
    }
    float largest = scores[0], total = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < num_keys; j++) largest = scores[j] > largest ? scores[j] : largest;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < num_keys; j++) {
        scores[j] = fast_exp(scores[j] - largest);
        total += scores[j];
    }
    for (int start = 0; start < whole; start += 4 * chunk) { /* the sums stay in registers */
        const int count = (whole - start < 4 * chunk ? whole - start : 4 * chunk) / chunk;
        floats sums[4][ITEM] = {0};
        for (int64_t j = 0; j < num_keys; j++) {
            const T *value = values + j * dim + start;
            if (start == 0) NAME(prefetch)(value + ahead, dim);
#pragma GCC unroll 4
            for (int c = 0; c < count; c++) {
                floats parts[ITEM];
                NAME(split)(load_items(value + c * chunk), parts);
                for (int p = 0; p < ITEM; p++) sums[c][p] += scores[j] * parts[p];
            }
        }
        for (int c = 0; c < count; c++)
            for (int i = 0; i < chunk; i++) out[start + c * chunk + i] = DOWN(sums[c][i % ITEM][i / ITEM] / total);
    }
    for (int i = whole; i < dim; i++) {
        float sum = 0;
        for (int64_t j = 0; j < num_keys; j++) sum += scores[j] * UP(values[j * dim + i]);
        out[i] = DOWN(sum / total);
    }
    return largest + logf(total);
}

ONCE float NAME(attend_to)(const T *query, const T *keys, const T *values, T *out, float *scores, int64_t num_keys,
                           int64_t dim, float scaling, int64_t ahead) {
#define ATTEND(DIM) return NAME(attend_one)(query, keys, values, out, scores, num_keys, DIM, scaling, ahead)
    WITH_CONSTANT_DIM(dim, ATTEND)
#undef ATTEND
}

/* Append a key and value to the first `end` of a row's cache (capacity, dim), then attend to all of them with `group`
 * heads: queries and out (group, dim). */
static void NAME(append_and_attend_one)(const T *queries, const T *key, const T *value, T *keys, T *values, T *out,
                                        float *scores, int64_t end, int64_t group, int64_t capacity, int64_t dim,
                                        float scaling) {
    memcpy(keys + end * dim, key, dim * sizeof(T));
    memcpy(values + end * dim, value, dim * sizeof(T));
    for (int64_t head = 0; head < group; head++)
        NAME(attend_to)(queries + head * dim, keys, values, out + head * dim, scores, end + 1, dim, scaling,
                        capacity * dim);
}

/* Call append_and_attend_one for every row and key-value head.
 * query, out (rows, heads, dim); key, value (rows, kv_heads, dim); all but out with a row stride;
 * keys, values (rows, kv_heads, capacity, dim); ends (rows,): tokens in the cache before this one. */
void NAME(append_and_attend)(const T *query, const T *key, const T *value, T *keys, T *values, const int64_t *ends,
                             T *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t capacity,
                             int64_t longest, int64_t query_stride, int64_t key_stride, int64_t value_stride,
                             float scaling) {
    int64_t group = heads / kv_heads;
#pragma omp parallel if (rows * heads * dim * longest > SMALL)
    {
        float *scores = malloc((longest + LANES) * sizeof(float));
#pragma omp for schedule(dynamic, 8)
        for (int64_t task = 0; task < rows * kv_heads; task++) {
            int64_t row = task / kv_heads, kv = task % kv_heads, place = task * capacity * dim;
            NAME(append_and_attend_one)(query + row * query_stride + kv * group * dim,
                                        key + row * key_stride + kv * dim, value + row * value_stride + kv * dim,
                                        keys + place, values + place, out + task * group * dim, scores, ends[row],
                                        group, capacity, dim, scaling);
        }
        free(scores);
    }
}

/* Attend to the first keys of a sequence, as decoding does: token t to num_keys[t] of them from first_key[t] on.
 * query, out (tokens, heads, dim); keys, values (dim contiguous, keys of a head after each other, a head after
 * head_stride elements); log_normalizer (tokens, heads). */
void NAME(attend)(const T *query, const T *keys, const T *values, const int64_t *first_key, const int64_t *num_keys,
                  T *out, float *log_normalizer, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                  int64_t head_stride, int64_t longest, float scaling) {
    int64_t group = heads / kv_heads;
#pragma omp parallel if (tokens * heads * dim * longest > SMALL)
    {
        float *scores = malloc((longest + LANES) * sizeof(float));
#pragma omp for schedule(dynamic, 8)
        for (int64_t task = 0; task < tokens * kv_heads; task++) {
            int64_t token = task % tokens, kv = task / tokens;
            int64_t place = kv * head_stride + first_key[token] * dim, head = token * heads + kv * group;
            for (int64_t i = head; i < head + group; i++)
                log_normalizer[i] = NAME(attend_to)(query + i * dim, keys + place, values + place, out + i * dim, scores,
                                                    num_keys[token], dim, scaling, 0);
        }
        free(scores);
    }
}

/* ---------------------------------------------------------------------- causal attention of short packed sequences */

/* Sequences are in families: the first is a trunk, each other one is a branch, which continues the trunk and does not
 * attend to other branches. A plain sequence is a family of one. `longest`: tokens of the longest trunk with a branch. */

/* Append `length` tokens of one head, as float, to `before` existing ones: x (length, dim) with a token stride, by token
 * and transposed with `padded` tokens per row. */
INLINE void NAME(unpack)(const T *x, int64_t stride, float *by_token, float *transposed, int64_t before, int64_t length,
                         int64_t padded, const int dim) {
    for (int64_t t = 0; t < length; t++)
        for (int i = 0; i < dim; i++) by_token[(before + t) * dim + i] = UP(x[t * stride + i]);
    if (!transposed) return;
    int64_t end = before + length, covered = (end + LANES - 1) / LANES * LANES;
    for (int i = 0; i < dim; i++) {
        for (int64_t t = before; t < end; t++) transposed[i * padded + t] = by_token[t * dim + i];
        for (int64_t t = end; t < covered; t++) transposed[i * padded + t] = 0;
    }
}

/* Attention of one family and key-value head. starts: of each sequence, and the end; tensors begin at the family's first
 * token. */
INLINE void NAME(causal_one)(const T *query, const T *key, const T *value, T *out, float *log_normalizer,
                             float *scratch, const int64_t *starts, int64_t sequences, int64_t longest, int64_t heads,
                             int64_t kv_heads, const int dim, float scaling) {
    int64_t padded = padded_tokens(longest);
    float *k = scratch, *kt = k + padded * dim, *v = kt + padded * dim, *scores = v + padded * dim;
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        int64_t first = starts[sequence] - starts[0], length = starts[sequence + 1] - starts[sequence];
        int64_t before = sequence ? starts[1] - starts[0] : 0, kv_place = first * kv_heads * dim;
        NAME(unpack)(key + kv_place, kv_heads * dim, k, kt, before, length, padded, dim);
        NAME(unpack)(value + kv_place, kv_heads * dim, v, NULL, before, length, padded, dim);
        for (int64_t head = 0; head < heads / kv_heads; head++) {
            for (int64_t t = 0; t < length; t++) {
                int64_t place = (first + t) * heads + head, last = before + t;
                float scaled[dim], sums[dim], total = 0;
                for (int i = 0; i < dim; i++) scaled[i] = UP(query[place * dim + i]) * scaling;
                scores_of(scaled, kt, scores, (last + LANES) / LANES * LANES, padded, dim);
                float largest = scores[0];
#pragma omp simd reduction(max : largest)
                for (int64_t j = 0; j <= last; j++) largest = scores[j] > largest ? scores[j] : largest;
#pragma omp simd reduction(+ : total)
                for (int64_t j = 0; j <= last; j++) {
                    scores[j] = fast_exp(scores[j] - largest);
                    total += scores[j];
                }
                for (int i = 0; i < dim; i++) sums[i] = 0;
                for (int64_t j = 0; j <= last; j++)
#pragma omp simd
                    for (int i = 0; i < dim; i++) sums[i] += scores[j] * v[j * dim + i];
                for (int i = 0; i < dim; i++) out[place * dim + i] = DOWN(sums[i] / total);
                log_normalizer[place] = largest + logf(total);
            }
        }
    }
}

/* query, out (tokens, heads, dim); key, value (tokens, kv_heads, dim); starts (sequences + 1,): token at which each
 * sequence begins, and the end; family_starts (families + 1,): sequence at which each family begins, and the end;
 * log_normalizer (tokens, heads) is kept for the backward pass. */
void NAME(causal_attention)(const T *query, const T *key, const T *value, T *out, float *log_normalizer,
                            const int64_t *starts, const int64_t *family_starts, int64_t families, int64_t heads,
                            int64_t kv_heads, int64_t dim, int64_t longest, float scaling) {
    int64_t group = heads / kv_heads;
#pragma omp parallel
    {
        float *scratch = malloc((3 * dim + 1) * padded_tokens(longest) * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < families * kv_heads; task++) {
            int64_t family = task / kv_heads, kv = task % kv_heads;
            const int64_t *own_starts = starts + family_starts[family];
            int64_t sequences = family_starts[family + 1] - family_starts[family];
            int64_t q_head = *own_starts * heads + kv * group, k_head = *own_starts * kv_heads + kv;
#define CAUSAL(DIM)                                                                                             \
    NAME(causal_one)(query + q_head * dim, key + k_head * dim, value + k_head * dim, out + q_head * dim,        \
                     log_normalizer + q_head, scratch, own_starts, sequences, longest, heads, kv_heads, DIM, scaling)
            WITH_CONSTANT_DIM(dim, CAUSAL)
#undef CAUSAL
        }
        free(scratch);
    }
}

INLINE void NAME(store_gradients)(const float *from, T *to, int64_t stride, int64_t length, const int dim) {
    for (int64_t t = 0; t < length; t++)
        for (int i = 0; i < dim; i++) to[t * stride + i] = DOWN(from[t * dim + i]);
}

INLINE void NAME(causal_backward_one)(const T *grad_out, const T *query, const T *key, const T *value, const T *out,
                                      const float *log_normalizer, T *grad_query, T *grad_key, T *grad_value,
                                      float *scratch, const int64_t *starts, int64_t sequences, int64_t longest,
                                      int64_t heads, int64_t kv_heads, const int dim, float scaling) {
    int64_t padded = padded_tokens(longest), trunk = starts[1] - starts[0];
    float *k = scratch, *kt = k + padded * dim, *v = kt + padded * dim, *vt = v + padded * dim;
    float *grad_k = vt + padded * dim, *grad_v = grad_k + padded * dim;
    float *scores = grad_v + padded * dim, *grads = scores + padded;
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        int64_t first = starts[sequence] - starts[0], length = starts[sequence + 1] - starts[sequence];
        int64_t before = sequence ? trunk : 0, kv_place = first * kv_heads * dim;
        NAME(unpack)(key + kv_place, kv_heads * dim, k, kt, before, length, padded, dim);
        NAME(unpack)(value + kv_place, kv_heads * dim, v, vt, before, length, padded, dim);
        memset(grad_k + before * dim, 0, length * dim * sizeof(float));
        memset(grad_v + before * dim, 0, length * dim * sizeof(float));
        for (int64_t head = 0; head < heads / kv_heads; head++) {
            for (int64_t t = 0; t < length; t++) {
                int64_t place = (first + t) * heads + head, last = before + t;
                int64_t covered = (last + LANES) / LANES * LANES;
                float scaled[dim], from[dim], sums[dim], dot = 0, normalizer = log_normalizer[place];
                for (int i = 0; i < dim; i++) {
                    scaled[i] = UP(query[place * dim + i]) * scaling;
                    from[i] = UP(grad_out[place * dim + i]);
                    sums[i] = 0;
                }
#pragma omp simd reduction(+ : dot)
                for (int i = 0; i < dim; i++) dot += from[i] * UP(out[place * dim + i]);
                scores_of(scaled, kt, scores, covered, padded, dim);
                scores_of(from, vt, grads, covered, padded, dim);
#pragma omp simd
                for (int64_t j = 0; j <= last; j++) {
                    scores[j] = fast_exp(scores[j] - normalizer);
                    grads[j] = scores[j] * (grads[j] - dot);
                }
                for (int64_t j = 0; j <= last; j++) {
                    float weight = scores[j], grad = grads[j];
#pragma omp simd
                    for (int i = 0; i < dim; i++) {
                        sums[i] += grad * k[j * dim + i];
                        grad_k[j * dim + i] += grad * scaled[i];
                        grad_v[j * dim + i] += weight * from[i];
                    }
                }
                for (int i = 0; i < dim; i++) grad_query[place * dim + i] = DOWN(sums[i] * scaling);
            }
        }
        if (!sequence) continue; /* the branches add to the gradients of the trunk */
        NAME(store_gradients)(grad_k + before * dim, grad_key + kv_place, kv_heads * dim, length, dim);
        NAME(store_gradients)(grad_v + before * dim, grad_value + kv_place, kv_heads * dim, length, dim);
    }
    NAME(store_gradients)(grad_k, grad_key, kv_heads * dim, trunk, dim);
    NAME(store_gradients)(grad_v, grad_value, kv_heads * dim, trunk, dim);
}

/* The gradients of causal_attention; grad_out and grad_query have the shape of query, grad_key and grad_value of key. */
void NAME(causal_attention_backward)(const T *grad_out, const T *query, const T *key, const T *value, const T *out,
                                     const float *log_normalizer, T *grad_query, T *grad_key, T *grad_value,
                                     const int64_t *starts, const int64_t *family_starts, int64_t families,
                                     int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest, float scaling) {
    int64_t group = heads / kv_heads;
#pragma omp parallel
    {
        float *scratch = malloc((6 * dim + 2) * padded_tokens(longest) * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < families * kv_heads; task++) {
            int64_t family = task / kv_heads, kv = task % kv_heads;
            const int64_t *own_starts = starts + family_starts[family];
            int64_t sequences = family_starts[family + 1] - family_starts[family];
            int64_t q_place = (*own_starts * heads + kv * group) * dim, k_place = (*own_starts * kv_heads + kv) * dim;
#define BACKWARD(DIM)                                                                                            \
    NAME(causal_backward_one)(grad_out + q_place, query + q_place, key + k_place, value + k_place, out + q_place, \
                              log_normalizer + *own_starts * heads + kv * group, grad_query + q_place,           \
                              grad_key + k_place, grad_value + k_place, scratch, own_starts, sequences, longest,  \
                              heads, kv_heads, DIM, scaling)
            WITH_CONSTANT_DIM(dim, BACKWARD)
#undef BACKWARD
        }
        free(scratch);
    }
}
