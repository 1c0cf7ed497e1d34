/* A whole decoder for one token per row, matrix products included, in a single call.
 * T, ITEM, UP, DOWN and NAME are set by kernels.c. */

/* ------------------------------------------------------------------------------------------ products, weights packed */

/* A packed weight is ordered by panel, then by item of the input, then by the panel's columns. A plain panel is PANEL
 * consecutive outputs. A gated panel is VECTOR outputs of the gate followed by the same outputs of the other factor; in
 * the weight (2 * n, k) the factor follows the gate. */
INLINE int64_t NAME(row_of)(int64_t panel, int column, int64_t n, int gated) {
    int64_t row = gated ? panel * VECTOR + column % VECTOR : panel * PANEL + column;
    return row >= n ? -1 : gated && column >= VECTOR ? n + row : row;
}

INLINE int64_t NAME(num_panels)(int64_t n, int gated) {
    int64_t width = gated ? VECTOR : PANEL;
    return (n + width - 1) / width;
}

/* Elements of a packed weight with n outputs of k inputs, k a multiple of ITEM. */
int64_t NAME(packed_size)(int64_t n, int64_t k, int64_t gated) { return NAME(num_panels)(n, gated) * PANEL * k; }

INLINE void NAME(pack_panel)(const T *weight, T *packed, int64_t panel, int64_t n, int64_t k, int gated) {
    for (int column = 0; column < PANEL; column++) {
        int64_t row = NAME(row_of)(panel, column, n, gated);
        for (int64_t i = 0; i < k; i++)
            packed[(i / ITEM * PANEL + column) * ITEM + i % ITEM] = row < 0 ? 0 : weight[row * k + i];
    }
}

void NAME(pack_weight)(const T *weight, T *packed, int64_t n, int64_t k, int64_t gated) {
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < NAME(num_panels)(n, gated); panel++)
        NAME(pack_panel)(weight, packed + panel * PANEL * k, panel, n, k, gated);
}

/* sums = `rows` rows of x (rows, k) times the columns of a panel */
INLINE void NAME(multiply_tile)(const T *panel, const T *x, int64_t k, floats sums[TILE][2], const int rows) {
    floats own[TILE][2] = {0};
    for (int64_t i = 0; i < k; i += ITEM, panel += PANEL * ITEM) {
        items left = load_items(panel), right = load_items(panel + VECTOR * ITEM);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            items item = repeat_item(x + row * k + i);
            own[row][0] = NAME(multiply_add)(own[row][0], left, item);
            own[row][1] = NAME(multiply_add)(own[row][1], right, item);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int side = 0; side < 2; side++) sums[row][side] = own[row][side];
}

/* Add bias and residual to a row of a tile, apply the gate, and store the row. `residual` and `out` may be equal. */
INLINE void NAME(finish)(float *sums, const T *bias, const T *second_bias, const T *residual, T *out, int64_t count,
                         int gated) {
    float *second = sums + VECTOR;
    if (bias)
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sums[i] += UP(bias[i]);
    if (bias && gated)
#pragma omp simd
        for (int64_t i = 0; i < count; i++) second[i] += UP(second_bias[i]);
    if (residual)
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sums[i] += UP(residual[i]);
    if (gated)
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            float g = UP(DOWN(sums[i]));
            out[i] = DOWN(g * sigmoid(g) * UP(DOWN(second[i])));
        }
    else
#pragma omp simd
        for (int64_t i = 0; i < count; i++) out[i] = DOWN(sums[i]);
}

/* Rows from `first` on, at most ROW_BLOCK, of the columns of a panel: see `multiply`. */
ONCE void NAME(multiply_block)(const T *x, const T *panel, const T *bias, const T *residual, T *out, int64_t first,
                               int64_t rows, int64_t k, int64_t n, int64_t column, int gated) {
    const int64_t width = gated ? VECTOR : PANEL, count = n - column < width ? n - column : width;
    int64_t block_rows = rows - first < ROW_BLOCK ? rows - first : ROW_BLOCK, tiles = (block_rows + TILE - 1) / TILE;
    for (int64_t tile = 0; tile < tiles; tile++) { /* of nearly equal sizes */
        int64_t start = first + block_rows * tile / tiles, end = first + block_rows * (tile + 1) / tiles;
        floats sums[TILE][2];
        switch (end - start) {
#define CASE(ROWS)                                                \
    case ROWS:                                                    \
        NAME(multiply_tile)(panel, x + start * k, k, sums, ROWS); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
        for (int64_t row = start; row < end; row++)
            NAME(finish)((float *)sums[row - start], bias ? bias + column : NULL, bias ? bias + n + column : NULL,
                         residual ? residual + row * n + column : NULL, out + row * n + column, count, gated);
    }
}

/* out (rows, n) = x (rows, k) times the weight, + bias, + residual (rows, n), which may be NULL; gated: silu of the first
 * half times the second. Called by all threads of a parallel region. */
static void NAME(multiply)(const T *x, const T *packed, const T *bias, const T *residual, T *out, int64_t rows,
                           int64_t k, int64_t n, int gated) {
    const int64_t width = gated ? VECTOR : PANEL, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < NAME(num_panels)(n, gated) * blocks; task++)
        NAME(multiply_block)(x, packed + task / blocks * PANEL * k, bias, residual, out, task % blocks * ROW_BLOCK, rows,
                             k, n, task / blocks * width, gated);
}

void NAME(linear)(const T *x, const T *packed, const T *bias, const T *residual, T *out, int64_t rows, int64_t k,
                  int64_t n, int64_t gated) {
#pragma omp parallel if (rows * n * k > SMALL)
    NAME(multiply)(x, packed, bias, residual, out, rows, k, n, gated);
}

/* The same, for a weight (n, k) that is not packed: each panel is, in the memory of a thread. */
void NAME(linear_unpacked)(const T *x, const T *weight, const T *bias, const T *residual, T *out, int64_t rows,
                           int64_t k, int64_t n) {
#pragma omp parallel if (rows * n * k > SMALL)
    {
        T *packed = malloc(PANEL * k * sizeof(T));
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < NAME(num_panels)(n, 0); panel++) {
            NAME(pack_panel)(weight, packed, panel, n, k, 0);
            for (int64_t first = 0; first < rows; first += ROW_BLOCK)
                NAME(multiply_block)(x, packed, bias, residual, out, first, rows, k, n, panel * PANEL, 0);
        }
        free(packed);
    }
}

/* ----------------------------------------------------------------------------------------------------- the decoder */

/* Weights of products are packed; biases and the norms of heads may be NULL. */
typedef struct {
    const T *norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias;
    const T *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
} NAME(Layer);

/* Norms, rotary embedding, cache update and attention of the heads of one key-value head in one row. qkv: of the row;
 * queries, key: scratch. */
INLINE void NAME(attend_row)(const NAME(Layer) * layer, const T *qkv, T *keys, T *values, const float *cos,
                             const float *sin, T *out, T *queries, float *scores, int64_t kv, int64_t heads,
                             int64_t kv_heads, int64_t dim, int64_t capacity, int64_t end, float eps, float scaling) {
    int64_t group = heads / kv_heads;
    T *key = queries + group * dim;
    for (int64_t head = 0; head <= group; head++) { /* the last is the key */
        const T *from = qkv + (head < group ? kv * group + head : heads + kv) * dim;
        const T *norm = head < group ? layer->query_norm : layer->key_norm;
        T *to = queries + head * dim, normed[dim];
        if (norm) NAME(norm_row)(from, norm, normed, dim, eps);
        NAME(rotate)(norm ? normed : from, to, cos + end * (dim / 2), sin + end * (dim / 2), dim / 2, 1.0f);
    }
    NAME(append_and_attend_one)(queries, key, qkv + (heads + kv_heads + kv) * dim, keys, values, out, scores, end,
                                group, capacity, dim, scaling);
}

/* logits (rows, vocabulary) of the token after tokens (rows,), which are at positions ends (rows,).
 * keys, values: a pointer for each layer, to (rows, kv_heads, capacity, dim), of which the first `end` tokens are filled;
 * cos, sin (positions, dim / 2); scratch: rows * (2 * width + (2 * heads + 2 * kv_heads) * dim + mlp) elements. */
void NAME(decode)(const int64_t *tokens, const int64_t *ends, const NAME(Layer) * layers, const T *embedding,
                  const T *last_norm, const T *head, const T *head_bias, T **keys, T **values, const float *cos,
                  const float *sin, T *scratch, T *logits, int64_t rows, int64_t num_layers, int64_t width,
                  int64_t heads, int64_t kv_heads, int64_t dim, int64_t mlp, int64_t vocabulary, int64_t capacity,
                  int64_t longest, float eps, float scaling) {
    int64_t qkv_size = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
    T *hidden = scratch, *normed = hidden + rows * width, *qkv = normed + rows * width;
    T *attended = qkv + rows * qkv_size, *gated = attended + rows * heads * dim;
#pragma omp parallel
    {
        float *scores = malloc((longest + 1 + LANES) * sizeof(float));
        T *queries = malloc((group + 1) * dim * sizeof(T));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            memcpy(hidden + row * width, embedding + tokens[row] * width, width * sizeof(T));
        for (int64_t l = 0; l <= num_layers; l++) {
            const NAME(Layer) *layer = layers + l;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                NAME(norm_row)(hidden + row * width, l < num_layers ? layer->norm : last_norm, normed + row * width,
                               width, eps);
            if (l == num_layers) break;
            NAME(multiply)(normed, layer->qkv, layer->qkv_bias, NULL, qkv, rows, width, qkv_size, 0);
#pragma omp for schedule(dynamic, 8)
            for (int64_t task = 0; task < rows * kv_heads; task++) {
                int64_t row = task / kv_heads, place = task * capacity * dim;
                NAME(attend_row)(layer, qkv + row * qkv_size, keys[l] + place, values[l] + place, cos, sin,
                                 attended + task * group * dim, queries, scores, task % kv_heads, heads, kv_heads, dim,
                                 capacity, ends[row], eps, scaling);
            }
            NAME(multiply)(attended, layer->out, layer->out_bias, hidden, hidden, rows, heads * dim, width, 0);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                NAME(norm_row)(hidden + row * width, layer->mlp_norm, normed + row * width, width, eps);
            NAME(multiply)(normed, layer->gate_up, layer->gate_up_bias, NULL, gated, rows, width, mlp, 1);
            NAME(multiply)(gated, layer->down, layer->down_bias, hidden, hidden, rows, mlp, width, 0);
        }
        NAME(multiply)(normed, head, head_bias, NULL, logits, rows, width, vocabulary, 0);
        free(scores);
        free(queries);
    }
}
